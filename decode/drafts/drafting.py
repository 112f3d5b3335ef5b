"""Drafting with a model that gives one next-token distribution at a time: chains, static trees, dynamic trees."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from decode.drafts.base import ChainStop, DraftContext, Proposal, TokenTree
from decode.model.kv_cache import TreeNodes
from decode.model.runner import ModelRunner, spread_logits
from decode.verification.rules import NO_DRAFT
from decode.verification.sampling import Sampler, SamplingParams, has_finite_logits, warp
from decode.verification.tree import (
    DynamicTree,
    StaticTree,
    TreeShape,
    ancestor_mask,
    depths,
    rerank_candidates,
)

DraftStep = Callable[[Tensor, Tensor, TreeNodes | None, Tensor], Tensor]
"""(tokens [B, T], length [B], nodes, above [B, T]) -> logits [B, T, V] after each of the tokens.

`length` is the number of tokens that they continue. Without nodes it is one token of a chain, at position `length`.
With nodes they are nodes of a tree whose root is the last of those `length` tokens. above[i] is the index of token i's
parent among the tokens of the call before, where a draft finds the state that it passes on from token to token; in the
first call the parent is the proposal's root.
"""


@dataclass(frozen=True)
class ReducedVocab:
    """The tokens of a draft that knows only some: its logits [..., Vd] are those of the target's tokens `ids` [Vd]."""

    ids: Tensor
    size: int  # of the target's vocabulary

    def spread(self, q: Tensor) -> Tensor:
        """[..., V] from probabilities [..., Vd]: 0 for all other tokens."""
        full = q.new_zeros(*q.shape[:-1], self.size)
        full[..., self.ids] = q
        return full


def token_ids(vocab: ReducedVocab | None, index: Tensor) -> Tensor:
    """The target's ids of the draft's tokens `index`."""
    return index if vocab is None else vocab.ids[index]


def decoder_step(runner: ModelRunner) -> DraftStep:
    """The DraftStep of a language model, which passes on nothing but its KV cache."""

    def step(tokens: Tensor, length: Tensor, nodes: TreeNodes | None, above: Tensor) -> Tensor:
        return runner.step(tokens, length if nodes is None else length - 1, nodes)

    return step


@dataclass(frozen=True)
class TreeLevel:
    """One level of a static tree with F nodes: the rank and the parent of each, and the nodes to run."""

    ranks: Tensor  # [F]
    above: Tensor  # [F] index of the parent among the nodes of the level above
    num_ranks: int  # the highest rank + 1
    nodes: TreeNodes  # these nodes, as the draft model runs them for the next level


@dataclass(frozen=True)
class StaticTreePlan:
    """The tensors of a static tree on its device, so that a round copies nothing there."""

    tree: TokenTree
    levels: list[TreeLevel]


def build_tree_plan(shape: TreeShape, device: torch.device) -> StaticTreePlan | DynamicTree | None:
    """The `plan` that `draft_tokens` needs for this shape on `device`; made once a batch."""
    if not isinstance(shape, StaticTree):
        return shape
    depth = [0]
    for parent in shape.parents:
        depth.append(depth[parent] + 1)
    tree = build_token_tree(torch.tensor(shape.parents, device=device), shape.depth)
    levels, start = [], 0  # start: number of the first node of the level above
    for level in range(1, shape.depth + 1):
        begin, end = depth.index(level), len(depth) - depth[::-1].index(level)
        ranks, parents = shape.ranks[begin - 1 : end - 1], shape.parents[begin - 1 : end - 1]
        every = torch.arange(begin, end, device=device)[None]
        levels.append(
            TreeLevel(
                torch.tensor(ranks, device=device),
                torch.tensor(parents, device=device) - start,
                max(ranks) + 1,
                TreeNodes(every, tree.nodes.depth, tree.nodes.ancestor_mask[:, begin:end]),
            )
        )
        start = begin
    return StaticTreePlan(tree, levels)


