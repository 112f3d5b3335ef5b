"""What is measured along a text, against the engine's own rounds and against transformers' distributions."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from decode.common.errors import UserError
from decode.drafts.base import Draft
from decode.drafts.causal import CausalDraft
from decode.drafts.early_exit import EarlyExitDraft
from decode.drafts.lookup import NgramDraft, SuffixDraft
from decode.engine.engine import decode
from decode.engine.records import DecodeRecord
from decode.model.loading import Target
from decode.model.runner import ModelRunner
from eval.forecasting.chains import ChainSettings, follow_texts, measure_chains
from eval.forecasting.rounds import add_rounds, expected_rounds
from eval.metrics.acceptance import Acceptance
from eval.tasks.loading import TaskPrompt
from tests.heads import knowing_draft
from tests.tiny import noisy, reference, tiny_model, tiny_prompts, tiny_target

K, TOKENS = 3, 18
SETTINGS = ChainSettings(K, 0.0, TOKENS, rows=2)
FAMILIES = ("causal", "early-exit", "ngram", "medusa", "eagle3", "narrow")


def world(family: str) -> tuple[Target, Draft, list[TaskPrompt]]:
    """A target whose EOS ends some answers early, a draft that is right now and then, and three prompts."""
    model = tiny_model("llama", max_position_embeddings=128)
    prompts = tiny_prompts(5, 9, 7)
    plain = tiny_target(model)
    texts = [r.output_ids for r in decode(plain, None, prompts, max_new_tokens=TOKENS + K)]
    target = tiny_target(model, eos=(texts[1][11],))
    items = [TaskPrompt("t", str(i), prompt) for i, prompt in enumerate(prompts)]
    if family == "causal":
        return target, CausalDraft(ModelRunner(noisy(model, 0.03))), items
    if family == "early-exit":
        return target, EarlyExitDraft(target, 2), items
    if family == "ngram":
        return target, NgramDraft(), items
    known = list(zip(prompts, texts, strict=True))
    return target, knowing_draft(family, target, known, forget=0.3), items


def counts(records: list[DecodeRecord], k: int) -> dict[str, object]:
    found = Acceptance.of(records, k)
    return {
        "emitted": int(found.emitted.sum()), "rounds": int(found.rounds.sum()),
        "drafted": int(found.drafted.sum()), "reached": list(found.reached_at.sum(0)),
        "accepted": list(found.accepted_at.sum(0)),
    }  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_rounds_are_the_engines(family: str) -> None:
    """Catches a draft that reads the text ahead or an older state, shifted chains, and rounds behind EOS."""
    target, draft, items = world(family)
    texts = measure_chains(target, draft, items, SETTINGS, seed=0)
    assert {text.length for text in texts} > {TOKENS}  # EOS ended one
    accepted = 0.0
    for k in (1, 2, K):
        records = decode(target, draft, [x.prompt_ids for x in items], k=k, max_new_tokens=TOKENS)
        found = vars(add_rounds([expected_rounds(x, "greedy", k) for x in texts]))
        real = counts(records, k)
        assert {key: np.array(found[key]).tolist() for key in real} == real
        accepted += np.sum(real["accepted"])
    assert accepted > 0


def test_sampled_chances_are_those_of_transformers() -> None:
    """Catches p or q of another place, of another temperature, or of a draft that did not read the chain so far."""
    model = tiny_model("llama", max_position_embeddings=128)
    target, other = tiny_target(model), noisy(model, 0.03)
    draft = CausalDraft(ModelRunner(other))
    s = replace(SETTINGS, temperature=0.7)
    prompts, (text, _) = tiny_prompts(6, 9), tiny_prompts(TOKENS + K - 1, TOKENS + K - 1, seed=3)
    p, q, best, drafted = follow_texts(target, draft, prompts, [text, text], s)
    for row, prompt in enumerate(prompts):
        ids = torch.tensor([prompt + text])
        for model_, found in ((reference(model), p), (reference(other), q)):
            with torch.inference_mode():
                logits = model_(ids).logits[0, len(prompt) - 1 : -1]
            share = torch.softmax(logits / s.temperature, -1)
            own = share[torch.arange(len(text)), torch.tensor(text)].numpy()
            for i in range(TOKENS - 1):
                np.testing.assert_allclose(found[row, i], own[i + 1 : i + 1 + K], atol=1e-5)
        most = torch.softmax(logits, -1).argmax(-1) == torch.tensor(text)
        assert best[row, 0].tolist() == most[1 : 1 + K].tolist()
    assert (drafted == K).all()


def test_a_token_outside_the_drafts_vocabulary_has_no_chance() -> None:
    target, draft, items = world("eagle3")
    assert draft.vocab_ids is not None
    outside = next(x for x in range(97) if x not in set(draft.vocab_ids.tolist()))
    text = [outside] * (TOKENS + K - 1)
    s = replace(SETTINGS, temperature=1.0)
    p, q, best, _ = follow_texts(target, draft, [items[0].prompt_ids], [text], s)
    assert (q == 0).all()
    assert not best.any()
    assert (p > 0).all()


@pytest.mark.parametrize(
    ("draft", "tokens", "said"),
    [(SuffixDraft(), 8, "measure each K"), (NgramDraft(), 200, "smaller max_new_tokens")],
)
def test_what_cannot_be_measured_is_refused(draft: Draft, tokens: int, said: str) -> None:
    target, _, items = world("ngram")
    with pytest.raises(UserError, match=said):
        measure_chains(target, draft, items, replace(SETTINGS, max_new_tokens=tokens), 0)
