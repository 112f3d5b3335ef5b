"""The exact distribution of the whole engine for trees and blocks, all choices enumerated.

As test_exact_distribution.py does for chains.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from decode.drafts.base import Draft, Proposal
from decode.drafts.causal import CausalDraft
from decode.drafts.early_exit import EarlyExitDraft
from decode.model.cut_layers import cut_layers
from decode.model.loading import Target
from decode.model.runner import ModelRunner
from decode.verification.sampling import SamplingParams
from decode.verification.tree import DynamicTree, tree_from_paths
from tests.decode.verification.test_exact_distribution import (
    PROMPTS,
    distances,
    engine_law,
    own_law,
    small,
)
from tests.params import slow_except
from tests.tiny import noisy, tiny_target

REDUCED = torch.tensor([0, 2])
SAMPLING, LENGTH = SamplingParams(0.7), 3
FORKED = tree_from_paths([[0], [1], [0, 0]])
WALK = 3**4  # a draw at each of the root and three nodes
BLOCK = 3**2 * 2**2 * 3  # two drafts, their verdicts, the bonus


def near(target: Target, **shape: Any) -> CausalDraft:
    return CausalDraft(ModelRunner(noisy(target.runner.model, 0.2)), **shape)


def short(target: Target, **shape: Any) -> CausalDraft:
    """A draft whose context ends within the first round behind a prompt of two tokens."""
    draft = near(target, **shape)
    draft.reads = replace(draft.reads, context=4)
    return draft


def padded(rows: int, **shape: Any) -> Callable[[Target], CausalDraft]:
    """A draft whose embedding has `rows` rows for the three tokens of the target."""

    def make(target: Target) -> CausalDraft:
        model = small(num_hidden_layers=2, vocab_size=rows)
        return CausalDraft(ModelRunner(model, target.runner.vocab_size), **shape)

    return make


def reduced(target: Target, **shape: Any) -> CausalDraft:
    """A draft that can draft two of the three tokens of the target."""
    model = noisy(target.runner.model, 0.2)
    return CausalDraft(ModelRunner(model, ids=REDUCED), **shape)


def cut(target: Target, **shape: Any) -> CausalDraft:
    """A draft that is a layer of another model, and can draft two of the three tokens of the target."""
    model = noisy(small(num_hidden_layers=3), 0.1)
    cut_layers(model, [1])
    return CausalDraft(ModelRunner(model, ids=REDUCED), **shape)


# name: (draft, rule, branches of a round)
CASES: dict[str, tuple[Callable[[Target], Draft], str, int]] = {
    "block": (near, "block", BLOCK),
    "static": (lambda t: near(t, shape=FORKED), "exact", WALK),
    "dynamic": (lambda t: near(t, shape=DynamicTree(2, 3)), "exact", WALK),
    "early-exit tree": (lambda t: EarlyExitDraft(t, 1, FORKED), "exact", WALK),
    "fewer rows": (padded(2), "exact", BLOCK),
    "more rows": (padded(5), "exact", BLOCK),
    "fewer rows, block": (padded(2), "block", BLOCK),
    "more rows, tree": (padded(5, shape=FORKED), "exact", WALK),
    "short context": (short, "exact", BLOCK),
    "short context, block": (short, "block", BLOCK),
    "short context, tree": (lambda t: short(t, shape=FORKED), "exact", WALK),
    "reduced": (reduced, "exact", BLOCK),
    "reduced, block": (reduced, "block", BLOCK),
    "reduced, tree": (lambda t: reduced(t, shape=FORKED), "exact", WALK),
    "cut": (cut, "exact", BLOCK),
    "cut, block": (cut, "block", BLOCK),
    "cut, tree": (lambda t: cut(t, shape=FORKED), "exact", WALK),
}


TWO_ROUNDS = ("static", "dynamic", "early-exit tree", "short context, tree")
"""Texts of three tokens take 80 times the paths of two: of the trees that differ in what a round keeps for the next."""


def law_distances(name: str, length: int = LENGTH) -> Tensor:
    """TV of the emitted text from the target's own law, for each prompt."""
    make, rule, branches = CASES[name]
    model = small(num_hidden_layers=2)
    target = tiny_target(model)
    paths = 3 * branches ** (length - 1)
    law = engine_law(target, make(target), 2, length, SAMPLING, paths, rule)
    return distances(law, lambda x: own_law(model, x, length, SAMPLING), PROMPTS)


@pytest.mark.parametrize(
    "name",
    slow_except(CASES, ["block", "fewer rows", "more rows", "short context", "reduced", "cut"]),
)
def test_engine_emits_the_targets_law(name: str) -> None:
    """Catches a rule given the wrong laws, paths, K/V or positions by the real loop. Exact: no false alarm."""
    length = LENGTH if name in TWO_ROUNDS else 2
    assert law_distances(name, length).max() < 1e-7  # HF norms compute in fp32


def test_draft_ids_without_their_map_move_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above is blind if it passes tokens that are numbers within the draft's vocabulary, q being mapped."""
    propose = CausalDraft.propose

    def unmapped(self: CausalDraft, history: Tensor, length: Tensor, k: int) -> Proposal:
        proposal = propose(self, history, length, k)
        return Proposal(torch.searchsorted(REDUCED, proposal.tokens), proposal.q)

    monkeypatch.setattr(CausalDraft, "propose", unmapped)
    assert law_distances("reduced", 2).min() > 1e-3


def test_typical_acceptance_is_lossy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above is blind if it passes a rule that is known to move the law."""
    monkeypatch.setitem(CASES, "typical", (lambda t: near(t, shape=FORKED), "typical", 3))
    assert law_distances("typical", 2).min() > 1e-3
