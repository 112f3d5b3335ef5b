"""Drafts that learn while they serve: they accept more of what comes again, and the text keeps the target's law."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from decode.common.errors import UserError
from decode.drafts.base import Draft, DraftContext, Proposal
from decode.drafts.causal import CausalDraft
from decode.drafts.early_exit import EarlyExitDraft
from decode.drafts.lookup import NgramDraft
from decode.drafts.mirror import MirrorConfig
from decode.drafts.wrappers import CrossDeviceDraft, RecordingDraft
from decode.engine import learning
from decode.engine.composing import add_confidence, add_learning, add_lookup, make_mirror
from decode.engine.engine import SpeculativeEngine, decode
from decode.engine.learning import HeadUpdate, LearningDraft, law
from decode.model.loading import Target
from decode.model.runner import ModelRunner
from decode.verification.sampling import SamplingParams
from decode.verification.tree import DynamicTree
from tests import worlds
from tests.decode.drafts import test_pard
from tests.decode.engine.test_engine import texts
from tests.decode.verification.test_exact_distribution import (
    ENUMERATED,
    distance_from_own_law,
    engine_law,
    small,
)
from tests.heads import hf_states, ids_of, random_draft
from tests.params import slow_except
from tests.tiny import VOCAB, noisy, tiny_model, tiny_prompts, tiny_target

K, LENGTH = 3, 16
PROMPTS = tiny_prompts(13, 1, 9, 4)
SAMPLED = SamplingParams(0.8)


def near(target: Target, noise: float = 0.05) -> CausalDraft:
    return CausalDraft(ModelRunner(noisy(target.runner.model, noise)))


DRAFTS: dict[str, Callable[[Target], Draft]] = {
    "causal": near,
    "eagle3": lambda target: random_draft("eagle3", target),
}


def learner(name: str, target: Target, rate: float = 4.0) -> LearningDraft:
    return LearningDraft(DRAFTS[name](target), target, rate)


# ---- acceptance ----


def accepted(target: Target, draft: Draft, times: int, **settings: Any) -> list[int]:
    """Drafted tokens of the same texts that are accepted, each time that they are decoded."""
    found = []
    for _ in range(times):
        outputs = decode(target, draft, PROMPTS, k=K, max_new_tokens=LENGTH, **settings)
        found.append(sum(count for output in outputs for _, count in output.rounds))
    return found


@pytest.mark.parametrize("name", DRAFTS)
def test_more_is_accepted_of_what_comes_again(name: str) -> None:
    """Catches errors of the wrong sign, and states or tokens of another position."""
    own = tiny_target(tiny_model("llama"))
    first, _, last = accepted(own, learner(name, own), 3)
    assert last > 1.5 * first + 5


def test_a_draft_that_does_not_learn_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above is blind if it passes a draft without any update."""
    monkeypatch.setattr(HeadUpdate, "learn", lambda *args: None)
    own = tiny_target(tiny_model("llama"))
    assert len({*accepted(own, learner("causal", own), 3)}) == 1


def test_what_it_keeps_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a store that grows with the text, and rounds that learn all positions of many rows."""
    monkeypatch.setattr(learning, "CAPACITY", 16)
    monkeypatch.setattr(learning, "ROUND_POSITIONS", 4)
    counts, learn = [], HeadUpdate.learn

    def counted(self: HeadUpdate, states: Tensor, *rest: Any) -> None:
        counts.append(len(states))
        learn(self, states, *rest)

    monkeypatch.setattr(HeadUpdate, "learn", counted)
    own = tiny_target(tiny_model("llama"))
    draft = learner("causal", own)
    accepted(own, draft, 2)
    assert draft.update is not None
    assert {len(x) for x in (draft.update.directions, draft.update.errors)} == {16}
    assert int(draft.update.learned) == sum(counts) > 32
    assert max(counts) <= 4


# ---- text and law ----


def wrapped(name: str, target: Target) -> Draft:
    """A draft that learns, alone, behind a lookup, or with chains that end by confidence."""
    base, _, more = name.partition("+")
    draft: Draft = learner(base, target)
    if more == "ngram":
        draft = add_lookup(draft, "ngram", 1, target)
    return add_confidence(draft, 0.3) if more == "confidence" else draft


@pytest.mark.parametrize(
    ("name", "rows"),
    slow_except(
        product(["causal", "eagle3", "causal+ngram", "eagle3+confidence"], [1, 3]),
        [("causal", 1), ("eagle3", 3), ("causal+ngram", 3)],
    ),
)
def test_greedy_text_is_the_targets(name: str, rows: int) -> None:
    """Catches hooks that reach the target's own logits; rows are used again, and end at different times."""
    own = tiny_target(tiny_model("llama"))
    want = texts(decode(own, None, PROMPTS, max_new_tokens=LENGTH))
    draft = wrapped(name, own)
    for _ in range(2):
        outputs = decode(own, draft, PROMPTS, rows=rows, k=K, max_new_tokens=LENGTH)
        assert texts(outputs) == want
    part = next(x for x in draft.buffers().drafts if isinstance(x, LearningDraft))
    assert part.update is not None
    assert int(part.update.learned) > 0


