"""Latency of the first token, of a round and of a token; prefill and decoding apart.

A round emits several tokens at once. The latency of a token is its round's seconds ÷ the tokens that the round
emitted, each token counting once, as in a streaming server that spreads the tokens of a round evenly.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from decode.engine.records import DecodeRecord
from eval.metrics.bootstrap import MS_PER_SECOND, Array, ratio_or_none


@dataclass(frozen=True)
class Spread:
    """None for no value, the variance 0 for one. Older reports have the percentiles alone."""

    p50: float | None = None
    p95: float | None = None
    mean: float | None = None
    variance: float | None = None

    @classmethod
    def of(cls, values: Array) -> "Spread":
        if len(values) == 0:
            return cls()
        low, high = np.percentile(values, [50, 95])
        return cls(float(low), float(high), float(values.mean()), float(values.var()))


@dataclass(frozen=True)
class LatencyMs(Spread):
    """Milliseconds of a round, of a token and of the first token; variances in ms²."""

    first_token: float | None = None  # its mean
    first_token_p50: float | None = None
    first_token_p95: float | None = None
    token: Spread | None = None

    @classmethod
    def measure(cls, records: Sequence[DecodeRecord]) -> "LatencyMs":
        """A batch's round counts for each of its rows, since each of them waits for it."""
        rounds = Spread.of(MS_PER_SECOND * np.array([x for r in records for x in r.round_seconds]))
        first = Spread.of(MS_PER_SECOND * np.array([r.first_token_seconds for r in records]))
        token = Spread.of(MS_PER_SECOND * token_seconds(records))
        return cls(
            **vars(rounds),
            first_token=first.mean,
            first_token_p50=first.p50,
            first_token_p95=first.p95,
            token=token,
        )


@dataclass(frozen=True)
class Throughput:
    """Of prefill, which reads the prompt and gives the first token."""

    seconds: float
    tokens: int
    tokens_per_second: float | None


@dataclass(frozen=True)
class DecodeThroughput(Throughput):
    """Of all that follows prefill."""

    ms_per_token: float | None


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


def prefill_and_decode(records: Sequence[DecodeRecord]) -> tuple[Throughput, DecodeThroughput]:
    """Pooled. A batch's seconds are divided evenly among its rows."""
    prefill = sum(r.first_token_seconds / r.rows for r in records)
    decode = sum(r.seconds for r in records) - prefill
    read = sum(r.prompt_tokens for r in records)
    emitted = sum(r.output_tokens - 1 for r in records)
    return (
        Throughput(prefill, read, ratio_or_none(read, prefill)),
        DecodeThroughput(
            decode,
            emitted,
            ratio_or_none(emitted, decode),
            ratio_or_none(MS_PER_SECOND * decode, emitted),
        ),
    )
