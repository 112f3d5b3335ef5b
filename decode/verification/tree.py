"""Token trees: their shapes, parents, depths and ancestors, and which nodes to keep. Pure functions of tensors.

Node 0 is the last committed token, nodes 1..N are drafted and T = N + 1. `parents` [N] or [B, N] holds at i
the parent (0..i) of node i + 1; a chain is 0, 1, 2, … Nothing here reads a tensor on the host.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decode.common.errors import UserError


@dataclass(frozen=True)
class StaticTree:
    """A tree of the same shape in every round: node i + 1 is its parent's child of rank ranks[i]."""

    parents: tuple[int, ...]
    ranks: tuple[int, ...]
    """0 is the draft's most probable token after the parent, 1 the second, …"""
    depth: int
    """Edges from the root to the deepest node."""


@dataclass(frozen=True)
class DynamicTree:
    """EAGLE-2 (Li et al. 2024): expand the most probable nodes of each level, then keep the best of all candidates."""

    width: int = 4
    """Nodes expanded on each level, and children considered of each."""
    nodes: int = 16
    """Drafted nodes that the target verifies."""


TreeShape = StaticTree | DynamicTree | None
"""The shape of what a draft proposes; None: a chain."""


def max_depth(shape: TreeShape, k: int) -> int:
    """Edges on the longest path: a static tree has its own depth, chains and dynamic trees have k levels."""
    return shape.depth if isinstance(shape, StaticTree) else k


def max_slots(shape: TreeShape, k: int) -> int:
    """Slots past a row's length that drafting or verifying this shape may write to in a KV cache."""
    if shape is None:
        return k + 1
    if isinstance(shape, StaticTree):
        return len(shape.parents) + 1
    return max(shape.nodes, shape.width * k) + 1


def chain_parents(k: int, device: torch.device | str | None = None) -> Tensor:
    """Parents [k] of a chain of k tokens."""
    return torch.arange(k, device=device)


def path_sum(values: Tensor, parents: Tensor) -> Tensor:
    """[..., T]: values [..., N] of the drafted nodes summed over each node and its ancestors; 0 at the root.

    Pointer doubling: after m steps each node holds the sum over 2^m nodes and points 2^m nodes up.
    """
    up, total = _prepend_root(parents), _prepend_root(values)
    for _ in range((parents.shape[-1] - 1).bit_length()):
        total = total + total.gather(-1, up)
        up = up.gather(-1, up)
    return total


def depths(parents: Tensor) -> Tensor:
    """Edges [..., T] between the root and each node."""
    return path_sum(torch.ones_like(parents), parents)


def ancestor_mask(parents: Tensor) -> Tensor:
    """Bool [..., T, T]: [i, j] is True where j is i or an ancestor of i. The mask of tree attention."""
    up = _prepend_root(parents)
    size = up.shape[-1]
    above = torch.eye(size, dtype=torch.bool, device=up.device).expand(*up.shape, size)
    for _ in range((size - 1).bit_length()):
        above = above | above.gather(-2, up[..., None].expand_as(above))
        up = up.gather(-1, up)
    return above


def rerank_candidates(scores: Tensor, parents: Tensor, keep: int) -> tuple[Tensor, Tensor]:
    """The best `keep` of C candidates as a tree (EAGLE-2, Li et al. 2024): (index, parents), both [B, keep].

    scores [B, C] is log q summed along the path, so no child has a higher score than its parent; parents [B, C].
    `index` is ascending: candidate index[b, j] becomes node j + 1. The result is connected even where scores tie
    (q = 1), because the earlier candidate wins and a parent comes before its children. All C stay if C < keep.
    """
    order = scores.float().sort(dim=-1, descending=True, stable=True).indices
    index = order[:, :keep].sort(dim=-1).values
    kept = torch.zeros_like(parents).scatter(1, index, 1)
    node = _prepend_root(kept.cumsum(1))  # [B, C + 1] new number of each kept node
    return index, node.gather(1, parents.gather(1, index))


def tree_from_paths(paths: Sequence[Sequence[int]]) -> StaticTree:
    """The tree of these rank paths, the format of Medusa's and EAGLE's choices: [[0], [1], [0, 0], …].

    Nodes are numbered shallow first. Raises UserError for a repeated path or one without its parent.
    """
    ordered = sorted(map(tuple, paths), key=lambda path: (len(path), path))
    number: dict[tuple[int, ...], int] = {(): 0}
    for path in ordered:
        if not path or min(path) < 0:
            raise UserError(f"tree path {list(path)} must hold at least one rank, none negative")
        if path in number:
            raise UserError(f"tree path {list(path)} is there twice: remove one")
        if path[:-1] not in number:
            raise UserError(f"tree path {list(path)} has no parent: add {list(path[:-1])}")
        number[path] = len(number)
    parents = tuple(number[path[:-1]] for path in ordered)
    return StaticTree(
        parents, tuple(path[-1] for path in ordered), max(map(len, ordered), default=0)
    )


def optimal_static_tree(rank_accuracy: Sequence[Sequence[float]], nodes: int) -> StaticTree:
    """The tree of `nodes` drafted nodes with the largest `expected_tokens_per_round`.

    rank_accuracy[depth][rank] is measured: P(the target's token is the draft's rank-th | its parent was
    accepted). The length is a sum over nodes of P(node is accepted), which is never larger for a child than for its
    parent, so taking the most probable attachable node each time is optimal (Medusa, Cai et al. 2024, sec. 2.3.3).
    UserError for accuracies outside 0 … 1 or fewer possible nodes than `nodes`.
    """
    if not all(0 <= accuracy <= 1 for row in rank_accuracy for accuracy in row):
        raise UserError("rank accuracies are probabilities: each must lie between 0 and 1")
    open_paths: list[tuple[float, int, tuple[int, ...]]] = [(-1.0, 0, ())]  # smallest first
    taken: list[tuple[int, ...]] = []
    while open_paths and len(taken) <= nodes:
        value, depth, path = heapq.heappop(open_paths)
        taken.append(path)
        for rank, accuracy in enumerate(rank_accuracy[depth] if depth < len(rank_accuracy) else ()):
            heapq.heappush(open_paths, (value * accuracy, depth + 1, (*path, rank)))
    if len(taken) <= nodes:
        raise UserError(f"a tree of this depth and width has {len(taken) - 1} nodes, not {nodes}")
    return tree_from_paths(taken[1:])


def expected_tokens_per_round(tree: StaticTree, rank_accuracy: Sequence[Sequence[float]]) -> float:
    """Mean tokens per round of this tree, bonus included: 1 + the sum over nodes of P(node is accepted)."""
    value, depth = [1.0], [0]
    for parent, rank in zip(tree.parents, tree.ranks, strict=True):
        value.append(value[parent] * rank_accuracy[depth[parent]][rank])
        depth.append(depth[parent] + 1)
    return sum(value)


def _prepend_root(values: Tensor) -> Tensor:
    """[..., T] from [..., N]: a 0 in front for the root. For `parents`: the root is its own parent."""
    return torch.cat([values.new_zeros((*values.shape[:-1], 1)), values], -1)
