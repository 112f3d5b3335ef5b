"""A data_curve.json of made-up acceptance, for tests of what is made from it."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from decode.common.provenance import Hardware
from decode.common.target_record import TargetRecord
from decode.common.typed_json import to_json
from eval.scaling.data_curve import TrainedPoint, build_curve

TOKENIZER = "33c2eb365440cc00"
"""The target's, as tests/drafts.py has it."""


def curve(
    tau: Callable[[Any], Any], sizes: Sequence[int] = (600, 1897, 6000, 18_974, 60_000),
    worth: float = 0.02, **changes: Any,
) -> dict[str, Any]:  # fmt: skip
    """The content of data_curve.json where τ of n tokens is `tau(n)`, two seeds, K = 4; as read from the file."""
    rounds = np.full(20, 1000)

    def point(size: int, seed: int, value: float) -> TrainedPoint:
        easy = np.linspace(-0.2, 0.2, 20)
        emitted = np.round(rounds * (value + easy))
        accepted, reached = emitted - rounds, np.round(1.5 * rounds)
        each = np.stack([emitted, rounds, accepted, reached], 1).astype(int).tolist()
        rows = max(1, size // 80)
        return TrainedPoint(size, seed, size, rows, max(10, rows // 5), {"0.0": each, "1.0": each})

    points = [point(size, seed, float(tau(size))) for size in sizes for seed in (0, 1)]
    found = build_curve(
        points,
        point(0, 0, 1.31),
        [0.0, 1.0],
        4,
        worth,
        target=TargetRecord("org/target", tokenizer=TOKENIZER),
        data="outputs/samples",
        family="eagle3",
        loss="forward_kl",
        tasks=["code@1"],
        max_new_tokens=64,
        seeds=[0, 1],
        passes=3.0,
        least_steps=10,
        argv=["scripts/lab/data_curve.py"],
        git="484a9eb4872de3f5cf111c91f2d764b3cd5eee92",
        versions={"python": "3.11.7"},
        hardware=Hardware("AMD EPYC", 0, 2),
    )
    return json.loads(json.dumps(to_json(found) | changes))
