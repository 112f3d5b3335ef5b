"""What a draft is worth, from the decoder's own records: τ, α by position, speed, and intervals.

Everything is a sum or a count for each prompt, pooled over prompts and divided once. A mean of
per-prompt means would weigh a ten-token answer like a thousand-token one.

α and the acceptance rate are different things. α asks only about drafted tokens that verification
reached; the acceptance rate counts the tokens behind the first rejection as well. With 8 drafted
tokens and α = 0.6, τ is 2.47 and the acceptance rate 0.18.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from decode.engine.records import DecodeRecord
from eval.metrics.bootstrap import (
    Array,
    Interval,
    paired_difference_interval,
    paired_ratio_interval,
    ratio_interval,
)
from eval.metrics.latency import latency_ms, prefill_and_decode
from eval.metrics.records import MS_PER_SECOND, ratio_or_none


def emitted_tokens(samples: Sequence[DecodeRecord]) -> Array:
    """Tokens that rounds put out, for each prompt [n]: all but the first, which prefill gives."""
    return np.array([s.output_tokens - 1 for s in samples], dtype=np.int64)


def round_counts(samples: Sequence[DecodeRecord]) -> Array:
    """Rounds of each prompt [n]."""
    return np.array([len(s.rounds) for s in samples], dtype=np.int64)


def drafted_tokens(samples: Sequence[DecodeRecord]) -> Array:
    """Drafted tokens of each prompt [n]."""
    return np.array([sum(d for d, _ in s.rounds) for s in samples], dtype=np.int64)


def accepted_tokens(samples: Sequence[DecodeRecord]) -> Array:
    """Accepted drafted tokens of each prompt [n]."""
    return np.array([sum(a for _, a in s.rounds) for s in samples], dtype=np.int64)


def reached_by_position(samples: Sequence[DecodeRecord], k: int) -> Array:
    """Rounds of each prompt that reached position 1..k [n, k].

    Position i is reached when at least i tokens were drafted and the i - 1 before were accepted.
    For a tree, positions are depths and `k` is its depth.
    """
    limits = [[min(d, a + 1) for d, a in s.rounds] for s in samples]
    return _counts_at_least(limits, k)


def accepted_by_position(samples: Sequence[DecodeRecord], k: int) -> Array:
    """Rounds of each prompt in which position 1..k was accepted [n, k]."""
    return _counts_at_least([[a for _, a in s.rounds] for s in samples], k)


def tau(samples: Sequence[DecodeRecord]) -> float | None:
    """τ: tokens emitted after prefill ÷ rounds, pooled. Plain decoding is 1.0; None if no round."""
    return ratio_or_none(emitted_tokens(samples).sum(), round_counts(samples).sum())


def alpha_by_position(samples: Sequence[DecodeRecord], k: int) -> list[float | None]:
    """α_i = P(position i accepted | position i reached), i = 1..k; None where never reached."""
    numerators = accepted_by_position(samples, k).sum(0)
    denominators = reached_by_position(samples, k).sum(0)
    return [ratio_or_none(a, r) for a, r in zip(numerators, denominators, strict=True)]


def alpha(samples: Sequence[DecodeRecord], k: int) -> float | None:
    """α: Σ_i accepted at i ÷ Σ_i reached at i, over positions 1..k. None if none was reached."""
    return ratio_or_none(
        accepted_by_position(samples, k).sum(), reached_by_position(samples, k).sum()
    )


def acceptance_rate(samples: Sequence[DecodeRecord]) -> float | None:
    """Accepted ÷ drafted tokens. Not α: tokens behind a rejection count as drafted here."""
    return ratio_or_none(accepted_tokens(samples).sum(), drafted_tokens(samples).sum())


def unconditional_by_position(samples: Sequence[DecodeRecord], k: int) -> list[float | None]:
    """Accepted at position i ÷ all rounds, i = 1..k: what vLLM prints for each position."""
    total = round_counts(samples).sum()
    return [ratio_or_none(a, total) for a in accepted_by_position(samples, k).sum(0)]


def accepted_length_histogram(samples: Sequence[DecodeRecord], k: int) -> list[int]:
    """How many rounds accepted 0, 1, … k drafted tokens [k + 1]. Raises if a round exceeds k."""
    lengths = np.array([a for s in samples for _, a in s.rounds], dtype=np.int64)
    if len(lengths) > 0 and lengths.max() > k:
        raise ValueError(f"a round accepted {lengths.max()} tokens, more than k = {k}")
    return [int(count) for count in np.bincount(lengths, minlength=k + 1)]


def tokens_per_second(samples: Sequence[DecodeRecord]) -> float | None:
    """Output tokens ÷ seconds, prefill and first token included, pooled.

    A batch's seconds are shared out among its prompts, so this is the rate of the whole batch.
    """
    return ratio_or_none(sum(s.output_tokens for s in samples), sum(s.seconds for s in samples))


def ms_per_token(samples: Sequence[DecodeRecord]) -> float | None:
    """Milliseconds for each output token: the inverse of `tokens_per_second`."""
    milliseconds = MS_PER_SECOND * sum(s.seconds for s in samples)
    return ratio_or_none(milliseconds, sum(s.output_tokens for s in samples))


def speedup(samples: Sequence[DecodeRecord], plain_samples: Sequence[DecodeRecord]) -> float | None:
    """Plain seconds per token ÷ the method's, on the method's prompts, pooled."""
    slow, fast = ms_per_token(match_prompts(samples, plain_samples)), ms_per_token(samples)
    return None if slow is None or fast is None else ratio_or_none(slow, fast)


def match_prompts(
    samples: Sequence[DecodeRecord], others: Sequence[DecodeRecord]
) -> list[DecodeRecord]:
    """The samples of `others` that belong to the prompts of `samples`, in their order.

    Raises ValueError when a prompt is missing or doubled: a pair must be of the same prompt.
    """
    by_prompt = {(s.task, s.id): s for s in others}
    wanted = [(s.task, s.id) for s in samples]
    if len(by_prompt) != len(others) or len(set(wanted)) != len(wanted):
        raise ValueError("a prompt occurs twice: pass one sample for each prompt and method")
    missing = [key for key in wanted if key not in by_prompt]
    if len(missing) > 0:
        raise ValueError(f"{len(missing)} prompts have no counterpart, the first is {missing[0]}")
    return [by_prompt[key] for key in wanted]


def compare_alpha(
    samples_a: Sequence[DecodeRecord], samples_b: Sequence[DecodeRecord], k: int, seed: int
) -> dict[str, Any]:
    """{metric, difference, ci, prompts}: pooled α of a − that of b on the same prompts.

    Over positions 1..k of both: with different draft lengths, `k` is the smaller one.
    """
    samples_b = match_prompts(samples_a, samples_b)
    a, b = alpha(samples_a, k), alpha(samples_b, k)
    interval = paired_difference_interval(
        accepted_by_position(samples_a, k).sum(1),
        reached_by_position(samples_a, k).sum(1),
        accepted_by_position(samples_b, k).sum(1),
        reached_by_position(samples_b, k).sum(1),
        seed,
    )
    return {
        "metric": "alpha",
        "difference": None if a is None or b is None else a - b,
        "ci": interval,
        "prompts": len(samples_a),
    }


def summarize(
    samples: Sequence[DecodeRecord], plain_samples: Sequence[DecodeRecord] | None, k: int, seed: int
) -> dict[str, Any]:
    """The fields of a report's method entry that follow from samples alone, ready for JSON.

    `k` is the number of positions: the draft length, a tree's depth, 0 for plain decoding. What
    cannot be computed is None, never NaN. `counts` holds the sums behind the ratios:
    tau = emitted ÷ rounds, α_i = accepted_by_position ÷ rounds_by_position (rounds that reached i).
    `plain_samples` are plain decoding of (at least) the same prompts; without them no speed-up.
    """
    reached, taken = reached_by_position(samples, k), accepted_by_position(samples, k)
    tokens = [s.output_tokens for s in samples]
    seconds = [s.seconds for s in samples]
    return {
        "prompts": len(samples),
        "tau": tau(samples),
        "tau_ci": ratio_interval(emitted_tokens(samples), round_counts(samples), seed),
        "alpha": alpha(samples, k),
        "alpha_ci": ratio_interval(taken.sum(1), reached.sum(1), seed),
        "alpha_by_position": alpha_by_position(samples, k),
        "alpha_by_position_ci": [
            ratio_interval(taken[:, i], reached[:, i], seed) for i in range(k)
        ],
        "acceptance_rate": acceptance_rate(samples),
        "acceptance_rate_ci": ratio_interval(
            accepted_tokens(samples), drafted_tokens(samples), seed
        ),
        "unconditional_by_position": unconditional_by_position(samples, k),
        "histogram": accepted_length_histogram(samples, k),
        "counts": {
            "rounds": int(round_counts(samples).sum()),
            "drafted": int(drafted_tokens(samples).sum()),
            "accepted": int(accepted_tokens(samples).sum()),
            "emitted": int(emitted_tokens(samples).sum()),
            "output_tokens": sum(tokens),
            "rounds_by_position": [int(x) for x in reached.sum(0)],
            "accepted_by_position": [int(x) for x in taken.sum(0)],
        },
        "mean_output_tokens": ratio_or_none(sum(tokens), len(samples)),
        "latency_ms": latency_ms(samples),
        **prefill_and_decode(samples),
        "tokens_per_second": tokens_per_second(samples),
        "tokens_per_second_ci": ratio_interval(tokens, seconds, seed),
        "ms_per_token": ms_per_token(samples),
        "speedup": None if plain_samples is None else speedup(samples, plain_samples),
        "speedup_ci": None if plain_samples is None else _speedup_ci(samples, plain_samples, seed),
    }


def _speedup_ci(
    samples: Sequence[DecodeRecord], plain_samples: Sequence[DecodeRecord], seed: int
) -> Interval | None:
    plain = match_prompts(samples, plain_samples)
    return paired_ratio_interval(
        [s.seconds for s in plain],
        [s.output_tokens for s in plain],
        [s.seconds for s in samples],
        [s.output_tokens for s in samples],
        seed,
    )


def _counts_at_least(values: list[list[int]], k: int) -> Array:
    """[n, k]: how many numbers of row n are at least 1, 2, … k."""
    counts = np.zeros((len(values), k), dtype=np.int64)
    for row, numbers in enumerate(values):
        exactly = np.bincount(np.minimum(np.array(numbers, dtype=np.int64), k), minlength=k + 1)
        counts[row] = exactly[::-1].cumsum()[::-1][1:]
    return counts
