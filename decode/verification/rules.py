"""Which drafted tokens are accepted and which token follows them: pure functions of p, q and a sampler.

p is the target's distribution and q the draft's throughout; both went through the same temperature, top-k and top-p.
The functions compute in the dtype of p (fp32 in the engine, fp64 where tests enumerate the exact distribution).

Trees are as in decode/verification/tree.py: `parents` [N] or [B, N] gives the parent of each of the drafted `tokens`
[B, N], and p [B, T, V] is the target's distribution after each of the T = N + 1 nodes. `depth_limit` D, at least the
depth of the tree, fixes the shape of the result; deeper nodes are not accepted. No rule reads a tensor on the host.
decode/verification/registry.py gives the rules their names.

Which rule is lossless depends on how the tokens were drafted (`verify_exact` chooses): `verify_chain` for a
chain, drawn from q or not, and `verify_block` for one that was drawn; `verify_tree` for a tree of tokens that were not
drawn (top-k, re-ranked), which needs no q; `verify_tree_sampled` for children drawn without replacement. The sampler is
an argument so that tests can enumerate every draw and compare the exact distribution of the output with p.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from decode.verification.sampling import Sampler
from decode.verification.tree import depths, path_sum

NO_DRAFT = -1
"""The value in `tokens` where nothing was drafted: never accepted, and subtracted from no residual."""


@dataclass(frozen=True)
class VerificationResult:
    """n drafted tokens are accepted and the bonus token follows: a correction if n < K, else an extra token."""

    accepted: Tensor  # [B] n
    bonus: Tensor  # [B]
    path: Tensor | None = None
    """For a tree [B, D + 1]: the accepted node at each depth, 0 first; beyond n the last one repeats. None: a chain."""


def count_accepted(accept: Tensor) -> Tensor:
    """Length [B] of the leading run of True in accept [B, K]: one rejection discards all later tokens."""
    return accept.long().cumprod(-1).sum(-1)


def verify_greedy(tokens: Tensor, best: Tensor) -> VerificationResult:
    """Accepts while the drafted token is the target's argmax. tokens [B, K], best [B, K + 1] argmax of p."""
    accepted = count_accepted(tokens == best[:, :-1])
    return VerificationResult(accepted, best.gather(1, accepted[:, None])[:, 0])