CASES = [
    ("causal", *ENUMERATED[0]), ("causal", *ENUMERATED[2]), ("eagle3", *ENUMERATED[0]), ("narrow", *ENUMERATED[2]),
]  # fmt: skip
"""Drafts and texts of several rounds."""


def law_distance(name: str, vocab: int, k: int, length: int, paths: int) -> float:
    """Largest TV of the emitted text from the target's own law, of a draft that changes between the rounds."""
    model, sampling = small(vocab_size=vocab, num_hidden_layers=2), SamplingParams(0.7)
    own = tiny_target(model)
    ids = ids_of(name, vocab)
    if ids is not None:  # fewer branches for each drawn token
        drawn = k * (length - 1)
        paths = paths * len(ids) ** drawn // vocab**drawn
    inner = near(own, 0.2) if name == "causal" else random_draft(name, own)
    draft = LearningDraft(inner, own, 20.0)
    text = engine_law(own, draft, k, length, sampling, paths)
    assert draft.update is not None
    assert float(draft.update.errors.abs().max()) > 0.05
    return distance_from_own_law(text, model, length, sampling)


@pytest.mark.parametrize(
    ("name", "vocab", "k", "length", "paths"), slow_except(CASES, [CASES[0], CASES[2]])
)
def test_sampled_text_has_the_targets_law(
    name: str, vocab: int, k: int, length: int, paths: int
) -> None:
    """Catches a q that is not what a token was drawn from. Exact: no false alarm."""
    assert law_distance(name, vocab, k, length, paths) < 1e-7  # HF norms compute in fp32


PROPOSE = LearningDraft.propose


def q_after_the_update(self: LearningDraft, history: Tensor, length: Tensor, k: int) -> Proposal:
    """Draws first, learns then, and reports q as it has become."""
    waiting = self.drafted, self.verified, self.counts
    self._clear_round()
    proposal = PROPOSE(self, history, length, k)
    drafted = self.drafted
    self.drafted, self.verified, self.counts = waiting
    self._learn()
    self.drafted = drafted
    if self.update is None:
        return proposal
    logits = [own + self.update(states) for states, own, _ in drafted]
    return replace(proposal, q=law(torch.stack(logits, 1), self.request.sampling))


