"""Metrics against examples worked out by hand, and laws that hold for any decoding."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode.engine.records import DecodeRecord
from eval.metrics import acceptance

SEED = 0
K = 4


def sample(
    rounds: list[tuple[int, int]],
    output_tokens: int | None = None,
    seconds: float = 1.0,
    name: str = "a",
    task: str = "code",
) -> DecodeRecord:
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
    assert acceptance.tau(GOLDEN) == pytest.approx(9 / 4)


def test_golden_positions() -> None:
    """Catches an off-by-one in "reached", and counting positions that were never drafted."""
    assert acceptance.reached_by_position(GOLDEN, 3).tolist() == [[2, 2, 1], [2, 1, 0]]
    assert acceptance.accepted_by_position(GOLDEN, 3).tolist() == [[2, 1, 1], [1, 1, 0]]
    assert acceptance.alpha_by_position(GOLDEN, 3) == pytest.approx([3 / 4, 2 / 3, 1.0])
    assert acceptance.unconditional_by_position(GOLDEN, 3) == pytest.approx([3 / 4, 2 / 4, 1 / 4])
    assert acceptance.alpha(GOLDEN, 3) == pytest.approx(6 / 8)
    assert acceptance.acceptance_rate(GOLDEN) == pytest.approx(6 / 11)
    assert acceptance.accepted_length_histogram(GOLDEN, 3) == [1, 1, 1, 1]


def test_golden_speed() -> None:
    """Catches a mean of per-prompt rates, and milliseconds that are seconds."""
    assert acceptance.tokens_per_second(GOLDEN) == pytest.approx(11 / 3)
    assert acceptance.ms_per_token(GOLDEN) == pytest.approx(3000 / 11)


def test_golden_latency() -> None:
    """Catches a token that waits a whole round, tokens behind EOS that make it look short, and sd for variance.

    Rounds of 10, 20, 10, 20 ms. Prompt a puts out 4 and then 1 (of 2, cut at EOS) tokens, b 1 and then 3.
    """
    latency = acceptance.summarize(GOLDEN, None, 3, SEED)["latency_ms"]
    assert (latency["p50"], latency["mean"]) == pytest.approx((15, 15))
    assert latency["variance"] == pytest.approx(25)
    assert latency["first_token"] == latency["first_token_p95"] == pytest.approx(250)
    each = [10 / 4] * 4 + [20] + [10] + [20 / 3] * 3
    assert latency["token"]["mean"] == pytest.approx(np.mean(each))
    assert latency["token"]["variance"] == pytest.approx(np.var(each))
    assert latency["token"]["p50"] == pytest.approx(20 / 3)


def test_prefill_and_decoding_apart() -> None:
    """Catches a whole batch's prefill taken from each row's share, and first tokens counted as decoded."""
    summary = acceptance.summarize(GOLDEN, None, 3, SEED)
    assert summary["prefill"] == pytest.approx(
        {"seconds": 0.5, "tokens": 14, "tokens_per_second": 28}
    )
    assert summary["decode"] == pytest.approx(
        {"seconds": 2.5, "tokens": 9, "tokens_per_second": 9 / 2.5, "ms_per_token": 2500 / 9}
    )
    assert summary["mean_output_tokens"] == pytest.approx(11 / 2)
    two_rows = [replace(s, rows=2) for s in GOLDEN]
    assert acceptance.summarize(two_rows, None, 3, SEED)["prefill"]["seconds"] == pytest.approx(
        0.25
    )


def test_plain_decoding_is_one() -> None:
    """Catches a τ of plain decoding other than 1.0 and an α invented where nothing was drafted."""
    plain = [sample([(0, 0)] * 9), sample([(0, 0)] * 3, name="b")]
    assert acceptance.tau(plain) == 1.0
    assert acceptance.alpha(plain, 0) is None
    assert acceptance.acceptance_rate(plain) is None
    assert acceptance.accepted_length_histogram(plain, 0) == [12]


def test_pooled_not_a_mean_of_prompts() -> None:
    """Catches macro-averaging: a short perfect answer must not weigh like a long poor one."""
    short, long = sample([(K, K)]), sample([(K, 0)] * 9, name="b")
    assert acceptance.tau([short, long]) == pytest.approx((5 + 9) / 10)
    mean_of_prompts = ((acceptance.tau([short]) or 0) + (acceptance.tau([long]) or 0)) / 2
    assert mean_of_prompts == pytest.approx(3.0)
    assert acceptance.alpha([short, long], K) == pytest.approx(4 / 13)  # the mean would be 0.5


def test_alpha_is_not_the_acceptance_rate() -> None:
    """Catches printing one under the other's name: tokens behind a rejection are not reached."""
    samples = [sample([(4, 2)])]
    assert acceptance.alpha(samples, K) == pytest.approx(2 / 3)
    assert acceptance.acceptance_rate(samples) == pytest.approx(2 / 4)


