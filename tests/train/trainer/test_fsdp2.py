"""train/distill.py under FSDP2: two processes that each hold half of the draft, over gloo."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from decode.drafts.registry import load_draft
from decode.engine.engine import decode
from decode.model.loading import load_target
from tests import worlds
from tests.tiny import tiny_model
from tests.train.families.test_overfit import DRAFTS, conversation
from tests.train.test_distill_command import (
    COMMAND,
    WEIGHTS,
    arguments,
    facts_of,
    losses_of,
    metrics_of,
    norms_of,
)
from tests.worlds import Done, World
from train.data import batching
from train.families.base import FamilyContext
from train.families.builders import build_trainable
from train.losses import chunked_sums
from train.settings.training import LoopConfig
from train.trainer import sharding
from train.trainer.settings import DistillConfig

pytestmark = pytest.mark.slow
SHARDED = "tests/fsdp2.py"
RUN = ["--loop.steps", 4, "--loop.save_every", 2, "--loop.micro_batch", 2, "--check.k", 2]
FAMILIES: dict[str, list[object]] = {
    "causal": [],
    "lora": ["--draft.lora_rank", 2],
    "reduced": ["--draft.vocab", 100],
    "medusa": ["--draft.init", "", "--draft.family", "medusa", "--draft.heads", 2],
    "eagle1": ["--draft.init", "", "--draft.family", "eagle1"],
    "eagle3": ["--draft.init", "", "--draft.family", "eagle3", "--draft.steps", 2]
    + ["--draft.taps", "[0, 1, 2]", "--draft.vocab", 100],
    "pard": ["--draft.family", "pard", "--draft.block", 3, "--draft.depth", 2],
    "peagle": ["--draft.init", "", "--draft.family", "peagle", "--draft.block", 3]
    + ["--draft.taps", "[0, 1, 2]", "--draft.vocab", 100],
    "dflash": [
        "--draft.init", "", "--draft.family", "dflash", "--draft.block", 3, "--draft.depth", 2,
    ]
    + ["--draft.taps", "[1, 2]", "--draft.vocab", 100],
    "dspark": [
        "--draft.init", "", "--draft.family", "dspark", "--draft.block", 3, "--draft.depth", 2,
    ]
    + ["--draft.taps", "[1, 2]", "--draft.vocab", 100, "--draft.markov_rank", 4],
    "mtp": ["--draft.init", "", "--draft.family", "mtp", "--draft.steps", 2],
}  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A target of 3 layers, and a small LM with its tokenizer."""
    folder, tokenizer = tmp_path_factory.mktemp("world"), worlds.byte_tokenizer()
    world = worlds.build(folder)
    size: dict[str, Any] = {"vocab_size": len(tokenizer), "max_position_embeddings": worlds.CONTEXT}
    deep = worlds.save(folder / "deep", tiny_model("llama", seed=1, **size), tokenizer)
    return dataclasses.replace(world, target=deep)


@pytest.fixture(scope="module")
def data(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return worlds.sampled(world, tmp_path_factory.mktemp("data"), "--max_new_tokens", 40)


def sharded(world: World, data: Path, out: Path, *more: object) -> Done:
    command = worlds.ROOT / COMMAND
    chunks = worlds.ROOT / "tests/in_chunks.py"
    return worlds.fork(
        SHARDED, chunks, command, *arguments(world, data, out), *RUN, *more, processes=2
    )


def trains_as_one(
    launch: Callable[..., Done], family: str, world: World, data: Path, folder: Path
) -> tuple[Path, Path]:
    """Drafts of one process and of the two that `launch` starts, after the same training to the same weights."""
    one, two = folder / "one", folder / "two"
    worlds.call(COMMAND, *arguments(world, data, one), *RUN, *FAMILIES[family]).ok()
    launch(world, data, two, *FAMILIES[family]).ok()
    assert losses_of(two) == pytest.approx(losses_of(one), abs=1e-4)
    assert norms_of(two) == pytest.approx(norms_of(one), rel=1e-3)
    assert facts_of(two)["processes"] == 2
    found, wanted = load_file(two / WEIGHTS), load_file(one / WEIGHTS)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, atol=2e-3, rtol=0)
    return one, two


