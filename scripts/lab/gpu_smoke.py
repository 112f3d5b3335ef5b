"""What a GPU has to show first, in ten minutes: stages in the order of what they are worth, each with a limit.

    python scripts/lab/gpu_smoke.py --target T --draft EAGLE3 --out smoke.json

NOT RUN ON A GPU YET. On a CPU the same stages run without CUDA graphs, without the search for waits and without the
kernel for GPUs.

  plain, eagle3   eager and captured rounds
  graph           CUDA graphs of compiled rounds, plain and with the draft
  split_kv, w8a8  the Triton kernel of attention; eight bits (refused on CUDA, with the reason)
  vllm            vLLM beside our target on the device: what it ran with, its tokens a second
  training        steps of an EAGLE-3 head on the same samples, after which its loss must be lower

Texts must be those of plain eager decoding. Where one leaves them, the two tokens' gap in the next wider dtype is
compared with what rounding moves it by, as in eval/run.py: a near tie is counted, anything else is a problem. So is a
place where the host waits for the device inside a round (a planted wait must be found), a stage that fails, and one
that is not done within its own limit. The JSON is written after each stage, with the machine and the versions; what the
time of all was not enough for is "cut" or "not run". Exit code 1 if there is any problem.
"""

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from decode.common.command import run_command
from scripts.lab.settings import GpuSmokeConfig


def main(s: GpuSmokeConfig) -> None:
    from scripts.lab.gpu_checks import check_gpu  # loads torch: --help does without

    check_gpu(s)


if __name__ == "__main__":
    run_command(main, GpuSmokeConfig, __doc__)
