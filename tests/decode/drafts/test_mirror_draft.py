"""Drafting while the target verifies: the text and its law, the draft's state, and that threads change nothing."""

from typing import Any

import pytest
import torch
from torch import Tensor

from decode.common.errors import UserError
from decode.drafts import mirror
from decode.drafts.base import Proposal
from decode.drafts.branches import BranchSet, exit_candidates
from decode.drafts.causal import CausalDraft
from decode.drafts.early_exit import EarlyExitDraft
from decode.drafts.mirror import MirrorConfig, MirrorDraft
from decode.drafts.wrappers import RecordingDraft
from decode.engine.composing import add_confidence, add_lookup, make_mirror
from decode.engine.engine import SpeculativeEngine, decode
from decode.model.loading import Target
from decode.model.runner import ModelRunner
from decode.verification.sampling import SamplingParams, warp
from decode.verification.tree import DynamicTree
from tests.decode.engine.test_engine import assert_rows_are_alone, texts
from tests.decode.verification.test_exact_distribution import PROMPTS as LAW_PROMPTS
from tests.decode.verification.test_exact_distribution import (
    Branches,
    distance_from_own_law,
    engine_law,
    small,
)
from tests.heads import random_draft
from tests.params import rotated, slow_except
from tests.tiny import noisy, reference, tiny_model, tiny_prompts, tiny_target

K, LENGTH = 3, 24
PROMPTS = tiny_prompts(13, 1, 9)
SAMPLED = SamplingParams(1.0, top_k=2)
CONFIGS = {
    "ahead": MirrorConfig(1, 0),
    "one": MirrorConfig(1, 1),
    "two": MirrorConfig(2, 2),
    "waiting": MirrorConfig(2, 2, overlap=False),
}


def mirrored(target: Target, config: MirrorConfig, noise: float = 0.02) -> MirrorDraft:
    inner = CausalDraft(ModelRunner(noisy(target.runner.model, noise)))
    return make_mirror(inner, config, target)


# ---- text ----


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_text_is_the_targets(name: str) -> None:
    """Catches branches of another row, of an earlier round or of a prompt that the row has ended; rows are used again
    and end at different times."""
    own = tiny_target(tiny_model("llama"))
    want = texts(decode(own, None, PROMPTS, max_new_tokens=LENGTH))
    draft = mirrored(own, CONFIGS[name])
    outputs = decode(own, draft, PROMPTS, rows=2, k=K, max_new_tokens=LENGTH)
    assert texts(outputs) == want
    assert 0 < draft.counts.reused < draft.counts.rounds


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
def test_a_rows_text_does_not_depend_on_its_batch(sampling: SamplingParams) -> None:
    """Catches random numbers that a row uses up or not depending on whether other rows have a branch."""
    own = tiny_target(tiny_model("llama", dtype=torch.float64))
    assert_rows_are_alone(own, mirrored(own, CONFIGS["two"]), PROMPTS, sampling=sampling)


def test_threads_never_change_the_output() -> None:
    """Catches draws and K/V writes in the order of the threads: twelve repetitions of sampled text."""
    shape: dict[str, Any] = {"num_hidden_layers": 2, "vocab_size": 8}  # few tokens: guesses hit
    own = tiny_target(tiny_model("llama", dtype=torch.float64, **shape))
    settings: dict[str, Any] = {"k": 2, "sampling": SAMPLED, "max_new_tokens": 8}
    prompts = tiny_prompts(7, 1, vocab=8)
    waiting = mirrored(own, MirrorConfig(1, 3, overlap=False))
    want = decode(own, waiting, prompts, **settings)
    draft = mirrored(own, MirrorConfig(1, 3))
    for _ in range(12):
        got = decode(own, draft, prompts, **settings)
        assert [(o.output_ids, o.rounds) for o in got] == [(o.output_ids, o.rounds) for o in want]
    assert draft.counts.reused == 12 * waiting.counts.reused > 0


# ---- the draft's state ----


def state_error(config: MirrorConfig, rows: int) -> float:
    """How far q of all proposals is from what plain forward passes over the text and the drafted tokens give."""
    own = tiny_target(tiny_model("llama", dtype=torch.float64))
    sampling = SamplingParams(0.8)
    mirror = mirrored(own, config)
    draft, asked = RecordingDraft(mirror), []
    propose = mirror.propose

    def spy(history: Tensor, length: Tensor, k: int) -> Proposal:
        asked.append((history.clone(), length.clone(), mirror.base.clone()))
        return propose(history, length, k)

    mirror.propose = spy  # type: ignore[method-assign]
    decode(own, draft, PROMPTS, rows=rows, k=K, sampling=sampling, max_new_tokens=LENGTH)
    assert mirror.counts.reused > 0
    plain, worst = reference(noisy(own.runner.model, 0.02)), 0.0
    for (history, length, base), proposal in zip(asked, draft.proposals, strict=True):
        assert proposal.q is not None
        for row in (length > base + 1).nonzero()[:, 0].tolist():  # rows that are not done
            text = [*history[row, : length[row]].tolist(), *proposal.tokens[row].tolist()]
            logits = plain(torch.tensor([text]), use_cache=False).logits[0, -K - 1 : -1].detach()
            worst = max(worst, float((proposal.q[row] - warp(logits, sampling)).abs().max()))
    return worst


