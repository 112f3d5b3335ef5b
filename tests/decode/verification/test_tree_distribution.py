"""The exact law of one round of every rule on trees and blocks, against the target's own law.

As in test_exact_distribution.py nothing is drawn: rows of a batch stand for all branches of all choices. The root's
context is empty, `groups` random targets and drafts are enumerated together, and what a round emits is continued
by the target's law to a fixed length. A lossless rule then gives the target's law of texts, to rounding.
"""

from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from torch import Tensor

from decode.verification import rules
from decode.verification.rules import (
    NO_DRAFT,
    VerificationResult,
    block_ratios,
    block_weights,
    count_accepted,
    distributions_after_rejection,
    residual,
    verify_block,
    verify_chain,
    verify_tree,
    verify_tree_sampled,
    verify_typical,
)
from decode.verification.sampling import Sampler
from decode.verification.tree import (
    chain_parents,
    depths,
    expected_tokens_per_round,
    optimal_static_tree,
)
from tests.decode.verification.test_exact_distribution import Branches, child, contexts

EXACT, MOVED = 1e-12, 1e-3


@dataclass(frozen=True)
class Tables:
    """Laws [groups, contexts, V] after every context, of independent targets p and drafts q."""

    p: Tensor
    q: Tensor

    @property
    def groups(self) -> int:
        return self.p.shape[0]

    @property
    def vocab(self) -> int:
        return self.p.shape[2]


def tables(vocab: int, depth: int, groups: int, narrow: bool = False, seed: int = 0) -> Tables:
    """Random laws for texts of depth + 1 tokens. In group 0, p = q; `narrow` zeroes a third of all entries."""
    generator = torch.Generator().manual_seed(seed)
    laws = []
    for _ in range(2):
        shape = (groups, contexts(vocab, depth), vocab)
        logits = 1.5 * torch.randn(shape, generator=generator, dtype=torch.float64)
        if narrow:
            least = logits.amax(-1, keepdim=True)
            gone = (torch.rand(shape, generator=generator) < 1 / 3) & (logits < least)
            logits = logits.masked_fill(gone, float("-inf"))
        laws.append(torch.softmax(logits, -1))
    laws[1][0] = laws[0][0]
    return Tables(*laws)


Rule = Callable[..., VerificationResult]
"""(tokens, parents, depth_limit, p, q, choose) -> Verdict, for every rule alike."""


def walk(tokens, parents, limit, p, q, choose):  # type: ignore[no-untyped-def]
    return verify_tree(tokens, parents, limit, choose(p))


def block(tokens, parents, limit, p, q, choose):  # type: ignore[no-untyped-def]
    return verify_block(tokens, p, q[:, :-1], choose)


def token_level(tokens, parents, limit, p, q, choose):  # type: ignore[no-untyped-def]
    return verify_chain(tokens, p, q[:, :-1], choose)


Propose = Callable[[Tensor, Tensor, Tensor, int, Sampler], Tensor]
"""(q after the parent [B, V], earlier siblings [B, n], group [B], vocab, choose) -> token [B]"""


def drawn(q, siblings, group, vocab, choose):  # type: ignore[no-untyped-def]
    """Without replacement, in order; NO_DRAFT once all that q allows is drawn."""
    left = q
    for sibling in siblings.unbind(1):
        used = torch.nn.functional.one_hot(sibling.clamp_min(0), vocab).bool()
        left = torch.where(used & (sibling >= 0)[:, None], 0, left)
    over = left.sum(-1, keepdim=True) == 0
    first = torch.arange(vocab) == 0
    token = choose(torch.where(over, first.to(left.dtype), left))
    return torch.where(over[:, 0], NO_DRAFT, token)


def ranked(q, siblings, group, vocab, choose):  # type: ignore[no-untyped-def]
    """The most probable by q, a point mass each; every third group leaves its second child's place empty."""
    rank = (siblings >= -1).sum(1)  # the columns of other parents hold less
    token = q.argsort(dim=-1, descending=True).gather(1, rank[:, None])[:, 0]
    return torch.where((group % 3 == 2) & (rank == 1), NO_DRAFT, token)


