"""PARD in the engine: its distributions are those of a plain pass over text and masks, its text is the target's."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from decode.common.errors import UserError
from decode.drafts import blocks
from decode.drafts.base import Proposal
from decode.drafts.blocks import PardDraft
from decode.drafts.lookup import NgramDraft
from decode.drafts.registry import draft_family
from decode.drafts.wrappers import TwoSourceDraft
from decode.engine.engine import decode
from decode.model.runner import ModelRunner
from decode.verification.sampling import SamplingParams
from decode.verification.tree import TreeShape
from tests.blocks import LENGTH, PROMPTS, SHAPES, K, decode_and_compare, watch_logits
from tests.decode.verification.test_exact_distribution import (
    ROUND_1,
    ROUND_2,
    distance_from_own_law,
    engine_law,
    small,
)
from tests.params import rotated, slow_except
from tests.tiny import (
    ARCHITECTURES,
    FEW,
    VOCAB,
    noisy,
    reference,
    tiny_model,
    tiny_target,
)

MASK = VOCAB - 1


def pard_of(model: Any, shape: TreeShape = None, noise: float = 0.05) -> PardDraft:
    """A disturbed copy of the model: some of its drafts are accepted, though it never learnt what a mask is."""
    return PardDraft(ModelRunner(noisy(model, noise)), MASK, shape=shape)


def drift(draft: Any, inner: PardDraft, model: Any) -> tuple[float, set[int]]:
    """(largest difference from transformers' pass over the text and K - 1 masks, accepted lengths that occurred)."""
    plain = reference(noisy(model, 0.05))

    def one_pass(text: list[int], depth: int) -> Tensor:
        whole = torch.tensor([[*text, *[MASK] * (depth - 1)]])
        return plain(whole).logits[0, -depth:]

    with watch_logits(inner, inner, "_read_with_masks") as seen:
        return decode_and_compare(tiny_target(model), draft, seen, one_pass)


@pytest.mark.parametrize(("arch", "shape"), slow_except(rotated(ARCHITECTURES, SHAPES), FEW))
def test_distributions_are_those_of_text_and_masks(arch: str, shape: str) -> None:
    """Catches masks of an earlier pass that are still seen, positions one off, rows shorter than what is read again,
    and logits of the wrong tokens, after every number of accepted drafts."""
    model = tiny_model(arch)
    draft = pard_of(model, SHAPES[shape])
    worst, counts = drift(draft, draft, model)
    assert worst < 1e-3
    assert len(counts) > 1 or arch != "llama"


def test_distributions_after_rounds_without_it() -> None:
    """Catches tokens that a lookup's rounds committed and the KV cache lacks."""
    model = tiny_model("llama")
    inner = pard_of(model)
    draft = TwoSourceDraft(NgramDraft(longest=2, shortest=1), inner, VOCAB)
    assert drift(draft, inner, model)[0] < 1e-3


READ = PardDraft._read_with_masks


def too_few(self: PardDraft, *inputs: Any) -> Tensor:
    """Reads one token less than a round may commit: a mask of the pass before stays."""
    depth, self.depth = self.depth, self.depth - 2
    found = READ(self, *inputs)
    self.depth = depth
    return found


def one_early(self: PardDraft, history: Tensor, length: Tensor, k: int) -> Tensor:
    return READ(self, history, length - 1, k)


@pytest.mark.parametrize("bug", [too_few, one_early])
def test_planted_bugs_change_the_distributions(bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above are blind if one of these goes unseen."""
    monkeypatch.setattr(PardDraft, "_read_with_masks", bug)
    model = tiny_model("llama")
    draft = pard_of(model)
    assert drift(draft, draft, model)[0] > 0.05


@pytest.mark.parametrize(("arch", "shape"), slow_except(rotated(ARCHITECTURES, SHAPES), FEW))
def test_greedy_text_is_the_targets(arch: str, shape: str) -> None:
    model = tiny_model(arch)
    own = tiny_target(model)
    plain = decode(own, None, PROMPTS, max_new_tokens=LENGTH)
    outputs = decode(own, pard_of(model, SHAPES[shape]), PROMPTS, k=K, max_new_tokens=LENGTH)
    assert [o.output_ids for o in outputs] == [o.output_ids for o in plain]


@pytest.mark.parametrize(
    ("k", "length", "paths"),
    [
        (1, 3, 3 * ROUND_1**2),
        (2, 2, 3 * ROUND_2),
        pytest.param(2, 3, 3 * ROUND_2**2, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_sampled_text_has_the_targets_law(
    temperature: float, k: int, length: int, paths: int
) -> None:
    """Catches a q that is not the distribution a token of the block was drawn from. Exact: no false alarm."""
    model, sampling = small(), SamplingParams(temperature)
    draft = PardDraft(ModelRunner(noisy(model, 0.2)), 2)
    law = engine_law(tiny_target(model), draft, k, length, sampling, paths)
    assert distance_from_own_law(law, model, length, sampling) < 1e-7  # HF norms compute in fp32


PROPOSE = PardDraft.propose


def first_level_everywhere(self: PardDraft, *inputs: Any) -> Proposal:
    """Reports the first level's distribution for all tokens."""
    proposal = PROPOSE(self, *inputs)
    assert proposal.q is not None
    return Proposal(proposal.tokens, proposal.q[:, :1].expand_as(proposal.q))


@pytest.mark.slow
def test_a_wrong_q_moves_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above is blind if this goes unseen. Exact: no false alarm."""
    monkeypatch.setattr(PardDraft, "propose", first_level_everywhere)
    model, sampling = small(), SamplingParams(0.5)
    draft = PardDraft(ModelRunner(noisy(model, 0.2)), 2)
    law = engine_law(tiny_target(model), draft, 2, 3, sampling, 3 * ROUND_2**2)
    assert distance_from_own_law(law, model, 3, sampling) > 1e-3


def test_its_folder_says_what_it_is(tmp_path: Path) -> None:
    """Catches a PARD folder of another trainer taken for a plain language model, and a mask that is no token."""
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    assert draft_family(str(tmp_path)) == "causal"
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "pard_token": MASK}))
    assert draft_family(str(tmp_path)) == "pard"
    for wrong in (VOCAB, -1, "x"):
        (tmp_path / "config.json").write_text(json.dumps({**config, "pard_token": wrong}))
        with pytest.raises(UserError, match="pard_token"):
            blocks.mask_token_of("x", blocks.load_config(str(tmp_path), "draft"))