def test_short_drafts_do_not_count_against_later_positions() -> None:
    """Catches dividing by all rounds: n-gram lookup often drafts fewer than K, or nothing."""
    samples = [sample([(0, 0), (2, 2), (4, 4)])]
    assert acceptance.alpha_by_position(samples, K) == [1.0, 1.0, 1.0, 1.0]
    assert acceptance.unconditional_by_position(samples, K)[3] == pytest.approx(1 / 3)


@given(untrimmed_samples())
def test_tau_law(samples: list[DecodeRecord]) -> None:
    """Catches any drift between the counters: untrimmed, τ = 1 + accepted ÷ rounds."""
    accepted = sum(a for s in samples for _, a in s.rounds)
    total = sum(len(s.rounds) for s in samples)
    assert acceptance.tau(samples) == pytest.approx(1 + accepted / total)


@given(untrimmed_samples())
def test_counters_agree(samples: list[DecodeRecord]) -> None:
    """Catches by-position, histogram and total counts that were computed from different rounds."""
    reached = acceptance.reached_by_position(samples, K).sum(0)
    accepted = acceptance.accepted_by_position(samples, K).sum(0)
    counts = acceptance.accepted_length_histogram(samples, K)
    assert sum(counts) == acceptance.round_counts(samples).sum()
    assert sum(i * count for i, count in enumerate(counts)) == accepted.sum()
    assert accepted.sum() == acceptance.accepted_tokens(samples).sum()
    assert (accepted <= reached).all()
    assert (reached[1:] <= accepted[:-1]).all()
    assert reached.sum() <= acceptance.drafted_tokens(samples).sum()
    pooled, rate = acceptance.alpha(samples, K), acceptance.acceptance_rate(samples)
    by_position = acceptance.alpha_by_position(samples, K)
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
    straight = acceptance.summarize(samples, plain, K, SEED)
    assert acceptance.summarize(samples, shuffled, K, SEED) == straight


@settings(derandomize=True)
@given(untrimmed_samples(min_size=2))
def test_intervals_hold_the_estimate(samples: list[DecodeRecord]) -> None:
    """Catches an interval of another quantity (such as a mean of ratios) than the one printed."""
    plain = [sample([(0, 0)] * 5, seconds=2.0, name=s.id) for s in samples]
    entry = acceptance.summarize(samples, plain, K, SEED)
    for name in ("tau", "alpha", "acceptance_rate", "tokens_per_second", "speedup"):
        if entry[f"{name}_ci"] is not None:
            low, high = entry[f"{name}_ci"]
            assert low - 1e-9 <= entry[name] <= high + 1e-9


def test_interval_is_as_wide_as_theory() -> None:
    """Catches resampling rounds, or one interval end: 400 prompts of 5 equal rounds, p = 1/2.

    The prompts are the unit, so the half-width is 1.96 · 0.5 / √400 = 0.049; taking the 2000
    rounds as independent gives 0.022.
    """
    numerators = np.tile([0, 5], 200)
    interval = acceptance.ratio_interval(numerators, np.full(400, 5), SEED)
    assert interval is not None
    assert interval == pytest.approx((0.451, 0.549), abs=0.005)


