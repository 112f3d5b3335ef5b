"""Chains that end by confidence: the text and its law, and what is saved; a draft's state after rounds without it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from decode.common.errors import UserError
from decode.drafts.base import ChainStop, Draft, DraftContext, Proposal, empty_chain
from decode.drafts.causal import CausalDraft
from decode.drafts.drafting import discard_draws, rows_going_on
from decode.drafts.eagle import CachedHead
from decode.drafts.early_exit import EarlyExitDraft
from decode.drafts.lookup import NgramDraft
from decode.drafts.swift import SwiftDraft
from decode.drafts.wrappers import ConfidentDraft, CrossDeviceDraft, DraftWrapper
from decode.engine.composing import add_confidence, add_lookup
from decode.engine.engine import SpeculativeEngine, decode
from decode.engine.records import collect_outputs
from decode.engine.warm_up import run_first_rounds
from decode.model.loading import Target
from decode.model.runner import ModelRunner
from decode.verification.rules import NO_DRAFT
from decode.verification.sampling import SamplingParams
from decode.verification.tree import DynamicTree
from tests.decode.drafts import test_dflash, test_exit_adapter, test_mtp, test_pard, test_peagle
from tests.decode.drafts.test_swift import FIXED
from tests.decode.drafts.test_two_source import Watched, counted, keep_widths, whole_text_logits
from tests.decode.engine.test_compile import graphs  # noqa: F401  a fixture
from tests.decode.engine.test_engine import assert_rows_are_alone, texts
from tests.decode.verification.test_exact_distribution import (
    ENUMERATED,
    distance_from_own_law,
    engine_law,
    partner,
    small,
)
from tests.heads import knowing_draft, random_draft
from tests.params import rotated, slow_except
from tests.tiny import noisy, reference, tiny_model, tiny_prompts, tiny_target

K, LENGTH = 3, 16
PROMPTS = tiny_prompts(13, 1, 9)
GREEDY, SAMPLED = SamplingParams(), SamplingParams(1.0, top_k=2)
UNSURE = 0.2


def knowing(name: str, target: Target) -> Draft:
    """A head that knows two thirds of the greedy text."""
    outputs = decode(target, None, PROMPTS, max_new_tokens=LENGTH)
    known = [(o.prompt_ids, o.output_ids) for o in outputs]
    return knowing_draft(name, target, known, forget=0.3)


DRAFTS: dict[str, Callable[[Target], Draft]] = {
    "causal": lambda t: CausalDraft(ModelRunner(noisy(t.runner.model, 0.02))),
    "medusa": lambda t: knowing("medusa", t),
    "eagle1": lambda t: knowing("eagle1", t),
    "eagle3": lambda t: knowing("eagle3", t),
    "pard": lambda t: test_pard.pard_of(t.runner.model),
    "peagle": test_peagle.draft_of,
    "dflash": lambda t: test_dflash.draft_of("dflash", t),
    "dspark": lambda t: test_dflash.draft_of("dspark", t),
    "mtp": test_mtp.draft_of,
    "early-exit": lambda t: EarlyExitDraft(t, 2),
    "layerskip": test_exit_adapter.draft_of,
    "swift": lambda t: SwiftDraft(t, FIXED),
    "causal+ngram": lambda t: add_lookup(DRAFTS["causal"](t), "ngram", 2, t),
}


# ---- text ----


@pytest.mark.parametrize("name", DRAFTS)
def test_greedy_text_is_the_targets(name: str) -> None:
    """Catches tokens behind an end that are verified, and states spoiled by rounds of other lengths; rows are used
    again, and end at different times."""
    own = tiny_target(tiny_model("llama"))
    draft = ConfidentDraft(DRAFTS[name](own), UNSURE)
    outputs = decode(own, draft, PROMPTS, rows=2, k=K, max_new_tokens=LENGTH)
    assert texts(outputs) == texts(decode(own, None, PROMPTS, max_new_tokens=LENGTH))
    assert max(drafted for o in outputs for drafted, _ in o.rounds) <= K


ALONE = [
    (name, SAMPLED) for name in ("causal", "eagle3", "mtp", "dspark", "layerskip", "causal+ngram")
]


@pytest.mark.parametrize(("name", "sampling"), [*ALONE, ("eagle3", GREEDY)], ids=str)
def test_a_rows_text_does_not_depend_on_its_batch(name: str, sampling: SamplingParams) -> None:
    """Catches random numbers that a row uses up or not depending on how long other rows' chains are."""
    own = tiny_target(tiny_model("llama", dtype=torch.float64))
    draft = ConfidentDraft(DRAFTS[name](own), UNSURE)
    together = assert_rows_are_alone(own, draft, PROMPTS, sampling=sampling, max_new_tokens=LENGTH)
    lengths = {count for output in together for count, _ in output.rounds}
    assert len(lengths) > 1 or name != "causal" or sampling != SAMPLED


