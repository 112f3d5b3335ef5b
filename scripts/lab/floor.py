"""What a step of the target could take at best on this machine, and how near this project's decoder comes to it.

    python scripts/lab/floor.py                                   # bundled target
    python scripts/lab/floor.py --target T --dtype bfloat16 --out floor.json

A step that computes R rows (a text's R tokens to verify, or R texts) reads every weight once and does 2 operations for
each weight and row. For each R the table has

  roofline: the larger of weights ÷ memory bandwidth and operations ÷ the highest rate that any product below reached
  product: the target's linear layers alone, one after the other, by the fastest of these kernels: linear
    (torch.nn.functional.linear) and, on a CPU, packed (decode/model/linear.py); with --dtype w8a8 the products of whole
    numbers alone, without rotating and rounding their inputs
  engine: a whole round of the decoder without its draft's part: attention, norms, sampling and bookkeeping included.
    Up to 16 rows one text is verified (K = R - 1 drafted tokens), beyond it R texts are decoded plainly
  first: seconds of the first request of R rows. With --mode compiled its code is made or, the second time, read from
    the disk (set TORCHINDUCTOR_CACHE_DIR to an empty folder to time it from cold)

Weights come from memory: all layers are multiplied in turn, which is more than a cache holds, if the target is larger
than that. Run it on an idle machine. The last line is JSON.
"""

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from decode.common.command import run_command
from scripts.lab.settings import FloorConfig


def main(s: FloorConfig) -> None:
    from scripts.lab.floor_work import measure_floor  # loads torch: --help does without

    measure_floor(s)


if __name__ == "__main__":
    run_command(main, FloorConfig, __doc__)
