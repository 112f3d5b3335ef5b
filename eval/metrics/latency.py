"""How long a user waits: for the first token, for a round, for a token; prefill and decoding apart.

A round hands out several tokens at once. The latency of a token is its round's seconds ÷ the tokens that the round put
out, each token counting once: what a reader sees when a streaming server smooths the bursts.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from decode.engine.records import DecodeRecord
from eval.metrics.bootstrap import Array
from eval.metrics.records import MS_PER_SECOND, ratio_or_none


def latency_ms(samples: Sequence[DecodeRecord]) -> dict[str, Any]:
    """Milliseconds: p50, p95, mean and variance (ms²) of a round, of a token and of the wait for the first token.

    None where nothing was measured. A batch's round counts for each of its rows: each of them waits for it.
    """
    rounds = MS_PER_SECOND * np.array([x for s in samples for x in s.round_seconds])
    first = MS_PER_SECOND * np.array([s.first_token_seconds for s in samples])
    wait = summary_statistics(first)
    return {
        **summary_statistics(rounds),
        "first_token": wait["mean"],
        "first_token_p50": wait["p50"],
        "first_token_p95": wait["p95"],
        "token": summary_statistics(MS_PER_SECOND * token_seconds(samples)),
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


def token_seconds(samples: Sequence[DecodeRecord]) -> Array:
    """Seconds of each token that rounds put out [n]; tokens behind the end of an answer do not exist."""
    each: list[float] = []
    for sample in samples:
        left = sample.output_tokens - 1
        for (_, accepted), seconds in zip(sample.rounds, sample.round_seconds, strict=True):
            count = min(accepted + 1, left)
            each += [seconds / count] * count if count > 0 else []
            left -= count
    return np.array(each)


def prefill_and_decode(samples: Sequence[DecodeRecord]) -> dict[str, dict[str, float | None]]:
    """{prefill: {seconds, tokens, tokens_per_second}, decode: {…, ms_per_token}}, pooled.

    Prefill reads the prompt and gives the first token; decoding is all that follows. A batch's seconds are shared
    out evenly among its rows.
    """
    prefill = sum(s.first_token_seconds / s.rows for s in samples)
    decode = sum(s.seconds for s in samples) - prefill
    read = sum(s.prompt_tokens for s in samples)
    emitted = sum(s.output_tokens - 1 for s in samples)
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
