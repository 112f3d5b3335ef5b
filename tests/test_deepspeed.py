"""train/distill.py under DeepSpeed ZeRO-2: two processes over gloo, each with half of the gradients and moments.

Runs where DeepSpeed is installed (pip install deepspeed), which compiles its exchange through memory at first.
"""

import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import worlds
from tests.test_distill_command import COMMAND, WEIGHTS, arguments, facts_of, losses_of, norms_of
from tests.test_fsdp2 import FAMILIES, RUN, data, world
from tests.worlds import Done, World

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not importlib.util.find_spec("deepspeed"), reason="no DeepSpeed installed"),
]
__all__ = ["data", "world"]


def under_zero2(world: World, data: Path, out: Path, *more: object) -> Done:
    command = worlds.ROOT / COMMAND
    return worlds.run(
        "tests/zero2.py", command, *arguments(world, data, out), *RUN, *more,
        processes=2, env={"DS_ACCELERATOR": "cpu", "ACCELERATE_USE_CPU": "false"},
    )  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_two_processes_are_one(family: str, world: World, data: Path, tmp_path: Path) -> None:
    """Catches gradients that are averaged, not summed, clipped twice, or moments that a resume loses."""
    one, two = tmp_path / "one", tmp_path / "two"
    done = worlds.call(COMMAND, *arguments(world, data, one), *RUN, *FAMILIES[family])
    assert done.code == 0, done.err
    done = under_zero2(world, data, two, *FAMILIES[family])
    assert done.code == 0, done.err
    assert (two / "checkpoints/step-000002/pytorch_model").is_dir()  # DeepSpeed's own layout
    assert losses_of(two) == pytest.approx(losses_of(one), abs=1e-4)
    assert norms_of(two) == pytest.approx(norms_of(one), rel=1e-3)
    assert facts_of(two)["processes"] == 2
    found, wanted = load_file(two / WEIGHTS), load_file(one / WEIGHTS)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, atol=2e-3, rtol=0)
    whole = (two / WEIGHTS).read_bytes()
    (two / "checkpoints" / "latest").write_text("step-000002\n")  # as if killed there
    done = under_zero2(world, data, two, *FAMILIES[family])
    assert "from step 2" in done.err, done.err
    assert (two / WEIGHTS).read_bytes() == whole