def draft_tokens(
    step: DraftStep,
    logits: Tensor,
    length: Tensor,
    k: int,
    plan: StaticTreePlan | DynamicTree | None,
    request: DraftContext,
    vocab: ReducedVocab | None = None,
) -> Proposal:
    """A proposal that continues the last committed token, after which the draft's logits are [B, V].

    With `vocab` these and those of `step` are [..., Vd]: nothing in the drafting is as wide as the target's vocabulary
    but q, unless a grammar restricts it: the tokens that it allows may be others than the draft's.
    """
    finite = [has_finite_logits(logits[:, None])]
    spread = vocab if request.constraint is not None else None

    def checked_step(*inputs: Any) -> Tensor:
        found = step(*inputs)
        finite.append(has_finite_logits(found))
        return found if spread is None else spread_logits(found, spread.ids, spread.size)

    if spread is not None:
        logits, vocab = spread_logits(logits, spread.ids, spread.size), None

    if plan is None:
        proposal = draft_chain(checked_step, logits, length, k, request, vocab)
    elif isinstance(plan, StaticTreePlan):
        proposal = draft_static_tree(checked_step, logits, length, plan, vocab)
    else:
        proposal = draft_dynamic_tree(checked_step, logits, length, k, plan, vocab)
    return Proposal(proposal.tokens, proposal.q, proposal.tree, torch.stack(finite).all(0))


def draft_chain(
    step: DraftStep,
    logits: Tensor,
    length: Tensor,
    k: int,
    request: DraftContext,
    vocab: ReducedVocab | None = None,
) -> Proposal:
    """A chain of k tokens, each drawn from the draft's distribution (greedy: its argmax), q [B, k, V].

    Without `request.stop` it may be R chains of each row: given logits [B, R, V], tokens are [B, k, R], q is
    [B, k, R, V], and `step` gets tokens [B, 1, R] and returns [B, 1, R, V].

    With `request.stop` a row has NO_DRAFT behind its end. No step runs once all rows have ended, and there are no
    columns for what was not drafted; the random numbers of k tokens are drawn all the same. With `request.constraint`
    q is the draft's distribution over the tokens that the row's grammar allows after those drafted so far.
    """
    tokens: list[Tensor] = []
    q: list[Tensor] = []
    stop = request.stop
    above = torch.zeros_like(length)[:, None]
    path = torch.ones(len(length), device=length.device)  # of the drafted tokens' probabilities
    going = path.bool() if stop is None else rows_going_on(stop, 0, path, path)
    for i in range(k):
        if request.constraint is not None:
            logits = request.constraint.restrict(logits, tokens)
        if request.sampling.greedy:
            index = logits.argmax(-1)
        else:
            q.append(warp(logits, request.sampling))
            index = request.choose(q[-1])
        token = token_ids(vocab, index)
        tokens.append(token if stop is None else torch.where(going, token, NO_DRAFT))
        if stop is not None and i + 1 < k:
            # At temperature 1, whatever the tokens are drawn at.
            probability = torch.softmax(logits.float(), -1).gather(1, index[:, None])[:, 0]
            path = path * probability
            going = going & rows_going_on(stop, i + 1, probability, path)
            if not bool(going.any()):
                discard_draws(request, length, k - i - 1)
                break
        if i + 1 < k:
            logits = step(token[:, None], length + i, None, above)[:, -1]
    if not q:
        return Proposal(torch.stack(tokens, 1), None)
    drawn_from = torch.stack(q, 1)
    return Proposal(
        torch.stack(tokens, 1), drawn_from if vocab is None else vocab.spread(drawn_from)
    )


def rows_going_on(stop: ChainStop, drafted: int, probability: Tensor, path: Tensor) -> Tensor:
    """[B] bool: a chain of `drafted` tokens may have another, given probabilities [B] of its last token and of all."""
    limit = torch.tensor(stop.limit, device=path.device)
    return (limit > drafted) & (probability >= stop.token) & (path >= stop.path)


