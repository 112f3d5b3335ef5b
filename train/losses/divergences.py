"""Divergences between the target distribution p and the draft distribution q, one value per position.

Every divergence is called as `f(p_logits [N, V], q_logits [N, Vd], ids=None) -> [N]`. `ids` [Vd] are the target's token
ids of the draft's columns, for a draft with a reduced vocabulary. Logits may have any float type; the computation is in
fp32 (fp64 stays fp64). p carries no gradient. Values are not averaged here: sums and counts are divided once at the end
of the step.

Which one to train with: forward KL is the robust default (DistillSpec, arXiv 2310.08461, compares them). On a reduced
vocabulary the likelihood losses (KL, JSD, Rényi, CE) use p renormalised on `ids`, because q has no mass elsewhere;
those of acceptance (acceptance, tv, lk_*) use p unchanged, as decoding does.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# Log-probabilities below this are 0 in fp32 anyway; without the floor, -inf - -inf would give NaN.
LOG_PROB_FLOOR = -1e4
MIN_ACCEPTANCE = 1e-6  # lk_alpha has no gradient where the acceptance probability is below this
HASS_TOP_K = 10  # HASS's K
LK_ETA = 3.0  # LK's eta


@dataclass(frozen=True)
class TargetLogProbs:
    """The target's side of a comparison. What several comparisons need of it is computed once."""

    p: Tensor  # [N, Vd] log p, renormalised on the draft's columns
    mass: Tensor | None  # [N, 1] log of p's mass on these columns; None: the columns are all of V

    def rows(self, some: slice) -> "TargetLogProbs":
        """The target's side of these rows alone."""
        return TargetLogProbs(self.p[some], None if self.mass is None else self.mass[some])

    @functools.cached_property
    def probs(self) -> Tensor:
        """[N, Vd] p."""
        return self.p.exp()

    @functools.cached_property
    def negative_entropy(self) -> Tensor:
        """[N] the sum of p log p."""
        return _dot(self.probs, self.p)

    @functools.cached_property
    def not_renormalised(self) -> Tensor:
        """[N, Vd] log of the target's own probabilities."""
        return self.p if self.mass is None else self.p + self.mass


class LogProbPair(NamedTuple):
    """Log-probabilities of target and draft on the draft's columns, shared by the loss and its metrics."""

    target: TargetLogProbs
    q: Tensor  # [N, Vd] log q


def log_probs(p_logits: Tensor, q_logits: Tensor, ids: Tensor | None = None) -> LogProbPair:
    """The LogProbPair of p_logits [N, V] and q_logits [N, Vd]; p carries no gradient."""
    return pair_log_probs(target_log_probs(p_logits, ids), q_logits)


@torch.no_grad()
def target_log_probs(
    p_logits: Tensor, ids: Tensor | None = None, temperature: float = 1.0
) -> TargetLogProbs:
    """The target's side of p_logits [N, V], for any number of comparisons."""
    p = _log_softmax(p_logits, temperature)
    if ids is None:
        return TargetLogProbs(p.clamp_(min=LOG_PROB_FLOOR), None)
    p = p.index_select(-1, ids)
    # A row in which all ids have probability 0 gets p = 0 everywhere, not NaN.
    mass = p.logsumexp(-1, keepdim=True).clamp_(min=torch.finfo(p.dtype).min)
    return TargetLogProbs(p.sub_(mass).clamp_(min=LOG_PROB_FLOOR), mass)


def pair_log_probs(
    target: TargetLogProbs, q_logits: Tensor, temperature: float = 1.0
) -> LogProbPair:
    """The LogProbPair of `target` and q_logits [N, Vd]."""
    return LogProbPair(target, _log_softmax(q_logits, temperature).clamp(min=LOG_PROB_FLOOR))


def bucket_tail(pair: LogProbPair, top_columns: Tensor) -> LogProbPair:
    """The LogProbPair over top_columns [N, K] and one further column that holds the sum of all others.

    The probabilities of single tokens in the tail are not used, so a stored teacher that keeps only the top tokens
    loses nothing. A divergence of the merged columns is at most that of all columns, and 0 wherever that is 0.
    """
    if top_columns.shape[-1] == pair.q.shape[-1]:
        return pair

    def merge_tail(logs: Tensor) -> Tensor:
        rest = logs.scatter(-1, top_columns, -math.inf).logsumexp(-1, keepdim=True)
        return torch.cat([logs.gather(-1, top_columns), rest.clamp(min=LOG_PROB_FLOOR)], -1)

    target = TargetLogProbs(merge_tail(pair.target.p), pair.target.mass)
    return LogProbPair(target, merge_tail(pair.q))


