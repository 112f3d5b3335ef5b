"""train/distill.py under DeepSpeed ZeRO-2: two processes over gloo, each with half of the gradients and moments.

Runs where DeepSpeed is installed (pip install deepspeed), which compiles its exchange through memory at first.
"""

import importlib.util
from pathlib import Path

import pytest

from tests import worlds
from tests.train.test_distill_command import COMMAND, arguments
from tests.train.trainer.test_fsdp2 import (
    FAMILIES,
    RUN,
    data,
    resumes_to_the_byte,
    trains_as_one,
    world,
)
from tests.worlds import Done, World

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not importlib.util.find_spec("deepspeed"), reason="no DeepSpeed installed"),
]
__all__ = ["data", "world"]


def under_zero2(world: World, data: Path, out: Path, *more: object) -> Done:
    command = worlds.ROOT / COMMAND
    return worlds.run(
        "tests/zero2.py", worlds.ROOT / "tests/in_chunks.py", command, *arguments(world, data, out), *RUN, *more,
        processes=2, env={"DS_ACCELERATOR": "cpu", "ACCELERATE_USE_CPU": "false"},
    )  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_two_processes_are_one(family: str, world: World, data: Path, tmp_path: Path) -> None:
    """Catches gradients that are averaged, not summed, clipped twice, or moments that a resume loses."""
    _, two = trains_as_one(under_zero2, family, world, data, tmp_path)
    assert (two / "checkpoints/step-000002/pytorch_model").is_dir()  # DeepSpeed's own layout
    resumes_to_the_byte(under_zero2, family, world, data, two)
