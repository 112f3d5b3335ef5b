"""From logits to the distribution that is sampled, and random numbers that do not depend on the batch.

`warp` serves the target's p and the draft's q alike: a rule that compares them is lossless only if both
went through the same temperature, top-k and top-p (nucleus sampling, Holtzman et al. 2020).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from decode.common.target_settings import SamplingParams

# ---- top-p ----

FIRST_FLOOR, LAST_FLOOR = 2.0**-8, 2.0**-40
"""The probabilities from which, and down to which, `_likely` looks for the most probable tokens."""
RARE = 2.0**-17
"""All tokens below this probability seldom matter, so that those above are looked at alone."""


def keep_top_p(probs: Tensor, top_p: float) -> Tensor:
    """Probabilities [..., V], renormalised, of the smallest set of most probable tokens whose total in probs is
    at least `top_p`; those of other tokens are 0. Of equally probable tokens the ones with lower ids come first.

    `probs` may be overwritten.
    """
    if reads_are_free(probs):
        return top_p_on_cpu(probs, top_p)
    ordered, index = probs.sort(dim=-1, descending=True, stable=True)
    kept = probs.scatter_(-1, index, _cut(ordered, top_p))
    return kept.div_(kept.sum(-1, keepdim=True))


def reads_are_free(tensor: Tensor) -> bool:
    """Whether the host may read `tensor` without waiting: on a CPU."""
    return tensor.device.type == "cpu"


@torch.library.custom_op("draftsmith::top_p", mutates_args=())
def top_p_on_cpu(probs: Tensor, top_p: float) -> Tensor:
    """`keep_top_p` without sorting the vocabulary, which would take longer than a pass of a small model.

    It reads tensors on the host, and is an operation that compiled code calls.
    """
    rows = probs.reshape(-1, probs.shape[-1])
    few, token = _gather(rows, rows >= RARE)
    if bool((few.sum(-1) >= top_p + 1e-5).all()):
        few, place = _gather(few, _likely(few, top_p))
        token = token.gather(-1, place)
    else:
        few, token = _gather(rows, _likely(rows, top_p))
    ordered, order = few.sort(dim=-1, descending=True, stable=True)
    kept = _cut(ordered, top_p)
    kept /= kept.cumsum(-1)[:, -1:]  # a running sum does not depend on how many zeros follow
    # It adds because fillers name token 0 again, with probability 0.
    found = torch.zeros_like(rows).scatter_add_(-1, token.gather(-1, order), kept)
    return found.reshape(probs.shape)


@top_p_on_cpu.register_fake
def _(probs: Tensor, top_p: float) -> Tensor:
    return torch.empty_like(probs)


def _cut(ordered: Tensor, top_p: float) -> Tensor:
    """Probabilities [..., n] in falling order, those from the first total of at least top_p on set to 0, in place."""
    before = ordered.cumsum(-1).sub_(ordered)  # of all better tokens: the best one is always kept
    return ordered.masked_fill_(before >= top_p, 0.0)


def _gather(probs: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The entries of probs [R, V] where `mask` is set, in order, and their places, [R, n]; 0 where a row has fewer."""
    row, at = mask.nonzero(as_tuple=True)
    count = torch.bincount(row, minlength=len(probs))
    place = torch.arange(len(row)) - (count.cumsum(0) - count)[row]
    width = max(1, int(count.max())) if len(count) else 1
    found, index = probs.new_zeros(len(probs), width), count.new_zeros(len(probs), width)
    found[row, place], index[row, place] = probs[row, at], at
    return found, index


def _likely(probs: Tensor, top_p: float) -> Tensor:
    """Bool [R, V]: all tokens of at least some probability, in each row enough to have top_p with room for rounding.

    Every other token comes after a total of top_p, and so is outside the nucleus.
    """
    floor = torch.full_like(probs[:, :1], FIRST_FLOOR)
    while True:
        likely = probs >= floor
        short = (probs * likely).sum(-1, keepdim=True) < top_p + 1e-5
        short &= floor > 0
        if not short.any():
            return likely
        lower = torch.where(floor > LAST_FLOOR, floor / 8, 0)
        floor = torch.where(short, lower, floor)


# ---- distributions and random numbers ----

SUM_BLOCK = 256
"""Weights that `sample_inverse_cdf` adds up before it runs over the sums."""

Sampler = Callable[[Tensor], Tensor]
"""weights [B, ..., n], non-negative and of any scale -> indices [B, ...] drawn in proportion to them."""


