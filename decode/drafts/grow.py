"""How a model that gives one next-token law at a time drafts: a chain, a fixed tree, or a tree by confidence."""

from dataclasses import dataclass

import torch

from decode.cache import Nodes
from decode.drafts.base import Proposal, Request, Tree
from decode.sampling import warp
from decode.target import Decoder
from decode.tree import StaticTree, ancestors, depths, rerank


@dataclass(frozen=True)
class DynamicTree:
    """EAGLE-2 (Li et al. 2024): expand the most confident nodes, then keep the best of all that were seen."""

    width: int = 4
    """Nodes expanded a level, and children tried of each."""
    nodes: int = 16
    """Drafted nodes that the target verifies."""


Shape = StaticTree | DynamicTree | None
"""None: a chain."""


def reach(shape: Shape, k: int) -> int:
    """Slots behind a row's length that drafting or verifying this shape may write to."""
    if shape is None:
        return k + 1
    if isinstance(shape, StaticTree):
        return len(shape.parents) + 1
    return max(shape.nodes, shape.width * k) + 1


def levels(shape: Shape, k: int) -> int:
    """The longest path: a static tree has its own, others take k."""
    return shape.depth if isinstance(shape, StaticTree) else k


@dataclass(frozen=True)
class Step:
    """One level of a static tree: which ranks of which rows of the level above, and its nodes."""

    ranks: torch.Tensor  # [F]
    above: torch.Tensor  # [F] row of the parent among the nodes of the level above
    most: int  # ranks needed
    nodes: Nodes  # what to forward for the next level


@dataclass(frozen=True)
class Plan:
    """A static tree laid out on a device, so that a round uploads nothing."""

    tree: Tree
    steps: list[Step]


def lay_out(shape: StaticTree, device: torch.device) -> Plan:
    """The tensors that drafting `shape` needs."""
    depth = [0]
    for parent in shape.parents:
        depth.append(depth[parent] + 1)
    tree = tree_of(torch.tensor(shape.parents, device=device), shape.depth)
    steps, start = [], 0  # number of the first node of the level above
    for level in range(1, shape.depth + 1):
        begin, end = depth.index(level), len(depth) - depth[::-1].index(level)
        ranks, parents = shape.ranks[begin - 1 : end - 1], shape.parents[begin - 1 : end - 1]
        every = torch.arange(begin, end, device=device)[None]
        steps.append(
            Step(
                torch.tensor(ranks, device=device),
                torch.tensor(parents, device=device) - start,
                max(ranks) + 1,
                Nodes(every, tree.nodes.depth, tree.nodes.visible[:, begin:end]),
            )
        )
        start = begin
    return Plan(tree, steps)


def prepare(shape: Shape, device: torch.device) -> "Plan | DynamicTree | None":
    """What `grow` wants to be given for this shape; made once a batch."""
    return lay_out(shape, device) if isinstance(shape, StaticTree) else shape


def grow(
    decoder: Decoder,
    logits: torch.Tensor,
    length: torch.Tensor,
    k: int,
    plan: Plan | DynamicTree | None,
    request: Request,
) -> Proposal:
    """A proposal behind the last committed token, whose next-token logits [B, V] `decoder` has just given."""
    if plan is None:
        return chain(decoder, logits, length, k, request)
    if isinstance(plan, Plan):
        return static_tree(decoder, logits, length, plan)
    return dynamic_tree(decoder, logits, length, k, plan)


def chain(
    decoder: Decoder, logits: torch.Tensor, length: torch.Tensor, k: int, request: Request
) -> Proposal:
    """k tokens, each drawn (greedy: the best) from the law behind the one before."""
    tokens, laws = [], []
    for i in range(k):
        if request.sampling.greedy:
            tokens.append(logits.argmax(-1))
        else:
            laws.append(warp(logits, request.sampling))
            tokens.append(request.choose(laws[-1]))
        if i + 1 < k:
            logits = decoder.step(tokens[-1][:, None], length + i)[:, -1]
    return Proposal(torch.stack(tokens, 1), torch.stack(laws, 1) if laws else None)


def static_tree(
    decoder: Decoder, logits: torch.Tensor, length: torch.Tensor, plan: Plan
) -> Proposal:
    """The most probable tokens by rank, a level of the tree in one forward."""
    tokens = []
    ranked = logits[:, None]  # [B, F, V] behind the nodes of the level above
    for step in plan.steps:
        best = ranked.topk(step.most, dim=-1).indices
        tokens.append(best[:, step.above, step.ranks])
        if step is not plan.steps[-1]:
            ranked = decoder.step(tokens[-1], length - 1, step.nodes)
    return Proposal(torch.cat(tokens, 1), None, plan.tree)


def dynamic_tree(
    decoder: Decoder, logits: torch.Tensor, length: torch.Tensor, k: int, shape: DynamicTree
) -> Proposal:
    """k levels: each expands the `width` nodes with the most probable paths; the best `nodes` of all stay.

    Every candidate counts in the end, expanded or not. Expanded ones have slots of their own in the draft's store.
    """
    rows, width, device = len(length), shape.width, length.device
    every = torch.arange(1 + (k - 1) * width, device=device)  # the root and all that are expanded
    depth = (every[None] + width - 1) // width
    score, token = torch.log_softmax(logits.float(), -1).topk(width)  # [B, W] the nodes to expand
    tokens, scores, parents = [token], [score], [torch.zeros_like(token)]
    candidate = torch.arange(width, device=device).expand(rows, -1)  # which candidates they are
    seen = torch.zeros(rows, width, len(every), dtype=torch.bool, device=device)
    seen[:, :, 0] = True
    count = width
    for level in range(1, k):
        index = torch.arange(1 + (level - 1) * width, 1 + level * width, device=device)
        seen = seen | (index[:, None] == every)
        logits = decoder.step(token, length - 1, Nodes(index[None], depth, seen))
        more, next_token = torch.log_softmax(logits.float(), -1).topk(width)  # [B, W, W]
        total = (score[:, :, None] + more).flatten(1)
        next_token = next_token.flatten(1)
        tokens.append(next_token)
        scores.append(total)
        parents.append((candidate + 1).repeat_interleave(width, 1))
        score, at = total.topk(width)
        token = next_token.gather(1, at)
        candidate = count + at
        count += width * width
        above = (at // width)[:, :, None].expand(-1, -1, len(every))
        seen = seen.gather(1, above)
    index, kept = rerank(torch.cat(scores, 1), torch.cat(parents, 1), shape.nodes)
    return Proposal(torch.cat(tokens, 1).gather(1, index), None, tree_of(kept, k))


def tree_of(parents: torch.Tensor, depth: int) -> Tree:
    """The tree of `parents` [N] or [B, N] as the target verifies it, whole."""
    batched = parents if parents.ndim == 2 else parents[None]
    every = torch.arange(batched.shape[1] + 1, device=parents.device)[None]
    return Tree(parents, Nodes(every, depths(batched), ancestors(batched)), depth)