def same(q, siblings, group, vocab, choose):  # type: ignore[no-untyped-def]
    """All siblings the same token: what verify_tree must not be given."""
    return q.argmax(-1)


@dataclass(frozen=True)
class Round:
    ends: Tensor
    """[groups, contexts]: where a round ends."""
    law: Tensor
    """[groups, V ** (depth + 1)]: the text, continued by the target."""
    accepted: Tensor
    """[groups] mean accepted tokens."""
    walked: int
    """Branches of a group."""


def continued(ends: Tensor, p: Tensor) -> Tensor:
    """Law of texts: mass [groups, contexts] at contexts, each continued by p to the longest."""
    mass, (starts, vocab) = ends.clone(), p.shape[1:]
    for context in range(starts):  # a child's number is larger than its parent's
        first = context * vocab + 1
        mass[:, first : first + vocab] += mass[:, context, None] * p[:, context]
    return mass[:, starts:]


def play(
    case: Tables,
    parents: Tensor,
    rule: Rule,
    propose: Propose,
    limit: int | None = None,
    paths: int | None = None,
) -> Round:
    """All branches of one round on the tree of `parents` [N] or, one for each group, [groups, N]."""
    if paths is None:  # one branch alone tells how many there are
        paths = play(case, parents, rule, propose, limit, paths=1).walked
    vocab, nodes = case.vocab, parents.shape[-1]
    choose = Branches(case.groups, paths)
    group = torch.arange(case.groups).repeat_interleave(paths)
    rows = len(group)
    hangs = parents.expand(case.groups, nodes)[group]
    at, tokens = torch.zeros(rows, 1, dtype=torch.long), torch.zeros(rows, 0, dtype=torch.long)
    for i in range(nodes):
        above = at.gather(1, hangs[:, i : i + 1])[:, 0]
        siblings = torch.where(hangs[:, :i] == hangs[:, i : i + 1], tokens, -2)
        token = propose(case.q[group, above], siblings, group, vocab, choose)
        tokens = torch.cat([tokens, token[:, None]], 1)
        at = torch.cat([at, child(above, token.clamp_min(0), vocab)[:, None]], 1)
    p, q = case.p[group[:, None], at], case.q[group[:, None], at]
    deepest = int(depths(parents).max())
    given = parents if parents.ndim == 1 else hangs
    verdict = rule(tokens, given, deepest if limit is None else limit, p, q, choose)
    assert paths in (1, choose.walked)
    last = verdict.accepted if verdict.path is None else verdict.path[:, -1]
    deep = depths(hangs).gather(1, last[:, None])[:, 0]
    assert ((deep == verdict.accepted) | (choose.weight == 0)).all()
    kept = torch.cat([torch.zeros(rows, 1).long(), tokens], 1).gather(1, last[:, None])[:, 0]
    weight = torch.where(kept == NO_DRAFT, 0, choose.weight)  # a non-token counts for nothing
    end = child(at.gather(1, last[:, None])[:, 0], verdict.bonus, vocab)
    ends = torch.zeros(case.groups, case.p.shape[1] * vocab + 1, dtype=torch.float64)
    ends.view(-1).scatter_add_(0, group * ends.shape[1] + end, weight)
    accepted = torch.zeros(case.groups, dtype=torch.float64)
    accepted.scatter_add_(0, group, weight * verdict.accepted)
    return Round(ends, continued(ends, case.p), accepted, choose.walked)


def own(case: Tables) -> Tensor:
    """The target's law of texts."""
    ends = torch.zeros(case.groups, case.p.shape[1] * case.vocab + 1, dtype=torch.float64)
    ends[:, 0] = 1
    return continued(ends, case.p)


