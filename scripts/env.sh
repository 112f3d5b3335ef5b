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
# What samples and trains fastest, bfloat16, float16 or float32, in $dtype and $precision: measured once for each device
# and torch, since an environment's folder may be copied or shared by machines.
pick_dtype() {
  device=$(device_name)
  [ "$(sed -n 2p .venv/dtype 2>/dev/null)" = "$device" ] || {
    answer=$(python scripts/fastest_dtype.py) || exit
    printf '%s\n%s\n' "$answer" "$device" > .venv/dtype
  }
  read -r dtype precision < .venv/dtype
}
# The GPUs that are not hidden, the processor, and the version of torch.
device_name() {
  {
    nvidia-smi --query-gpu=name --format=csv,noheader || true
    echo "${CUDA_VISIBLE_DEVICES-all}"
    grep -m 1 '^model name' /proc/cpuinfo || uname -mp
    basename .venv/lib/python*/site-packages/torch-*.dist-info
  } 2>/dev/null | paste -sd ' ' -
}
