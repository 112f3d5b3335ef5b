"""Divergences between target p and draft q, one value for each position.

Every divergence is called as `f(p_logits [N, V], q_logits [N, Vd], ids=None) -> [N]`. `ids` [Vd] are
the target's ids of the draft's columns, for a draft with a reduced vocabulary. Any float type comes
in; the work is done in fp32 (fp64 stays fp64). The target is never trained: p has no gradient.
Values are not averaged here: sums and counts travel to the end of the step and are divided once.

Which one to train with: forward KL is the robust default (DistillSpec, arXiv 2310.08461, compares).
On a reduced vocabulary a likelihood (KL, JSD, CE) teaches p renormalised on `ids`, since q cannot
reach the rest; what speaks of acceptance (acceptance, tv, lk_*) keeps p as it is, since decoding does.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# Log-probabilities below this are 0 in fp32 anyway; without the floor, -inf - -inf would give NaN.
LOG_PROB_FLOOR = -1e4
MIN_ACCEPTANCE = (
    1e-6  # acceptance below this has no gradient: nothing of the draft is worth saving there
)
HASS_TOP_K = 10  # HASS's K
LK_ETA = 3.0  # LK's eta


class LogProbPair(NamedTuple):
    """What every divergence is made of; computed once, it serves a loss and its metrics."""

    p: Tensor  # [N, Vd] log p, renormalised on the draft's columns
    q: Tensor  # [N, Vd] log q
    mass: Tensor | None  # [N, 1] log of p's mass on these columns; None: they are all of V


def log_probs(p_logits: Tensor, q_logits: Tensor, ids: Tensor | None = None) -> LogProbPair:
    """The `Pair` of p_logits [N, V] and q_logits [N, Vd]; p carries no gradient."""
    return pair_log_probs(target_log_probs(p_logits, ids), q_logits)


@torch.no_grad()
def target_log_probs(
    p_logits: Tensor, ids: Tensor | None = None, temperature: float = 1.0
) -> tuple[Tensor, Tensor | None]:
    """`Pair.p` and `Pair.mass`: what several drafts compared with the same p need only once."""
    p = _log_softmax(p_logits, temperature)
    if ids is None:
        return p.clamp_(min=LOG_PROB_FLOOR), None
    p = p.index_select(-1, ids)
    # A row whose ids are all impossible gets p = 0 everywhere, not NaN.
    mass = p.logsumexp(-1, keepdim=True).clamp_(min=torch.finfo(p.dtype).min)
    return p.sub_(mass).clamp_(min=LOG_PROB_FLOOR), mass


def pair_log_probs(
    law: tuple[Tensor, Tensor | None], q_logits: Tensor, temperature: float = 1.0
) -> LogProbPair:
    """The `Pair` of a `target_law` and q_logits [N, Vd]."""
    p, mass = law
    return LogProbPair(p, _log_softmax(q_logits, temperature).clamp(min=LOG_PROB_FLOOR), mass)


def bucket_tail(pair: LogProbPair, best: Tensor) -> LogProbPair:
    """The `Pair` over the columns best [N, K] and one more, which stands for all others together.

    What p says of the others by name is not looked at, so a stored teacher that keeps `best` alone is no worse
    than the whole. Divergences between few are never larger than between all, and 0 wherever those are.
    """
    if best.shape[-1] == pair.p.shape[-1]:
        return pair

    def lump(logs: Tensor) -> Tensor:
        rest = logs.scatter(-1, best, -math.inf).logsumexp(-1, keepdim=True)
        return torch.cat([logs.gather(-1, best), rest.clamp(min=LOG_PROB_FLOOR)], -1)

    return LogProbPair(lump(pair.p), lump(pair.q), pair.mass)


class Divergence:
    """A formula on a `Pair`, called with logits: `f(p_logits, q_logits, ids=None) -> [N]`.

    Loss and metrics of the same logits share the costly part, a softmax over the vocabulary each:
    `pair = log_probs(p_logits, q_logits, ids)`, then `f.of(pair)` for each of them. What some formulas leave open
    (jsd's beta, top_k's count) is asked for there.
    """

    def __init__(self, formula: Callable[..., Tensor]) -> None:
        self.of = formula
        functools.update_wrapper(self, formula)

    def __call__(self, p_logits: Tensor, q_logits: Tensor, ids: Tensor | None = None) -> Tensor:
        return self.of(log_probs(p_logits, q_logits, ids))


@Divergence
def forward_kl(pair: LogProbPair) -> Tensor:
    """KL(p || q) [N]: 0 only at equality, for the target's entropy is in it.

    Covers all that the target may say. Its gradient in q's logits is q - p.
    """
    return (pair.p.exp() * (pair.p - pair.q)).sum(-1)


@Divergence
def reverse_kl(pair: LogProbPair) -> Tensor:
    """KL(q || p) [N]: the draft concentrates on modes of the target."""
    return (pair.q.exp() * (pair.q - pair.p)).sum(-1)


@Divergence
def jsd(pair: LogProbPair, beta: float = 0.5) -> Tensor:
    """b KL(p || m) + (1 - b) KL(q || m) [N], m = b p + (1 - b) q: between forward and reverse KL, at most log 2.

    0 < b < 1. Divided by b it nears forward KL as b falls to 0, divided by 1 - b reverse KL as b rises to 1.
    """
    p, q, _ = pair
    middle = torch.logaddexp(p + math.log(beta), q + math.log1p(-beta))
    forward, reverse = (p.exp() * (p - middle)).sum(-1), (q.exp() * (q - middle)).sum(-1)
    return beta * forward + (1 - beta) * reverse


@Divergence
def soft_ce(pair: LogProbPair) -> Tensor:
    """-sum p log q [N]: forward KL plus the target's entropy, so not 0 at equality.

    EAGLE's loss. Same gradient as forward KL.
    """
    return -(pair.p.exp() * pair.q).sum(-1)


@Divergence
def top_k(pair: LogProbPair, count: int = HASS_TOP_K) -> Tensor:
    """-sum p log q over the `count` likeliest tokens of p [N]: HASS (arXiv 2408.15766), added to soft_ce.

    Alone it leaves the rest of q untaught, and its least value is not at q = p.
    """
    p, best = pair.p.topk(min(count, pair.p.shape[-1]), dim=-1)
    return -(p.exp() * pair.q.gather(-1, best)).sum(-1)


@Divergence
def hard_ce(pair: LogProbPair) -> Tensor:
    """-log q(argmax p) [N]: enough for greedy decoding, blind to the rest of p."""
    return -pair.q.gather(-1, pair.p.argmax(-1, keepdim=True)).squeeze(-1)


@Divergence
def acceptance(pair: LogProbPair) -> Tensor:
    """Probability [N] that a token drawn from q is accepted: the sum of min(p, q).

    Leviathan et al., arXiv 2211.17192, corollary 3.6. Never more than p's mass on the draft's columns.
    """
    p = pair.p if pair.mass is None else pair.p + pair.mass
    return torch.minimum(p, pair.q).exp().sum(-1)


@Divergence
def tv(pair: LogProbPair) -> Tensor:
    """Total variation [N], which is 1 - acceptance: what decoding pays for exactly.

    Its gradient vanishes where p and q hardly overlap, so it is slow from a cold start.
    """
    return 1 - acceptance.of(pair)


@Divergence
def lk_alpha(pair: LogProbPair) -> Tensor:
    """-log of the acceptance [N]: as TV it asks for what decoding pays for, but its gradient does not fade.

    TV's gradient divided by the acceptance: positions where p and q hardly overlap count most.
    LK losses, arXiv 2602.23881.
    """
    return -acceptance.of(pair).clamp_min(MIN_ACCEPTANCE).log()


@Divergence
def lk_lambda(pair: LogProbPair) -> Tensor:
    """l KL + (1 - l) TV [N], l = exp(-3 acceptance) of each position: KL from a cold start, then TV.

    LK losses, arXiv 2602.23881. No gradient flows through l.
    """
    overlap = acceptance.of(pair)
    share = torch.exp(-LK_ETA * overlap.detach())
    return share * forward_kl.of(pair) + (1 - share) * (1 - overlap)


LOSSES: dict[str, Divergence] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jsd": jsd,
    "tv": tv,
    "lk_alpha": lk_alpha,
    "lk_lambda": lk_lambda,
    "hard_ce": hard_ce,
    "soft_ce": soft_ce,
    "top_k": top_k,
}


def top1(p_logits: Tensor, q_logits: Tensor, ids: Tensor | None = None) -> Tensor:
    """Whether q's likeliest token is p's likeliest of all [N] bool: acceptance at temperature 0."""
    best = q_logits.argmax(-1)
    return (best if ids is None else ids[best]) == p_logits.argmax(-1)


def argmax_in_vocabulary(p_logits: Tensor, ids: Tensor | None = None) -> Tensor:
    """Whether the draft can say p's likeliest token [N] bool: the positions that EAGLE-3 trains on."""
    known = torch.ones(p_logits.shape[-1], dtype=torch.bool, device=p_logits.device)
    if ids is not None:
        known = torch.zeros_like(known).index_fill_(0, ids, True)
    return known[p_logits.argmax(-1)]


