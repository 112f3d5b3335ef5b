"""Acceptance and speed-up from decode records: τ, α by position, tokens per second, and their intervals.

Everything is a sum or a count for each prompt, pooled over prompts and divided once. A mean of per-prompt means would
weigh a ten-token answer like a thousand-token one.

α is not the acceptance rate: α counts only drafted tokens that verification reached, the acceptance rate also those
after the first rejection. With 8 drafted tokens and α = 0.6, τ is 2.47 and the acceptance rate 0.18. Tokens that a
grammar forced are in τ alone: they cannot be rejected, so they say nothing about the draft.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from decode.engine.records import DecodeRecord
from eval.metrics.bootstrap import (
    MS_PER_SECOND,
    Array,
    Interval,
    mean_of_ratios,
    paired_difference_interval,
    paired_ratio_interval,
    ratio_interval,
    ratio_or_none,
)
from eval.metrics.latency import latency_ms, prefill_and_decode


def emitted_tokens(records: Sequence[DecodeRecord]) -> Array:
    """Tokens that rounds emitted, for each prompt [n]: all but the first, which prefill gives."""
    return np.array([s.output_tokens - 1 for s in records], dtype=np.int64)


def round_counts(records: Sequence[DecodeRecord]) -> Array:
    """Rounds of each prompt [n]."""
    return np.array([len(s.rounds) for s in records], dtype=np.int64)


def drafted_tokens(records: Sequence[DecodeRecord]) -> Array:
    """Drafted tokens of each prompt [n]."""
    return np.array([sum(d for d, _ in s.rounds) for s in records], dtype=np.int64)


def accepted_tokens(records: Sequence[DecodeRecord]) -> Array:
    """Accepted drafted tokens of each prompt [n]."""
    return np.array([sum(a for _, a in s.rounds) for s in records], dtype=np.int64)


def reached_by_position(records: Sequence[DecodeRecord], k: int) -> Array:
    """Rounds of each prompt that reached position 1..k [n, k].

    Position i is reached when at least i tokens were drafted and the i - 1 before it were accepted. For a tree,
    positions are depths and `k` is its depth.
    """
    limits = [[min(d, a + 1) for d, a in s.rounds] for s in records]
    return _counts_at_least(limits, k)


def accepted_by_position(records: Sequence[DecodeRecord], k: int) -> Array:
    """Rounds of each prompt in which position 1..k was accepted [n, k]."""
    return _counts_at_least([[a for _, a in s.rounds] for s in records], k)


def tau(records: Sequence[DecodeRecord]) -> float | None:
    """τ: tokens emitted after prefill ÷ rounds, pooled. Plain decoding is 1.0; None if no round."""
    return ratio_or_none(emitted_tokens(records).sum(), round_counts(records).sum())


def alpha_by_position(records: Sequence[DecodeRecord], k: int) -> list[float | None]:
    """α_i = P(position i accepted | position i reached), i = 1..k; None where never reached."""
    numerators = accepted_by_position(records, k).sum(0)
    denominators = reached_by_position(records, k).sum(0)
    return [ratio_or_none(a, r) for a, r in zip(numerators, denominators, strict=True)]


def alpha(records: Sequence[DecodeRecord], k: int) -> float | None:
    """α: Σ_i accepted at i ÷ Σ_i reached at i, over positions 1..k. None if none was reached."""
    return ratio_or_none(
        accepted_by_position(records, k).sum(), reached_by_position(records, k).sum()
    )


def acceptance_rate(records: Sequence[DecodeRecord]) -> float | None:
    """Accepted ÷ drafted tokens. Not α: tokens after a rejection count as drafted here."""
    return ratio_or_none(accepted_tokens(records).sum(), drafted_tokens(records).sum())


def unconditional_by_position(records: Sequence[DecodeRecord], k: int) -> list[float | None]:
    """Accepted at position i ÷ all rounds, i = 1..k: what serving engines print."""
    total = round_counts(records).sum()
    return [ratio_or_none(a, total) for a in accepted_by_position(records, k).sum(0)]


def accepted_length_histogram(records: Sequence[DecodeRecord], k: int) -> list[int]:
    """How many rounds accepted 0, 1, … k drafted tokens [k + 1]. ValueError if a round accepted more than k."""
    lengths = np.array([a for s in records for _, a in s.rounds], dtype=np.int64)
    if len(lengths) > 0 and lengths.max() > k:
        raise ValueError(f"a round accepted {lengths.max()} tokens, more than k = {k}")
    return [int(count) for count in np.bincount(lengths, minlength=k + 1)]


def tokens_per_second(records: Sequence[DecodeRecord]) -> float | None:
    """Output tokens ÷ seconds, prefill and first token included, pooled.

    A batch's seconds are divided among its prompts, so this is the rate of the whole batch.
    """
    return ratio_or_none(sum(s.output_tokens for s in records), sum(s.seconds for s in records))


def ms_per_token(records: Sequence[DecodeRecord]) -> float | None:
    """Milliseconds per output token: the inverse of `tokens_per_second`."""
    milliseconds = MS_PER_SECOND * sum(s.seconds for s in records)
    return ratio_or_none(milliseconds, sum(s.output_tokens for s in records))


def speedup(records: Sequence[DecodeRecord], plain_records: Sequence[DecodeRecord]) -> float | None:
    """Plain seconds per token ÷ the method's, on the method's prompts, pooled."""
    slow, fast = ms_per_token(match_prompts(records, plain_records)), ms_per_token(records)
    return None if slow is None or fast is None else ratio_or_none(slow, fast)


def speedup_of_sums(
    records: Sequence[DecodeRecord], plain_records: Sequence[DecodeRecord]
) -> float | None:
    """`speedup` by the clock, with what the machine stalled."""
    return speedup(*(list(map(as_measured, own)) for own in (records, plain_records)))


def as_measured(record: DecodeRecord) -> DecodeRecord:
    """The record with the clock's seconds of the request; of no use for its rounds."""
    return replace(record, seconds=record.measured_seconds or record.seconds)