def accept_weights(tokens: Tensor, p: Tensor, q: Tensor | None) -> Tensor:
    """[B, K, 2] weights of (accept, reject) for each drafted token: min(p, q) and q - min(p, q).

    Weights instead of the ratio p/q avoid a division by q = 0. q None: the draft is a point mass at its token.
    """
    at = tokens.clamp_min(0)[..., None]
    p_token = p[:, : tokens.shape[1]].gather(-1, at)[..., 0]
    q_token = torch.ones_like(p_token) if q is None else q.gather(-1, at)[..., 0]
    stay = torch.where(tokens == NO_DRAFT, 0, torch.minimum(p_token, q_token))
    go = torch.where(tokens == NO_DRAFT, 1, q_token - stay)
    return torch.stack([stay, go], -1)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Weights [B, V] of max(p - q, 0), the distribution after a rejection; p itself where that is all zero (p == q)."""
    rest = (p - q).clamp_min(0)
    return torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)


def verify_chain(
    tokens: Tensor, p: Tensor, q: Tensor | None, choose: Sampler
) -> VerificationResult:
    """Speculative sampling of a chain (Leviathan et al. 2023, alg. 1; Chen et al. 2023): output ~ p exactly.

    tokens [B, K] drawn from q [B, K, V] (None: point masses at the tokens), p [B, K + 1, V]. Token i is accepted with
    probability min(1, p_i / q_i). The first rejected token is replaced by a draw from the residual at its position;
    if all are accepted, the bonus token is drawn from p at K + 1.
    """
    count = tokens.shape[1]
    accepted = count_accepted(choose(accept_weights(tokens, p, q)) == 0)
    if count == 0:
        return VerificationResult(accepted, choose(p[:, 0]))
    p_next = _row_at(p, accepted)  # [B, V]
    inside = accepted.clamp_max(count - 1)
    rejected = (accepted < count) & (tokens.gather(1, inside[:, None])[:, 0] != NO_DRAFT)
    if q is None:
        point = tokens.clamp_min(0).gather(1, inside[:, None])
        q_next = torch.zeros_like(p_next).scatter(1, point, 1)
    else:
        q_next = _row_at(q, inside)
    # Where all were accepted or nothing was drafted, nothing is subtracted from p.
    q_next = torch.where(rejected[:, None], q_next, 0)
    return VerificationResult(accepted, choose(residual(p_next, q_next)))


def _row_at(p: Tensor, index: Tensor) -> Tensor:
    """[B, V] the distribution at index [B] of each row of p [B, T, V]; a gather over V would read an index for each."""
    if p.shape[1] == 1:
        return p[:, 0]
    row = torch.arange(len(p), device=p.device)
    return p.flatten(0, 1).index_select(0, row * p.shape[1] + index)


# ---- chains, verified as one block ----


def verify_block(tokens: Tensor, p: Tensor, q: Tensor, choose: Sampler) -> VerificationResult:
    """Block verification of a chain (Sun et al. 2025): output ~ p exactly, mean acceptance at least verify_chain's.

    tokens [B, K] drawn from q [B, K, V], NO_DRAFT only after the drafted tokens, p [B, K + 1, V]. Each prefix is
    accepted or not, and the longest accepted one counts. The residual is that of r p and q, r at the end of the prefix.
    """
    if tokens.shape[1] == 0:
        return verify_chain(tokens, p, q, choose)
    r = block_ratios(tokens, p, q)
    accepted = last_success_index(choose(block_weights(tokens, p, q, r)) == 0)
    end = torch.full_like(tokens[:, :1], NO_DRAFT)
    more = torch.cat([tokens, end], 1).gather(1, accepted[:, None]) != NO_DRAFT  # [B, 1]
    p_next = _row_at(p, accepted)
    q_next = _row_at(q, accepted.clamp_max(tokens.shape[1] - 1))
    r_next = r.gather(1, accepted[:, None])
    cut = residual(r_next * p_next, q_next)
    return VerificationResult(accepted, choose(torch.where(more, cut, p_next)))


def block_ratios(tokens: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """r [B, K + 1]: r_0 = 1, r_i = min(1, r_(i-1) p_i / q_i) of token i; 0 from the first NO_DRAFT or q = 0 on."""
    at = tokens.clamp_min(0)[..., None]
    p_token = p[:, : tokens.shape[1]].gather(-1, at)[..., 0]
    q_token = q.gather(-1, at)[..., 0]
    real = (tokens != NO_DRAFT) & (q_token > 0)
    r = [torch.ones_like(p_token[:, 0])]
    for i in range(tokens.shape[1]):
        ratio = (r[i] * p_token[:, i] / q_token[:, i]).clamp_max(1)
        r.append(torch.where(real[:, i], ratio, 0))
    return torch.stack(r, 1)


def block_weights(tokens: Tensor, p: Tensor, q: Tensor, r: Tensor) -> Tensor:
    """[B, K, 2] weights of (success, failure) of the prefix of the first i tokens, i = 1 … K.

    The probability of success is r for the whole block and s / (s + 1 - r) for a shorter prefix, where s is the sum of
    max(r p - q, 0) after it; 1 where both weights would be 0 (r = 1 and p = q).
    """
    r = r[:, 1:]
    s = (r[:, :-1, None] * p[:, 1:-1] - q[:, 1:]).clamp_min(0).sum(-1)  # [B, K - 1]
    more = tokens[:, 1:] != NO_DRAFT
    win = torch.cat([torch.where(more, s, r[:, :-1]), r[:, -1:]], 1)
    lose = 1 - r
    return torch.stack([torch.where((win == 0) & (lose == 0), 1, win), lose], -1)


def last_success_index(success: Tensor) -> Tensor:
    """[B]: the largest i in 1..K with success[:, i - 1] of [B, K], 0 if there is none."""
    position = torch.arange(1, success.shape[1] + 1, device=success.device)
    return torch.where(success, position, 0).amax(-1)


# ---- trees ----


def verify_tree(tokens: Tensor, parents: Tensor, depth_limit: int, y: Tensor) -> VerificationResult:
    """Walks from the root while the token sampled from p is among the children: output ~ p exactly, for any tree
    that was built without knowledge of y (Monte-Carlo form of the rule with q = 1 in EAGLE-2, Li et al. 2024).

    y [B, T] is one independent draw from p at each node, or its argmax for greedy decoding. Siblings must have
    distinct tokens.
    """
    parents = parents.expand_as(tokens)
    depth = depths(parents)
    alive = accepted_path_mask(matches_target(tokens, parents, y), parents, depth, depth_limit)
    # Siblings differ, so exactly one path is accepted
    last = torch.where(alive, depth, -1).argmax(1)
    return _result_at_node(last, parents, depth, depth_limit, y.gather(1, last[:, None])[:, 0])


def matches_target(tokens: Tensor, parents: Tensor, y: Tensor) -> Tensor:
    """Bool [B, N]: the drafted token equals y [B, T] at its parent."""
    return (tokens == y.gather(1, parents)) & (tokens != NO_DRAFT)


def accepted_path_mask(accept: Tensor, parents: Tensor, depth: Tensor, depth_limit: int) -> Tensor:
    """Bool [B, T]: accept [B, N] holds at the node and at all its ancestors, within the limit. The root always."""
    return (path_sum(accept.long(), parents) == depth) & (depth <= depth_limit)


def verify_tree_sampled(
    tokens: Tensor, parents: Tensor, depth_limit: int, p: Tensor, q: Tensor, choose: Sampler
) -> VerificationResult:
    """Recursive rejection on a tree whose siblings were drawn from q WITHOUT replacement (SpecInfer, Miao et al.
    2024; EAGLE, Li et al. 2024): output ~ p exactly.

    q [B, T, V] is the draft's full distribution after each node, ignored at leaves. Siblings are numbered in the order
    in which they were drawn, and the tree's shape was fixed before: a tree that was pruned, sorted or filled depending
    on its tokens (top-k, re-ranking) needs verify_tree. A sibling that repeats an earlier one, or that q excludes, is
    skipped, so draws with replacement are lossless too.
    """
    parents = parents.expand_as(tokens)
    depth = depths(parents)
    tokens = torch.where(depth[:, 1:] <= depth_limit, tokens, NO_DRAFT)
    last, p_now, q_now = torch.zeros_like(tokens[:, 0]), p[:, 0], q[:, 0]
    for i in range(tokens.shape[1]):  # children have larger numbers than their parents
        token = torch.where(parents[:, i] == last, tokens[:, i], NO_DRAFT)[:, None]
        token = torch.where(q_now.gather(1, token.clamp_min(0)) > 0, token, NO_DRAFT)
        tried = token[:, 0] != NO_DRAFT
        weights = accept_weights(token, p_now[:, None], q_now[:, None])
        stays = tried & (choose(weights)[:, 0] == 0)
        p_less, q_less = distributions_after_rejection(token.clamp_min(0), p_now, q_now)
        stay, go = stays[:, None], (tried & ~stays)[:, None]
        p_now = torch.where(stay, p[:, i + 1], torch.where(go, p_less, p_now))
        q_now = torch.where(stay, q[:, i + 1], torch.where(go, q_less, q_now))
        last = torch.where(stays, i + 1, last)
    return _result_at_node(last, parents, depth, depth_limit, choose(p_now))


def distributions_after_rejection(token: Tensor, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """(p, q) [B, V] for the next sibling after token [B, 1] was rejected: p's residual, and q without the token."""
    return _normalize(residual(p, q)), _normalize(q.scatter(1, token, 0))