@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_a_planted_late_q_moves_the_law(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above is blind if this goes unseen."""
    monkeypatch.setattr(LearningDraft, "propose", q_after_the_update)
    assert law_distance(*case) > 1e-3


# ---- what is learned ----


def farthest(monkeypatch: pytest.MonkeyPatch, lookup: bool) -> float:
    """How far the states and errors that a draft learns from are at most from those of plain passes over the texts."""
    learned: list[Tensor] = []
    monkeypatch.setattr(
        HeadUpdate, "learn", lambda self, states, errors, rate: learned.append(torch.cat([states, errors], 1))
    )  # fmt: skip
    own = tiny_target(tiny_model("llama"))
    draft: Draft = learner("causal", own)
    if lookup:
        draft = add_lookup(draft, "ngram", 1, own)
    outputs = decode(own, draft, PROMPTS, rows=2, k=K, max_new_tokens=40)
    assert len({count for output in outputs for _, count in output.rounds}) >= K
    plain = []
    for output in outputs:
        ids = [*output.prompt_ids, *output.output_ids]
        states, mine = hf_states(noisy(own.runner.model, 0.05), ids)
        _, logits = hf_states(own.runner.model, ids)
        plain.append(torch.cat([states[-1], logits.softmax(-1) - mine.softmax(-1)], 1))
    found, there = torch.cat(learned).double(), torch.cat(plain).double()
    assert len(found) > 30
    return float(torch.cdist(found, there).amin(1).max())


@pytest.mark.parametrize("lookup", [False, True])
def test_it_learns_from_the_true_text(lookup: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches states behind rejected tokens, and p and q of different positions, rows or rounds."""
    assert farthest(monkeypatch, lookup) < 1e-3


COMMIT = LearningDraft.on_commit


def one_more(self: LearningDraft, row: int, tokens: list[int]) -> None:
    COMMIT(self, row, [*tokens, 0])


def kept_in_skips(
    self: LearningDraft, history: Tensor, length: Tensor, k: int, proposed: bool = False
) -> None:
    self.inner.skip(history, length, k, proposed)


@pytest.mark.parametrize(
    ("method", "bug", "lookup"),
    [("on_commit", one_more, False), ("skip", kept_in_skips, True)],
)
def test_planted_errors_of_position_are_seen(
    method: str, bug: Any, lookup: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above is blind if one of these goes unseen."""
    monkeypatch.setattr(LearningDraft, method, bug)
    assert farthest(monkeypatch, lookup) > 0.1


@pytest.mark.parametrize("arch", ["llama", "granite", "gemma2", "eagle3"])
def test_what_is_judged_is_what_tokens_were_drawn_from(
    arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches scales and caps of logits, and tokens of a reduced vocabulary, that the change is added without."""
    own = tiny_target(tiny_model("llama" if arch == "eagle3" else arch))
    draft = learner("eagle3" if arch == "eagle3" else "causal", own, 20.0)
    judged: list[Tensor] = []
    moved: list[float] = []

    def keep(self: LearningDraft, target: Tensor, before: Tensor, after: Tensor) -> None:
        ids = slice(None) if self.head.ids is None else self.head.ids
        full = torch.zeros(len(after), VOCAB)
        full[:, ids] = law(after, SAMPLED)
        judged.append(full)
        moved.append(float((law(before, SAMPLED) - law(after, SAMPLED)).abs().max()))

    monkeypatch.setattr(LearningDraft, "_judge", keep)
    recorded = RecordingDraft(draft)
    decode(own, recorded, PROMPTS[:1], k=K, sampling=SAMPLED, max_new_tokens=40)
    drawn = [proposal.q[0] for proposal in recorded.proposals[1:] if proposal.q is not None]
    assert len(judged) > 5
    assert max(moved) > 0.01
    for mine, q in zip(judged, drawn[: len(judged)], strict=True):
        assert torch.allclose(mine, q[: len(mine)], atol=1e-5)


# ---- when it ends ----


@pytest.mark.parametrize(("rate", "goes_on"), [(4.0, True), (1e-9, False), (-4.0, False)])
def test_learning_that_does_not_pay_ends(
    rate: float, goes_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a change that stays although it gains nothing, or harms, and one that is dropped although it gains."""
    monkeypatch.setattr(learning, "WINDOW", 120)
    own = tiny_target(tiny_model("llama"))
    draft = learner("causal", own, rate)
    accepted(own, draft, 3)
    assert (draft.is_learning, draft.update is not None) == (goes_on, goes_on)


def test_once_ended_it_is_the_draft_that_it_was() -> None:
    """Catches bits that differ from those of the draft alone, and hooks that stay in target or draft."""
    own = tiny_target(tiny_model("llama"))
    draft = learner("causal", own)
    accepted(own, draft, 1)
    assert draft.update is not None
    for module in (own.runner.model, draft.head.module):
        assert len(module._forward_hooks) == 0
    draft.forget()
    draft.is_learning = False
    runs = [RecordingDraft(draft), RecordingDraft(draft.inner)]
    outputs = [
        decode(own, run, PROMPTS, k=K, sampling=SAMPLED, max_new_tokens=LENGTH) for run in runs
    ]
    assert texts(outputs[0]) == texts(outputs[1])
    for mine, other in zip(runs[0].proposals, runs[1].proposals, strict=True):
        assert mine.q is not None
        assert other.q is not None
        assert torch.equal(mine.q, other.q)


def test_it_goes_on_from_what_was_kept(tmp_path: Path) -> None:
    own = tiny_target(tiny_model("llama"))
    draft, other = learner("causal", own), learner("causal", own)
    other.load(str(tmp_path))  # nothing is there
    accepted(own, draft, 2)
    draft.save(str(tmp_path))
    other.load(str(tmp_path))
    assert accepted(own, other, 2) == accepted(own, draft, 2)
    fresh = learner("eagle3", own)
    fresh.load(str(tmp_path))
    assert fresh.update is None
    [file] = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(UserError, match=r"learned-.*is damaged"):
        other.load(str(tmp_path))


def test_the_command_goes_on_when_called_again(tmp_path: Path) -> None:
    """Catches settings and a folder that do not reach the draft."""
    words = [
        "--prompt",
        "import os\nimport sys\n",
        "--draft",
        worlds.ROOT / "assets/draft",
        "--max_new_tokens",
        20,
    ]
    counts, printed = [], set[str]()
    for _ in range(2):
        done = worlds.call("decode/generate.py", *words, "--learn", "true", "--state", tmp_path)
        assert done.code == 0, done.err
        [file] = tmp_path.iterdir()
        counts.append(int(load_file(file)["learned"]))
        printed.add(done.out)
    assert counts[1] > counts[0] > 1
    assert printed == {worlds.call("decode/generate.py", *words).out}


# ---- what is refused ----


def refuse_tree(target: Target) -> None:
    inner = near(target)
    inner.shape = DynamicTree(2, 4)
    decode(target, LearningDraft(inner, target), PROMPTS, k=K)


def refuse_grammar(target: Target) -> None:
    with ExitStack() as closing:
        constraint: Any = object()
        context = DraftContext(
            1,
            8,
            K,
            SamplingParams(),
            lambda p: p.argmax(-1),
            constraint=constraint,
            closing=closing,
        )
        learner("causal", target).begin_batch(context)


CPU = torch.device("cpu")
REFUSED: dict[str, tuple[Callable[[Target], object], str]] = {
    "none": (lambda t: add_learning(None, 1.0, t), "draft 'none' cannot learn"),
    "ngram": (lambda t: add_learning(NgramDraft(), 1.0, t), "'ngram' cannot learn while it serves"),
    "eagle1": (lambda t: add_learning(random_draft("eagle1", t), 1.0, t), "'eagle1' cannot learn"),
    "medusa": (lambda t: add_learning(random_draft("medusa", t), 1.0, t), "'medusa' cannot learn"),
    "pard": (lambda t: add_learning(test_pard.pard_of(t.runner.model), 1.0, t), "'pard' cannot learn"),
    "exit": (lambda t: add_learning(EarlyExitDraft(t, 1), 1.0, t), "cannot learn while it serves"),
    "device": (lambda t: add_learning(CrossDeviceDraft(near(t), CPU, CPU), 1.0, t), "on the target's device"),
    "lookup": (lambda t: add_learning(add_lookup(near(t), "ngram", 3, t), 1.0, t), "cannot learn"),
    "mirror": (lambda t: make_mirror(learner("causal", t), MirrorConfig(1), t), "mirror drafts while"),
    "tree": (refuse_tree, "learns from chains: give it no tree"),
    "grammar": (refuse_grammar, "follows no grammar while it learns"),
    "compiled": (lambda t: SpeculativeEngine(t, learner("causal", t), mode="compiled"), "choose mode eager"),
    "compiled lookup": (
        lambda t: SpeculativeEngine(t, wrapped("causal+ngram", t), mode="compiled"), "choose mode eager",
    ),
    "other target": (
        lambda t: SpeculativeEngine(tiny_target(tiny_model("llama", 1)), learner("causal", t)), "another target",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_learn_is_refused(name: str) -> None:
    refused, said = REFUSED[name]
    with pytest.raises(UserError, match=said):
        refused(tiny_target(tiny_model("llama")))


def test_a_draft_that_learns_already_stays_as_it_is() -> None:
    """Catches one that forgets with each call from Python, which adds learning again."""
    own = tiny_target(tiny_model("llama"))
    draft = learner("causal", own)
    assert add_learning(draft, 1.0, own) is draft
