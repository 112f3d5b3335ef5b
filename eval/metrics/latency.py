"""Latency of the first token, of a round and of a token; prefill and decoding apart.

A round emits several tokens at once. The latency of a token is its round's seconds ÷ the tokens that the round
emitted, each token counting once, as in a streaming server that spreads the tokens of a round evenly.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from decode.engine.records import DecodeRecord
from eval.metrics.bootstrap import MS_PER_SECOND, Array, ratio_or_none


def latency_ms(records: Sequence[DecodeRecord]) -> dict[str, Any]:
    """Milliseconds: p50, p95, mean and variance (ms²) of a round, of a token and of the first token.

    None where nothing was measured. A batch's round counts for each of its rows, since each of them waits for it.
    """
    rounds = MS_PER_SECOND * np.array([x for s in records for x in s.round_seconds])
    first = MS_PER_SECOND * np.array([s.first_token_seconds for s in records])
    wait = summary_statistics(first)
    return {
        **summary_statistics(rounds),
        "first_token": wait["mean"],
        "first_token_p50": wait["p50"],
        "first_token_p95": wait["p95"],
        "token": summary_statistics(MS_PER_SECOND * token_seconds(records)),
    }


def summary_statistics(values: Array) -> dict[str, float | None]:
    """{p50, p95, mean, variance}; all None for no value, the variance 0 for one."""
    if len(values) == 0:
        return dict.fromkeys(("p50", "p95", "mean", "variance"))
    return {
        "p50": float(np.percentile(values, 50)),
        "p95": float(np.percentile(values, 95)),
        "mean": float(values.mean()),
        "variance": float(values.var()),
    }


def token_seconds(records: Sequence[DecodeRecord]) -> Array:
    """Seconds of each token that rounds emitted [n], without tokens after the end of an answer."""
    seconds_per_token: list[float] = []
    for record in records:
        left = record.output_tokens - 1
        for committed, seconds in zip(record.committed, record.round_seconds, strict=True):
            count = min(committed, left)
            seconds_per_token += [seconds / count] * count if count > 0 else []
            left -= count
    return np.array(seconds_per_token)


def prefill_and_decode(records: Sequence[DecodeRecord]) -> dict[str, dict[str, float | None]]:
    """{prefill: {seconds, tokens, tokens_per_second}, decode: {…, ms_per_token}}, pooled.

    Prefill reads the prompt and gives the first token; decoding is all that follows. A batch's seconds are divided
    evenly among its rows.
    """
    prefill = sum(s.first_token_seconds / s.rows for s in records)
    decode = sum(s.seconds for s in records) - prefill
    read = sum(s.prompt_tokens for s in records)
    emitted = sum(s.output_tokens - 1 for s in records)
    return {
        "prefill": {
            "seconds": prefill,
            "tokens": read,
            "tokens_per_second": ratio_or_none(read, prefill),
        },
        "decode": {
            "seconds": decode,
            "tokens": emitted,
            "tokens_per_second": ratio_or_none(emitted, decode),
            "ms_per_token": ratio_or_none(MS_PER_SECOND * decode, emitted),
        },
    }