class Divergence:
    """A formula on a LogProbPair that can also be called with logits: `f(p_logits, q_logits, ids=None) -> [N]`.

    Loss and metrics of the same logits can share the costly softmaxes over the vocabulary:
    `pair = log_probs(p_logits, q_logits, ids)`, then `f.of(pair)` for each of them. Further parameters of a formula
    (beta of jsd, count of top_k) are arguments of `of`.
    """

    def __init__(self, formula: Callable[..., Tensor]) -> None:
        self.of = formula
        functools.update_wrapper(self, formula)

    def __call__(self, p_logits: Tensor, q_logits: Tensor, ids: Tensor | None = None) -> Tensor:
        return self.of(log_probs(p_logits, q_logits, ids))


@Divergence
def forward_kl(pair: LogProbPair) -> Tensor:
    """KL(p || q) [N]: 0 only where q = p.

    It makes q cover every token to which p gives probability. Its gradient with respect to q's logits is q - p.
    """
    return pair.target.negative_entropy - _dot(pair.target.probs, pair.q)


@Divergence
def reverse_kl(pair: LogProbPair) -> Tensor:
    """KL(q || p) [N]: makes q concentrate on the modes of p."""
    return (pair.q.exp() * (pair.q - pair.target.p)).sum(-1)


@Divergence
def jsd(pair: LogProbPair, beta: float = 0.5) -> Tensor:
    """b KL(p || m) + (1 - b) KL(q || m) [N], m = b p + (1 - b) q: between forward and reverse KL, at most log 2.

    0 < b < 1. Divided by b it tends to forward KL as b -> 0; divided by 1 - b to reverse KL as b -> 1.
    """
    p, q = pair.target.p, pair.q
    mixture = torch.logaddexp(p + math.log(beta), q + math.log1p(-beta))
    forward = pair.target.negative_entropy - _dot(pair.target.probs, mixture)
    reverse = (q.exp() * (q - mixture)).sum(-1)
    return beta * forward + (1 - beta) * reverse


@Divergence
def renyi_half(pair: LogProbPair) -> Tensor:
    """Rényi divergence of order 1/2 [N]: -2 log of the sum of sqrt(p q), the Bhattacharyya coefficient.

    D-PARD's loss (SpecForge #827, speculators #1078). With r = sqrt(p q) ÷ its sum, the gradient with respect to q's
    logits is q - r: that of a cross-entropy to a law between p and q.
    """
    return -2 * (0.5 * (pair.target.p + pair.q)).logsumexp(-1)


@Divergence
def soft_ce(pair: LogProbPair) -> Tensor:
    """-sum p log q [N]: forward KL plus the entropy of p, so not 0 where q = p.

    EAGLE's loss. It has the same gradient as forward KL.
    """
    return -_dot(pair.target.probs, pair.q)


@Divergence
def top_k(pair: LogProbPair, count: int = HASS_TOP_K) -> Tensor:
    """-sum p log q over the `count` likeliest tokens of p [N]: HASS (arXiv 2408.15766), added to soft_ce.

    On its own it does not train the rest of q, and its minimum is not at q = p.
    """
    p, best = pair.target.p.topk(min(count, pair.q.shape[-1]), dim=-1)
    return -(p.exp() * pair.q.gather(-1, best)).sum(-1)


@Divergence
def hard_ce(pair: LogProbPair) -> Tensor:
    """-log q(argmax p) [N]: sufficient for greedy decoding; it ignores the rest of p."""
    return -pair.q.gather(-1, pair.target.p.argmax(-1, keepdim=True)).squeeze(-1)


@Divergence
def acceptance(pair: LogProbPair) -> Tensor:
    """α [N], the probability that a token sampled from q is accepted: the sum of min(p, q).

    Leviathan et al., arXiv 2211.17192, corollary 3.6. At most p's mass on the draft's columns.
    """
    return torch.minimum(pair.target.not_renormalised, pair.q).exp().sum(-1)