class RandomChoices(Protocol):
    """What tells how tokens are drawn: a DraftContext, or the engine's StepConfig."""

    @property
    def sampling(self) -> SamplingParams: ...
    @property
    def choose(self) -> Sampler: ...


def discard_draws(request: RandomChoices, length: Tensor, count: int) -> None:
    """Draws the random numbers of `count` tokens that are not drafted: a row's numbers depend on no other row."""
    if not request.sampling.greedy:
        certain = torch.ones(len(length), 1, device=length.device)
        for _ in range(count):
            request.choose(certain)


def draft_static_tree(
    step: DraftStep,
    logits: Tensor,
    length: Tensor,
    plan: StaticTreePlan,
    vocab: ReducedVocab | None = None,
) -> Proposal:
    """The most probable tokens by rank, one forward pass for each level of the tree."""
    tokens = []
    ranked = logits[:, None]  # [B, F, V] after the nodes of the level above
    for level in plan.levels:
        best = ranked.topk(level.num_ranks, dim=-1).indices
        tokens.append(token_ids(vocab, best[:, level.above, level.ranks]))
        if level is not plan.levels[-1]:
            above = level.above.expand(len(length), -1)
            ranked = step(tokens[-1], length, level.nodes, above)
    return Proposal(torch.cat(tokens, 1), None, plan.tree)


def draft_dynamic_tree(
    step: DraftStep,
    logits: Tensor,
    length: Tensor,
    k: int,
    shape: DynamicTree,
    vocab: ReducedVocab | None = None,
) -> Proposal:
    """EAGLE-2: each of k levels expands the `width` nodes with the most probable paths; the best `nodes` are kept.

    All candidates are ranked in the end, expanded or not. Only expanded ones take slots in the draft's KV cache.
    """
    rows, width, device = len(length), shape.width, length.device
    every = torch.arange(1 + (k - 1) * width, device=device)  # the root and all expanded nodes
    depth = (every[None] + width - 1) // width
    score, index = torch.log_softmax(logits.float(), -1).topk(width)
    token = token_ids(vocab, index)  # [B, W] of the nodes to expand
    tokens, scores, parents = [token], [score], [torch.zeros_like(token)]
    # Their index among the candidates
    candidate = torch.arange(width, device=device).expand(rows, -1)
    seen = torch.zeros(rows, width, len(every), dtype=torch.bool, device=device)
    seen[:, :, 0] = True
    above = torch.zeros_like(token)  # index of the parent among the tokens of the step before
    count = width
    for level in range(1, k):
        node = torch.arange(1 + (level - 1) * width, 1 + level * width, device=device)
        seen = seen | (node[:, None] == every)
        logits = step(token, length, TreeNodes(node[None], depth, seen), above)
        more, index = torch.log_softmax(logits.float(), -1).topk(width)  # [B, W, W]
        next_token = token_ids(vocab, index)
        total = (score[:, :, None] + more).flatten(1)
        next_token = next_token.flatten(1)
        tokens.append(next_token)
        scores.append(total)
        parents.append((candidate + 1).repeat_interleave(width, 1))
        score, at = total.topk(width)
        token = next_token.gather(1, at)
        candidate = count + at
        count += width * width
        above = at // width
        seen = seen.gather(1, above[:, :, None].expand(-1, -1, len(every)))
    index, kept = rerank_candidates(torch.cat(scores, 1), torch.cat(parents, 1), shape.nodes)
    return Proposal(torch.cat(tokens, 1).gather(1, index), None, build_token_tree(kept, k))


def build_token_tree(parents: Tensor, depth: int) -> TokenTree:
    """The TokenTree of `parents` [N] or [B, N] and of this depth."""
    batched = parents if parents.ndim == 2 else parents[None]
    every = torch.arange(batched.shape[1] + 1, device=parents.device)[None]
    return TokenTree(parents, TreeNodes(every, depths(batched), ancestor_mask(batched)), depth)
