"""Samples that share a line learn and are read as if each had one for itself: in the target, in drafts, from disk."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from decode.common.errors import UserError
from decode.model import attention
from decode.model.hidden_states import HiddenStateSpec
from tests.params import slow_except
from tests.tiny import ARCHITECTURES, FEW, WINDOW, tiny_model, tiny_prompts, tiny_target
from tests.train.families.test_heads_training import (
    DRAFTS,
    STEPS,
    assert_same,
    learned,
    model_of,
    row,
)
from train.data import batching
from train.data.batching import Batch
from train.data.sample_store import SampleRow
from train.families import ttt_attention
from train.families.base import FamilyContext
from train.families.builders import build_trainable
from train.families.settings.blocks import (
    DFlashSettings,
    DSparkSettings,
    PardSettings,
    PEagleSettings,
)
from train.families.settings.causal import CausalSettings
from train.families.settings.heads import (
    LayerSkip2Settings,
    LayerSkipSettings,
    Medusa2Settings,
    MtpSettings,
)
from train.settings.training import LossWeights
from train.teacher.cached import CachedTeacher, FeatureFolder
from train.teacher.live import compute_hidden_states
from train.trainer.settings import DistillConfig

FAMILY = {
    "causal": CausalSettings(layers=[0, 1]),
    "pard": PardSettings(layers=[0, 1], block=STEPS),
    "peagle": PEagleSettings(block=STEPS, vocab=60, taps=[0, 1, 2]),
    "dflash": DFlashSettings(depth=2, block=STEPS, vocab=60, taps=[1, 2], anchors=0.6),
    "dspark": DSparkSettings(depth=2, block=STEPS, vocab=0, taps=[1, 2], markov_rank=8),
    "medusa2": Medusa2Settings(heads=STEPS, target_lora_rank=2),
    "mtp": MtpSettings(steps=STEPS),
    "layerskip": LayerSkipSettings(exit_layer=2, vocab=60),
    "layerskip2": LayerSkip2Settings(exit_layer=2, target_lora_rank=2, layer_dropout=0.5),
    **DRAFTS,
}
SAMPLES = [
    {**row(ids, (len(ids) // 3, len(ids))), "id": str(i)}
    for i, ids in enumerate(tiny_prompts(20, 13, 9, 31, 12, 6, 18, 25, seed=7))
]
"""More than a window long, and less."""


def per_sample(batch: Batch, values: Tensor) -> list[Tensor]:
    """[n, ...] of each sample from [B, T, ...]."""
    ends = [len(SAMPLES[int(name)]["input_ids"]) for name in batch.ids]
    return [values[line, at : at + n] for (line, at), n in zip(batch.starts, ends, strict=True)]


def test_each_sample_is_there_once_and_lines_are_even() -> None:
    """Catches samples that overlap, lose a token or their mask, learn across a seam, or leave lines half empty."""
    whole, packed = batching.collate(SAMPLES, 5, 1), batching.pack(SAMPLES, 5, 1)
    assert packed.ids == whole.ids
    for name in ("input_ids", "loss_mask"):
        for here, there in zip(
            per_sample(packed, getattr(packed, name)),
            per_sample(whole, getattr(whole, name)),
            strict=True,
        ):
            assert torch.equal(here, there)
    assert packed.documents is not None
    numbers = per_sample(packed, packed.documents)
    assert all(len(set(x.tolist())) == 1 for x in numbers)
    assert len({int(x[0]) for x in numbers}) == len(SAMPLES)
    inside = sum(len(x) for x in numbers)
    padding = packed.documents == len(SAMPLES)
    assert int((~padding).sum()) == inside
    assert not packed.loss_mask[padding].any()
    assert int(packed.loss_mask.sum()) == batching.supervised_token_count(SAMPLES)
    assert packed.input_ids.numel() < 1.2 * inside < whole.input_ids.numel()
    places = per_sample(packed, packed.positions().expand_as(packed.input_ids))
    assert all(x.tolist() == list(range(len(x))) for x in places)
    moved = packed.to("cpu")
    assert torch.equal(moved.documents, packed.documents)  # type: ignore[arg-type]
    assert moved.starts == packed.starts


@pytest.mark.parametrize("arch", slow_except(ARCHITECTURES, FEW))
def test_states_of_a_target_are_those_of_the_sample_alone(arch: str) -> None:
    """Catches tokens that see the sample before theirs, positions that run on, windows over a seam, and experts or
    caps of a model that go another way."""
    model = tiny_target(tiny_model(arch)).runner.model
    taps = HiddenStateSpec((1, 2), final=True)
    assert max(len(sample["input_ids"]) for sample in SAMPLES) > WINDOW
    with torch.no_grad():
        packed, whole = batching.pack(SAMPLES, 0), batching.collate(SAMPLES, 0)
        here, there = (
            per_sample(batch, compute_hidden_states(model, batch, taps))
            for batch in (packed, whole)
        )
        for x, y in zip(here, there, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-3)
        loose = Batch(packed.input_ids, packed.loss_mask, packed.ids, packed.starts)
        blind = per_sample(packed, compute_hidden_states(model, loose, taps))
    assert any(float((x - y).abs().max()) > 0.05 for x, y in zip(blind, there, strict=True))


def trainee_of(family: str, own: Any, where: FeatureFolder | None = None, **weights: Any) -> Any:
    torch.manual_seed(0)
    settings = DistillConfig(draft=FAMILY[family], weights=LossWeights(**weights))
    return build_trainable(settings.draft, FamilyContext(settings, own, SAMPLES, "cpu", where))


@pytest.mark.parametrize("positions", ["decay", "dpace", "dpard"])
@pytest.mark.parametrize("family", FAMILY)
def test_packed_samples_teach_the_same(
    family: str, positions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches any family whose draft, teacher or alignment looks over a seam: sums and gradients."""
    monkeypatch.setattr(ttt_attention, "BLOCK", 16)
    trainee = trainee_of(family, tiny_target(model_of()), positions=positions)
    with torch.no_grad():  # LoRA's second matrix starts at zero, and would hide the first
        for value in trainee.low_lr_parameters:
            value.add_(0.05 * torch.randn(value.shape))
    whole = learned(trainee, batching.collate(SAMPLES, 0))
    assert_same(learned(trainee, batching.pack(SAMPLES, 0)), whole)


