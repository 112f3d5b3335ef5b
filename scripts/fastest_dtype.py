"""Prints the dtype in which the decoder multiplies matrices fastest on this machine, and accelerate's name for it.

    python scripts/fastest_dtype.py        # "bfloat16 bf16" or "float32 no"

scripts/env.sh asks it, because the flags of a processor do not tell: some that have bfloat16 instructions multiply
float32 faster. On a GPU the answer is bfloat16 without a measurement, and float16 on cards that only emulate bfloat16
(compute capability below 8.0).
"""

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from decode.common.errors import UserError
from decode.devices.choice import find_gpu, has_bfloat16
from decode.model.linear import PackedLinear

ACCELERATE = {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}
ROWS = (1, 64)
"""A step of one text, and a batch."""
WIDTH, OUTPUTS, LAYERS = 576, 1536, 48
"""48 different matrices of 0.9 million weights each, more than a cache holds, as a small language model has."""
REPEATS = 5


def measure_ms(dtype: torch.dtype, rows: int) -> float:
    """Milliseconds to multiply `rows` rows by all matrices once: the median of several times."""
    layers = [
        PackedLinear(torch.nn.Linear(WIDTH, OUTPUTS, bias=False, dtype=dtype))
        for _ in range(LAYERS)
    ]
    x = torch.randn(rows, WIDTH).to(dtype)
    times = []
    for _ in range(REPEATS + 1):  # the first one warms up
        begun = time.perf_counter()
        for layer in layers:
            layer(x)
        times.append((time.perf_counter() - begun) * 1000)
    return statistics.median(times[1:])


def fastest(ms: Mapping[str, Sequence[float]]) -> str:
    """The dtype whose product of times is smallest: twice as fast at one row size outweighs a third slower at the
    other."""
    return min(ms, key=lambda name: torch.tensor(ms[name]).log().sum().item())


@torch.inference_mode()
def main() -> None:
    if find_gpu():
        name = "bfloat16" if has_bfloat16() else "float16"
    else:
        dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
        name = fastest(
            {key: [measure_ms(dtype, rows) for rows in ROWS] for key, dtype in dtypes.items()}
        )
    print(name, ACCELERATE[name])


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
