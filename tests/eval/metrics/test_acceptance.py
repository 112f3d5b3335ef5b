"""Metrics against examples worked out by hand, and laws that hold for any decoding."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode.engine.records import DecodeRecord
from eval.metrics.acceptance import Acceptance, match_prompts, seconds_per_token, speedup
from eval.metrics.bootstrap import Ratio, paired_difference, paired_ratio, ratio_interval
from eval.metrics.latency import LatencyMs, prefill_and_decode
from eval.results.report import Counts
from tests import drafts

SEED = 0
K = 4


def sample(
    rounds: list[tuple[int, int]], output_tokens: int | None = None, seconds: float = 1.0,
    name: str = "a", task: str = "code",
) -> DecodeRecord:  # fmt: skip
    """A sample whose output is untrimmed (first token + accepted + one a round) unless given."""
    untrimmed = 1 + sum(accepted + 1 for _, accepted in rounds)
    return DecodeRecord(
        task=task,
        id=name,
        prompt_ids=[5] * 7,
        output_ids=[5] * (untrimmed if output_tokens is None else output_tokens),
        rounds=rounds,
        seconds=seconds,
        first_token_seconds=0.25,
        round_seconds=[0.01 * (i + 1) for i in range(len(rounds))],
    )


def values(ratios: list[Ratio]) -> list[float | None]:
    return [x.value for x in ratios]


one_round = st.integers(0, K).flatmap(lambda d: st.tuples(st.just(d), st.integers(0, d)))
many_rounds = st.lists(one_round, min_size=1, max_size=12)
any_seconds = st.floats(0.1, 10.0)


@st.composite
def untrimmed_samples(draw: st.DrawFn, min_size: int = 1) -> list[DecodeRecord]:
    prompts = draw(st.lists(st.tuples(many_rounds, any_seconds), min_size=min_size, max_size=8))
    return [sample(r, seconds=s, name=str(i)) for i, (r, s) in enumerate(prompts)]


# Two prompts, K = 3. Reached: 4, 3, 2 rounds at positions 1, 2, 3 (the last round drafted 2 only).
GOLDEN = [
    sample([(3, 3), (3, 1)], output_tokens=6, seconds=2.0, name="a"),  # 7 untrimmed, cut at EOS
    sample([(3, 0), (2, 2)], seconds=1.0, name="b"),  # 1 + 1 + 3 = 5 tokens
]


def test_golden_tau() -> None:
    """Catches counting the prefill's token, rounds + 1, or tokens past EOS: (6 + 5 - 2) / 4."""
    assert Acceptance.of(GOLDEN).tau.value == pytest.approx(9 / 4)


def test_golden_positions() -> None:
    """Catches an off-by-one in "reached", and counting positions that were never drafted."""
    found = Acceptance.of(GOLDEN, 3)
    assert found.reached_at.tolist() == [[2, 2, 1], [2, 1, 0]]
    assert found.accepted_at.tolist() == [[2, 1, 1], [1, 1, 0]]
    assert values(found.alpha_by_position) == pytest.approx([3 / 4, 2 / 3, 1.0])
    assert values(found.unconditional_by_position) == pytest.approx([3 / 4, 2 / 4, 1 / 4])
    assert found.alpha.value == pytest.approx(6 / 8)
    assert found.rate.value == pytest.approx(6 / 11)
    assert found.histogram == [1, 1, 1, 1]


def test_golden_speed() -> None:
    """Catches a mean of per-prompt rates, and milliseconds that are seconds."""
    assert seconds_per_token(GOLDEN).value == pytest.approx(3 / 11)
    found = drafts.measured(GOLDEN, 3)
    assert found.tokens_per_second.value == pytest.approx(11 / 3)
    assert found.ms_per_token == pytest.approx(3000 / 11)


def test_golden_latency() -> None:
    """Catches a token that waits a whole round, tokens behind EOS that make it look short, and sd for variance. Rounds
    of 10, 20, 10, 20 ms. Prompt a puts out 4 and then 1 (of 2, cut at EOS) tokens, b 1 and then 3."""
    latency = LatencyMs.measure(GOLDEN)
    assert (latency.p50, latency.mean) == pytest.approx((15, 15))
    assert latency.variance == pytest.approx(25)
    assert latency.first_token == latency.first_token_p95 == pytest.approx(250)
    each = [10 / 4] * 4 + [20] + [10] + [20 / 3] * 3
    assert latency.token is not None
    assert latency.token.mean == pytest.approx(np.mean(each))
    assert latency.token.variance == pytest.approx(np.var(each))
    assert latency.token.p50 == pytest.approx(20 / 3)


def test_prefill_and_decoding_apart() -> None:
    """Catches a whole batch's prefill taken from each row's share, and first tokens counted as decoded."""
    prefill, decode = prefill_and_decode(GOLDEN)
    assert vars(prefill) == pytest.approx({"seconds": 0.5, "tokens": 14, "tokens_per_second": 28})
    assert vars(decode) == pytest.approx(
        {"seconds": 2.5, "tokens": 9, "tokens_per_second": 9 / 2.5, "ms_per_token": 2500 / 9}
    )
    assert drafts.measured(GOLDEN, 3).mean_output_tokens == pytest.approx(11 / 2)
    assert prefill_and_decode([replace(s, rows=2) for s in GOLDEN])[0].seconds == pytest.approx(
        0.25
    )