@pytest.mark.parametrize("family", ["causal", "pard", "dflash", "medusa", "eagle3"])
@pytest.mark.parametrize("arch", FEW)
def test_packed_samples_teach_the_same_whatever_the_target(family: str, arch: str) -> None:
    """Catches windows, sinks and learned positions that are not kept to a sample in backward."""
    trainee = trainee_of(family, tiny_target(tiny_model(arch)))
    trainee.model.eval()  # GPT-2 has dropout
    whole = learned(trainee, batching.collate(SAMPLES, 0))
    assert_same(learned(trainee, batching.pack(SAMPLES, 0)), whole)


@pytest.mark.parametrize("family", ["causal", "medusa", "eagle1", "eagle3"])
def test_a_test_without_seams_would_be_seen(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the tests above: attention over seams changes the loss."""
    trainee = trainee_of(family, tiny_target(model_of()))
    whole = learned(trainee, batching.collate(SAMPLES, 0))[0]["loss"]
    monkeypatch.setattr(attention, "packed_documents", lambda numbers: nullcontext())
    assert abs(learned(trainee, batching.pack(SAMPLES, 0))[0]["loss"] - whole) > 1e-2 * whole


@pytest.mark.parametrize("top", [0, 8])
@pytest.mark.parametrize("family", ["causal", "pard", "dflash", "medusa", "eagle3"])
def test_packed_samples_read_their_own_states_from_disk(
    family: str, top: int, tmp_path: Path
) -> None:
    """Catches stored states and laws put where the sample would be on a line of its own."""
    where = FeatureFolder(tmp_path / "features", top, 64)
    trainee = trainee_of(family, tiny_target(model_of()), where)
    assert isinstance(trainee.teacher, CachedTeacher)
    trainee.teacher.fill_store(Console(quiet=True))
    whole = learned(trainee, batching.collate(SAMPLES, 0))
    assert_same(learned(trainee, batching.pack(SAMPLES, 0)), whole)


def test_layers_that_are_computed_again_are_refused() -> None:
    """Catches gradient checkpointing, whose second forward would run without the seams."""
    model = tiny_model("llama")
    model.set_attn_implementation(attention.ATTENTION_NAME)
    model.gradient_checkpointing_enable()
    compute_hidden_states(model, batching.collate(SAMPLES, 0), HiddenStateSpec(final=True))
    with pytest.raises(UserError, match="loop.pack"):
        compute_hidden_states(model, batching.pack(SAMPLES, 0), HiddenStateSpec(final=True))


def test_one_sample_packs_to_itself() -> None:
    """Catches a division by nothing, and a line too short."""
    sample: SampleRow = SAMPLES[2]
    packed, whole = batching.pack([sample], 0), batching.collate([sample], 0)
    assert torch.equal(packed.input_ids, whole.input_ids)
    assert torch.equal(packed.loss_mask, whole.loss_mask)