def distance(a: Tensor, b: Tensor) -> float:
    """The largest TV of any group."""
    return float((a - b).abs().sum(-1).max() / 2)


TREES = {
    "root alone": [],
    "one": [0],
    "chain": [0, 1, 2],
    "star": [0, 0, 0],
    "two levels": [0, 0, 1, 1, 2, 2],
    "branch numbered first": [0, 1, 1, 0, 4],
    "siblings apart": [0, 1, 0, 1, 3],
    "trunk": [0, 0, 1, 3, 3],
}


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
def test_walk_emits_the_targets_law(tree: list[int], narrow: bool) -> None:
    """Catches a walk that reads y, parents or depths of the wrong node, on any tree. Exact: no false alarm."""
    parents = torch.tensor(tree, dtype=torch.long)
    case = tables(3, int(depths(parents).max()), groups=6, narrow=narrow)
    assert distance(play(case, parents, walk, ranked).law, own(case)) < EXACT


def test_walk_on_a_tree_for_each_row() -> None:
    """Catches rows that read the tree of another row. Exact: no false alarm."""
    trees = [[0, 0, 1, 1, 2], [0, 1, 2, 0, 4], [0, 0, 0, 2, 2], [0, 1, 1, 2, 0]]
    parents = torch.tensor(trees)
    case = tables(3, 3, groups=4)
    assert distance(play(case, parents, walk, ranked).law, own(case)) < EXACT


@pytest.mark.parametrize("rule", [walk, verify_tree_sampled])
@pytest.mark.parametrize("limit", [0, 1, 4])
def test_depth_limit_cuts_the_tree_losslessly(rule: Rule, limit: int) -> None:
    """Catches nodes below the limit that are half checked, and a limit above the depth. Exact: no false alarm."""
    parents = torch.tensor([0, 0, 1, 3])
    case = tables(3, 3, groups=3)
    propose = ranked if rule is walk else drawn
    got = play(case, parents, rule, propose, limit=limit)
    assert distance(got.law, own(case)) < EXACT
    assert limit > 0 or not got.accepted.any()


def test_walk_on_a_chain_is_point_mass_speculative_sampling() -> None:
    """The two implementations accept alike, not only losslessly. Exact: no false alarm."""
    case = tables(4, 3, groups=6)

    def point_mass(tokens, parents, limit, p, q, choose):  # type: ignore[no-untyped-def]
        return verify_chain(tokens, p, None, choose)

    a, b = (play(case, chain_parents(3), rule, ranked) for rule in (walk, point_mass))
    assert distance(a.ends, b.ends) < EXACT
    assert torch.allclose(a.accepted, b.accepted)


SAMPLED = [
    ("one", [0], 4),
    ("chain", [0, 1], 4),
    ("star of 2", [0, 0], 4),
    ("star of 3", [0, 0, 0], 4),
    ("star that uses up the vocabulary", [0, 0, 0], 3),
    ("two levels", [0, 0, 1, 1, 2, 2], 3),
    ("two of four below the first", [0, 0, 1, 1], 4),
    ("siblings apart", [0, 1, 0, 1], 4),
]


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize(
    ("tree", "vocab"), [case[1:] for case in SAMPLED], ids=[c[0] for c in SAMPLED]
)
def test_sampled_tree_emits_the_targets_law(tree: list[int], vocab: int, narrow: bool) -> None:
    """Catches a residual or a renormalisation gone wrong between siblings or levels. Exact: no false alarm."""
    parents = torch.tensor(tree)
    case = tables(
        vocab, int(depths(parents).max()), groups=2 if len(tree) > 5 else 4, narrow=narrow
    )
    assert distance(play(case, parents, verify_tree_sampled, drawn).law, own(case)) < EXACT


