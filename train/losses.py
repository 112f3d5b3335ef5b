"""Divergences between target p and draft q, one value for each position.

All take logits [N, V] of any float type and work in fp32. Which one to train with: forward KL is
the robust default; DistillSpec (arXiv 2310.08461) compares them. Values are not averaged
here: sums and counts travel to the end of the step, where they are divided once.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

# Log-probabilities below this are 0 in fp32 anyway; without the floor, -inf - -inf would give NaN.
FLOOR = -1e4
LEAST = 1e-6  # acceptance below this has no gradient: nothing of the draft is worth saving there


def forward_kl(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """KL(p || q) [N]: 0 only at equality, for the target's entropy is in it.

    Covers all that the target may say. Its gradient in q's logits is q - p.
    """
    p, q = _log_probs(p_logits), _log_probs(q_logits)
    return (p.exp() * (p - q)).sum(-1)


def reverse_kl(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """KL(q || p) [N]: the draft concentrates on modes of the target."""
    p, q = _log_probs(p_logits), _log_probs(q_logits)
    return (q.exp() * (q - p)).sum(-1)


def jsd(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """Jensen-Shannon divergence [N], beta 0.5: between forward and reverse KL, at most log 2."""
    p, q = _log_probs(p_logits), _log_probs(q_logits)
    middle = torch.logaddexp(p, q) - math.log(2)
    return 0.5 * (p.exp() * (p - middle) + q.exp() * (q - middle)).sum(-1)


def tv(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """Total variation [N], which is 1 - acceptance: what decoding pays for exactly.

    Its gradient vanishes where p and q hardly overlap, so it is slow from a cold start.
    """
    p, q = _log_probs(p_logits), _log_probs(q_logits)
    return 0.5 * (p.exp() - q.exp()).abs().sum(-1)


def hard_ce(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """-log q(argmax p) [N]: enough for greedy decoding, blind to the rest of p."""
    best = p_logits.argmax(-1, keepdim=True)
    return -_log_probs(q_logits).gather(-1, best).squeeze(-1)


def acceptance(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """Probability [N] that a token drawn from q is accepted: the sum of min(p, q).

    Leviathan et al., arXiv 2211.17192, corollary 3.6.
    """
    return torch.minimum(_log_probs(p_logits), _log_probs(q_logits)).exp().sum(-1)


def lk_alpha(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """-log of the acceptance [N]: as TV it asks for what decoding pays for, but its gradient does not fade.

    TV's gradient divided by the acceptance: positions where p and q hardly overlap count most.
    """
    return -acceptance(p_logits, q_logits).clamp_min(LEAST).log()


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jsd": jsd,
    "tv": tv,
    "lk_alpha": lk_alpha,
    "hard_ce": hard_ce,
}


def _log_probs(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits.float(), dim=-1).clamp(min=FLOOR)