@Divergence
def tv(pair: LogProbPair) -> Tensor:
    """Total variation distance [N], which is 1 - acceptance, the probability of a rejection in decoding.

    Its gradient vanishes where p and q hardly overlap, so training from scratch with it is slow.
    """
    return 1 - acceptance.of(pair)


@Divergence
def lk_alpha(pair: LogProbPair) -> Tensor:
    """-log of the acceptance [N]: like TV it optimises acceptance, but its gradient does not vanish.

    Its gradient is that of TV divided by the acceptance: positions where p and q hardly overlap count most.
    LK losses, arXiv 2602.23881.
    """
    return -acceptance.of(pair).clamp_min(MIN_ACCEPTANCE).log()


@Divergence
def lk_lambda(pair: LogProbPair) -> Tensor:
    """l KL + (1 - l) TV [N] with l = exp(-3 acceptance) per position: mostly KL while acceptance is low, then TV.

    LK losses, arXiv 2602.23881. No gradient flows through l.
    """
    overlap = acceptance.of(pair)
    share = torch.exp(-LK_ETA * overlap.detach())
    return share * forward_kl.of(pair) + (1 - share) * (1 - overlap)


LOSSES: dict[str, Divergence] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jsd": jsd,
    "renyi_half": renyi_half,
    "tv": tv,
    "lk_alpha": lk_alpha,
    "lk_lambda": lk_lambda,
    "hard_ce": hard_ce,
    "soft_ce": soft_ce,
    "top_k": top_k,
}


def top1(p_logits: Tensor, q_logits: Tensor, ids: Tensor | None = None) -> Tensor:
    """Whether argmax q = argmax p over the whole vocabulary [N] bool: acceptance at temperature 0."""
    return drafted(q_logits, ids) == p_logits.argmax(-1)


def drafted(q_logits: Tensor, ids: Tensor | None = None) -> Tensor:
    """[N] the target's ids of the draft's likeliest tokens."""
    column = q_logits.argmax(-1)
    return column if ids is None else ids[column]


def smooth_l1(prediction: Tensor, feature: Tensor) -> Tensor:
    """Smooth L1 loss [N] of predicted hidden states [N, H], averaged over H: EAGLE-1, arXiv 2401.15077."""
    prediction = prediction.to(_compute_dtype(prediction))
    feature = feature.to(_compute_dtype(feature))
    return torch.nn.functional.smooth_l1_loss(prediction, feature, reduction="none").mean(-1)


def dpace(confidence: Tensor, valid: Tensor, a: float = 0.5) -> Tensor:
    """Weights [N, K] of a block's positions, detached: D-PACE, arXiv 2605.18810; D-PARD's with confidence = acceptance.

    w_i = sum over k >= i of s_1 ... s_k, with s_j = (1 - a) confidence_j + a, which is position i's contribution
    to the expected accepted length E = sum over k of s_1 ... s_k: w_i = dE / d log s_i. So at a = 0 the gradient of
    sum w CE is that of -E for independent positions accepted with confidence = exp(-CE); a > 0 keeps weight on late
    positions while early ones are still bad. A slot that is not `valid` has s = 1, adds no length and has weight 0, so
    padding changes nothing.
    """
    step = ((1 - a) * confidence.detach().to(_compute_dtype(confidence)) + a).where(valid, 1.0)
    prefix = step.cumprod(-1) * valid
    return prefix.flip(-1).cumsum(-1).flip(-1) * valid


def reach(accepted: Tensor, valid: Tensor) -> Tensor:
    """[N, K] the probability that verification reaches a block's position, detached; 0 for slots not `valid`."""
    before = accepted.detach().to(_compute_dtype(accepted)).where(valid, 1.0)[:, :-1]
    return torch.nn.functional.pad(before, (1, 0), value=1.0).cumprod(-1) * valid


def _dot(x: Tensor, y: Tensor) -> Tensor:
    """[N] the products of the rows of x and y [N, V], without a tensor of that size."""
    return torch.bmm(x[:, None], y[..., None])[:, 0, 0]


def _compute_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _log_softmax(logits: Tensor, temperature: float = 1.0) -> Tensor:
    if temperature != 1:
        logits = logits.to(_compute_dtype(logits)) / temperature
    return torch.log_softmax(logits, dim=-1, dtype=_compute_dtype(logits))