@pytest.mark.parametrize("narrow", [False, True])
def test_repeated_siblings_of_the_sampled_tree_are_passed_over(narrow: bool) -> None:
    """Draws with replacement: a repeat was not drawn from what is left of q. Exact: no false alarm."""
    case, parents = tables(4, 2, groups=4, narrow=narrow), torch.tensor([0, 0, 0, 1])
    got = play(
        case, parents, verify_tree_sampled, lambda q, siblings, group, vocab, choose: choose(q)
    )
    assert distance(got.law, own(case)) < EXACT


def test_siblings_that_q_excludes_are_passed_over() -> None:
    """A top-k of perturbed log q fills every place, even if q has fewer tokens. Exact: no false alarm."""
    case, parents = tables(4, 2, groups=6, narrow=True), torch.tensor([0, 0, 0, 1])

    def filled(q, siblings, group, vocab, choose):  # type: ignore[no-untyped-def]
        token = drawn(q, siblings, group, vocab, choose)
        return torch.where(token == NO_DRAFT, group % vocab, token)

    assert distance(play(case, parents, verify_tree_sampled, filled).law, own(case)) < EXACT


def test_sampled_tree_on_a_chain_is_speculative_sampling() -> None:
    """The two implementations accept alike, not only losslessly. Exact: no false alarm."""
    case = tables(3, 3, groups=4)
    a = play(case, chain_parents(3), verify_tree_sampled, drawn)
    b = play(case, chain_parents(3), token_level, drawn)
    assert distance(a.ends, b.ends) < EXACT


def test_sampled_tree_accepts_everything_of_a_perfect_draft() -> None:
    """p = q: the first child always stays. Catches acceptance lost to a needless residual. Exact."""
    case = tables(3, 2, groups=1)
    got = play(case, torch.tensor([0, 1, 0]), verify_tree_sampled, drawn)
    assert got.accepted.tolist() == pytest.approx([2])


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize(("k", "vocab"), [(0, 3), (1, 4), (2, 3), (2, 4), (3, 3)])
def test_block_emits_the_targets_law(k: int, vocab: int, narrow: bool) -> None:
    """Catches a wrong ratio, success probability or residual anywhere in the block. Exact: no false alarm."""
    case = tables(vocab, k, groups=6, narrow=narrow)
    assert distance(play(case, chain_parents(k), block, drawn).law, own(case)) < EXACT


def in_room(k: int) -> Propose:
    """Drawn, but group g has only g % (k + 1) places."""

    def propose(q, siblings, group, vocab, choose):  # type: ignore[no-untyped-def]
        token = drawn(q, siblings, group, vocab, choose)
        return torch.where(siblings.shape[1] < group % (k + 1), token, NO_DRAFT)

    return propose


@pytest.mark.parametrize("k", [1, 2, 3])
def test_block_ends_at_the_last_real_draft(k: int) -> None:
    """Rows with fewer drafts than K. Catches a block that waits for its empty places, or accepts them. Exact. What
    stands in q at an empty place is no law; it may be NaN."""
    case = tables(3, k, groups=2 * (k + 1))

    def padded(tokens, parents, limit, p, q, choose):  # type: ignore[no-untyped-def]
        q = torch.where((tokens == NO_DRAFT)[..., None], float("nan"), q[:, :-1])
        return verify_block(tokens, p, q, choose)

    got = play(case, chain_parents(k), padded, in_room(k))
    assert distance(got.law, own(case)) < EXACT


def test_block_reproduces_the_papers_toy() -> None:
    """Sun et al. 2025: p = (1/3, 2/3), q = (2/3, 1/3), K = 2: 10/9 accepted tokens become 11/9."""
    p = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64).expand(1, contexts(2, 2), 2)
    case = Tables(p, p.flip(-1))
    assert play(case, chain_parents(2), token_level, drawn).accepted.item() == pytest.approx(10 / 9)
    assert play(case, chain_parents(2), block, drawn).accepted.item() == pytest.approx(11 / 9)


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize(("k", "vocab"), [(2, 3), (3, 3), (2, 5)])
def test_block_never_accepts_less_than_token_level(k: int, vocab: int, narrow: bool) -> None:
    """Catches a success probability that is valid but too small: the whole point of the rule. 60 random laws."""
    case = tables(vocab, k, groups=60, narrow=narrow, seed=k)
    more = play(case, chain_parents(k), block, drawn).accepted
    less = play(case, chain_parents(k), token_level, drawn).accepted
    assert (more >= less - 1e-12).all()
    assert (more > less + 1e-3).any()