def _normalize(weights: Tensor) -> Tensor:
    """Weights [..., V] scaled to sum 1; all-zero weights stay all zero."""
    total = weights.sum(-1, keepdim=True)
    return weights / torch.where(total > 0, total, 1)


def verify_typical(
    tokens: Tensor,
    parents: Tensor,
    depth_limit: int,
    p: Tensor,
    choose: Sampler,
    epsilon: float = 0.09,
    delta: float = 0.3,
) -> VerificationResult:
    """LOSSY: the output does not follow p. Typical acceptance (Medusa, Cai et al. 2024, sec. 2.3.1).

    A token is accepted if p(token) > min(epsilon, delta exp(-H(p))) with p the distribution after its parent. The
    longest accepted path counts, of equally long ones the most probable; the bonus token is drawn from p at its end.
    Medusa's "first token always accepted" is the root here. With one-hot p this is exactly greedy decoding.
    """
    parents = parents.expand_as(tokens)
    depth = depths(parents)
    entropy = torch.special.entr(p).sum(-1)  # [B, T]
    threshold = (delta * torch.exp(-entropy)).clamp_max(epsilon).gather(1, parents)
    likelihood = p.flatten(1).gather(1, parents * p.shape[-1] + tokens.clamp_min(0))  # [B, N]
    typical = (likelihood > threshold) & (tokens != NO_DRAFT)
    alive = accepted_path_mask(typical, parents, depth, depth_limit)
    longest = torch.where(alive, depth, 0).amax(1, keepdim=True)
    score = path_sum(torch.where(typical, likelihood.log(), 0), parents)
    last = torch.where(alive & (depth == longest), score, float("-inf")).argmax(1)
    p_next = _row_at(p, last)
    return _result_at_node(last, parents, depth, depth_limit, choose(p_next))


def _result_at_node(
    last: Tensor, parents: Tensor, depth: Tensor, depth_limit: int, bonus: Tensor
) -> VerificationResult:
    """The result that accepts the path from the root to node last [B], followed by bonus [B]."""
    up = torch.cat([torch.zeros_like(last)[:, None], parents], 1)
    ancestors = [last[:, None]]
    for _ in range(depth_limit):
        ancestors.append(up.gather(1, ancestors[-1]))
    accepted = depth.gather(1, last[:, None])
    steps = (accepted - torch.arange(depth_limit + 1, device=last.device)).clamp_min(0)
    return VerificationResult(accepted[:, 0], bonus, torch.cat(ancestors, 1).gather(1, steps))