def smooth_l1(prediction: Tensor, feature: Tensor) -> Tensor:
    """Smooth L1 of a predicted hidden state [N, H], the mean over H [N]: EAGLE-1, arXiv 2401.15077."""
    prediction, feature = (
        prediction.to(_compute_dtype(prediction)),
        feature.to(_compute_dtype(feature)),
    )
    return torch.nn.functional.smooth_l1_loss(prediction, feature, reduction="none").mean(-1)


def dpace(confidence: Tensor, valid: Tensor, a: float = 0.5) -> Tensor:
    """Weights [N, K] of a block's positions, detached: D-PACE, arXiv 2605.18810.

    w_i = sum over k >= i of s_1 ... s_k, with s_j = (1 - a) confidence_j + a: what position i adds to
    the expected accepted length E = sum over k of s_1 ... s_k. Exactly, w_i = dE / d log s_i. So at
    a = 0 the gradient of sum w CE is that of -E for independent positions accepted with confidence =
    exp(-CE); a > 0 keeps late positions alive while early ones are still bad.
    A slot that is not `valid` has s = 1, counts as no length and weighs 0: padding changes nothing.
    """
    step = ((1 - a) * confidence.detach().to(_compute_dtype(confidence)) + a).where(valid, 1.0)
    reach = step.cumprod(-1) * valid
    return reach.flip(-1).cumsum(-1).flip(-1) * valid


