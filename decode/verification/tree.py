"""Token trees: which node hangs below which, which nodes are worth a place. Pure functions of tensors.

Node 0 is the last committed token, nodes 1..N are drafted and T = N + 1. `parents` [N] or [B, N] holds at i
the node (0..i) above node i + 1; a chain is 0, 1, 2, … Nothing here reads a tensor on the host.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from decode.common.errors import UserError


@dataclass(frozen=True)
class StaticTree:
    """A tree of the same shape in every round: node i + 1 is its parent's child of rank ranks[i]."""

    parents: tuple[int, ...]
    ranks: tuple[int, ...]
    """0 is the draft's most probable token at that place, 1 the next, …"""
    depth: int
    """Edges from the root to the deepest node."""


@dataclass(frozen=True)
class DynamicTree:
    """EAGLE-2 (Li et al. 2024): expand the most confident nodes, then keep the best of all that were seen."""

    width: int = 4
    """Nodes expanded a level, and children tried of each."""
    nodes: int = 16
    """Drafted nodes that the target verifies."""


TreeShape = StaticTree | DynamicTree | None
"""How a draft lays out what it proposes; None: a chain."""


def chain_parents(k: int, device: torch.device | str | None = None) -> torch.Tensor:
    """Parents [k] of k tokens in a row."""
    return torch.arange(k, device=device)


def path_sum(values: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
    """[..., T]: values [..., N] of the drafted nodes summed over each node and all above it; 0 at the root.

    Pointer doubling: after m steps every node has the sum over 2^m nodes and points 2^m nodes up.
    """
    up, total = _prepend_root(parents), _prepend_root(values)
    for _ in range((parents.shape[-1] - 1).bit_length()):
        total = total + total.gather(-1, up)
        up = up.gather(-1, up)
    return total


def depths(parents: torch.Tensor) -> torch.Tensor:
    """Edges [..., T] between the root and each node."""
    return path_sum(torch.ones_like(parents), parents)


def ancestor_mask(parents: torch.Tensor) -> torch.Tensor:
    """Bool [..., T, T]: [i, j] says that j is i or lies above it. The mask of tree attention."""
    up = _prepend_root(parents)
    size = up.shape[-1]
    above = torch.eye(size, dtype=torch.bool, device=up.device).expand(*up.shape, size)
    for _ in range((size - 1).bit_length()):
        above = above | above.gather(-2, up[..., None].expand_as(above))
        up = up.gather(-1, up)
    return above


def rerank_candidates(
    scores: torch.Tensor, parents: torch.Tensor, keep: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best `keep` of C candidates as a tree (EAGLE-2, Li et al. 2024): (index, parents), both [B, keep].

    scores [B, C] is log q summed along the path, so no child beats its parent; parents [B, C]. `index` is
    ascending: candidate index[b, j] becomes node j + 1. Connected even where scores tie (q = 1), because the
    earlier candidate wins and a parent comes before its children. C candidates stay if C < keep.
    """
    order = scores.float().sort(dim=-1, descending=True, stable=True).indices
    index = order[:, :keep].sort(dim=-1).values
    kept = torch.zeros_like(parents).scatter(1, index, 1)
    node = _prepend_root(kept.cumsum(1))  # [B, C + 1] new number of each old node that stays
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
            raise UserError(f"tree path {list(path)} is given twice: remove one")
        if path[:-1] not in number:
            raise UserError(f"tree path {list(path)} hangs in the air: add {list(path[:-1])}")
        number[path] = len(number)
    parents = tuple(number[path[:-1]] for path in ordered)
    return StaticTree(
        parents, tuple(path[-1] for path in ordered), max(map(len, ordered), default=0)
    )


def optimal_static_tree(rank_accuracy: Sequence[Sequence[float]], nodes: int) -> StaticTree:
    """The tree of `nodes` drafted nodes with the largest `expected_length`.

    rank_accuracy[depth][rank] is measured: P(the target's token is the draft's rank-th | its parent was
    accepted). The length is a sum over nodes and no child is worth more than its parent, so taking the most
    valuable node that can be attached is optimal (Medusa, Cai et al. 2024, sec. 2.3.3 does it greedily).
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
    """Tokens a round of this tree yields, bonus included: 1 + the sum over nodes of P(node is accepted)."""
    value, depth = [1.0], [0]
    for parent, rank in zip(tree.parents, tree.ranks, strict=True):
        value.append(value[parent] * rank_accuracy[depth[parent]][rank])
        depth.append(depth[parent] + 1)
    return sum(value)


def _prepend_root(values: torch.Tensor) -> torch.Tensor:
    """[..., T] from [..., N]: 0 put in front, for the root. Of `parents`: the root is its own parent."""
    return torch.cat([values.new_zeros((*values.shape[:-1], 1)), values], -1)
