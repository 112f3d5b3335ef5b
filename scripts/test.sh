#!/usr/bin/env bash
# Lints, type-checks and tests. With CI=true the tests marked slow run as well.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/env.sh dev
ruff check .
ruff format --check .
mypy
if [ "${CI:-}" = true ]; then
  python -m pytest -m "" "$@"
else
  python -m pytest "$@"
fi