def test_plain_decoding_is_one() -> None:
    """Catches a τ of plain decoding other than 1.0 and an α invented where nothing was drafted."""
    plain = [sample([(0, 0)] * 9), sample([(0, 0)] * 3, name="b")]
    assert Acceptance.of(plain).tau.value == 1.0
    assert Acceptance.of(plain, 0).alpha.value is None
    assert Acceptance.of(plain).rate.value is None
    assert Acceptance.of(plain, 0).histogram == [12]


def test_pooled_not_a_mean_of_prompts() -> None:
    """Catches macro-averaging: a short perfect answer must not weigh like a long poor one."""
    short, long = sample([(K, K)]), sample([(K, 0)] * 9, name="b")
    assert Acceptance.of([short, long]).tau.value == pytest.approx((5 + 9) / 10)
    mean_of_prompts = (
        (Acceptance.of([short]).tau.value or 0) + (Acceptance.of([long]).tau.value or 0)
    ) / 2
    assert mean_of_prompts == pytest.approx(3.0)
    assert Acceptance.of([short, long], K).alpha.value == pytest.approx(
        4 / 13
    )  # the mean would be 0.5


def test_alpha_is_not_the_acceptance_rate() -> None:
    """Catches printing one under the other's name: tokens behind a rejection are not reached."""
    samples = [sample([(4, 2)])]
    assert Acceptance.of(samples, K).alpha.value == pytest.approx(2 / 3)
    assert Acceptance.of(samples).rate.value == pytest.approx(2 / 4)


def test_short_drafts_do_not_count_against_later_positions() -> None:
    """Catches dividing by all rounds: n-gram lookup often drafts fewer than K, or nothing."""
    samples = [sample([(0, 0), (2, 2), (4, 4)])]
    assert values(Acceptance.of(samples, K).alpha_by_position) == [1.0, 1.0, 1.0, 1.0]
    assert values(Acceptance.of(samples, K).unconditional_by_position)[3] == pytest.approx(1 / 3)


@given(untrimmed_samples())
def test_tau_law(samples: list[DecodeRecord]) -> None:
    """Catches any drift between the counters: untrimmed, τ = 1 + accepted ÷ rounds."""
    accepted = sum(a for s in samples for _, a in s.rounds)
    total = sum(len(s.rounds) for s in samples)
    assert Acceptance.of(samples).tau.value == pytest.approx(1 + accepted / total)


@given(untrimmed_samples())
def test_counters_agree(samples: list[DecodeRecord]) -> None:
    """Catches by-position, histogram and total counts that were computed from different rounds."""
    reached = Acceptance.of(samples, K).reached_at.sum(0)
    accepted = Acceptance.of(samples, K).accepted_at.sum(0)
    counts = Acceptance.of(samples, K).histogram
    assert sum(counts) == Acceptance.of(samples).rounds.sum()
    assert sum(i * count for i, count in enumerate(counts)) == accepted.sum()
    assert accepted.sum() == Acceptance.of(samples).accepted.sum()
    assert (accepted <= reached).all()
    assert (reached[1:] <= accepted[:-1]).all()
    assert reached.sum() <= Acceptance.of(samples).drafted.sum()
    pooled, rate = Acceptance.of(samples, K).alpha.value, Acceptance.of(samples).rate.value
    by_position = values(Acceptance.of(samples, K).alpha_by_position)
    weighted = sum((a or 0.0) * r for a, r in zip(by_position, reached, strict=True))
    if pooled is None or rate is None:
        assert reached.sum() == 0
    else:
        assert pooled == pytest.approx(weighted / reached.sum())
        assert 0 <= rate <= pooled <= 1


@given(untrimmed_samples(min_size=2), st.randoms(use_true_random=False))
def test_order_of_prompts_does_not_matter(samples: list[DecodeRecord], random: object) -> None:
    """Catches pairing by list position: shuffled plain samples give the same speed-up."""
    plain = [sample([(0, 0)] * 5, seconds=1.0 + i, name=str(i)) for i in range(len(samples))]
    shuffled = plain[:]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert drafts.measured(samples, K, shuffled) == drafts.measured(samples, K, plain)


@settings(derandomize=True)
@given(untrimmed_samples(min_size=2))
def test_intervals_hold_the_estimate(samples: list[DecodeRecord]) -> None:
    """Catches an interval of another quantity (such as a mean of ratios) than the one printed."""
    plain = [sample([(0, 0)] * 5, seconds=2.0, name=s.id) for s in samples]
    found = drafts.measured(samples, K, plain)
    for x in (
        found.tau,
        found.alpha,
        found.acceptance_rate,
        found.tokens_per_second,
        found.speedup,
    ):
        if x.ci is not None:
            assert x.value is not None
            assert x.ci[0] - 1e-9 <= x.value <= x.ci[1] + 1e-9