def max_chunk_rows(vocab_size: int, budget_bytes: int = 2**28) -> int:
    """How many rows one fp32 [rows, V] tensor may have within the budget, at least 1.

    Logits, loss and backward together hold up to 10 of them at once: about 2 GiB by default.
    """
    return max(1, budget_bytes // (4 * vocab_size))


def sums_in_chunks(
    function: Callable[..., dict[str, Tensor]], tensors: Sequence[Tensor], rows: int
) -> dict[str, Tensor]:
    """The scalars of `function(*tensors)`, added up over pieces of at most `rows` rows.

    Gives the values and gradients of one call for whatever is a sum over rows, parameters that
    `function` closes over included, but forgets each piece's logits: backward computes them again.
    That second run stops behind the last thing the loss needs, so metrics at the function's end,
    under no_grad, are computed once. Without any row it runs once on nothing, so that the zero it
    returns still reaches every parameter and no process of a distributed run waits for gradients.
    """
    if len(tensors[0]) <= rows:  # it fits as it is: nothing to compute twice
        return function(*tensors)
    total: dict[str, Tensor] = {}
    # split, not slices: its backward is one concatenation, not a full-size gradient for every piece.
    for piece in zip(*(tensor.split(rows) for tensor in tensors), strict=True):
        part: dict[str, Any] = (
            checkpoint(function, *piece, use_reentrant=False)
            if torch.is_grad_enabled()
            else function(*piece)
        )
        total = {name: total[name] + part[name] if total else part[name] for name in part}
    return total


def _compute_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _log_softmax(logits: Tensor, temperature: float = 1.0) -> Tensor:
    if temperature != 1:
        logits = logits.to(_compute_dtype(logits)) / temperature
    return torch.log_softmax(logits, dim=-1, dtype=_compute_dtype(logits))
