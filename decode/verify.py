"""Which drafted tokens stay, and what follows them: pure functions of p and q with injected choices.

p is the target's distribution and q the draft's, everywhere; both already warped alike. Rules compute in
the dtype of p (fp32 in the engine, fp64 when tests enumerate their exact law).
"""

from dataclasses import dataclass

import torch

from decode.sampling import Choose

NO_DRAFT = -1
"""Stands in `tokens` for "nothing drafted here": never accepted, and takes nothing from the residual."""


@dataclass(frozen=True)
class Verdict:
    """n drafted tokens stay, then `bonus` follows: a correction if n < K, else the extra token."""

    accepted: torch.Tensor  # [B] n
    bonus: torch.Tensor  # [B]


def count_accepted(accept: torch.Tensor) -> torch.Tensor:
    """Length [B] of the leading run of True in accept [B, K]: one rejection discards all that follows."""
    return accept.long().cumprod(-1).sum(-1)


def verify_greedy(tokens: torch.Tensor, best: torch.Tensor) -> Verdict:
    """Accepts while the draft equals the target's argmax. tokens [B, K], best [B, K + 1]."""
    accepted = count_accepted(tokens == best[:, :-1])
    return Verdict(accepted, best.gather(1, accepted[:, None])[:, 0])


def accept_weights(tokens: torch.Tensor, p: torch.Tensor, q: torch.Tensor | None) -> torch.Tensor:
    """[B, K, 2] weights of (accept, reject) for each drafted token: min(p, q) against the rest of q.

    As weights, not as the ratio p/q, so that q = 0 divides nothing. q None: the draft is a point mass.
    """
    at = tokens.clamp_min(0)[..., None]
    p_token = p[:, : tokens.shape[1]].gather(-1, at)[..., 0]
    q_token = torch.ones_like(p_token) if q is None else q.gather(-1, at)[..., 0]
    stay = torch.where(tokens == NO_DRAFT, 0, torch.minimum(p_token, q_token))
    go = torch.where(tokens == NO_DRAFT, 1, q_token - stay)
    return torch.stack([stay, go], -1)


def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Weights [B, V] of max(p - q, 0), the law after a rejection; p itself where nothing is left (p == q)."""
    rest = (p - q).clamp_min(0)
    return torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)


def verify_chain(
    tokens: torch.Tensor, p: torch.Tensor, q: torch.Tensor | None, choose: Choose
) -> Verdict:
    """Speculative sampling on a chain (Leviathan et al. 2023, alg. 1; Chen et al. 2023): output ~ p exactly.

    tokens [B, K] drawn from q [B, K, V] (None: point masses at the tokens), p [B, K + 1, V]. Token i stays with
    probability min(1, p_i / q_i). The first rejection is replaced by a draw from the residual at its place;
    if all stay, the bonus token comes from p at K + 1.
    """
    count = tokens.shape[1]
    accepted = count_accepted(choose(accept_weights(tokens, p, q)) == 0)
    at = accepted[:, None, None].expand(-1, 1, p.shape[-1])
    p_next = p.gather(1, at)[:, 0]  # [B, V]
    if count == 0:
        return Verdict(accepted, choose(p_next))
    inside = accepted.clamp_max(count - 1)
    rejected = (accepted < count) & (tokens.gather(1, inside[:, None])[:, 0] != NO_DRAFT)
    if q is None:
        point = tokens.clamp_min(0).gather(1, inside[:, None])
        q_next = torch.zeros_like(p_next).scatter(1, point, 1)
    else:
        q_next = q.gather(1, at.clamp_max(count - 1))[:, 0]
    q_next = torch.where(
        rejected[:, None], q_next, 0
    )  # all accepted, or nothing drafted: p is left whole
    return Verdict(accepted, choose(residual(p_next, q_next)))
