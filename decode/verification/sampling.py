"""From logits to the distribution that is sampled, and random numbers that do not depend on the batch.

`warp` serves the target's p and the draft's q alike: a rule that compares them is lossless only if both
went through the same temperature, top-k and top-p.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from decode.common.ranges import CountOrZero, Temperature, TopP

SUM_BLOCK = 256
"""Weights that `sample_inverse_cdf` adds up before it runs over the sums."""
FIRST_FLOOR, LAST_FLOOR = 2.0**-8, 2.0**-40
"""The probabilities from which, and down to which, `_likely` looks for the most probable tokens."""

Sampler = Callable[[torch.Tensor], torch.Tensor]
"""weights [B, ..., n], non-negative and of any scale -> indices [B, ...] drawn in proportion to them."""


@dataclass(frozen=True)
class SamplingParams:
    """Temperature, top-k and top-p of sampling; temperature 0 is greedy decoding."""

    temperature: Temperature = 0.0
    """0 takes the most probable token; 1 samples the model's unchanged distribution."""
    top_k: CountOrZero = 0
    """Keep the k most probable tokens; 0 keeps all."""
    top_p: TopP = 1.0
    """Keep the smallest set of most probable tokens with at least this total probability; 1 keeps all."""

    @property
    def greedy(self) -> bool:
        """Whether the temperature is 0."""
        return self.temperature == 0


def warp(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
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
    if sampling.top_p < 1:
        if reads_are_free(probs):
            found = _sorted_nucleus(probs.reshape(-1, probs.shape[-1]), sampling.top_p)
            ordered, index = (x.reshape(*probs.shape[:-1], x.shape[-1]) for x in found)
            # It adds because fillers name token 0 again, with probability 0.
            probs = torch.zeros_like(probs).scatter_add_(-1, index, ordered)
        else:
            ordered, index = probs.sort(dim=-1, descending=True, stable=True)
            probs.scatter_(-1, index, _cut_nucleus(ordered, sampling.top_p))
        probs.div_(probs.sum(-1, keepdim=True))
    return probs


def reads_are_free(tensor: torch.Tensor) -> bool:
    """Whether the host may read `tensor` without waiting: in eager mode on a CPU."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def _cut_nucleus(ordered: torch.Tensor, top_p: float) -> torch.Tensor:
    """Probabilities [..., n] in falling order, those from the first total of at least top_p on set to 0, in place."""
    before = ordered.cumsum(-1).sub_(ordered)  # of all better tokens: the best one is always kept
    return ordered.masked_fill_(before >= top_p, 0.0)


def _sorted_nucleus(probs: torch.Tensor, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """What `_cut_nucleus` of the sorted probs [R, V] leaves [R, n], and its tokens: n is far smaller than V.

    Sorting a vocabulary takes longer than a pass of a small model. It reads tensors on the host (`reads_are_free`).
    """
    likely = _likely(probs, top_p)
    row, token = likely.nonzero(
        as_tuple=True
    )  # in the order of the tokens, which decides between equal ones
    count = likely.sum(-1, dtype=torch.long)
    place = torch.arange(len(row)) - (count.cumsum(0) - count)[row]
    width = int(count.max()) if len(count) else 1
    candidates, index = probs.new_zeros(len(probs), width), count.new_zeros(len(probs), width)
    candidates[row, place], index[row, place] = probs[row, token], token
    ordered, order = candidates.sort(dim=-1, descending=True, stable=True)
    return _cut_nucleus(ordered, top_p), index.gather(-1, order)


def _likely(probs: torch.Tensor, top_p: float) -> torch.Tensor:
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


def has_finite_logits(logits: torch.Tensor) -> torch.Tensor:
    """[B] bool: logits [B, T, V] give a distribution at each position of the row. -inf makes a token impossible."""
    return logits.amax(-1).isfinite().all(-1)  # the largest of numbers and NaN is NaN


def sample_inverse_cdf(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
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


def _first_beyond(running: torch.Tensor, aim: torch.Tensor) -> torch.Tensor:
    """Index [...] of the first of the running sums [..., n] that exceeds aim [...]; the last one if none does."""
    return (running <= aim[..., None]).sum(-1).clamp_max(running.shape[-1] - 1)


class CounterRNG:
    """Uniform numbers as a hash of (seed of the row, draw, position), so a row's text never depends on its batch.

    A row gets the same numbers when it is decoded alone, in any batch, in a refilled row, or again after a crash
    (counter-based generation, Salmon et al. 2011; mixer: SplitMix64). Seeds and counters are on the device
    and change in place, so that a captured CUDA graph draws new numbers at every replay. Calling it is a Sampler.
    """

    def __init__(self, seeds: torch.Tensor):
        self.seeds = _splitmix64(seeds)  # [B] int64
        self.draws = torch.zeros_like(seeds)  # [B]: draws of the row so far

    def reset_rows(self, row: torch.Tensor, seeds: torch.Tensor) -> None:
        """Restarts rows `row` [b] with `seeds` [b]."""
        self.seeds[row] = _splitmix64(seeds)
        self.draws[row] = 0

    def for_rows(self, row: torch.Tensor) -> Sampler:
        """A Sampler for weights [b, ..., n] of rows `row` [b]; the counters of other rows do not change."""

        def choose(weights: torch.Tensor) -> torch.Tensor:
            self.draws[row] += 1
            shape = weights.shape[:-1]
            return sample_inverse_cdf(
                weights, _counter_uniform(self.seeds[row], self.draws[row], shape)
            )

        return choose

    def uniform(self, shape: torch.Size) -> torch.Tensor:
        """New numbers of `shape` [B, ...] in (0, 1), fp64, 32 random bits each."""
        self.draws += 1
        return _counter_uniform(self.seeds, self.draws, shape)

    def __call__(self, weights: torch.Tensor) -> torch.Tensor:
        return sample_inverse_cdf(weights, self.uniform(weights.shape[:-1]))


def _counter_uniform(seeds: torch.Tensor, draws: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    place = torch.arange(shape[1:].numel(), device=seeds.device)
    bits = _splitmix64(_splitmix64(place + (draws << 32)[:, None]) ^ seeds[:, None]) & 0xFFFFFFFF
    return ((bits.double() + 0.5) / 2**32).reshape(shape)


def _splitmix64(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's output function on int64, wrapping; shifts are made logical by a mask."""
    x = x + -7046029254386353131  # 0x9E3779B97F4A7C15
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685  # 0x94D049BB133111EB
    return x ^ ((x >> 31) & 0x1FFFFFFFF)
