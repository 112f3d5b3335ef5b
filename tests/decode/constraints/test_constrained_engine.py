"""Constrained decoding by the whole engine: greedy identity, batches, states of drafts after forced tokens, counts."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch

from decode.common.errors import UserError
from decode.constraints.rows import RowConstraints
from decode.drafts.base import Draft
from decode.drafts.blocks import PardDraft
from decode.drafts.causal import CausalDraft
from decode.drafts.eagle import CachedHead
from decode.drafts.early_exit import EarlyExitDraft
from decode.drafts.lookup import GrammarDraft, NgramDraft, SuffixDraft
from decode.drafts.wrappers import ConfidentDraft, TwoSourceDraft
from decode.engine.engine import SpeculativeEngine, decode, speculate
from decode.engine.records import DecodeRecord, RoundRecord, add_record
from decode.model.loading import Target
from decode.model.runner import ModelRunner
from decode.verification.sampling import SamplingParams
from decode.verification.tree import DynamicTree
from eval.checks.greedy_equivalence import reference_greedy_output
from eval.metrics.acceptance import Acceptance
from eval.metrics.latency import token_seconds
from tests import drafts
from tests.automata import START, Automaton, fields, follows
from tests.decode.drafts.test_heads_decoding import anew, watched
from tests.heads import draft_of, net_of
from tests.params import slow_except
from tests.tiny import VOCAB, noisy, reference, tiny_model, tiny_prompts, tiny_target

EOS, K, LENGTH = 5, 3, 40
PROMPTS = tiny_prompts(7, 1, 12)
RULES = fields(VOCAB, EOS, [2, 13, 0, 4], seed=2)
"""Runs of forced tokens shorter and longer than what a round can hold."""
GRAMMAR = Automaton(RULES, VOCAB)
WARM = SamplingParams(0.8, top_p=0.95)


@cache
def model() -> Any:
    return tiny_model("llama", seed=3)


def target() -> Target:
    return tiny_target(model(), (EOS,))


def near(own: Target) -> CausalDraft:
    return CausalDraft(ModelRunner(noisy(model(), 0.05)))


def reduced(own: Target) -> CausalDraft:
    """Half of the vocabulary, so that many forced tokens are none of its own."""
    return CausalDraft(ModelRunner(noisy(model(), 0.05), ids=torch.arange(0, VOCAB, 2)))


def head(family: str, own: Target) -> Draft:
    return draft_of(net_of(family, own), own)


DRAFTS: dict[str, Callable[[Target], Draft]] = {
    "grammar": lambda own: GrammarDraft(),
    "ngram": lambda own: NgramDraft(),
    "suffix": lambda own: SuffixDraft(),
    "causal": near,
    "reduced": reduced,
    "causal + ngram": lambda own: TwoSourceDraft(NgramDraft(2, 1), near(own), VOCAB),
    "early-exit": lambda own: EarlyExitDraft(own, 2),
    "pard": lambda own: PardDraft(ModelRunner(noisy(model(), 0.05)), 9),
    "medusa": partial(head, "medusa"),
    "eagle1": partial(head, "eagle1"),
    "eagle3": partial(head, "eagle3"),
}


def constrained(draft: Draft | None, own: Target, **settings: Any) -> list[DecodeRecord]:
    settings = {"k": K, "max_new_tokens": LENGTH, "matchers": [GRAMMAR] * len(PROMPTS)} | settings
    return decode(own, draft, PROMPTS, **settings)


def ids(outputs: Sequence[DecodeRecord]) -> list[list[int]]:
    return [output.output_ids for output in outputs]


def test_greedy_text_is_that_of_transformers_under_the_same_grammar() -> None:
    """Catches a wrong mask anywhere in plain constrained decoding: `generate` shares none of its code."""
    outputs, own = constrained(None, target()), reference(model())
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        text = reference_greedy_output(own, prompt, LENGTH, target(), grammar=GRAMMAR)
        assert output.output_ids == text
        assert follows(RULES, text, EOS)
    assert {output.finish_reason for output in outputs} == {"eos"}
    free = decode(target(), None, PROMPTS, max_new_tokens=LENGTH)
    assert not any(follows(RULES, text, EOS) for text in ids(free))


@cache
def plain_texts(length: int) -> list[list[int]]:
    return ids(constrained(None, target(), max_new_tokens=length))


@pytest.mark.parametrize(
    "name", slow_except(DRAFTS, ["grammar", "ngram", "causal", "causal + ngram", "pard", "eagle3"])
)
def test_greedy_text_is_that_of_plain_constrained_decoding(name: str) -> None:
    """Catches drafts, forced tokens and masks that change the text, rows that are refilled, and a text that ends in the
    middle of a forced run."""
    for rows, length in ((2, LENGTH), (3, 17)):
        own = target()
        outputs = constrained(DRAFTS[name](own), own, rows=rows, max_new_tokens=length)
        assert ids(outputs) == plain_texts(length)
        assert all(sum(output.forced) > 0 for output in outputs)
        assert sum(len(output.rounds) for output in outputs) < sum(map(len, ids(outputs)))


@pytest.mark.parametrize("name", ["reduced", "eagle3", "grammar"])
def test_sampled_text_depends_on_no_other_row(name: str) -> None:
    """Catches random numbers that depend on how many tokens other rows draft or have forced. A row without a grammar
    says what it says without any grammar in its batch."""
    matchers = [GRAMMAR, None, Automaton(fields(VOCAB, EOS, [1, 6], seed=4), VOCAB)]
    settings: dict[str, Any] = {"k": K, "max_new_tokens": 24, "sampling": WARM}
    own = target()
    draft, seeds = DRAFTS[name](own), [1, 2, 3]
    together = decode(own, draft, PROMPTS, seeds=seeds, matchers=matchers, **settings)
    for number, (prompt, matcher) in enumerate(zip(PROMPTS, matchers, strict=True)):
        own, seed = target(), seeds[number : number + 1]
        given = None if matcher is None and name != "grammar" else [matcher]
        (alone,) = decode(own, DRAFTS[name](own), [prompt], seeds=seed, matchers=given, **settings)
        assert alone.output_ids == together[number].output_ids
    assert follows(matchers[0].rules, together[0].output_ids, EOS)  # type: ignore[union-attr]
    assert GRAMMAR.states == [START]


def perfect(own: Target) -> CausalDraft:
    return CausalDraft(ModelRunner(noisy(model(), 0.0)))


def perfect_pard(own: Target) -> PardDraft:
    """Its first drafted token is the target's choice, if its KV cache holds the text."""
    return PardDraft(ModelRunner(noisy(model(), 0.0)), 9)


