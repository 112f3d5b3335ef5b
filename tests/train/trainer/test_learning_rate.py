"""The learning rate's values: warm-up, cosine and the lowest one."""

import math

import pytest

from train.settings.training import LoopConfig
from train.trainer.loop import lr_multiplier


@pytest.mark.parametrize(
    ("warmup", "step", "share"),
    [
        (4, 0, 1 / 4),
        (4, 3, 1.0),
        (4, 4, 1.0),
        (4, 9, 0.55 + 0.45 * math.cos(math.pi * 5 / 16)),
        (4, 12, 0.55),  # half of the way
        (4, 20, 0.1),
        (0.2, 1, 2 / 4),  # a share of the steps
        (0, 0, 1.0),
    ],
)
def test_the_rate_is_as_documented(warmup: float, step: int, share: float) -> None:
    """Catches a warm-up that begins at 0 or ends a step late, a cosine over all steps, and another lowest rate."""
    s = LoopConfig(steps=20, warmup=warmup, min_lr=0.1)
    assert lr_multiplier(step, s) == pytest.approx(share)