def test_interval_is_as_wide_as_theory() -> None:
    """Catches resampling rounds, or one interval end: 400 prompts of 5 equal rounds, p = 1/2. The prompts are the
    unit, so the half-width is 1.96 · 0.5 / √400 = 0.049; taking the 2000 rounds as independent gives 0.022."""
    numerators = np.tile([0, 5], 200)
    interval = ratio_interval(numerators, np.full(400, 5), SEED)
    assert interval is not None
    assert interval == pytest.approx((0.451, 0.549), abs=0.005)


def test_same_seed_same_interval() -> None:
    """Catches an unseeded generator: a report must be reproducible."""
    numerators = np.geomspace(1, 2, 30)
    first, again, other = (ratio_interval(numerators, np.ones(30), seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_pairing_narrows_the_speedup() -> None:
    """Catches resampling the two arms apart: prompts that differ 100-fold, always sped up 2×."""
    tokens = np.full(20, 10)
    plain_seconds = np.geomspace(1, 100, 20)
    found = paired_ratio(Ratio(plain_seconds, tokens), Ratio(plain_seconds / 2, tokens), SEED)
    assert found.ci == pytest.approx((2.0, 2.0))


def test_speedup_is_per_token() -> None:
    """Catches a ratio of wall clocks when sampled answers differ in length, and its inverse."""
    plain = [sample([(0, 0)] * 9, seconds=10.0)]  # 10 tokens, 1 s each
    fast = [sample([(K, K)] * 4, output_tokens=20, seconds=5.0)]  # 0.25 s each
    assert speedup(fast, plain, SEED).value == pytest.approx(4.0)
    assert speedup(plain, plain, SEED).value == 1.0


def test_unpaired_prompts_are_refused() -> None:
    """Catches a speed-up between different prompt sets, and one id hiding behind another."""
    with pytest.raises(ValueError, match="no counterpart"):
        speedup([sample([(1, 1)], name="x")], [sample([(0, 0)], name="y")], SEED)
    with pytest.raises(ValueError, match="twice"):
        speedup([sample([(1, 1)])], [sample([(0, 0)])] * 2, SEED)


@given(untrimmed_samples(min_size=2))
def test_no_difference_with_itself(samples: list[DecodeRecord]) -> None:
    """Catches unpaired resampling: a method against itself differs by exactly nothing."""
    own = Acceptance.of(samples, K).alpha
    found = paired_difference(own, own, SEED)
    assert found.value in (None, 0.0)
    assert found.ci in (None, (0.0, 0.0))


def test_difference_has_the_right_sign() -> None:
    """Catches a swapped pair: a accepts all, b nothing."""
    a = [sample([(2, 2)], name=str(i)) for i in range(5)]
    b = [sample([(2, 0)], name=str(i)) for i in range(5)]
    of_a, of_b = (Acceptance.of(x, 2).alpha for x in (a, match_prompts(a, b)))
    assert paired_difference(of_a, of_b, SEED) == (1.0, (1.0, 1.0))


def test_nothing_measured_is_none() -> None:
    """Catches NaN and ZeroDivisionError: no prompts at all, and one prompt without any round."""
    for samples in ([], [sample([])]):
        found = drafts.measured(samples, K)
        assert found.prompts == len(samples)
        assert found.tau == (None, None)
        assert [x.value for x in found.alpha_by_position] == [None] * K
        assert found.latency_ms is not None
        assert found.latency_ms.p95 is None
        assert found.histogram == [0] * (K + 1)


def test_one_prompt_has_no_interval() -> None:
    """Catches [x, x]: resampling a single prompt looks like certainty."""
    found = drafts.measured([sample([(4, 2), (4, 3)])], K)
    assert found.tau.ci is None
    assert [x.ci for x in found.alpha_by_position] == [None] * K


def test_positions_reached_by_few_prompts_stay_finite() -> None:
    """Catches NaN percentiles: position 2 is reached by 2 of 20 prompts, so some draws miss it."""
    samples = [sample([(2, 1 if i < 2 else 0)], name=str(i)) for i in range(20)]
    interval = Acceptance.of(samples, 2).alpha_by_position[1].estimate(SEED).ci
    assert interval is not None
    assert all(math.isfinite(end) for end in interval)


def test_summary_counts() -> None:
    """Catches counts from which the printed ratios cannot be computed again."""
    found = drafts.measured(GOLDEN, 3)
    assert found.counts == Counts(4, 11, 6, 0, 9, 11, [4, 3, 1], [3, 2, 1])
    assert found.tau.value == found.counts.emitted / found.counts.rounds
    assert found.acceptance_rate.value == found.counts.accepted / found.counts.drafted
    assert found.speedup.value == 1.0


def test_impossible_rounds_are_refused() -> None:
    """Catches swapped (accepted, drafted), and a histogram that silently drops long rounds."""
    with pytest.raises(ValueError, match="3 of 1"):
        sample([(1, 3)])
    with pytest.raises(ValueError, match="more than k"):
        _ = Acceptance.of([sample([(4, 4)])], 3).histogram