# ---- law ----

LAW = SamplingParams(0.7)
HALF_SURE = 0.4
"""Some tokens end a chain of two, some do not."""


class WholeText(DraftWrapper):
    """`inner` of texts with a token everywhere: branches of weight 0 accept what was not drafted."""

    def propose(self, history: Tensor, length: Tensor, k: int) -> Proposal:
        return self.inner.propose(history.clamp_min(0), length, k)


def law_distance(
    confidence: float, vocab: int, k: int, length: int, paths: int, rule: str = "exact"
) -> float:
    """Largest TV of the emitted text from the target's own law."""
    model = small(vocab_size=vocab, num_hidden_layers=2)
    own = tiny_target(model)
    draft = ConfidentDraft(WholeText(partner(model)), confidence)
    law = engine_law(own, draft, k, length, LAW, paths, rule=rule)
    return distance_from_own_law(law, model, length, LAW)


CASES = [(HALF_SURE, *ENUMERATED[1]), (HALF_SURE, *ENUMERATED[2])]


@pytest.mark.parametrize(("case", "rule"), rotated(CASES, ["exact", "block"]), ids=str)
def test_sampled_text_has_the_targets_law(case: Any, rule: str) -> None:
    """Catches an end of a chain that chooses among tokens. Exact."""
    assert law_distance(*case, rule) < 1e-7  # HF norms compute in fp32


PROPOSE = ConfidentDraft.propose


def unsure_tokens_dropped(
    self: ConfidentDraft, history: Tensor, length: Tensor, k: int
) -> Proposal:
    """The token behind which a chain ends is not drafted: its value decides whether it is."""
    proposal = PROPOSE(self, history, length, k)
    tokens = proposal.tokens.clone()
    count = (tokens != NO_DRAFT).sum(1)
    ended = (count > 0) & (count < k)
    tokens[ended, count[ended] - 1] = NO_DRAFT
    return Proposal(tokens, proposal.q, finite=proposal.finite)


def late_choice(self: ConfidentDraft, history: Tensor, length: Tensor, k: int) -> Proposal:
    """K is 0 in rows whose first token is 0: chosen when the tokens are known."""
    proposal = PROPOSE(self, history, length, k)
    unpleasant = (proposal.tokens == 0).cumsum(1) > 0
    tokens = proposal.tokens.masked_fill(unpleasant, NO_DRAFT)
    return Proposal(tokens, proposal.q, finite=proposal.finite)


