"""A lookup in front of a model's draft: the law of mixed batches, the model's state after copied tokens, its cost."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from decode.common.errors import UserError
from decode.drafts import causal, drafting
from decode.drafts.base import Draft, Proposal
from decode.drafts.causal import CausalDraft
from decode.drafts.eagle import EagleDraft
from decode.drafts.early_exit import EarlyExitDraft
from decode.drafts.lookup import NgramDraft, SuffixDraft
from decode.drafts.medusa import MedusaDraft
from decode.drafts.wrappers import (
    CrossDeviceDraft,
    DraftWrapper,
    RecordingDraft,
    TwoSourceDraft,
    point_masses,
)
from decode.engine.composing import add_lookup
from decode.engine.engine import SpeculativeEngine, decode
from decode.engine.records import DecodeRecord, collect_outputs
from decode.model.loading import Target
from decode.model.runner import ModelRunner
from decode.verification.rules import NO_DRAFT
from decode.verification.sampling import SamplingParams
from decode.verification.tree import DynamicTree
from tests.decode.engine.test_compile import graphs  # noqa: F401  a fixture
from tests.decode.engine.test_engine import texts
from tests.decode.verification.test_exact_distribution import (
    distance_from_own_law,
    engine_law,
    small,
)
from tests.heads import FAMILIES, random_draft
from tests.params import rotated
from tests.spellings import two_of_three
from tests.tiny import VOCAB, noisy, reference, tiny_model, tiny_prompts, tiny_target

MODELS = ["causal", "early-exit", *FAMILIES]
PROMPTS = tiny_prompts(13, 1, 9)
K, LENGTH = 3, 40


def model_draft(name: str, target: Target, noise: float = 0.02) -> Draft:
    if name == "causal":
        return CausalDraft(ModelRunner(noisy(target.runner.model, noise)))
    return EarlyExitDraft(target, 1) if name == "early-exit" else random_draft(name, target)


class Watched(DraftWrapper):
    """Counts what is asked of `inner`; `states` are the logits of each first step, by the text before it. With
    `never_skip` it is asked in every round, as if it drafted alone."""

    def __init__(self, inner: Draft, never_skip: bool = False):
        super().__init__(inner)
        self.never_skip = never_skip
        self.asked = self.skipped = 0
        self.states: dict[tuple[int, ...], Tensor] = {}

    def propose(self, history: Tensor, length: Tensor, k: int) -> Proposal:
        self.asked += 1
        with first_logits() as seen:
            proposal = self.inner.propose(history, length, k)
        for ids, count, logits in zip(history.tolist(), length.tolist(), seen[0], strict=True):
            self.states[tuple(ids[:count])] = logits.clone()
        return proposal

    def skip(self, history: Tensor, length: Tensor, k: int, proposed: bool = False) -> None:
        self.skipped += not proposed
        if self.never_skip and not proposed:
            self.propose(history, length, k)
        else:
            self.inner.skip(history, length, k, proposed)


@contextmanager
def first_logits() -> Iterator[list[Tensor]]:
    """[B, V] that each chain drafted within it begins with."""
    seen: list[Tensor] = []
    chain = drafting.draft_chain

    def spy(step: Any, logits: Tensor, *rest: Any) -> Proposal:
        seen.append(logits)
        return chain(step, logits, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafting, "draft_chain", spy)
        yield seen


class Script(Draft):
    """A lookup that knows the texts. For `silent` of 16 lengths it finds nothing; at some its second token is wrong."""

    name = "script"

    def __init__(self, outputs: list[DecodeRecord], silent: int = 5):
        self.known = [[*o.prompt_ids, *o.output_ids] for o in outputs]
        self.silent = silent

    def propose(self, history: Tensor, length: Tensor, k: int) -> Proposal:
        rows = []
        for ids, count in zip(history.tolist(), length.tolist(), strict=True):
            text = next((x for x in self.known if x[:count] == ids[:count]), [])
            tokens = text[count : count + k] if count % 16 >= self.silent else []
            if count % 3 == 0 and len(tokens) > 1:
                tokens[1] = (tokens[1] + 1) % VOCAB
            rows.append(tokens + [NO_DRAFT] * (k - len(tokens)))
        return Proposal(torch.tensor(rows), None)


# ---- text ----


TEXTS = [("causal", "ngram", 3), ("early-exit", "suffix", 1), ("medusa", "suffix", 3)]
TEXTS += [("eagle1", "ngram", 1), ("eagle3", "suffix", 3)]


@pytest.mark.parametrize(("name", "lookup", "rows"), TEXTS)
def test_greedy_text_is_the_targets(name: str, lookup: str, rows: int) -> None:
    """Catches tokens of one source in the row of the other, and states that only one kind of round keeps. The random
    target repeats itself after a while, so that both sources draft."""
    own, prompts = tiny_target(tiny_model("llama")), PROMPTS[:rows]
    watched = Watched(model_draft(name, own))
    draft = add_lookup(watched, lookup, 2, own)
    settings: dict[str, Any] = {"k": K, "max_new_tokens": LENGTH}
    outputs = decode(own, draft, prompts, **settings)
    assert texts(outputs) == texts(decode(own, None, prompts, max_new_tokens=LENGTH))
    assert watched.asked > 0
    alone = decode(own, model_draft(name, own), prompts, **settings)
    assert [o.rounds for o in outputs] != [o.rounds for o in alone]


@pytest.mark.parametrize(
    ("lookup", "text", "least", "found"),
    [
        (NgramDraft(5, 3), [7, 8, 9, 4, 7, 8, 9], 3, [4, 7]),
        (NgramDraft(5, 4), [7, 8, 9, 4, 7, 8, 9], 4, []),
        (SuffixDraft(shortest=3), [7, 8, 9, 4, 7, 8, 9], 3, [4, 7]),
        (SuffixDraft(shortest=4), [7, 8, 9, 4, 7, 8, 9], 4, []),
    ],
)
def test_a_match_has_at_least_min_match_tokens(
    lookup: Draft, text: list[int], least: int, found: list[int]
) -> None:
    """Catches a threshold off by one in either lookup, and a registry that hands on another one."""
    own = tiny_target(tiny_model("llama"))
    built = add_lookup(model_draft("causal", own), lookup.name, least, own)
    assert isinstance(built, TwoSourceDraft)
    for draft in (lookup, built.lookup):
        recorded = RecordingDraft(draft)
        decode(own, recorded, [text[:-1]], k=2, max_new_tokens=1)
        # the draft is asked by hand: the target's own next token is not the one of this text
        draft.on_commit(0, [])
        history, length = torch.tensor([text + [0] * 4]), torch.tensor([len(text)])
        if isinstance(draft, SuffixDraft):
            draft._rows[0] = draft._start_request(0)
            draft.on_commit(0, text)
        tokens = draft.propose(history, length, 2).tokens[0].tolist()
        assert [token for token in tokens if token != NO_DRAFT] == found


def test_a_row_does_not_depend_on_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches random numbers that rounds without the model leave out: another row decides whether it is asked. Without
    the numbers that are drawn in vain the texts must differ, or the test is blind."""
    own, seeds = tiny_target(tiny_model("llama", dtype=torch.float64)), [11, 12, 13]
    sampling = SamplingParams(1.0, top_k=2)
    settings: dict[str, Any] = {"k": K, "sampling": sampling, "max_new_tokens": LENGTH}

    def alone_and_together() -> tuple[list[DecodeRecord], list[DecodeRecord], Watched]:
        watched = Watched(model_draft("causal", own))
        draft = TwoSourceDraft(NgramDraft(2, 1), watched, VOCAB)
        pairs = zip(PROMPTS, seeds, strict=True)
        alone = [decode(own, draft, [p], seeds=[seed], **settings)[0] for p, seed in pairs]
        return alone, decode(own, draft, PROMPTS, seeds=seeds, **settings), watched

    alone, together, watched = alone_and_together()
    assert min(watched.asked, watched.skipped) > 5
    assert texts(together) == texts(alone)
    assert [o.rounds for o in together] == [o.rounds for o in alone]
    monkeypatch.setattr("decode.drafts.wrappers.discard_draws", lambda *args: None)
    alone, together, _ = alone_and_together()
    assert texts(together) != texts(alone)