def match_prompts(
    records: Sequence[DecodeRecord], others: Sequence[DecodeRecord]
) -> list[DecodeRecord]:
    """The records of `others` on the prompts of `records`, in their order.

    ValueError when a prompt is missing or occurs twice, since the two records of a pair must be of the same prompt.
    """
    by_prompt = {(s.task, s.id): s for s in others}
    wanted = [(s.task, s.id) for s in records]
    if len(by_prompt) != len(others) or len(set(wanted)) != len(wanted):
        raise ValueError("a prompt occurs twice: pass one record for each prompt and method")
    missing = [key for key in wanted if key not in by_prompt]
    if len(missing) > 0:
        raise ValueError(f"{len(missing)} prompts have no counterpart, the first is {missing[0]}")
    return [by_prompt[key] for key in wanted]


def compare_alpha(
    records_a: Sequence[DecodeRecord], records_b: Sequence[DecodeRecord], k: int, seed: int
) -> dict[str, Any]:
    """{metric, difference, ci, prompts}: pooled α of a − that of b on the same prompts.

    Over positions 1..k of both: with different draft lengths, `k` is the smaller one.
    """
    records_b = match_prompts(records_a, records_b)
    a, b = alpha(records_a, k), alpha(records_b, k)
    interval = paired_difference_interval(
        accepted_by_position(records_a, k).sum(1),
        reached_by_position(records_a, k).sum(1),
        accepted_by_position(records_b, k).sum(1),
        reached_by_position(records_b, k).sum(1),
        seed,
    )
    return {
        "metric": "alpha",
        "difference": None if a is None or b is None else a - b,
        "ci": interval,
        "prompts": len(records_a),
    }


