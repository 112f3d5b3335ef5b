# Sourced by the other scripts: makes .venv if there is none, and installs what pyproject.toml asks for.
# PYTHON is the interpreter to make it with (>= 3.11); extras is an extra of pyproject.toml, such as dev.

extras=${extras:-}
if [ ! -x .venv/bin/python ]; then
  python=${PYTHON:-python3}
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "error: $python is older than 3.11: set PYTHON to a newer interpreter" >&2
    exit 2
  }
  echo "making .venv"
  "$python" -m venv .venv
fi
wanted=$({ cat pyproject.toml; echo "$extras"; } | cksum)
stamp=.venv/installed${extras:+-$extras}
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
  echo "installing: 1 to 10 minutes, by your line (torch for Linux is several GB; README says how to get its CPU build first)"
  .venv/bin/python -m pip install -qq --disable-pip-version-check --editable ".${extras:+[$extras]}"
  echo "$wanted" > "$stamp"
fi
PATH=$PWD/.venv/bin:$PATH
export TOKENIZERS_PARALLELISM=false
# nproc does not see the quota of a container.
cpus=$(python -c 'from decode.common.machine import cpu_count; print(cpu_count())')
# One process on whatever device there is, with a thread for each CPU: what `accelerate launch` would start with
# configs/accelerate/one_gpu.yaml, without the seconds that its own process takes.
launch="env OMP_NUM_THREADS=$cpus python"
# What samples and trains fastest here, bfloat16, float16 or float32, in $dtype; accelerate's name for it in $precision.
pick_dtype() {
  dtype=$(python -c '
import sys
from decode.common.errors import UserError
from decode.devices.choice import fastest_dtype
try:
    print(fastest_dtype())
except UserError as error:
    sys.exit(f"error: {error}")
') || exit 2
  case $dtype in bfloat16) precision=bf16 ;; float16) precision=fp16 ;; *) precision=no ;; esac
}