@pytest.mark.parametrize("nodes", [1, 4, 6])
def test_expected_length_is_what_the_walk_accepts(nodes: int) -> None:
    """Laws that depend on the depth alone: `expected_length` must be exact, not only a score to sort by."""
    rows = [[0.5, 0.3, 0.2], [0.4, 0.35, 0.25], [0.8, 0.2, 0.0]]
    per_depth = torch.tensor(rows, dtype=torch.float64)
    accuracy = [[0.3, 0.5, 0.2], [0.4, 0.25, 0.35], [0.2, 0.8, 0.0]]  # of ranks 0, 1, 2 by q
    order = torch.tensor([[1, 0, 2], [0, 2, 1], [1, 0, 2]])
    level = [0] + [1] * 3 + [2] * 9 + [3] * 27
    rank_of = order.argsort(-1)
    q = (torch.tensor([3, 2, 1]).double() / 6)[rank_of]
    at = torch.tensor(level).clamp_max(2)
    case = Tables(per_depth[at][None], q[at][None])
    tree = optimal_static_tree(accuracy, nodes)
    want = expected_tokens_per_round(tree, accuracy)

    def pick_rank(q, siblings, group, vocab, choose):  # type: ignore[no-untyped-def]
        rank = tree.ranks[siblings.shape[1]]
        return q.argsort(dim=-1, descending=True)[:, rank]

    got = play(case, torch.tensor(tree.parents), walk, pick_rank)
    assert 1 + got.accepted.item() == pytest.approx(want)
    assert distance(got.law, own(case)) < EXACT


# ---- planted bugs ----


def patched(rule: Rule, **functions: Callable[..., object]) -> Rule:
    """The rule with these functions of decode/verification/rules.py replaced."""

    def wrong(*args):  # type: ignore[no-untyped-def]
        with mock.patch.multiple(rules, **functions):
            return rule(*args)

    return wrong


def one_uniform(tokens, parents, limit, p, q, choose):  # type: ignore[no-untyped-def]
    """Each node inverts its own law, all with the root's random number: y given the root's, exactly."""
    y = [choose(p[:, 0])]
    high = p.cumsum(-1)
    low = high - p
    top, bottom = (edge[:, 0].gather(1, y[0][:, None]) for edge in (high, low))
    for i in range(1, p.shape[1]):
        overlap = torch.minimum(high[:, i], top) - torch.maximum(low[:, i], bottom)
        y.append(choose(overlap.clamp_min(0)))
    return verify_tree(tokens, parents, limit, torch.stack(y, 1))


def law_of_the_parent(tokens, parents, limit, p, q, choose):  # type: ignore[no-untyped-def]
    up = torch.cat([parents.new_zeros(1), parents])
    return verify_tree(tokens, parents, limit, choose(p[:, up]))


def bonus_from_the_root(tokens, parents, limit, p, q, choose):  # type: ignore[no-untyped-def]
    y = choose(p)
    verdict = verify_tree(tokens, parents, limit, y)
    return VerificationResult(verdict.accepted, y[:, 0], verdict.path)


WALK_BUGS: dict[str, Rule] = {
    "one draw for all nodes": lambda tokens, parents, limit, p, q, choose: verify_tree(
        tokens, parents, limit, choose(p[:, :1]).expand(-1, p.shape[1])
    ),
    "one random number for all nodes": one_uniform,
    "law of the parent": law_of_the_parent,
    "bonus from the root": bonus_from_the_root,
    "y of the child itself": patched(
        walk, matches_target=lambda tokens, parents, y: tokens == y[:, 1:]
    ),
    "ancestors not asked": patched(
        walk,
        accepted_path_mask=lambda accept, parents, depth, limit: torch.cat(
            [torch.ones_like(accept[:, :1]), accept], 1
        ),
    ),
    "token by token as on a chain": patched(
        walk, matches_target=lambda tokens, parents, y: tokens == y[:, :-1]
    ),
}


