"""Warping against slow references, and random choices that follow their weights and nothing else."""

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from decode.engine.engine import row_seeds
from decode.verification import sampling
from decode.verification.sampling import (
    CounterRNG,
    SamplingParams,
    has_finite_logits,
    sample_inverse_cdf,
    warp,
)


def slow_warp(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """The same in plain Python: temperature, then top-k with ties, then top-p of the rest, earliest tie first."""
    scores = [value / temperature for value in logits]
    if 0 < top_k < len(scores):
        border = sorted(scores, reverse=True)[top_k - 1]
        scores = [score if score >= border else -math.inf for score in scores]
    weights = [math.exp(score - max(scores)) for score in scores]
    probs = [weight / sum(weights) for weight in weights]
    order = sorted(range(len(probs)), key=lambda i: (-probs[i], i))
    kept, mass = set(), 0.0
    for i in order:
        assume(abs(mass - top_p) > 1e-9)  # at the very border rounding decides
        if mass < top_p or top_p == 1:
            kept.add(i)
        mass += probs[i]
    total = sum(probs[i] for i in kept)
    return [probs[i] / total if i in kept else 0.0 for i in range(len(probs))]


tied_logits = st.lists(st.integers(-6, 6).map(lambda n: n / 2), min_size=1, max_size=9)


@settings(max_examples=300)
@given(
    tied_logits,
    st.sampled_from([0.3, 0.7, 1.0, 2.5]),
    st.integers(0, 10),
    st.sampled_from([0.05, 0.37, 0.618, 0.9, 0.99, 1.0]),
)
def test_warp_equals_the_slow_reference(
    logits: list[float], temperature: float, top_k: int, top_p: float
) -> None:
    """Catches top-p of the mass before top-k, a kept set one short of top_p, lost ties, a scrambled scatter."""
    got = warp(torch.tensor(logits, dtype=torch.float64), SamplingParams(temperature, top_k, top_p))
    want = slow_warp(logits, temperature, top_k, top_p)
    assert got.tolist() == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sampling", [SamplingParams(0.7), SamplingParams(1.0, 50, 0.9)], ids=str)
def test_warp_of_half_precision_computes_in_fp32(
    dtype: torch.dtype, sampling: SamplingParams
) -> None:
    """Catches bf16 probabilities, under which 0.999 counts as certain and acceptance is too high."""
    logits = (torch.randn(3, 4, 1000) * 3).to(dtype)
    probs = warp(logits, sampling)
    assert probs.dtype == torch.float32
    assert torch.equal(probs, warp(logits.float(), sampling))
    assert torch.allclose(probs.sum(-1), torch.ones(3, 4), atol=1e-5)


def test_warp_stays_finite_with_excluded_tokens() -> None:
    """Catches NaN from logits of minus infinity and from differences that overflow exp."""
    logits = torch.tensor([[-math.inf, 0.0, -math.inf], [3e4, -3e4, 0.0]])
    probs = warp(logits, SamplingParams(0.1, 2, 0.9))
    assert probs.tolist() == [[0, 1, 0], [1, 0, 0]]


LOWEST, HIGHEST = 0.5 / 2**32, 1 - 0.5 / 2**32  # the extremes that Dice can give


@settings(max_examples=300)
@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=8).filter(any),
    st.one_of(st.sampled_from([LOWEST, HIGHEST]), st.floats(LOWEST, HIGHEST)),
    st.sampled_from([1.0, 1e-30, 1e30]),
)
def test_pick_inverts_the_running_sum(weights: list[int], uniform: float, scale: float) -> None:
    """Catches an index off by one, an entry of weight 0, and dependence on the scale of the weights."""
    place = torch.tensor(uniform, dtype=torch.float64)
    index = int(sample_inverse_cdf(torch.tensor(weights, dtype=torch.float64) * scale, place))
    assert weights[index] > 0
    low, high = sum(weights[:index]), sum(weights[: index + 1])
    assert low - 1e-9 <= uniform * sum(weights) <= high + 1e-9


@pytest.mark.parametrize("size", [513, 1000, 4096, 49_152, 100_003])
def test_pick_in_blocks_is_that_of_one_running_sum(size: int) -> None:
    """Catches a block off by one, a lost rest behind the last whole block, and the wrong row's block."""
    torch.manual_seed(size)
    weights = (torch.randn(40, 2, size) * 3).exp() * (torch.rand(40, 2, size) < 0.3)
    uniform = torch.rand(40, 2, dtype=torch.float64)
    found = sample_inverse_cdf(weights, uniform)
    total = weights.double().cumsum(-1)  # one running sum over all weights
    assert torch.equal(found, (total <= (uniform * total[..., -1])[..., None]).sum(-1))
    assert (weights.gather(-1, found[..., None]) > 0).all()


