"""train/distill.py under DeepSpeed ZeRO-2: two processes over gloo, each with half of the gradients and moments.

Runs where DeepSpeed is installed (pip install deepspeed), which compiles its exchange through memory at first.
"""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import worlds
from tests.train.test_distill_command import COMMAND, WEIGHTS, arguments
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


def under_zero2(
    world: World, data: Path, out: Path, *more: object, processes: int = 2,
    env: dict[str, str] | None = None,
) -> Done:  # fmt: skip
    command = worlds.ROOT / COMMAND
    return worlds.run(
        "tests/zero2.py", worlds.ROOT / "tests/in_chunks.py", command, *arguments(world, data, out), *RUN, *more,
        processes=processes, env={"DS_ACCELERATOR": "cpu", "ACCELERATE_USE_CPU": "false", **(env or {})},
    )  # fmt: skip


def error_of(done: Done) -> str:
    assert done.code != 0
    (error,) = [line for line in done.err.splitlines() if line.startswith("error: ")]
    return error


@pytest.mark.parametrize("family", FAMILIES)
def test_two_processes_are_one(family: str, world: World, data: Path, tmp_path: Path) -> None:
    """Catches gradients that are averaged, not summed, clipped twice, or moments that a resume loses."""
    _, two = trains_as_one(under_zero2, family, world, data, tmp_path)
    assert (two / "checkpoints/step-000002/pytorch_model").is_dir()  # DeepSpeed's own layout
    resumes_to_the_byte(under_zero2, family, world, data, two)


def test_its_file_is_followed(world: World, data: Path, tmp_path: Path) -> None:
    """Bug: its accumulation divided the gradient once more, its clipping was ignored."""
    file = tmp_path / "ds.json"
    asked = {"zero_optimization": {"stage": 1}, "gradient_accumulation_steps": 2}
    file.write_text(json.dumps({**asked, "gradient_clipping": 0.25, "bf16": {"enabled": "auto"}}))
    one, two = tmp_path / "one", tmp_path / "two"
    worlds.call(COMMAND, *arguments(world, data, one), *RUN, "--loop.clip", 0.25).ok()
    env = {"ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file)}
    done = under_zero2(world, data, two, env=env).ok()
    assert "ZeRO-1, 2 process(es), precision no" in done.err
    assert "loop.clip 0.25, 8 samples a step (2 micro-batch(es) of 2 in a process)" in done.err
    found, wanted = load_file(two / WEIGHTS), load_file(one / WEIGHTS)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, atol=2e-3, rtol=0)
    before = worlds.contents(two)
    for processes, stage in [(1, "1"), (2, "2")]:
        own = {"ACCELERATE_DEEPSPEED_ZERO_STAGE": stage}
        again = under_zero2(world, data, two, "--resume", "true", processes=processes, env=own)
        error = error_of(again)
        assert "continue it with ZeRO-1 over 2 process(es) with mixed_precision no" in error
    error = worlds.call(COMMAND, *arguments(world, data, two), *RUN, "--resume", "true").error()
    assert "continue it with ZeRO-1 over 2 process(es)" in error
    assert worlds.contents(two) == before
    file.write_text(json.dumps({**asked, "gradient_accumulation_steps": 16}))
    assert f"gradient_accumulation_steps in {file} is 16" in error_of(
        under_zero2(world, data, tmp_path / "x", env=env)
    )
    file.write_text(json.dumps({**asked, "bf16": {"enabled": True}}))
    more = ["--mixed_precision", "no"]
    assert f"bf16 in {file} is bf16" in error_of(
        under_zero2(world, data, tmp_path / "x", *more, env=env)
    )
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("stage", "advice"), [(0, "plain data parallelism"), (3, "shard the draft with FSDP 2")]
)
def test_other_stages_are_named(
    stage: int, advice: str, world: World, data: Path, tmp_path: Path
) -> None:
    """Bug: "restore the tokenizer.json" for stage 3, and a traceback for stage 0."""
    env = {"ACCELERATE_DEEPSPEED_ZERO_STAGE": str(stage)}
    error = error_of(under_zero2(world, data, tmp_path / "out", env=env))
    assert f"ZeRO stage {stage} " in error
    assert advice in error
    assert not (tmp_path / "out").exists()