def test_same_seed_same_interval() -> None:
    """Catches an unseeded generator: a report must be reproducible."""
    numerators = np.geomspace(1, 2, 30)
    first, again, other = (
        acceptance.ratio_interval(numerators, np.ones(30), seed) for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_pairing_narrows_the_speedup() -> None:
    """Catches resampling the two arms apart: prompts that differ 100-fold, always sped up 2×."""
    tokens = np.full(20, 10)
    plain_seconds = np.geomspace(1, 100, 20)
    interval = acceptance.paired_ratio_interval(
        plain_seconds, tokens, plain_seconds / 2, tokens, SEED
    )
    assert interval == pytest.approx((2.0, 2.0))


def test_speedup_is_per_token() -> None:
    """Catches a ratio of wall clocks when sampled answers differ in length, and its inverse."""
    plain = [sample([(0, 0)] * 9, seconds=10.0)]  # 10 tokens, 1 s each
    fast = [sample([(K, K)] * 4, output_tokens=20, seconds=5.0)]  # 0.25 s each
    assert acceptance.speedup(fast, plain) == pytest.approx(4.0)
    assert acceptance.speedup(plain, plain) == 1.0


def test_unpaired_prompts_are_refused() -> None:
    """Catches a speed-up between different prompt sets, and one id hiding behind another."""
    with pytest.raises(ValueError, match="no counterpart"):
        acceptance.speedup([sample([(1, 1)], name="x")], [sample([(0, 0)], name="y")])
    with pytest.raises(ValueError, match="twice"):
        acceptance.speedup([sample([(1, 1)])], [sample([(0, 0)])] * 2)


@given(untrimmed_samples(min_size=2))
def test_no_difference_with_itself(samples: list[DecodeRecord]) -> None:
    """Catches unpaired resampling: a method against itself differs by exactly nothing."""
    result = acceptance.compare_alpha(samples, samples, K, SEED)
    assert result["prompts"] == len(samples)
    assert result["difference"] in (None, 0.0)
    assert result["ci"] in (None, (0.0, 0.0))


def test_difference_has_the_right_sign() -> None:
    """Catches a swapped pair: a accepts all, b nothing."""
    a = [sample([(2, 2)], name=str(i)) for i in range(5)]
    b = [sample([(2, 0)], name=str(i)) for i in range(5)]
    result = acceptance.compare_alpha(a, b, 2, SEED)
    assert result == {"metric": "alpha", "difference": 1.0, "ci": (1.0, 1.0), "prompts": 5}


def test_nothing_measured_is_none() -> None:
    """Catches NaN and ZeroDivisionError: no prompts at all, and one prompt without any round."""
    for samples in ([], [sample([])]):
        entry = acceptance.summarize(samples, samples, K, SEED)
        assert entry["prompts"] == len(samples)
        assert entry["tau"] is None
        assert entry["tau_ci"] is None
        assert entry["alpha_by_position"] == [None] * K
        assert entry["latency_ms"]["p95"] is None
        assert entry["histogram"] == [0] * (K + 1)


def test_one_prompt_has_no_interval() -> None:
    """Catches [x, x]: resampling a single prompt looks like certainty."""
    entry = acceptance.summarize([sample([(4, 2), (4, 3)])], None, K, SEED)
    assert entry["tau_ci"] is None
    assert entry["alpha_by_position_ci"] == [None] * K
    assert entry["speedup"] is None


def test_positions_reached_by_few_prompts_stay_finite() -> None:
    """Catches NaN percentiles: position 2 is reached by 2 of 20 prompts, so some draws miss it."""
    samples = [sample([(2, 1 if i < 2 else 0)], name=str(i)) for i in range(20)]
    interval = acceptance.summarize(samples, None, 2, SEED)["alpha_by_position_ci"][1]
    assert interval is not None
    assert all(math.isfinite(end) for end in interval)


def test_summary_counts() -> None:
    """Catches counts from which the printed ratios cannot be computed again."""
    entry = acceptance.summarize(GOLDEN, GOLDEN, 3, SEED)
    counts = entry["counts"]
    assert counts == {
        "rounds": 4,
        "drafted": 11,
        "accepted": 6,
        "emitted": 9,
        "forced": 0,
        "output_tokens": 11,
        "rounds_by_position": [4, 3, 1],
        "accepted_by_position": [3, 2, 1],
    }
    assert entry["tau"] == counts["emitted"] / counts["rounds"]
    assert entry["acceptance_rate"] == counts["accepted"] / counts["drafted"]
    assert entry["speedup"] == 1.0


def test_impossible_rounds_are_refused() -> None:
    """Catches swapped (accepted, drafted), and a histogram that silently drops long rounds."""
    with pytest.raises(ValueError, match="3 of 1"):
        sample([(1, 3)])
    with pytest.raises(ValueError, match="more than k"):
        acceptance.accepted_length_histogram([sample([(4, 4)])], 3)