# ---- the model's state ----

WORK = tiny_prompts(7, 1, 3, 21, 2)
"""More prompts than rows, so that rows are used again."""
TIGHT, SHORT = 1e-8, 30


def largest_difference(
    name: str, rows: int, unread: int = causal.MAX_UNREAD, late: int | None = None
) -> float:
    """How far logits after copied tokens are from those that the text gives. Those are the logits of plain forward
    passes over the whole text; of heads, whose proposals do not depend on what they drafted before
    (tests/decode/drafts/test_heads_decoding.py), those of the same draft asked in every round. With `late` the draft
    reads as in compiled code, which has so many tokens of skipped rounds."""
    own = tiny_target(tiny_model("llama", dtype=torch.float64))
    lookup = Script(decode(own, None, WORK, max_new_tokens=SHORT))
    watched, control = (Watched(model_draft(name, own), never) for never in (False, True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(causal, "MAX_UNREAD", unread)
        if late is not None:
            patch.setattr(causal, "LATE", late)
            begin, as_it_is = TwoSourceDraft.begin_batch, {"compiled": lambda function: function}
            patch.setattr(
                TwoSourceDraft, "begin_batch", lambda self, r: begin(self, replace(r, **as_it_is))
            )
        for each in (watched, control):
            draft = TwoSourceDraft(lookup, each, VOCAB)
            outputs = decode(own, draft, WORK, rows=rows, k=K, max_new_tokens=SHORT)
            assert {count for o in outputs for _, count in o.rounds} >= {0, 1, K}
    assert min(watched.asked, watched.skipped) > 5
    want = control.states
    if name == "causal":
        want = whole_text_logits(reference(noisy(own.runner.model, 0.02)), watched.states)
    pairs = [(logits, want[text]) for text, logits in watched.states.items()]
    return max(
        float((here - there).masked_fill(here == there, 0).abs().max()) for here, there in pairs
    )


@torch.no_grad()
def whole_text_logits(
    model: Any, texts: Iterable[tuple[int, ...]]
) -> dict[tuple[int, ...], Tensor]:
    return {text: model(torch.tensor([text]), use_cache=False).logits[0, -1] for text in texts}


@pytest.mark.parametrize(("name", "rows"), rotated(MODELS[:-1], [1, 2])[1:])
def test_state_is_what_the_text_gives(name: str, rows: int) -> None:
    """Catches K/V that lacks what skipped rounds committed, states of another round, and a row that is filled again
    while another has tokens to catch up, and the model's own tokens in the K/V of a row that copied others."""
    assert largest_difference(name, rows) < TIGHT


def test_a_long_skip_is_read_in_parts() -> None:
    """Catches tokens lost where the small LM reads in a round that does not ask it."""
    assert largest_difference("causal", 2, unread=5) < TIGHT


@pytest.mark.parametrize(("rows", "late"), [(2, 8), (1, 14)])
def test_compiled_code_reads_what_was_skipped(rows: int, late: int) -> None:
    """Catches tokens before those of skipped rounds that are read at other positions."""
    read, plain = [], causal.CausalDraft._read_committed

    def watched(self: CausalDraft, history: Tensor, length: Tensor) -> Tensor:
        read.append(self.unread)
        return plain(self, history, length)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CausalDraft, "_read_committed", watched)
        assert largest_difference("causal", rows, late=late) < TIGHT
    assert late in read


@pytest.mark.parametrize(
    ("name", "rows", "owner", "where"),
    [
        ("causal", 1, CausalDraft, False),
        ("causal", 2, CausalDraft, True),
        ("eagle3", 1, EagleDraft, False),
    ],
)
def test_a_draft_that_does_not_catch_up_is_seen(
    name: str, rows: int, owner: type[Draft], where: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests above are blind if stale K/V goes unseen, of rounds in which the draft was asked or was not."""
    right = owner.skip

    def forgetful(
        draft: Any, history: Tensor, length: Tensor, k: int, proposed: bool = False
    ) -> None:
        if proposed != where:
            right(draft, history, length, k, proposed)

    monkeypatch.setattr(owner, "skip", forgetful)
    assert largest_difference(name, rows) > 1e-3


# ---- cost ----


def test_a_skipped_small_lm_runs_no_forward_pass() -> None:
    """Catches a model that is run although every row copies, one that is run once more to catch up, and one that reads
    more than it must where nothing was copied."""
    own = tiny_target(tiny_model("llama"))
    plain = decode(own, None, PROMPTS[:1], max_new_tokens=LENGTH)
    for silent in (0, 5, 16):
        model = model_draft("causal", own)
        assert isinstance(model, CausalDraft)
        watched = Watched(model)
        widths: list[int] = []
        keep_widths(model.runner.model, widths)
        draft = TwoSourceDraft(Script(plain, silent), watched, VOCAB)
        decode(own, draft, PROMPTS[:1], k=K, max_new_tokens=LENGTH)
        assert (watched.asked == 0, watched.skipped == 0) == (silent == 0, silent == 16)
        assert len(widths) == 1 + K * watched.asked  # the prompt's, and K for each proposal
        if silent == 16:
            assert widths[1:] == [2, *[1] * (K - 1)] * watched.asked


def keep_widths(model: Any, widths: list[int]) -> None:
    """Appends the number of tokens of each forward pass."""
    model.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )


def test_skipped_heads_run_no_more_than_they_must(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches further steps and LM heads of EAGLE, and any head of Medusa, in rounds that copy."""
    own = tiny_target(tiny_model("llama"))
    script = Script(decode(own, None, PROMPTS[:1], max_new_tokens=LENGTH), silent=0)
    for name in ("eagle3", "medusa"):
        heads = random_draft(name, own)
        counts = dict.fromkeys(("step", "logits"), 0)
        for method in counts:
            if hasattr(heads.net, method):
                monkeypatch.setattr(heads.net, method, counted(heads.net, method, counts))
        watched = Watched(heads)
        draft = TwoSourceDraft(script, watched, VOCAB)
        decode(own, draft, PROMPTS[:1], k=K, max_new_tokens=LENGTH)
        assert watched.asked == 0
        assert counts["logits"] == 0
        assert counts["step"] == (0 if isinstance(heads, MedusaDraft) else 1 + watched.skipped)


def counted(net: Any, method: str, counts: dict[str, int]) -> Callable[..., Any]:
    real = getattr(net, method)

    def call(*args: Any) -> Any:
        counts[method] += 1
        return real(*args)

    return call


# ---- law ----

LAW_PROMPTS = [[0, 2, 1], [1]]
"""Over three tokens the end of the first is always found again, that of the second seldom: mixed batches."""
SAMPLING = SamplingParams(0.7)
ROUND = 3 * 2 * 3
"""Branches of a round: a draw of the model (in vain in rows that copy), its verdict, the bonus token."""


class Copier(Draft):
    """A lookup that always finds something."""

    name = "copier"

    def propose(self, history: Tensor, length: Tensor, k: int) -> Proposal:
        return Proposal(history.gather(1, length[:, None] - 1).expand(-1, k), None)


def fewer_rows(target: Target) -> Draft:
    """A small LM that does not have the last of the target's three tokens."""
    model = small(num_hidden_layers=2, vocab_size=2)
    return CausalDraft(ModelRunner(model, target.runner.vocab_size))


MIXED: dict[str, Callable[[Target], Draft]] = {
    "causal": lambda target: model_draft("causal", target, 0.2),
    "fewer rows": fewer_rows,
    "eagle3": lambda target: random_draft("eagle3", target),
    "medusa": lambda target: random_draft("medusa", target),
    "other tokenizer": two_of_three,
}
LACKS = {"fewer rows": 2, "eagle3": 1, "other tokenizer": 2}
"""A token that the draft's vocabulary does not have."""


def law_distance(
    draft: Draft, target: Target, k: int, length: int, paths: int, rule: str = "exact"
) -> float:
    """TV of what the engine emits from the target's own law, all choices walked."""
    law = engine_law(target, draft, k, length, SAMPLING, paths, rule, LAW_PROMPTS)
    return distance_from_own_law(law, target.runner.model, length, SAMPLING, LAW_PROMPTS)


def mixed(name: str, two_source: type[TwoSourceDraft] = TwoSourceDraft) -> tuple[Target, Draft]:
    target = tiny_target(small(num_hidden_layers=2))
    return target, two_source(NgramDraft(2, 1), MIXED[name](target), 3)


@pytest.mark.parametrize(
    ("name", "size", "rule"),
    [
        ("causal", (1, 3), "exact"),
        ("causal", (2, 2), "block"),
        ("fewer rows", (2, 2), "exact"),
        ("fewer rows", (2, 2), "block"),
        ("eagle3", (1, 3), "exact"),
        ("medusa", (2, 2), "exact"),
        ("other tokenizer", (1, 3), "exact"),
        ("other tokenizer", (2, 2), "block"),
    ],
    ids=str,
)
def test_mixed_batches_emit_the_targets_law(name: str, size: tuple[int, int], rule: str) -> None:
    """Catches the model's q for a copied token, a copied token that the model's vocabulary lacks, and a choice of the
    source that knows more than the text. Exact: no false alarm."""
    k, length = size
    target, draft = mixed(name)
    recorded = RecordingDraft(draft)
    known = 2 if name in ("eagle3", "other tokenizer") else 3  # tokens that the model draws from
    paths = 3 * (known**k * 2**k * 3) ** (length - 1)
    assert law_distance(recorded, target, k, length, paths, rule) < 1e-7
    tokens, q = recorded.proposals[0].tokens[:, 0], recorded.proposals[0].q
    assert q is not None
    certain = q[:, 0].amax(-1) == 1
    assert 0 < int(certain.sum()) < len(certain)
    if name in LACKS:
        assert LACKS[name] in tokens[certain].tolist()
        assert q[~certain, 0, LACKS[name]].eq(0).all()


@pytest.mark.parametrize("rule", ["exact", "block"])
def test_rounds_without_the_model_emit_the_targets_law(rule: str) -> None:
    """Catches random numbers drawn in vain that move the law. Exact: no false alarm."""
    target = tiny_target(small(num_hidden_layers=2))
    draft = TwoSourceDraft(Copier(), Watched(model_draft("causal", target)), 3)
    assert law_distance(draft, target, 2, 2, 3 * 2**2 * 3, rule) < 1e-7
    assert isinstance(draft.inner, Watched)
    assert (draft.inner.asked, draft.inner.skipped) == (0, 1)


class ModelsLaw(TwoSourceDraft):
    """The planted bug: copied tokens are judged by the model's distributions."""

    def propose(self, history: Tensor, length: Tensor, k: int) -> Proposal:
        recorded = RecordingDraft(self.inner)
        self.inner = recorded
        proposal = super().propose(history, length, k)
        self.inner = recorded.inner
        return Proposal(proposal.tokens, recorded.proposals[0].q, finite=proposal.finite)


class LateChoice(TwoSourceDraft):
    """The planted bug: a model's token that does not please is replaced by one that is certain."""

    def propose(self, history: Tensor, length: Tensor, k: int) -> Proposal:
        proposal = super().propose(history, length, k)
        assert proposal.q is not None
        other = torch.ones_like(proposal.tokens)
        unpleasant = (proposal.tokens[:, 0] == 0) & (proposal.q[:, 0].amax(-1) < 1)
        tokens = torch.where(unpleasant[:, None], other, proposal.tokens)
        certain = point_masses(other, self.vocab_size)
        q = torch.where(unpleasant[:, None, None], certain, proposal.q)
        return Proposal(tokens, q, finite=proposal.finite)


@pytest.mark.parametrize("bug", [ModelsLaw, LateChoice])
def test_a_law_of_the_other_source_is_seen(bug: type[TwoSourceDraft]) -> None:
    """The tests above are blind if one of these goes unseen."""
    target, draft = mixed("causal", bug)
    assert law_distance(draft, target, 1, 3, 3 * ROUND**2) > 1e-3


# ---- modes, devices, errors ----


@pytest.mark.slow
def test_compiled_rounds_say_the_same(graphs: list[int]) -> None:  # noqa: F811
    """Catches a graph of the target's half for each source, or of the chain for each number of tokens that it reads."""
    own, sampling = tiny_target(tiny_model("llama")), SamplingParams(1.0, top_k=2)
    settings: dict[str, Any] = {"max_new_tokens": LENGTH, "seed": 3}
    watched = Watched(model_draft("causal", own))
    draft = TwoSourceDraft(NgramDraft(2, 1), watched, VOCAB)
    want = decode(own, draft, PROMPTS[:1], k=K, sampling=sampling, **settings)
    assert min(watched.asked, watched.skipped) > 0
    draft = TwoSourceDraft(NgramDraft(2, 1), model_draft("causal", own), VOCAB)
    engine = SpeculativeEngine(own, draft, k=K, sampling=sampling, mode="compiled")
    got = collect_outputs(PROMPTS[:1], engine.speculate(PROMPTS[:1], **settings))
    assert [(o.output_ids, o.rounds) for o in got] == [(o.output_ids, o.rounds) for o in want]
    assert len(graphs) == 3  # of the chain one with the tokens of skipped rounds


@pytest.mark.parametrize("name", ["causal", "eagle3"])
def test_a_model_elsewhere_is_skipped_there(name: str) -> None:
    """Catches a wrapper that does not hand on that a round was skipped (here both devices are the CPU)."""
    own, cpu = tiny_target(tiny_model("llama")), torch.device("cpu")
    script = Script(decode(own, None, PROMPTS, max_new_tokens=LENGTH))
    rounds = []
    for draft in (model_draft(name, own), CrossDeviceDraft(model_draft(name, own), cpu, cpu)):
        two = TwoSourceDraft(script, draft, VOCAB)
        outputs = decode(own, two, PROMPTS, k=K, max_new_tokens=LENGTH)
        rounds.append([o.rounds for o in outputs])
    assert rounds[0] == rounds[1]


def test_what_cannot_be_combined_is_refused() -> None:
    """Catches trees that are silently drafted as chains, and a lookup in front of a lookup."""
    own = tiny_target(tiny_model("llama"))
    near = model_draft("causal", own)
    two = add_lookup(near, "ngram", 3, own)
    for refused, said in (
        (
            lambda: add_lookup(near, "causal", 3, own),
            "lookup 'causal' is unknown: give ngram or suffix",
        ),
        (lambda: add_lookup(None, "ngram", 3, own), "has no model for a lookup in front"),
        (lambda: add_lookup(NgramDraft(), "ngram", 3, own), "has no model for a lookup in front"),
        (lambda: SpeculativeEngine(own, two, mode="graph"), "mode graph needs"),
    ):
        with pytest.raises(UserError, match=said):
            refused()
    near.shape = DynamicTree(2, 4)
    with pytest.raises(UserError, match=r"'causal\+ngram' drafts chains only: give it no tree"):
        decode(own, two, PROMPTS, k=2)