@pytest.mark.parametrize("bug", [unsure_tokens_dropped, late_choice])
def test_planted_bugs_move_the_law(bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above is blind if one of these goes unseen."""
    monkeypatch.setattr(ConfidentDraft, "propose", bug)
    assert law_distance(*CASES[0]) > 1e-3


# ---- the draft's state ----

PATTERN = [3, 0, 3, 0, 0, 1, 0, 0, 0, 0, 0, 2, 0]
WORK = tiny_prompts(7, 1, 3, 21, 2)
"""More prompts than rows, so that rows are used again."""


class Patterned(DraftWrapper):
    """The longest chain of each round is given; rows that are odd are one round ahead, except that all have 0 at once
    now and then."""

    def __init__(self, inner: Draft, pattern: Sequence[int] = PATTERN):
        super().__init__(inner)
        self.runs = "host"
        self.pattern, self.at = pattern, 0

    def begin_batch(self, request: DraftContext) -> None:
        self.request = request
        self.inner.begin_batch(request)

    def propose(self, history: Tensor, length: Tensor, k: int) -> Proposal:
        self.at += 1
        now = self.pattern[self.at % len(self.pattern)]
        if now == 0:
            self.inner.skip(history, length, 0)
            discard_draws(self.request, length, k)
            return empty_chain(history, torch.ones_like(length, dtype=torch.bool))
        proposal = self.inner.propose(history, length, now)
        discard_draws(self.request, length, k - now)
        limits = (now - torch.arange(len(length))).clamp_min(0)
        drafted = torch.arange(proposal.tokens.shape[1]) < limits[:, None]
        return replace(proposal, tokens=torch.where(drafted, proposal.tokens, NO_DRAFT))


class NeverSkipped(Watched):
    """`inner` is asked in every round, whatever is made of its answer."""

    def skip(self, history: Tensor, length: Tensor, k: int) -> None:
        self.skipped += 1
        self.propose(history, length, K)


NEVER = [0]
"""No round drafts, so that there is one for every text."""


def largest_difference(name: str, rows: int) -> float:
    """How far logits after rounds of other lengths are from those that the text gives: of plain forward passes over the
    whole text, or, of heads, those of the same draft asked in every round."""
    own = tiny_target(tiny_model("llama", dtype=torch.float64))
    plain = decode(own, None, WORK, max_new_tokens=28)
    known = [(o.prompt_ids, o.output_ids) for o in plain]
    inner = knowing_draft(name, own, known, forget=0.1) if "eagle" in name else DRAFTS[name](own)
    watched, control = Watched(inner), NeverSkipped(inner)
    for draft in (Patterned(watched), Patterned(control, NEVER)):
        outputs = decode(own, draft, WORK, rows=rows, k=K, max_new_tokens=28)
        assert texts(outputs) == texts(plain)
    assert min(watched.asked, watched.skipped) > 5
    want = control.states
    if name == "causal":
        want = whole_text_logits(reference(noisy(own.runner.model, 0.02)), watched.states)
    # a row that has ended is still asked, after a text that is cut later
    pairs = [(logits, want[text]) for text, logits in watched.states.items() if text in want]
    assert len(pairs) > 0.8 * len(watched.states)
    return max(
        float((here - there).masked_fill(here == there, 0).abs().max()) for here, there in pairs
    )


STATEFUL = [("causal", 2), ("eagle3", 2), ("medusa", 1), ("pard", 1), ("peagle", 2), ("dflash", 1)]
STATEFUL += [("mtp", 2), ("early-exit", 2)]


@pytest.mark.parametrize(("name", "rows"), slow_except(STATEFUL, ["causal", "eagle3"]))
def test_state_is_what_the_text_gives(name: str, rows: int) -> None:
    """Catches K/V that lacks what rounds without drafts committed, and states that were dropped before they were
    read."""
    assert largest_difference(name, rows) < 1e-8


def skipped_too_long(
    self: CachedHead, history: Tensor, length: Tensor, k: int, proposed: bool = False
) -> None:
    """Reads one round too late."""
    if self.unread + k > self.state_buffer.states.shape[1]:
        self._read_committed(history, length)
        self.unread = 0
    self.unread += k + 1


@pytest.mark.parametrize("bug", [Draft.skip, skipped_too_long])
def test_a_draft_that_does_not_catch_up_is_seen(bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above is blind if stale K/V goes unseen. The buffers of random heads, hardly accepted, have room."""
    monkeypatch.setattr(CachedHead, "skip", bug)
    assert largest_difference("eagle3", 1) > 1e-3


# ---- passes ----


def passes(confidence: float) -> tuple[list[int], list[tuple[int, int]]]:
    """(tokens of each forward pass of a small LM, rounds of its only row)."""
    own = tiny_target(tiny_model("llama"))
    model = DRAFTS["causal"](own)
    assert isinstance(model, CausalDraft)
    widths: list[int] = []
    keep_widths(model.runner.model, widths)
    [output] = decode(
        own, ConfidentDraft(model, confidence), PROMPTS[:1], k=K, max_new_tokens=LENGTH
    )
    return widths[1:], output.rounds


def test_as_many_passes_as_drafted_tokens() -> None:
    """Catches steps after the end of the only chain."""
    for confidence, lengths in ((UNSURE, {1, 2, 3}), (1.0, {1})):
        widths, rounds = passes(confidence)
        assert len(widths) == sum(drafted for drafted, _ in rounds)
        assert {drafted for drafted, _ in rounds} <= lengths


def test_where_a_chain_ends() -> None:
    """Catches a token beyond the limit, and a bound of single tokens in the place of that of the whole chain."""
    stop = ChainStop([2, 3, 3, 3], token=0.3, path=0.1)
    token, path = torch.tensor([0.9, 0.9, 0.2, 0.9]), torch.tensor([0.5, 0.5, 0.5, 0.05])
    assert rows_going_on(stop, 2, token, path).tolist() == [False, True, False, False]
    own = tiny_target(tiny_model("llama"))
    draft = ConfidentDraft(CausalDraft(own.runner), 0.4)
    draft.begin_batch(DraftContext(2, 8, 3, SamplingParams(), lambda p: p.argmax(-1)))
    assert draft.stop == ChainStop([3, 3], token=0.0, path=0.4)


def test_rows_that_have_ended_keep_no_chain_going(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches steps for rows that ended rounds ago and would be sure of anything."""
    own = tiny_target(tiny_model("llama"))
    draft = ConfidentDraft(DRAFTS["causal"](own), 0.0)
    recorded: list[list[int]] = []

    def propose(self: CausalDraft, history: Tensor, length: Tensor, k: int) -> Proposal:
        recorded.append([*draft.stop.limit])
        return usual(self, history, length, k)

    usual = CausalDraft.propose
    monkeypatch.setattr(CausalDraft, "propose", propose)
    prompts = [tiny_prompts(60)[0], tiny_prompts(5)[0]]  # the first one ends at the context's limit
    decode(own, draft, prompts, k=K, max_new_tokens=LENGTH)
    assert recorded[0] == [K, K]
    assert recorded[-1] == [0, K]


def test_eagle_reads_several_rounds_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a pass of the layer in each round without drafts, though the buffer holds K + 1 states."""
    own = tiny_target(tiny_model("llama"))
    head = random_draft("eagle3", own)
    counts = {"step": 0, "logits": 0}
    for method in counts:
        monkeypatch.setattr(head.net, method, counted(head.net, method, counts))
    [output] = decode(own, Patterned(head, NEVER), PROMPTS[:1], k=K, max_new_tokens=LENGTH)
    assert output.rounds == [(0, 0)] * (LENGTH - 1)
    assert counts["logits"] == 0
    assert counts["step"] == 1 + (LENGTH - 1 - 1) // (K + 1)  # the prompt's, then every fourth


# ---- modes, devices, errors ----


@pytest.mark.slow
def test_compiled_rounds_have_two_shapes(graphs: list[int]) -> None:  # noqa: F811
    """Catches a graph of the target's half for each length, and one that is made after the warm-up."""
    own = tiny_target(tiny_model("llama"))
    settings: dict[str, Any] = {"max_new_tokens": 24, "seed": 3}
    inner = DRAFTS["causal"](own)
    want = decode(own, ConfidentDraft(inner, 0.05), PROMPTS, k=K, sampling=SAMPLED, **settings)
    draft = ConfidentDraft(inner, 0.05)
    engine = SpeculativeEngine(own, draft, k=K, sampling=SAMPLED, mode="compiled")
    run_first_rounds(engine, PROMPTS, 24)
    assert len(graphs) == 2
    got = collect_outputs(PROMPTS, engine.speculate(PROMPTS, **settings))
    assert len(graphs) == 2
    assert [(o.output_ids, o.rounds) for o in got] == [(o.output_ids, o.rounds) for o in want]
    assert len({drafted for o in got for drafted, _ in o.rounds}) > 1


def test_a_draft_elsewhere_stops_there() -> None:
    """Catches limits that stay on the target's device (here both devices are the CPU)."""
    own, cpu = tiny_target(tiny_model("llama")), torch.device("cpu")
    settings: dict[str, Any] = {"k": K, "sampling": SAMPLED, "max_new_tokens": LENGTH}
    found = []
    for inner in (DRAFTS["causal"](own), CrossDeviceDraft(DRAFTS["causal"](own), cpu, cpu)):
        outputs = decode(own, ConfidentDraft(inner, 0.3), PROMPTS, **settings)
        found.append([o.rounds for o in outputs])
    assert found[0] == found[1]


def test_what_confidence_cannot_end_is_refused() -> None:
    own = tiny_target(tiny_model("llama"))
    near, tree = DRAFTS["causal"](own), DRAFTS["causal"](own)
    tree.shape = DynamicTree(2, 4)
    confident = add_confidence(near, 0.3)
    for refused, said in (
        (lambda: add_confidence(None, 0.3), "has no model whose passes"),
        (lambda: add_confidence(NgramDraft(), 0.3), "has no model whose passes"),
        (lambda: add_lookup(confident, "ngram", 3, own), "a lookup belongs inside"),
        (lambda: SpeculativeEngine(own, confident, mode="graph"), "mode graph needs"),
        (lambda: decode(own, ConfidentDraft(tree, 0.3), PROMPTS, k=2), "'causal' ends .*give it no tree"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=said):
            refused()