@pytest.mark.parametrize("bug", WALK_BUGS.values(), ids=WALK_BUGS.keys())
def test_planted_bugs_of_the_walk_are_seen(bug: Rule) -> None:
    """The tests above are blind if one of these passes. Exact: no false alarm."""
    case, parents = tables(3, 2, groups=3, seed=1), torch.tensor([0, 0, 1, 1])
    assert distance(play(case, parents, walk, ranked).law, own(case)) < EXACT
    assert distance(play(case, parents, bug, ranked).law, own(case)) > MOVED


def test_repeated_siblings_are_seen() -> None:
    """Why siblings must differ: two copies of a token continue by two draws, and the longer path is taken."""
    case, parents = tables(3, 2, groups=3, seed=1), torch.tensor([0, 0, 1, 2])
    assert distance(play(case, parents, walk, same).law, own(case)) > MOVED


def residual_from_the_original_p(tokens, parents, limit, p, q, choose):  # type: ignore[no-untyped-def]
    def wrong(token, p_now, q_now):  # type: ignore[no-untyped-def]
        return distributions_after_rejection(token, p[:, 0], q_now)

    return after_rejection(wrong)(tokens, parents, limit, p, q, choose)


def siblings_sorted(tokens, parents, limit, p, q, choose):  # type: ignore[no-untyped-def]
    by_q = q[:, 0].gather(1, tokens).argsort(dim=-1, descending=True)
    return verify_tree_sampled(tokens.gather(1, by_q), parents, limit, p, q, choose)


AFTER = distributions_after_rejection


def after_rejection(wrong: Callable[..., object]) -> Rule:
    return patched(verify_tree_sampled, distributions_after_rejection=wrong)


SAMPLED_BUGS: dict[str, Rule] = {
    "q not renormalised": after_rejection(lambda token, p, q: (AFTER(token, p, q)[0], q.scatter(1, token, 0))),
    "rejected token stays in q": after_rejection(lambda token, p, q: (AFTER(token, p, q)[0], q)),
    "p not renormalised": after_rejection(lambda token, p, q: (residual(p, q), AFTER(token, p, q)[1])),
    "p unchanged": after_rejection(lambda token, p, q: (p, AFTER(token, p, q)[1])),
    # the rule of point masses (EAGLE-2's q = 1), on samples
    "p only loses the token": after_rejection(
        lambda token, p, q: (rules._normalize(p.scatter(1, token, 0)), AFTER(token, p, q)[1])
    ),
    "residual from the original p": residual_from_the_original_p,
    "siblings sorted by probability": siblings_sorted,
}  # fmt: skip


@pytest.mark.parametrize("bug", SAMPLED_BUGS.values(), ids=SAMPLED_BUGS.keys())
def test_planted_bugs_of_the_sampled_tree_are_seen(bug: Rule) -> None:
    """The tests above are blind if one of these passes. Exact: no false alarm."""
    case, parents = tables(4, 1, groups=4, seed=2), torch.tensor([0, 0, 0])
    right = play(case, parents, verify_tree_sampled, drawn)
    assert distance(right.law, own(case)) < EXACT
    wrong = play(case, parents, bug, drawn)
    assert distance(wrong.law, own(case)) > MOVED


def test_top_k_children_of_the_sampled_tree_are_seen() -> None:
    """Why children that were not drawn need verify_tree: here they bias the text. Exact: no false alarm."""
    case, parents = tables(4, 1, groups=4, seed=2), torch.tensor([0, 0])
    assert distance(play(case, parents, verify_tree_sampled, ranked).law, own(case)) > MOVED


