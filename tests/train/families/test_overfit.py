"""Heads fitted to one conversation must be accepted whole when it is decoded: training and decoding mean the same."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from decode.drafts.eagle_model import Eagle1Model, Eagle3Model
from decode.engine.engine import decode
from decode.engine.records import DecodeRecord
from decode.model.loading import Target
from tests.params import slow_except
from tests.tiny import rope, tiny_model, tiny_prompts, tiny_target
from tests.train.families.test_heads_training import row
from train.data import batching
from train.data.sample_store import SampleRow
from train.families import head_loss
from train.families.base import FamilyContext
from train.families.builders import build_trainable
from train.families.eagle import EagleTrainer
from train.families.settings.base import FamilySettings
from train.families.settings.blocks import (
    DFlashSettings,
    DSparkSettings,
    PardSettings,
    PEagleSettings,
)
from train.families.settings.causal import CausalSettings
from train.families.settings.eagle import Eagle1Settings, Eagle3Settings
from train.families.settings.heads import LayerSkipSettings, MedusaSettings, MtpSettings
from train.settings.training import LossWeights
from train.trainer.settings import DistillConfig

K, LENGTH, TAPS = 3, 1 + 6 * 4, [0, 1, 2]
"""The first token comes with the prompt; a perfect draft gives the rest in 6 rounds of 4."""
DRAFTS: dict[str, FamilySettings] = {
    "causal": CausalSettings(layers=[0]),
    "pard": PardSettings(layers=[0], block=K, retention=1.0),
    "peagle": PEagleSettings(block=K, vocab=60, taps=TAPS, retention=1.0),
    "dflash": DFlashSettings(depth=2, block=K, vocab=60, taps=[1, 2], anchors=1.0),
    "dspark": DSparkSettings(depth=2, block=K, vocab=0, taps=[1, 2], anchors=1.0, markov_rank=8),
    "medusa": MedusaSettings(heads=K),
    "eagle1": Eagle1Settings(),
    "eagle3": Eagle3Settings(steps=K, vocab=60, taps=TAPS),
    "whole": Eagle3Settings(steps=K, vocab=0, taps=TAPS),
    "narrow": Eagle3Settings(steps=K, vocab=0, taps=TAPS, width=16),
    "mtp": MtpSettings(steps=K),
    "layerskip": LayerSkipSettings(exit_layer=2, exit_width=64, vocab=60),
}
"""`eagle3` has a reduced vocabulary."""


@cache
def conversation() -> tuple[Target, SampleRow]:
    """A target, and a text of its own in which most tokens have several successors."""
    turned = rope("llama3", rope_theta=5e4, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0)
    own = tiny_target(tiny_model("llama+llama3", **turned))
    (prompt,) = tiny_prompts(8, seed=5)
    answer = decode(own, None, [prompt], max_new_tokens=LENGTH)[0].output_ids
    return own, row([*prompt, *answer], (8, 8 + LENGTH))


def fitted(family: str) -> DecodeRecord:
    """The conversation's answer, decoded with a draft that was trained on nothing else.

    EAGLE-1 goes on from its own features, so it has to learn them and all that they say; the best token is enough for
    the others."""
    own, sample = conversation()
    steps, rate, loss = (250, 5e-3, "forward_kl") if family == "eagle1" else (150, 1e-2, "hard_ce")
    settings = DistillConfig(draft=DRAFTS[family], weights=LossWeights(divergence=1.0), loss=loss)  # type: ignore[arg-type]
    torch.manual_seed(0)
    trainee = build_trainable(settings.draft, FamilyContext(settings, own, [sample]))
    trained = [value for value in trainee.model.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(trained, weight_decay=0.0)
    batch = batching.collate([sample], 0, 1)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1, (step + 1) / 20) * (1 - step / steps)
        (trainee.loss(trainee.model, batch)["loss"] / LENGTH).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    ids = list(sample["input_ids"])
    (output,) = decode(own, trainee.to_draft(), [ids[:8]], k=K, max_new_tokens=LENGTH)
    assert output.output_ids == ids[8:]  # lossless, whatever the draft
    return output


def test_the_conversation_is_varied() -> None:
    """Guards the tests below: a text that repeats itself would be accepted with states or positions one off."""
    _, sample = conversation()
    answer = list(sample["input_ids"])[8:]
    assert len(set(answer)) > 15
    pairs = set(zip(answer, answer[1:], strict=False))
    assert len(pairs) > len({first for first, _ in pairs}) + 3


@pytest.mark.parametrize(
    "family", slow_except(DRAFTS, DRAFTS.keys() - {"eagle1", "eagle3", "whole", "narrow"})
)
def test_a_fitted_draft_is_accepted_whole(family: str) -> None:
    """Catches any disagreement between training and decoding on states, tokens, positions, labels, K/V or the
    vocabulary map (methods 2, 4, 12): tau must be K + 1."""
    *rounds, _ = fitted(family).rounds
    assert rounds == [(K, K)] * 5


SLOT_OF = head_loss.SupervisedRows.values_at_slots


def late_labels(self: head_loss.SupervisedRows, values: Tensor, j: int) -> Tensor:
    """Every slot learns the law one place behind its own."""
    return SLOT_OF(self, values, j + 1)


def late_features(kind: type) -> Callable[..., Any]:
    """Every slot reads the state before its own, in training only."""
    forward, start = EagleTrainer.forward, kind.init_state  # type: ignore[attr-defined]

    def spoiled(*inputs: Any, **more: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kind, "init_state", lambda net, features: start(net, features.roll(1, 1)))
            return forward(*inputs, **more)

    return spoiled


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bug", "family"),
    [("labels", "medusa"), *((bug, f) for bug in ("labels", "features") for f in ("eagle1", "eagle3"))],
)  # fmt: skip
def test_training_one_off_fails_the_gate(
    bug: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above is blind if one of these passes it. Not by a hair: less than half is accepted, though the token
    that an EAGLE net also reads says much about the next."""
    if bug == "labels":
        monkeypatch.setattr(head_loss.SupervisedRows, "values_at_slots", late_labels)
    else:
        kind = Eagle1Model if family == "eagle1" else Eagle3Model
        monkeypatch.setattr(EagleTrainer, "forward", late_features(kind))
    rounds = fitted(family).rounds
    assert sum(accepted for _, accepted in rounds) < K / 2 * len(rounds)
