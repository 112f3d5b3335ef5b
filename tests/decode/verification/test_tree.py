"""Trees by hand, against slow references, and the promise that no rule reads a tensor on the host."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from decode.common.errors import UserError
from decode.verification.rules import (
    NO_DRAFT,
    VerificationResult,
    verify_block,
    verify_tree,
    verify_tree_sampled,
    verify_typical,
)
from decode.verification.sampling import CounterRNG
from decode.verification.tree import (
    StaticTree,
    ancestor_mask,
    depths,
    expected_tokens_per_round,
    optimal_static_tree,
    path_sum,
    rerank_candidates,
    tree_from_paths,
)
from tests.decode.engine.test_capture_lint import Lint

#        0
#      / | \
#     1  2  4
#    /   |  | \
#   3    5  6  7
#        |
#        8
DRAWN = [0, 0, 1, 0, 2, 4, 4, 5]
DEPTHS = [0, 1, 1, 2, 1, 2, 2, 2, 3]
ABOVE = [[0], [1, 0], [2, 0], [3, 1, 0], [4, 0], [5, 2, 0], [6, 4, 0], [7, 4, 0], [8, 5, 2, 0]]


def random_parents(rng: random.Random, nodes: int) -> list[int]:
    return [rng.randint(0, i) for i in range(nodes)]


def way_up(parents: list[int], node: int) -> list[int]:
    """The node and all above it, the root last."""
    return [node] if node == 0 else [node, *way_up(parents, parents[node - 1])]


# ---- shape ----


def test_drawn_tree() -> None:
    """Catches depths, masks and sums that are one edge off, or take an index for a depth."""
    parents = torch.tensor(DRAWN)
    assert depths(parents).tolist() == DEPTHS
    assert [row.nonzero()[:, 0].tolist() for row in ancestor_mask(parents)] == list(
        map(sorted, ABOVE)
    )
    values = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128])
    assert path_sum(values, parents).tolist() == [0, 1, 2, 5, 8, 18, 40, 72, 146]


@pytest.mark.parametrize("nodes", [0, 1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33])
def test_depths_and_ancestors_of_any_tree(nodes: int) -> None:
    """Catches one doubling too few, which only shows on chains of some lengths, and rows that mix."""
    rng = random.Random(nodes)
    trees = [list(range(nodes)), [0] * nodes, *(random_parents(rng, nodes) for _ in range(6))]
    parents = torch.tensor(trees, dtype=torch.long)
    ups = [[way_up(tree, node) for node in range(nodes + 1)] for tree in trees]
    assert depths(parents).tolist() == [[len(up) - 1 for up in tree] for tree in ups]
    want = [[[j in up for j in range(nodes + 1)] for up in tree] for tree in ups]
    assert ancestor_mask(parents).tolist() == want
    for one, depth, mask in zip(parents, depths(parents), ancestor_mask(parents), strict=True):
        assert torch.equal(depths(one), depth)
        assert torch.equal(ancestor_mask(one), mask)


# ---- static trees ----


def test_paths_become_a_tree() -> None:
    """Catches nodes numbered in the order given (a child before its parent) and ranks taken for places."""
    tree = tree_from_paths([[1, 0, 2], [0], [1, 0], [1], [0, 3]])
    assert tree == StaticTree(parents=(0, 0, 1, 2, 4), ranks=(0, 1, 3, 0, 2), depth=3)
    assert tree_from_paths([]) == StaticTree((), (), 0)


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        ([[0], [0, 1, 0]], r"\[0, 1, 0\] has no parent: add \[0, 1\]"),
        ([[0], [1], [0]], r"\[0\] is there twice"),
        ([[0], []], "at least one rank"),
        ([[0], [-1]], "none negative"),
    ],
)
def test_broken_paths_are_refused(paths: list[list[int]], words: str) -> None:
    """Catches a tree that silently loses a branch or drafts the same token twice."""
    with pytest.raises(UserError, match=words):
        tree_from_paths(paths)


def all_trees(widths: list[int], nodes: int) -> list[list[tuple[int, ...]]]:
    """Every set of `nodes` rank paths that holds the prefixes of its members."""
    paths = [
        path
        for depth in range(1, len(widths) + 1)
        for path in itertools.product(*map(range, widths[:depth]))
    ]
    return [
        list(chosen)
        for chosen in itertools.combinations(paths, nodes)
        if all(path[:-1] in chosen for path in chosen if len(path) > 1)
    ]


@pytest.mark.parametrize("nodes", [0, 1, 2, 3, 4, 5, 6])
def test_best_static_beats_every_other_tree(nodes: int) -> None:
    """Catches a search that misses deep nodes, or believes that a lower rank is always likelier."""
    rng = random.Random(nodes)
    for _ in range(6):
        table = [[rng.random() / width for _ in range(width)] for width in (3, 2, 2)]
        best = optimal_static_tree(table, nodes)
        assert len(best.parents) == nodes
        lengths = [
            expected_tokens_per_round(tree_from_paths(paths), table)
            for paths in all_trees([3, 2, 2], nodes)
        ]
        assert expected_tokens_per_round(best, table) == pytest.approx(max(lengths))


def test_best_static_says_what_it_cannot_do() -> None:
    """Catches a smaller tree than was asked for, and percentages taken for probabilities."""
    assert len(optimal_static_tree([[0.5, 0.0], [0.1]], 4).parents) == 4
    with pytest.raises(UserError, match="has 4 nodes, not 5"):
        optimal_static_tree([[0.5, 0.0], [0.1]], 5)
    for wrong in (35.0, float("nan")):
        with pytest.raises(UserError, match="between 0 and 1"):
            optimal_static_tree([[wrong]], 1)


# ---- EAGLE-2's choice ----


def test_rerank_by_hand() -> None:
    """Catches parents that still count candidates, and an index in order of score."""
    parents = torch.tensor([DRAWN])
    scores = torch.tensor([[-1.0, -0.1, -1.5, -2.0, -0.3, -9.0, -9.0, -0.4]])
    index, kept = rerank_candidates(scores, parents, 5)
    assert index.tolist() == [[0, 1, 2, 4, 7]]
    assert kept.tolist() == [[0, 0, 1, 2, 4]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("keep", [1, 7, 20, 40, 50])
def test_rerank_stays_connected_under_ties(keep: int, dtype: torch.dtype) -> None:
    """Catches a child kept without its parent where scores tie: q = 1, or fp16 cannot tell them apart."""
    rng = random.Random(keep)
    trees = [random_parents(rng, 40) for _ in range(30)]
    rows = []
    for tree in trees:
        score = [0.0]
        for parent in tree:
            score.append(score[parent] + rng.choice([0.0, 0.0, -1e-4, -1.0, float("-inf")]))
        rows.append(score[1:])
    scores = torch.tensor(rows).to(dtype)
    index, parents = rerank_candidates(scores, torch.tensor(trees), keep)
    assert index.shape == parents.shape == (30, min(keep, 40))
    for tree, chosen, got in zip(trees, index.tolist(), parents.tolist(), strict=True):
        assert chosen == sorted(set(chosen))
        number = {0: 0} | {old + 1: new for new, old in enumerate(chosen, 1)}
        assert got == [number[tree[old]] for old in chosen]  # a KeyError: the parent is missing
    worst = scores.float().gather(1, index).amin(1)
    dropped = scores.float().scatter(1, index, float("-inf")).amax(1)
    assert (worst >= dropped).all()


# ---- the rules against slow references ----

VOCAB = 5


def random_forest(rng: random.Random, rows: int, nodes: int) -> tuple[Tensor, Tensor]:
    """(tokens, parents) [B, N]; siblings differ, and one place in eight is empty."""
    all_tokens, all_parents = [], []
    for _ in range(rows):
        parents: list[int] = []
        tokens: list[int] = []
        while len(parents) < nodes:
            parent = rng.randint(0, len(parents))
            used = {t for t, above in zip(tokens, parents, strict=True) if above == parent}
            free = [t for t in range(VOCAB) if t not in used]
            if free:
                parents.append(parent)
                tokens.append(NO_DRAFT if rng.random() < 1 / 8 else rng.choice(free))
        all_tokens.append(tokens)
        all_parents.append(parents)
    return torch.tensor(all_tokens), torch.tensor(all_parents)


def path_of(parents: list[int], node: int, limit: int) -> list[int]:
    down = way_up(parents, node)[::-1]
    return down + [node] * (limit + 1 - len(down))


@pytest.mark.parametrize("limit", [1, 3, 12])
def test_walk_equals_the_slow_walk(limit: int) -> None:
    """Catches a path, a depth or a bonus of another node; an empty place that is accepted."""
    rng = random.Random(limit)
    tokens, parents = random_forest(rng, 200, 12)
    y = torch.tensor([[rng.randrange(VOCAB) for _ in range(13)] for _ in range(200)])
    verdict = verify_tree(tokens, parents, limit, y)
    assert verdict.path is not None
    for b, (row, tree, said) in enumerate(
        zip(tokens.tolist(), parents.tolist(), y.tolist(), strict=True)
    ):
        node, depth = 0, 0
        while depth < limit:
            down = [i + 1 for i in range(12) if tree[i] == node and row[i] == said[node]]
            if not down:
                break
            node, depth = down[0], depth + 1
        assert verdict.accepted[b] == depth
        assert verdict.bonus[b] == said[node]
        assert verdict.path[b].tolist() == path_of(tree, node, limit)
    assert set(verdict.accepted.tolist()) >= {0, 1, min(limit, 3)}


def laws(*shape: int, sharp: float = 2.0) -> Tensor:
    return torch.softmax(sharp * torch.randn(*shape, dtype=torch.float64), -1)


@pytest.mark.parametrize("limit", [1, 3, 12])
def test_typical_equals_the_slow_rule(limit: int) -> None:
    """Catches a border or a likelihood of another node, the first instead of the likeliest longest path."""
    tokens, parents = random_forest(random.Random(limit), 200, 12)
    p = laws(200, 13, VOCAB)
    verdict = verify_typical(tokens, parents, limit, p, lambda weights: weights.argmax(-1))
    assert verdict.path is not None
    entropy = -(p * p.log()).sum(-1)
    several = 0
    for b, (row, tree) in enumerate(zip(tokens.tolist(), parents.tolist(), strict=True)):
        likelihood = {0: 1.0}
        for i, (token, above) in enumerate(zip(row, tree, strict=True), 1):
            border = min(0.09, 0.3 * float(torch.exp(-entropy[b, above])))
            deep = len(way_up(tree, i)) - 1 <= limit
            if deep and above in likelihood and token != NO_DRAFT and p[b, above, token] > border:
                likelihood[i] = likelihood[above] * float(p[b, above, token])
        ranking = {i: (len(way_up(tree, i)), likelihood[i]) for i in likelihood}
        best = max(ranking, key=lambda i: ranking[i])
        several += sum(length == ranking[best][0] for length, _ in ranking.values()) > 1
        assert verdict.accepted[b] == ranking[best][0] - 1
        assert verdict.path[b].tolist() == path_of(tree, best, limit)
        assert verdict.bonus[b] == p[b, best].argmax()
    assert several > 20


def test_typical_by_hand() -> None:
    """Catches a border without its entropy, min taken for max, and a first token accepted unseen. Over 10 equal tokens
    H = log 10 and the border is 0.3 / 10, so probability 0.1 passes. After 0.7, 0.08, 0.22 it is 0.3 exp(-H) = 0.14 at
    most 0.09, so 0.08 does not."""
    flat = [0.1] * 10
    sharp = [0.7, 0.08, 0.22] + [0.0] * 7
    #  0 ─ 1 (flat, passes) ─ 2 (token 1 after sharp: 0.08)
    #                       └ 3 (token 2 after sharp: 0.22)
    #                       └ 4 (token 0 after sharp: 0.70)
    tokens = torch.tensor([[4, 1, 2, 0]])
    parents = torch.tensor([0, 1, 1, 1])
    p = torch.tensor([[flat, sharp, flat, flat, flat[::-1]]], dtype=torch.float64)
    got = verify_typical(tokens, parents, 2, p, lambda weights: weights.argmax(-1))
    assert got.path is not None
    assert (got.accepted.tolist(), got.path.tolist()) == ([2], [[0, 1, 4]])
    only = verify_typical(tokens[:, :2], parents[:2], 2, p[:, :3], lambda w: w.argmax(-1))
    assert only.path is not None
    assert (only.accepted.tolist(), only.path.tolist()) == ([1], [[0, 1, 1]])
    assert only.bonus.tolist() == [0]
    # Flat: min(0.5, 1.1 / 10) is above 0.1, so nothing passes
    strict = verify_typical(tokens, parents, 2, p, lambda w: w.argmax(-1), epsilon=0.5, delta=1.1)
    assert strict.accepted.tolist() == [0]


def test_typical_with_one_hot_p_is_greedy() -> None:
    """Catches a NaN in the entropy of a one-hot law, which temperature 0 hands in."""
    tokens, parents = random_forest(random.Random(0), 100, 12)
    best = torch.randint(0, VOCAB, (100, 13))
    p = torch.nn.functional.one_hot(best, VOCAB).float()
    got = verify_typical(tokens, parents, 4, p, lambda weights: weights.argmax(-1))
    want = verify_tree(tokens, parents, 4, best)
    assert same(got, want)
    assert got.accepted.any()


def same(a: VerificationResult, b: VerificationResult) -> bool:
    pairs = [(a.accepted, b.accepted), (a.bonus, b.bonus), (a.path, b.path)]
    return all(
        x is y is None or (x is not None and y is not None and torch.equal(x, y)) for x, y in pairs
    )


# ---- every rule: rows stand alone, shapes are fixed, nothing is read ----

Rules = dict[str, Callable[[dict[str, Any]], VerificationResult | Any]]

RULES: Rules = {
    "walk": lambda x: verify_tree(x["tokens"], x["parents"], 3, x["choose"](x["p"])),
    "walk, one tree": lambda x: verify_tree(x["tokens"], x["tree"], 3, x["choose"](x["p"])),
    "sampled": lambda x: verify_tree_sampled(
        x["tokens"], x["parents"], 3, x["p"], x["q"], x["choose"]
    ),
    "block": lambda x: verify_block(x["tail"], x["p"], x["q"][:, :-1], x["choose"]),
    "typical": lambda x: verify_typical(x["tokens"], x["parents"], 3, x["p"], x["choose"]),
}
SHAPES: Rules = {
    "depths": lambda x: depths(x["parents"]),
    "ancestors": lambda x: ancestor_mask(x["parents"]),
    "ancestors, one tree": lambda x: ancestor_mask(x["tree"]),
    "rerank": lambda x: rerank_candidates(x["scores"], x["parents"], 5),
}


def inputs(rows: int, nodes: int = 8) -> dict[str, Any]:
    tokens, parents = random_forest(random.Random(0), rows, nodes)
    room = torch.arange(rows) % (nodes + 1)
    return {
        "tokens": tokens,
        "parents": parents,
        "tree": torch.tensor(DRAWN),
        "tail": torch.where(torch.arange(nodes) < room[:, None], tokens.clamp_min(0), NO_DRAFT),
        "p": laws(rows, nodes + 1, VOCAB).float(),
        "q": laws(rows, nodes + 1, VOCAB).float(),
        "scores": path_sum(torch.randn(rows, nodes).abs().neg(), parents)[:, 1:],
        "choose": CounterRNG(torch.arange(rows)),
    }


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_a_row_does_not_depend_on_its_batch(
    rule: Callable[[dict[str, Any]], VerificationResult],
) -> None:
    """Catches rows that share random numbers, laws or trees."""
    everything = inputs(40)
    whole = rule(everything)
    for b in (0, 7, 23, 39):
        alone = {
            k: v[b : b + 1] if k not in ("tree", "choose") else v for k, v in everything.items()
        }
        alone["choose"] = CounterRNG(torch.tensor([b]))
        path = None if whole.path is None else whole.path[b : b + 1]
        part = VerificationResult(whole.accepted[b : b + 1], whole.bonus[b : b + 1], path)
        assert same(rule(alone), part)


@pytest.mark.parametrize("function", [*RULES.values(), *SHAPES.values()], ids=[*RULES, *SHAPES])
def test_nothing_is_read_on_the_host(function: Callable[[dict[str, Any]], Any]) -> None:
    """Catches a hidden synchronisation: it stalls the GPU every round and forbids a captured graph."""
    given = inputs(6)
    with Lint() as lint:
        function(given)
    assert lint.found == {}


@pytest.mark.parametrize("function", [*RULES.values(), *SHAPES.values()], ids=[*RULES, *SHAPES])
def test_shapes_are_known_without_values(function: Callable[[dict[str, Any]], Any]) -> None:
    """The same on tensors that have no values at all: whatever asks for one raises."""
    given = {k: v.to("meta") for k, v in inputs(6).items() if k != "choose"}
    given["choose"] = lambda weights: weights.argmax(-1)
    function(given)


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x.sum() and 1,
        lambda x: torch.equal(x, x + 1),
    ],
)
def test_reads_are_seen(read: Callable[[Tensor], object]) -> None:
    """The two tests above are blind if one of these passes both."""
    with Lint() as lint:
        read(torch.ones(3))
    assert lint.found != {}
    with pytest.raises((RuntimeError, NotImplementedError)):
        read(torch.ones(3, device="meta"))
