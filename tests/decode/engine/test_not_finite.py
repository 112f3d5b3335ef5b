"""Logits that are NaN are said, not decoded as token 0; drafts up to the end of the context change nothing."""

from typing import Any

import pytest
import torch
from torch import Tensor

from decode.common.errors import UserError
from decode.drafts.base import Draft
from decode.drafts.causal import CausalDraft
from decode.drafts.lookup import NgramDraft
from decode.engine.engine import decode
from decode.model.loading import Target
from decode.model.runner import ModelRunner
from decode.verification.sampling import SamplingParams
from decode.verification.tree import DynamicTree
from tests.decode.drafts.test_token_trees import BUSHY
from tests.decode.engine.test_engine import PROMPTS, hf_text, texts
from tests.heads import random_draft
from tests.params import slow_except
from tests.tiny import noisy, tiny_model, tiny_prompts, tiny_target

SAMPLINGS = {"greedy": SamplingParams(), "sampled": SamplingParams(1.0)}


def spoil(model: Any, position: int) -> None:
    """From this position on the model's hidden states are NaN, as where float16 overflows."""
    rotary = model.model.rotary_emb
    forward = rotary.forward

    def spoiled(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = forward(x, position_ids)
        return cos.masked_fill((position_ids >= position)[..., None], float("nan")), sin

    rotary.forward = spoiled


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("position", [3, 16])
@pytest.mark.parametrize("drafts", ["plain", "ngram", "causal"])
def test_a_target_without_numbers_is_said(
    drafts: str, position: int, sampling: SamplingParams
) -> None:
    """Catches NaN that is sampled or taken as token 0, in prefill and in rounds."""
    model = tiny_model("llama")
    draft = {"plain": None, "ngram": NgramDraft(), "causal": CausalDraft(ModelRunner(model))}
    target = tiny_target(model)
    spoil(target.runner.model, position)
    with pytest.raises(UserError, match="target 'tiny' gives NaN .* tokens of prompt 0"):
        decode(target, draft[drafts], PROMPTS, k=2, max_new_tokens=12, sampling=sampling)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("shape", [None, BUSHY, DynamicTree(3, 8)])
def test_a_draft_without_numbers_is_said(shape: Any, sampling: SamplingParams) -> None:
    """Catches q = NaN, of which every token would be accepted."""
    model = tiny_model("llama")
    draft = CausalDraft(ModelRunner(noisy(model, 0.01)), shape=shape)
    spoil(draft.runner.model, 16)
    with pytest.raises(UserError, match="the draft gives NaN"):
        decode(tiny_target(model), draft, PROMPTS, k=3, max_new_tokens=12, sampling=sampling)


def heads(name: str, target: Target) -> Draft:
    near = ModelRunner(noisy(target.runner.model, 0.01))
    return {
        "causal": CausalDraft(near),
        "bushy": CausalDraft(near, shape=BUSHY),
        "tree": CausalDraft(near, shape=DynamicTree(3, 8)),
        "eagle1": random_draft("eagle1", target),
        "eagle3": random_draft("eagle3", target, DynamicTree(3, 8)),
        "medusa": random_draft("medusa", target),
    }[name]


@pytest.mark.parametrize("name", ["medusa", "eagle1"])
def test_heads_without_numbers_are_said(name: str) -> None:
    """Catches heads whose weights are NaN: they load, and every token of theirs would be accepted."""
    target = tiny_target(tiny_model("llama"))
    draft: Any = heads(name, target)
    with torch.no_grad():
        next(iter(draft.net.parameters())).fill_(float("nan"))
    with pytest.raises(UserError, match="the draft gives NaN"):
        decode(target, draft, PROMPTS, k=2, max_new_tokens=4, sampling=SAMPLINGS["sampled"])


CASES = ["causal", "bushy", "tree", "eagle1", "eagle3", "medusa"]


@pytest.mark.parametrize("name", slow_except(CASES, ["causal", "tree", "eagle3"]))
@pytest.mark.parametrize("left", [1, 2, 4])
def test_drafts_reach_beyond_the_context(name: str, left: int) -> None:
    """Catches K tokens drafted where the context has room for fewer: wrong text, an index out of range, rounds that
    accept what cannot be committed."""
    context = 32
    model = tiny_model("llama", max_position_embeddings=context)
    target = tiny_target(model)
    prompts = tiny_prompts(context - left, 5, context - left)
    k = 3 if name in ("bushy", "medusa") else 12
    outputs = decode(target, heads(name, target), prompts, k=k, max_new_tokens=99)
    assert texts(outputs) == [hf_text(model, prompt, max_length=context) for prompt in prompts]
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(prompt) + len(output.output_ids) == context
        assert output.finish_reason == "length"
