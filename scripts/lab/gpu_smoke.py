"""What a GPU has to show first: captured rounds, no wait inside a round, tokens a second, one training step.

    python scripts/lab/gpu_smoke.py --target T --draft D --dtype bfloat16 --out smoke.json

NOT RUN ON A GPU YET. On a CPU the same path runs without CUDA graphs and without the search for waits. Plain decoding
and the draft decode the same prompts greedily in every mode that the machine has:

  same     `captured` rounds must write eager's tokens and `graph` rounds those of `compiled` ones, which run the same
           kernels. How many texts compiled code writes as eager does is reported and no error: near ties may differ
  waits    places where the host waits for the device inside a round: there must be none. A planted wait must be found
  speed    tokens a second of whole requests, after a first turn that loads, compiles and captures
Then an EAGLE-3 head is trained for a step, after which its loss on the same samples must be lower. The last line is
JSON: the machine, the versions, what was measured, and `problems`. Exit code 1 if there are any.
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
