#!/usr/bin/env bash
# Tests decoding, real compilation and short trainings with the lowest versions that pyproject.toml allows
# (tests/lowest/versions.txt), in an environment of their own. The folder, .venv-lowest or $LOWEST, takes 8 GB on Linux.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=${LOWEST:-.venv-lowest}
if [ "$(cat "$venv/installed" 2>/dev/null)" != "$(cat tests/lowest/{run.sh,versions.txt} pyproject.toml | cksum)" ]; then
  "${PYTHON:-python3}" -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    --constraint tests/lowest/versions.txt --editable . "pytest>=9" "pytest-xdist>=3.8" "hypothesis>=6.100"
  cat tests/lowest/{run.sh,versions.txt} pyproject.toml | cksum > "$venv/installed"
fi
export TOKENIZERS_PARALLELISM=false
# Not verification, which is arithmetic on tensors. A file among the arguments: tests/durations.txt is for the fast suite.
"$venv/bin/python" -m pytest -p tests.lowest.first_cases -n auto --max-worker-restart 0 --dist loadfile \
  tests/decode/engine tests/decode/model tests/decode/drafts tests/decode/checkpoints tests/decode/test_generate.py \
  tests/train/families "$@"
# The generated C++ itself runs, and a whole training.
exec "$venv/bin/python" -m pytest -m "" tests/decode/engine/test_compile.py tests/train/test_distill_command.py \
  -k "real or falls or losslessly or prompts_are_learned"
