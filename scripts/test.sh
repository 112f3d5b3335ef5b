#!/usr/bin/env bash
# Lints, type-checks and tests. With CI=true the tests marked slow run as well, and the decoder's and some trainings'
# tests with the lowest versions that pyproject.toml allows (tests/lowest/run.sh).
set -euo pipefail
cd "$(dirname "$0")/.."
extras=dev
. scripts/env.sh
ruff check .
ruff format --check .
mypy
# One process per core, and one thread in each, also in the commands that tests start: threads that wait for each other
# while others run take several times as long. All tests of a file run in the same process, so that its tiny models are
# built once.
export OMP_NUM_THREADS=1
# A test that crashes its process, as one that hangs does in the end (pyproject.toml), ends the run.
if [ "${CI:-}" = true ]; then
  python -m pytest -n "$cpus" --max-worker-restart 0 --dist loadfile -m "" "$@"
  bash tests/lowest/run.sh -q
else
  python -m pytest -n "$cpus" --max-worker-restart 0 --dist loadfile "$@"
fi