def test_pick_in_blocks_at_their_edges() -> None:
    """Catches an entry of weight 0 where rounding puts the aim at the end of a block, and a rare token between blocks.
    The weights of a block have many sizes, so that its sum and its running sum round differently."""
    size, block = 4 * sampling.SUM_BLOCK, sampling.SUM_BLOCK
    torch.manual_seed(0)
    weights = torch.zeros(2000, size)
    weights[:, block : block + 100] = 10 ** (torch.rand(2000, 100) * 12 - 12)
    weights[:, 3 * block + 7] = 1e-9
    sums = weights.double().cumsum(-1)
    for border in (sums[:, 2 * block - 1], sums[:, block + 99]):
        for step in (-1e-16, 0.0, 1e-16):
            uniform = border / sums[:, -1] + step
            found = sample_inverse_cdf(weights, uniform)
            assert (weights.gather(-1, found[:, None]) > 0).all()
            assert set(found.tolist()) <= {*range(block, block + 100), 3 * block + 7}
    extremes = torch.tensor([LOWEST, HIGHEST], dtype=torch.float64)
    rare = torch.zeros(2, size)
    rare[:, block - 1], rare[:, block], rare[:, 2 * block - 1] = 1e-9, 0.5, 1e-9
    assert sample_inverse_cdf(rare, extremes).tolist() == [block - 1, 2 * block - 1]


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999, 0.9999999])
@pytest.mark.parametrize("scale", [0.0, 0.5, 3.0, 20.0])
def test_top_p_of_a_large_vocabulary_sorts_what_matters(scale: float, top_p: float) -> None:
    """Catches a nucleus cut from too few candidates, ties in another order, and rows that depend on each other. Logits
    are multiples of an eighth, so that many tokens are equally probable."""
    torch.manual_seed(1)
    logits = (torch.randn(5, 1, 30_000) * scale * 8).round() / 8
    logits[1] = logits[1] / 4
    params = SamplingParams(1.0, 0, top_p)
    probs = torch.softmax(logits, -1)
    ordered, index = probs.sort(dim=-1, descending=True, stable=True)
    ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= top_p, 0.0)
    kept = torch.zeros_like(probs).scatter(-1, index, ordered)
    wanted = kept / ordered.cumsum(-1)[..., -1:]
    found = warp(logits, params)
    assert torch.equal(found, wanted)
    for row in range(5):
        assert torch.equal(warp(logits[row], params), found[row])


@pytest.mark.parametrize("top_p", [0.3, 0.9])
def test_top_p_in_compiled_code_is_that_of_eager_code(top_p: float) -> None:
    """Catches compiled code that sorts the vocabulary, and an operation that dynamo cannot trace."""
    logits, params = torch.randn(3, 2, 5_000), SamplingParams(0.7, 0, top_p)
    calls: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        calls.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    compiled = torch.compile(warp, fullgraph=True, dynamic=False, backend=backend)
    assert torch.equal(compiled(logits, params), warp(logits, params))
    assert any("top_p" in call for call in calls)
    assert not any("sort" in call for call in calls)


@pytest.mark.parametrize(("bits", "number"), [(0, LOWEST), (-1, HIGHEST)])
def test_dice_never_give_zero_or_one(
    bits: int, number: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches the 0 or 1 that comes up once in 2 ** 32 numbers, too rare for a sample to show it."""
    monkeypatch.setattr(sampling, "_splitmix64", lambda x: torch.full_like(x, bits))
    assert CounterRNG(torch.tensor([7])).uniform(torch.Size([1])).tolist() == [number]


def test_dice_never_repeat() -> None:
    """Catches one number shared by rows, draws or places. 32 bits: a chance repeat has probability 2e-4."""
    dice = CounterRNG(torch.tensor(row_seeds(3, 8)))
    numbers = torch.stack([dice.uniform(torch.Size([8, 5])) for _ in range(33)])
    assert len(numbers.unique()) == numbers.numel()  # 1320 ** 2 / 2 ** 33


def test_row_seeds_differ_between_seeds_and_rows() -> None:
    """Catches seed + row, under which run 1's row 0 repeats run 0's row 1."""
    seeds = [seed for run in range(5) for seed in row_seeds(run, 100)]
    assert len(set(seeds)) == 500
    assert row_seeds(4, 2) == row_seeds(4, 3)[:2]


def p_value(cells: Tensor, count: int) -> float:
    """Chi-square tail of cell numbers [n] that should be uniform over `count` cells."""
    seen, expected = torch.bincount(cells, minlength=count).double(), len(cells) / count
    statistic = ((seen - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((count - 1) / 2.0), (statistic / 2).float()))


def test_dice_are_uniform_and_independent() -> None:
    """Catches bias, and correlation between neighbouring rows (consecutive seeds), draws and places. Four chi-squares
    and a mean on 262,144 numbers, fixed seeds; new seeds fail with probability 5e-6."""
    dice = CounterRNG(torch.arange(256))
    u = torch.stack([dice.uniform(torch.Size([256, 8])) for _ in range(128)])  # [draw, row, place]
    assert ((u > 0) & (u < 1)).all()
    assert abs(float(u.mean()) - 0.5) < 4.9 / math.sqrt(12 * u.numel())
    assert p_value((u * 256).long().flatten(), 256) > 1e-6
    sixteenth = (u * 16).long()
    for axis in range(3):
        pairs = sixteenth.narrow(axis, 0, u.shape[axis] - 1) * 16
        pairs = pairs + sixteenth.narrow(axis, 1, u.shape[axis] - 1)
        assert p_value(pairs.flatten(), 256) > 1e-6


def test_top_p_keeps_what_reaches_its_total_exactly() -> None:
    """Catches one token too many where the best ones have exactly the total: 0.5 + 0.25 of 0.75."""
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    assert warp(logits, SamplingParams(1.0, top_p=0.75))[2:].tolist() == [0.0, 0.0]


def test_one_position_without_numbers_is_enough() -> None:
    """Catches rows of which only the last position, or none but all of them, is looked at."""
    logits = torch.zeros(3, 2, 4)
    logits[1, 0, 2], logits[2, 1, :3] = float("nan"), float("-inf")
    assert has_finite_logits(logits).tolist() == [True, False, True]