def test_laws_of_the_level_above_are_seen() -> None:
    """q of the root used again for its grandchildren. Exact: no false alarm."""
    case, parents = tables(3, 2, groups=3, seed=3), torch.tensor([0, 0, 1])

    def stale(tokens, parents, limit, p, q, choose):  # type: ignore[no-untyped-def]
        return verify_tree_sampled(tokens, parents, limit, p, q[:, :1].expand_as(q), choose)

    assert distance(play(case, parents, stale, drawn).law, own(case)) > MOVED


def success_without_r(tokens, p, q, r):  # type: ignore[no-untyped-def]
    """s from max(p - q, 0)."""
    ones = torch.cat([torch.ones_like(r[:, :-1]), r[:, -1:]], 1)
    win = block_weights(tokens, p, q, ones)[..., 0]
    return torch.stack([win, (1 - r)[:, 1:]], -1)


def token_level_ratios(tokens, p, q):  # type: ignore[no-untyped-def]
    r = block_ratios(tokens, p, q)
    at = tokens[..., None]
    own_ratio = (p[:, :-1].gather(-1, at) / q.gather(-1, at))[..., 0].clamp_max(1)
    return torch.cat([r[:, :1], own_ratio], 1)


def ratios_clamped_late(tokens, p, q):  # type: ignore[no-untyped-def]
    r = block_ratios(tokens, p, q)
    at = tokens[..., None]
    product = (p[:, :-1].gather(-1, at) / q.gather(-1, at))[..., 0].cumprod(-1).clamp_max(1)
    return torch.cat([r[:, :1], product], 1)


BLOCK_BUGS: dict[str, Rule] = {
    "early exit": patched(block, last_success_index=count_accepted),
    "success without r": patched(block, block_weights=success_without_r),
    # r of every prefix, as if each were the whole block
    "success is r": patched(
        block, block_weights=lambda tokens, p, q, r: torch.stack([r[:, 1:], 1 - r[:, 1:]], -1)
    ),
    "residual without r": patched(
        block, residual=lambda p, q: residual(p / p.sum(-1, keepdim=True), q)
    ),
    "residual of nothing": patched(block, residual=lambda p, q: p),
    "ratios of single tokens": patched(block, block_ratios=token_level_ratios),
    "ratios clamped late": patched(block, block_ratios=ratios_clamped_late),
}


@pytest.mark.parametrize("bug", BLOCK_BUGS.values(), ids=BLOCK_BUGS.keys())
def test_planted_bugs_of_the_block_are_seen(bug: Rule) -> None:
    """The tests above are blind if one of these passes. Exact: no false alarm."""
    case = tables(3, 3, groups=6)
    assert distance(play(case, chain_parents(3), block, drawn).law, own(case)) < EXACT
    assert distance(play(case, chain_parents(3), bug, drawn).law, own(case)) > MOVED


def test_block_padding_read_as_token_zero_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty place must not count as draft 0. Exact: no false alarm."""
    case = tables(3, 2, groups=6)
    assert distance(play(case, chain_parents(2), block, in_room(2)).law, own(case)) < EXACT
    monkeypatch.setattr(rules, "NO_DRAFT", -2)
    assert distance(play(case, chain_parents(2), block, in_room(2)).law, own(case)) > MOVED


def test_typical_acceptance_is_lossy() -> None:
    """It is labelled LOSSY for a reason; if this fails, it accepts nothing. Exact: no false alarm."""
    case, parents = tables(3, 2, groups=3), torch.tensor([0, 0, 1])

    def typical(tokens, parents, limit, p, q, choose):  # type: ignore[no-untyped-def]
        return verify_typical(tokens, parents, limit, p, choose)

    got = play(case, parents, typical, ranked)
    assert distance(got.law, own(case)) > 0.05
    assert got.law.sum(1).tolist() == pytest.approx([1] * 3)