def rejected_at_once(draft: Draft) -> list[bool]:
    """Of each round whose chain begins with a token that is not forced, whether all of it was rejected."""
    prompts = tiny_prompts(7, 1, 12, 3, 9, 5, 2, 11)
    found, places = [], [GRAMMAR.copy() for _ in prompts]
    for record in speculate(
        target(), draft, prompts, k=K, max_new_tokens=LENGTH, matchers=[GRAMMAR] * len(prompts)
    ):
        place = places[record.prompt]
        if record.drafted > 0 and int(place.allowed().sum()) > 1:
            found.append(record.accepted == 0)
        place.advance([token for token in record.tokens if token != EOS])
    return found


@pytest.mark.parametrize("make", [perfect, perfect_pard])
def test_a_draft_that_is_the_target_is_accepted(
    make: Callable[[Target], Draft], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a draft's KV cache that lacks forced tokens, and masks of another place than the drafted token's. The
    second half plants the first bug."""
    draft = make(target())
    found = rejected_at_once(draft)
    assert len(found) > 5
    assert not any(found)
    monkeypatch.setattr(type(draft), "skip", lambda *args, **kwargs: None)
    assert any(rejected_at_once(make(target())))


def head_drift(family: str) -> float:
    """How far the first logits of each proposal are from those of a head that begins with the text so far."""
    own = tiny_target(tiny_model("llama", seed=3, dtype=torch.float64), (EOS,))
    net = net_of(family, own)
    draft, found, known = draft_of(net, own), [], set()
    with watched(draft) as seen:
        decode(own, draft, PROMPTS, k=K, max_new_tokens=LENGTH, matchers=[GRAMMAR] * len(PROMPTS))
    for proposal in seen:
        for row, text in enumerate(proposal.texts):
            if tuple(text) in known or text[-1] == EOS:  # a row that is done
                continue
            known.add(tuple(text))
            fresh = anew(net, own, text, K, None)
            apart = proposal.calls[0].logits[row] - fresh.calls[0].logits[0]
            found.append(float(apart.detach().abs().max()))
    assert len(found) > 10
    return max(found)


@pytest.mark.parametrize("family", ["eagle1", "eagle3"])
def test_heads_have_read_forced_tokens(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a buffer of the target's states that is shorter than a round with forced tokens. The second half plants
    that bug."""
    assert head_drift(family) < 1e-5
    begin = CachedHead.begin_batch
    monkeypatch.setattr(
        CachedHead, "begin_batch", lambda self, request: begin(self, replace(request, extra=0))
    )
    assert head_drift(family) > 1e-3


def test_forced_tokens_count_for_tau_alone() -> None:
    """Catches an α that forced tokens raise, and a τ or a time per token that leaves them out."""
    (output, *_) = constrained(GrammarDraft(), target())
    assert {drafted for drafted, _ in output.rounds} == {0}
    assert Acceptance.of([output], K).alpha.value is None
    assert len(output.forced) == len(output.rounds)
    assert max(output.forced) > K
    emitted = len(output.output_ids) - 1
    assert sum(output.committed) >= emitted
    assert Acceptance.of([output]).tau.value == emitted / len(output.rounds)
    assert drafts.measured([output], K).counts.forced == sum(output.forced)
    assert Acceptance.of([output]).accept_length.value == 1
    assert len(token_seconds([output])) == emitted


def test_records_separate_forced_tokens() -> None:
    """Catches forced tokens behind a rejection counted as accepted, and lists of unequal length."""
    output = DecodeRecord([1])
    add_record(output, RoundRecord(0, True, 0, 0, [], [7], None, 0.1))
    add_record(output, RoundRecord(0, False, 3, 1, [1, 2, 3], [1, 9], None, 0.1))
    add_record(
        output, RoundRecord(0, False, 5, 3, [1, 2, 3, 4, 5], [1, 2, 3, 9], None, 0.1, (4, 2))
    )
    assert output.rounds == [(3, 1), (1, 1)]
    assert output.forced == [0, 2]
    assert output.committed == [2, 4]


def test_a_dead_end_ends_the_text() -> None:
    """Catches a token that no grammar allows in the text, NaN where nothing is allowed, and a row that runs on."""
    rules = {START: {4: "a"}, "a": {6: "b", 7: "b"}, "b": {}}
    for draft in (None, near(target()), GrammarDraft()):
        outputs = constrained(draft, target(), matchers=[Automaton(rules, VOCAB), GRAMMAR, None])
        dead, fine, free = outputs
        assert dead.finish_reason == "grammar"
        assert len(dead.output_ids) == 2
        assert fine.output_ids == constrained(None, target())[1].output_ids
        assert len(free.output_ids) > 2
    with pytest.raises(UserError, match="no first token"):
        constrained(None, target(), matchers=[Automaton({START: {}}, VOCAB)] * 3)


def test_what_cannot_follow_a_grammar_is_refused() -> None:
    """Catches a tree or compiled code that decodes past the grammar."""
    own = target()
    with pytest.raises(UserError, match="trees"):
        constrained(CausalDraft(ModelRunner(model()), shape=DynamicTree(2, 4)), own)
    with pytest.raises(UserError, match="choose eager"):
        list(SpeculativeEngine(own, mode="compiled").speculate(PROMPTS, matchers=[GRAMMAR] * 3))
    with pytest.raises(UserError, match="drop `confidence`"):
        constrained(ConfidentDraft(near(own), 0.3), own)


def test_an_engine_decodes_without_grammars_as_before() -> None:
    """Catches a constraint of an earlier call that stays in the engine."""
    own = target()
    engine = SpeculativeEngine(own, near(own), k=K)
    want = ids(decode(target(), None, PROMPTS, max_new_tokens=LENGTH))
    for matchers in (None, [GRAMMAR] * 3, None):
        texts: list[list[int]] = [[] for _ in PROMPTS]
        for record in engine.speculate(PROMPTS, max_new_tokens=LENGTH, matchers=matchers):
            texts[record.prompt] += record.tokens
        assert (texts == want) is (matchers is None)


def test_masks_are_asked_once_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches drafting and verification that each compute the masks of the same places."""
    asked: list[tuple[int, ...]] = []
    ask = RowConstraints._ask

    def count(self: RowConstraints, matcher: Any, path: tuple[int, ...]) -> Any:
        asked.append((len(matcher.states), *path))
        return ask(self, matcher, path)

    monkeypatch.setattr(RowConstraints, "_ask", count)
    own = target()
    decode(own, near(own), PROMPTS[:1], k=K, max_new_tokens=LENGTH, matchers=[GRAMMAR])
    assert len(asked) == len(set(asked))
