"""Continuations of several possible outcomes of a verification, drafted together as one token tree.

Node 0 of the tree is the root, the newest token that the target has committed; nodes 1 … W are the window, the drafted
tokens that are being verified. A verification ends with (number of accepted tokens, bonus token). A branch is a guess
of that pair, and the K tokens that the draft draws behind it.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from decode.drafts.base import DraftContext
from decode.drafts.drafting import draft_chain
from decode.model.kv_cache import TreeNodes
from decode.model.runner import ModelRunner
from decode.verification.rules import NO_DRAFT
from decode.verification.sampling import has_finite_logits


@dataclass(frozen=True)
class BranchSet:
    """R branches of each row, with K tokens each. Every tensor's first dimension is B, or 1 for all rows."""

    accepted: Tensor  # [1|B, R] window tokens that a branch follows
    bonus: Tensor  # [B, R] the token after them
    tokens: Tensor  # [B, K, R]
    # [B, K, R, V] what each token was drawn from; None: they are the most probable ones
    q: Tensor | None
    nodes: Tensor  # [K, R] numbers of the nodes of the bonus token and of all tokens but the last
    finite: Tensor  # [B, R] bool: the draft's logits were numbers


def exit_candidates(logits: Tensor, window: Tensor, count: int) -> Tensor:
    """[B, T, count]: the most probable bonus tokens after each of the T verified tokens, by exit logits [B, T, V].

    A drafted token is none behind the tokens before it: it would be accepted there. There are fewer than `count` only
    if the vocabulary is that small.
    """
    ranked = logits.topk(min(count + 1, logits.shape[-1])).indices
    drafted = F.pad(window, (0, 1), value=NO_DRAFT)[:, : logits.shape[1]]
    is_drafted = (ranked == drafted[..., None]).long()
    last_if_drafted = is_drafted.argsort(dim=-1, stable=True)
    return ranked.gather(-1, last_if_drafted)[..., :count]


def draft_branches(
    runner: ModelRunner,
    base: Tensor,
    unread: Tensor | None,
    accepted: Tensor,
    bonus: Tensor,
    start: int,
    k: int,
    request: DraftContext,
) -> BranchSet:
    """Drafts k tokens after each outcome (`accepted` [1|B, R], `bonus` [B, R]), in k passes of the draft.

    The root is at slot `base` [B] of its KV cache and the window behind it; the branches' nodes get numbers from
    `start` on. `unread` [B, W] is the window if its last token is not in the KV cache yet; None: it is.
    """
    rows, count = bonus.shape
    device = bonus.device
    nodes = start + torch.arange(k * count, device=device).view(k, count)
    window = torch.arange(start, device=device)
    level = torch.arange(k, device=device)
    depth = torch.cat(
        [
            window.expand(rows, -1),
            (accepted.expand(rows, -1)[:, None] + 1 + level[:, None]).flatten(1),
        ],
        1,
    )
    own = torch.eye(count, dtype=torch.bool, device=device).repeat(1, k)  # [R, K * R] one's branch
    before = (window <= accepted[..., None]).expand(rows, -1, -1)  # [B, R, start]

    def tree_nodes(at: int) -> TreeNodes:
        """The nodes of all branches at level `at`."""
        seen = own & (level <= at).repeat_interleave(count)
        mask = torch.cat([before, seen.expand(rows, -1, -1)], -1)
        return TreeNodes(nodes[at][None], depth, mask)

    finite = []

    def checked(logits: Tensor) -> Tensor:
        flat = logits.flatten(0, 1)[:, None]
        finite.append(has_finite_logits(flat).view(rows, count))
        return logits

    passed = 0

    def step(tokens: Tensor, length: Tensor, chain: TreeNodes | None, above: Tensor) -> Tensor:
        nonlocal passed
        passed += 1
        return checked(runner.step(tokens[:, 0], base, tree_nodes(passed)))[:, None]

    tokens, first = bonus, tree_nodes(0)
    if unread is not None:
        first = with_window_token(first, unread.shape[1])
        tokens = torch.cat([unread[:, -1:], bonus], 1)
    logits = checked(runner.step(tokens, base, first, last=count))
    drafted = draft_chain(step, logits, base, k, request)
    return BranchSet(accepted, bonus, drafted.tokens, drafted.q, nodes, torch.stack(finite).all(0))


def with_window_token(nodes: TreeNodes, number: int) -> TreeNodes:
    """`nodes` and, before them, window token `number`, which attends to the root and the window up to itself."""
    index = torch.cat([nodes.index.new_tensor([[number]]), nodes.index], 1)
    rows, _, size = nodes.ancestor_mask.shape
    seen = torch.arange(size, device=index.device) <= number
    mask = torch.cat([seen.expand(rows, 1, -1), nodes.ancestor_mask], 1)
    return TreeNodes(index, nodes.depth, mask)


def find_branch(branches: BranchSet, accepted: Tensor, bonus: Tensor) -> tuple[Tensor, Tensor]:
    """([B] bool: there is a branch of the outcome (accepted [B], bonus [B]); [B] its number, 0 where there is none).

    Nothing but the outcome decides: a choice by the branches' tokens would change the distribution of the output.
    """
    same = (branches.accepted == accepted[:, None]) & (branches.bonus == bonus[:, None])
    return same.any(1), same.long().argmax(1)


def accepted_path(accepted: Tensor, nodes: Tensor, window: int) -> Tensor:
    """[B, P] node numbers of the root, `accepted` [B] window tokens and a branch's nodes [B, K]; then themselves.

    They are what the KV cache needs in this order for the branch to be the next window.
    """
    position = torch.arange(window + 1 + nodes.shape[1], device=nodes.device).expand(len(nodes), -1)
    at = position - 1 - accepted[:, None]
    inside = (at >= 0) & (at < nodes.shape[1])
    branch = nodes.gather(1, at.clamp(0, nodes.shape[1] - 1))
    return torch.where(inside, branch, position)