def warp(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """Probabilities [..., V] after temperature, top-k, then top-p (of the renormalised rest), in that order.

    Computed in fp32 (fp64 logits in fp64): bf16 probabilities bias acceptance upwards. All ties at the top-k threshold
    are kept.
    """
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32)) / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        threshold = scores.topk(sampling.top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < threshold, float("-inf"))
    probs = torch.softmax(scores, -1)
    del scores  # tensors as wide as a vocabulary are what a round needs memory for
    return keep_top_p(probs, sampling.top_p) if sampling.top_p < 1 else probs


def has_finite_logits(logits: Tensor) -> Tensor:
    """[B] bool: logits [B, T, V] give a distribution at each position of the row. -inf makes a token impossible."""
    return logits.amax(-1).isfinite().all(-1)  # the largest of numbers and NaN is NaN


def sample_inverse_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """Index [...] at which the running sum of weights [..., n] first exceeds uniform [...] of its total.

    Inverse transform sampling without a host read. It runs in fp64, because the error of an fp32 running sum over
    100 k tokens exceeds the probability of a rare token: first over sums of SUM_BLOCK weights, then over the weights of
    the block in which it exceeds, which takes a tenth of the time of one running sum. An entry of weight 0 is never
    picked.
    """
    count = weights.shape[-1]
    if count <= 2 * SUM_BLOCK:
        running = weights.double().cumsum(-1)
        return _first_beyond(running, uniform * running[..., -1])
    if short := -count % SUM_BLOCK:
        weights = F.pad(weights, (0, short))
    blocks = weights.unflatten(-1, (-1, SUM_BLOCK))
    sums = blocks.sum(-1, dtype=torch.float64)
    running = sums.cumsum(-1)
    aim = uniform * running[..., -1]
    block = _first_beyond(running, aim)[..., None]
    chosen = block[..., None].expand(*block.shape, SUM_BLOCK)
    inside = blocks.gather(-2, chosen)[..., 0, :].double().cumsum(-1)
    aim = aim - (running - sums).gather(-1, block)[..., 0]
    # Rounding may put the aim at the block's end: then its last positive weight is meant, where the sum stops growing.
    place = ((inside <= aim[..., None]) & (inside < inside[..., -1:])).sum(-1)
    return block[..., 0] * SUM_BLOCK + place


def _first_beyond(running: Tensor, aim: Tensor) -> Tensor:
    """Index [...] of the first of the running sums [..., n] that exceeds aim [...]; the last one if none does."""
    return (running <= aim[..., None]).sum(-1).clamp_max(running.shape[-1] - 1)


class CounterRNG:
    """Uniform numbers as a hash of (seed of the row, draw, position), so a row's text never depends on its batch.

    A row gets the same numbers when it is decoded alone, in any batch, in a refilled row, or again after a crash
    (counter-based generation, Salmon et al. 2011; mixer: SplitMix64). Seeds and counters are on the device
    and change in place, so that a captured CUDA graph draws new numbers at every replay. Calling it is a Sampler.
    """

    def __init__(self, seeds: Tensor):
        self.seeds = _splitmix64(seeds)  # [B] int64
        self.draws = torch.zeros_like(seeds)  # [B]: draws of the row so far

    def reset_rows(self, row: Tensor, seeds: Tensor) -> None:
        """Restarts rows `row` [b] with `seeds` [b]."""
        self.seeds[row] = _splitmix64(seeds)
        self.draws[row] = 0

    def for_rows(self, row: Tensor) -> Sampler:
        """A Sampler for weights [b, ..., n] of rows `row` [b]; the counters of other rows do not change."""

        def choose(weights: Tensor) -> Tensor:
            self.draws[row] += 1
            shape = weights.shape[:-1]
            return sample_inverse_cdf(
                weights, _counter_uniform(self.seeds[row], self.draws[row], shape)
            )

        return choose

    def uniform(self, shape: torch.Size) -> Tensor:
        """New numbers of `shape` [B, ...] in (0, 1), fp64, 32 random bits each."""
        self.draws += 1
        return _counter_uniform(self.seeds, self.draws, shape)

    def __call__(self, weights: Tensor) -> Tensor:
        return sample_inverse_cdf(weights, self.uniform(weights.shape[:-1]))


def _counter_uniform(seeds: Tensor, draws: Tensor, shape: torch.Size) -> Tensor:
    place = torch.arange(shape[1:].numel(), device=seeds.device)
    bits = _splitmix64(_splitmix64(place + (draws << 32)[:, None]) ^ seeds[:, None]) & 0xFFFFFFFF
    return ((bits.double() + 0.5) / 2**32).reshape(shape)


def _splitmix64(x: Tensor) -> Tensor:
    """SplitMix64's output function on int64, wrapping; shifts are made logical by a mask."""
    x = x + -7046029254386353131  # 0x9E3779B97F4A7C15
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685  # 0x94D049BB133111EB
    return x ^ ((x >> 31) & 0x1FFFFFFFF)
