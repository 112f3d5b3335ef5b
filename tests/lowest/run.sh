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
"$venv/bin/python" -m pytest -n auto --max-worker-restart 0 --dist loadfile \
  tests/decode/engine tests/decode/model tests/decode/drafts tests/decode/verification tests/decode/checkpoints \
  tests/train/families tests/train/test_distill_command.py "$@"
# The generated C++ itself runs: minutes.
exec "$venv/bin/python" -m pytest -m slow tests/decode/engine/test_compile.py -k real