def summarize(
    records: Sequence[DecodeRecord], plain_records: Sequence[DecodeRecord] | None, k: int, seed: int
) -> dict[str, Any]:
    """The fields of a report's method entry that follow from records alone, ready for JSON.

    `k` is the number of positions: the draft length, a tree's depth, 0 for plain decoding. Values that cannot be
    computed are None, never NaN. `counts` holds the sums of the ratios: tau = emitted ÷ rounds, α_i =
    accepted_by_position ÷ rounds_by_position (rounds that reached i). `mean_accept_length` is 1 + accepted ÷ rounds:
    τ without trimming at the end of an answer and without forced tokens; its `per_request` is the mean of the prompts'
    own. `plain_records` are plain decoding of (at least) the same prompts; without them there is no speed-up. `stalled`
    are prompts of whose seconds a stall was taken off (eval/metrics/stalls.py); `speedup_of_sums` is with all stalls.
    """
    reached, taken = reached_by_position(records, k), accepted_by_position(records, k)
    tokens = [s.output_tokens for s in records]
    seconds = [s.seconds for s in records]
    rounds = round_counts(records)
    untrimmed = rounds + accepted_tokens(records)
    per_request, per_request_ci = mean_of_ratios(untrimmed, rounds, seed)
    return {
        "prompts": len(records),
        "tau": tau(records),
        "tau_ci": ratio_interval(emitted_tokens(records), round_counts(records), seed),
        "alpha": alpha(records, k),
        "alpha_ci": ratio_interval(taken.sum(1), reached.sum(1), seed),
        "alpha_by_position": alpha_by_position(records, k),
        "alpha_by_position_ci": [
            ratio_interval(taken[:, i], reached[:, i], seed) for i in range(k)
        ],
        "acceptance_rate": acceptance_rate(records),
        "acceptance_rate_ci": ratio_interval(
            accepted_tokens(records), drafted_tokens(records), seed
        ),
        "unconditional_by_position": unconditional_by_position(records, k),
        "unconditional_by_position_ci": [
            ratio_interval(taken[:, i], rounds, seed) for i in range(k)
        ],
        "mean_accept_length": {
            "pooled": ratio_or_none(untrimmed.sum(), rounds.sum()),
            "ci": ratio_interval(untrimmed, rounds, seed),
            "per_request": per_request,
            "per_request_ci": per_request_ci,
        },
        "histogram": accepted_length_histogram(records, k),
        "counts": {
            "rounds": int(round_counts(records).sum()),
            "drafted": int(drafted_tokens(records).sum()),
            "accepted": int(accepted_tokens(records).sum()),
            "forced": sum(sum(s.forced) for s in records),
            "emitted": int(emitted_tokens(records).sum()),
            "output_tokens": sum(tokens),
            "rounds_by_position": [int(x) for x in reached.sum(0)],
            "accepted_by_position": [int(x) for x in taken.sum(0)],
        },
        "mean_output_tokens": ratio_or_none(sum(tokens), len(records)),
        "latency_ms": latency_ms(records),
        **prefill_and_decode(records),
        "tokens_per_second": tokens_per_second(records),
        "tokens_per_second_ci": ratio_interval(tokens, seconds, seed),
        "ms_per_token": ms_per_token(records),
        "speedup": None if plain_records is None else speedup(records, plain_records),
        "speedup_ci": None if plain_records is None else _speedup_ci(records, plain_records, seed),
        "speedup_of_sums": None
        if plain_records is None
        else speedup_of_sums(records, plain_records),
        "stalled": sum(s.measured_seconds > s.seconds for s in records),
    }


def _speedup_ci(
    records: Sequence[DecodeRecord], plain_records: Sequence[DecodeRecord], seed: int
) -> Interval | None:
    plain = match_prompts(records, plain_records)
    return paired_ratio_interval(
        [s.seconds for s in plain],
        [s.output_tokens for s in plain],
        [s.seconds for s in records],
        [s.output_tokens for s in records],
        seed,
    )


def _counts_at_least(values: list[list[int]], k: int) -> Array:
    """[n, k]: how many numbers of each row are at least 1, 2, … k."""
    counts = np.zeros((len(values), k), dtype=np.int64)
    for row, numbers in enumerate(values):
        exactly = np.bincount(np.minimum(np.array(numbers, dtype=np.int64), k), minlength=k + 1)
        counts[row] = exactly[::-1].cumsum()[::-1][1:]
    return counts