def resumes_to_the_byte(
    launch: Callable[..., Done], family: str, world: World, data: Path, out: Path
) -> None:
    whole = (out / WEIGHTS).read_bytes()
    (out / "checkpoints" / "latest").write_text("step-000002\n")  # as if killed there
    done = launch(world, data, out, *FAMILIES[family])
    assert "from step 2" in done.err, done.err
    assert (out / WEIGHTS).read_bytes() == whole


@pytest.mark.parametrize("family", ["causal", "eagle3", "dspark"])
def test_two_halves_are_one(family: str, world: World, data: Path, tmp_path: Path) -> None:
    """Catches losses that touch weights outside of a forward pass, norms of a half, and a half draft that is saved."""
    one, two = trains_as_one(sharded, family, world, data, tmp_path)
    assert list(two.glob("checkpoints/step-*/optimizer_0/__1_0.distcp"))  # in pieces indeed
    measured = [dict(metrics_of(out, "accept/tau")) for out in (one, two)]
    assert measured[0] == pytest.approx(measured[1], abs=0.2)
    own = load_target(str(world.target), "cpu")
    prompts = [own.tokenizer(text)["input_ids"] for text in world.texts[:3]]
    drafted = decode(own, load_draft(str(two), own), prompts, k=2, max_new_tokens=12)
    assert [o.output_ids for o in drafted] == [
        o.output_ids for o in decode(own, None, prompts, max_new_tokens=12)
    ]
    if family == "eagle3":
        resumes_to_the_byte(sharded, family, world, data, two)


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    """This process alone."""
    file = f"file://{tmp_path / 'group'}"
    torch.distributed.init_process_group("gloo", init_method=file, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("family", DRAFTS)
def test_a_loss_touches_weights_in_a_forward_pass_alone(
    family: str, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches, in any family, losses over weights that FSDP has taken apart again."""
    monkeypatch.setattr(chunked_sums, "max_chunk_rows", lambda vocab_size, budget_bytes=0: 5)
    own, sample = conversation()
    settings = DistillConfig(draft=DRAFTS[family])  # type: ignore[arg-type]
    found = []
    for sharded in (False, True):
        torch.manual_seed(0)
        trainee = build_trainable(settings.draft, FamilyContext(settings, own, [sample]))
        if sharded:
            fully_shard(trainee.model, mesh=mesh, reshard_after_forward=True)
        torch.manual_seed(1)
        loss = trainee.loss(trainee.model, batching.collate([sample], 0, 1))["loss"]
        loss.backward()
        grads = [value.grad for value in trainee.model.parameters() if value.grad is not None]
        assert all(isinstance(grad, DTensor) == sharded for grad in grads)
        whole = [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads]
        found.append([loss.item(), *(float(grad.norm()) for grad in whole)])
    assert found[1] == pytest.approx(found[0], rel=1e-4, abs=1e-6)


def test_in_bf16_the_loss_is_near(world: World, data: Path, tmp_path: Path) -> None:
    """Catches inputs or outputs in a type that the loss does not take, and sums over a batch that are cast to bf16."""
    one, two, family = tmp_path / "one", tmp_path / "two", FAMILIES["eagle1"]
    assert worlds.call(COMMAND, *arguments(world, data, one), *RUN, *family).code == 0
    sharded(world, data, two, *family, "--mixed_precision", "bf16").ok()
    assert losses_of(two) == pytest.approx(losses_of(one), rel=0.02)
    assert losses_of(two) != losses_of(one)


def test_what_the_loss_returns_stays_in_fp32() -> None:
    """Catches accelerate's policy, under which FSDP2 rounds sums over thousands of tokens to three digits."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    plugin.set_mixed_precision("bf16")
    assert plugin.mixed_precision_policy.output_dtype == torch.bfloat16  # or nothing is left to do
    state = SimpleNamespace(fsdp_plugin=plugin)
    sharding.configure_accelerator(
        SimpleNamespace(
            is_fsdp2=True, mixed_precision="bf16", state=state, distributed_type="FSDP"
        ),  # type: ignore[arg-type]
        LoopConfig(),
    )
    policy = plugin.mixed_precision_policy
    assert policy.param_dtype == torch.bfloat16
    assert policy.reduce_dtype == policy.output_dtype == torch.float32