@pytest.mark.parametrize(("name", "rows"), [("two", 1), *((name, 2) for name in CONFIGS)])
def test_q_is_what_the_text_gives(name: str, rows: int) -> None:
    """Catches a stale root, a branch of another outcome, K/V that were moved wrongly, positions and masks of nodes."""
    assert state_error(CONFIGS[name], rows) < 1e-6  # HF norms compute in fp32


def stale_root(self: MirrorDraft, *args: Any) -> None:
    """Rows that are filled again keep the branches of the text before."""
    PREFILL(self, *args)
    self.base[args[0]] -= 1


def any_bonus(branches: BranchSet, accepted: Tensor, bonus: Tensor) -> tuple[Tensor, Tensor]:
    same = branches.accepted.expand_as(branches.bonus) == accepted[:, None]
    return same.any(1), same.long().argmax(1)


PREFILL = MirrorDraft.prefill


@pytest.mark.parametrize(
    ("owner", "name", "bug"),
    [
        (MirrorDraft, "prefill", stale_root),
        (mirror, "find_branch", any_bonus),
        (
            mirror,
            "accepted_path",
            lambda _, nodes, w: torch.arange(w + 1 + nodes.shape[1]).repeat(len(nodes), 1),
        ),
    ],
)
def test_a_wrong_state_is_seen(
    owner: Any, name: str, bug: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above is blind if one of these goes unseen."""
    monkeypatch.setattr(owner, name, bug)
    assert state_error(CONFIGS["two"], 2) > 1e-3


# ---- law ----


class OutcomeBranches(Branches):
    """Walks a round's branches of MirrorDraft as one draw that all of them share, since at most one of them is used:
    what its tokens are likelier than 1 / V counts when it is. What is drafted after `last` such rounds is never used
    and not walked."""

    def __init__(self, groups: int, paths: int, last: int):
        super().__init__(groups, paths)
        self.beside, self.rounds_left = False, last
        self.likelier = torch.ones(len(self.digits), 1, dtype=torch.float64)

    def __call__(self, weights: Tensor) -> Tensor:
        if not self.beside:
            return super().__call__(weights)
        rows, count, vocab = weights.shape
        if self.rounds_left <= 0:
            return torch.zeros(rows, count, dtype=torch.long)
        branch = self.digits % vocab
        share = weights[torch.arange(rows), :, branch] / weights.sum(-1)
        self.likelier = self.likelier * share.nan_to_num() * vocab
        self.weight /= vocab
        self.digits //= vocab
        self.walked *= vocab
        return branch[:, None].expand(rows, count)

    def settle(self, found: Tensor, number: Tensor) -> None:
        """These rows use this branch."""
        used = self.likelier.gather(1, number.clamp_max(self.likelier.shape[1] - 1)[:, None])[:, 0]
        self.weight *= torch.where(found, used, 1.0)
        self.likelier = torch.ones(len(self.digits), 1, dtype=torch.float64)
        self.rounds_left -= 1


class EnumeratedMirror(MirrorDraft):
    """Tells its OutcomeBranches which draws are those of branches, and which branch is used."""

    def propose(self, history: Tensor, length: Tensor, k: int) -> Proposal:
        choose = self.request.choose
        if self.branches is not None:
            assert isinstance(choose, OutcomeBranches)
            outcome = length - self.base - 2
            bonus = history.gather(1, length[:, None] - 1)[:, 0]
            found, number = mirror.find_branch(self.branches, outcome.clamp_min(0), bonus)
            choose.settle(found & self.has_branches & (outcome >= 0), number)
        return super().propose(history, length, k)

    def _draft_branches(self, states: Tensor, threads: int) -> BranchSet:
        choose = self.request.choose
        assert isinstance(choose, OutcomeBranches)
        choose.beside = True
        try:
            return super()._draft_branches(states, threads)
        finally:
            choose.beside = False


LAW = SamplingParams(0.7)


def law_distance(
    vocab: int, k: int, length: int, config: MirrorConfig, rule: str = "exact"
) -> float:
    """Largest TV of texts of `length` tokens, in up to `length` - 1 rounds, from the target's own law."""
    drawn, verified, mirrored_rounds = vocab**k, 2**k * vocab, length - 2
    paths = vocab * (drawn * drawn * verified) ** mirrored_rounds * (drawn * verified)
    model = small(num_hidden_layers=2, vocab_size=vocab)
    target = tiny_target(model)
    inner = CausalDraft(ModelRunner(noisy(model, 0.2)))
    draft = EnumeratedMirror(inner, target, config)
    starts = [[token % vocab for token in prompt] for prompt in LAW_PROMPTS]
    choose = OutcomeBranches(len(starts), paths, last=mirrored_rounds)
    law = engine_law(target, draft, k, length, LAW, paths, rule, starts, choose)
    assert 0 < draft.counts.reused < draft.counts.rounds
    return distance_from_own_law(law, model, length, LAW, starts)


CASES = {
    "accepted": (2, 1, 4, MirrorConfig(1, 1)),  # a branch behind an accepted token is used too
    "one": (3, 1, 3, MirrorConfig(1, 1)),
    "two": (3, 1, 3, MirrorConfig(1, 2)),
    "ahead": (2, 1, 4, MirrorConfig(1, 0)),
    "longer": (2, 2, 3, MirrorConfig(1, 1)),
}


@pytest.mark.parametrize(
    ("name", "rule"), slow_except(rotated(CASES, ["exact", "block"])[1:], ["one", "accepted"])
)
def test_sampled_text_has_the_targets_law(name: str, rule: str) -> None:
    """Catches a branch that is used for any reason but the outcome, and a q that is not its own. Exact."""
    assert law_distance(*CASES[name], rule) < 1e-7  # HF norms compute in fp32


FIND, TAKE = mirror.find_branch, mirror.take_branch


def chosen_by_content(
    branches: BranchSet, accepted: Tensor, bonus: Tensor
) -> tuple[Tensor, Tensor]:
    """A branch is used only if its first token pleases."""
    found, number = FIND(branches, accepted, bonus)
    return found & (branches.tokens[torch.arange(len(number)), 0, number] == 0), number


def chosen_by_likelihood(
    branches: BranchSet, accepted: Tensor, bonus: Tensor
) -> tuple[Tensor, Tensor]:
    """A branch is used only if its first token is likelier than others, as the target's later logits would say too."""
    found, number = FIND(branches, accepted, bonus)
    assert branches.q is not None
    row = torch.arange(len(number))
    first = branches.tokens[row, 0, number]
    likely = branches.q[row, 0, number].gather(1, first[:, None])[:, 0]
    return found & (likely > 1 / branches.q.shape[-1]), number


def q_of_the_first_branch(branches: BranchSet, rows: Tensor, number: Tensor) -> mirror.ChosenBranch:
    """q is not kept for each branch."""
    chosen = TAKE(branches, rows, number)
    assert branches.q is not None
    proposal = Proposal(chosen.proposal.tokens, branches.q[:, :, 0], finite=chosen.proposal.finite)
    return mirror.ChosenBranch(proposal, chosen.nodes)


@pytest.mark.parametrize(
    ("name", "bug", "case"),
    [
        ("find_branch", chosen_by_content, "one"),
        ("find_branch", chosen_by_likelihood, "one"),
        ("take_branch", q_of_the_first_branch, "two"),
    ],
)
def test_planted_bugs_move_the_law(
    name: str, bug: Any, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above is blind if one of these goes unseen."""
    monkeypatch.setattr(mirror, name, bug)
    assert law_distance(*CASES[case]) > 1e-3


# ---- errors ----


def test_candidates_leave_out_what_was_drafted() -> None:
    """Catches a drafted token that stands for its own rejection, and one left out behind the wrong position."""
    logits = torch.tensor([[[4.0, 3, 2, 1], [4.0, 3, 2, 1], [1.0, 2, 3, 4]]])
    window = torch.tensor([[0, 2]])
    assert exit_candidates(logits, window, 2).tolist() == [[[1, 2], [0, 1], [3, 2]]]
    assert exit_candidates(logits[:, :1], window, 1).tolist() == [[[1]]]


def test_an_error_in_the_second_thread_is_raised() -> None:
    """Catches a thread that fails in silence or keeps the round waiting, and hooks or halved cores that stay."""
    own = tiny_target(tiny_model("llama"))
    draft = mirrored(own, CONFIGS["two"])
    cores = torch.get_num_threads()

    class Broken(RuntimeError):
        pass

    def fail(states: Tensor) -> None:
        raise Broken

    draft._outcomes = fail  # type: ignore[assignment,method-assign]
    with pytest.raises(Broken):
        decode(own, draft, PROMPTS, k=K, max_new_tokens=LENGTH)
    assert torch.get_num_threads() == cores
    assert not any(layer._forward_pre_hooks for layer in draft.layers)
    assert not draft.last_module._forward_hooks


def test_what_cannot_be_mirrored_is_refused() -> None:
    own, config = tiny_target(tiny_model("llama")), MirrorConfig(1)
    near, tree = (CausalDraft(ModelRunner(noisy(own.runner.model, 0.02))) for _ in range(2))
    tree.shape = DynamicTree(2, 4)
    mirror = make_mirror(near, config, own)
    for refused, said in (
        (lambda: make_mirror(random_draft("eagle3", own), config, own), "needs a small language model"),
        (lambda: make_mirror(EarlyExitDraft(own, 1), config, own), "mirror needs a small language model as draft"),
        (lambda: make_mirror(near, MirrorConfig(3), own), "early exit needs 1 to 2 layers of this target, not 3"),
        (lambda: add_lookup(mirror, "ngram", 3, own), "one of both"),
        (lambda: add_confidence(mirror, 0.3), "give it no confidence"),
        (lambda: SpeculativeEngine(own, mirror, mode="compiled"), "choose mode eager"),
        (lambda: decode(own, make_mirror(tree, config, own), PROMPTS, k=2), "drafts chains only: give it no tree"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=said):
            refused()
