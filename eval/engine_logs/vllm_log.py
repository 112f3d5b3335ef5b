"""vLLM: responses with metrics.speculative_decoding (--per-request-spec-decode-metrics), and /metrics dumps.

vLLM counts a round where drafts were scheduled, so steps without a draft are in no figure. Dumps and its log line are
pooled over all requests; the field mean_acceptance_length is of one request.
"""

from collections.abc import Mapping
from typing import Any

from decode.common.errors import UserError
from eval.engine_logs import prometheus
from eval.engine_logs.counts import (
    EngineLog,
    RequestCounts,
    by_position,
    checked,
    read_count,
    read_histogram,
)

PREFIX = "vllm:spec_decode_num_"
BY_LENGTH = "acceptance_histogram_by_draft_length"


def from_response(body: Mapping[str, Any], where: str) -> RequestCounts:
    """The counts of one response. UserError without metrics.speculative_decoding."""
    metrics = body.get("metrics")
    found = metrics.get("speculative_decoding") if isinstance(metrics, Mapping) else None
    if not isinstance(found, Mapping):
        raise UserError(
            f"{where} has no metrics.speculative_decoding: start vLLM with --per-request-spec-decode-metrics summary, "
            "and ask for one answer a request"
        )
    rounds = read_count(found, "num_spec_steps", where)
    histograms = _histograms(found, where)
    accepted_at, reached_at = by_position(histograms)
    if sum(map(sum, histograms.values())) != (rounds if histograms else 0):
        raise UserError(f"{where}: the histogram is not of {rounds} steps: the log is damaged")
    return checked(
        RequestCounts(
            rounds,
            read_count(found, "num_draft_tokens", where),
            read_count(found, "num_accepted_draft_tokens", where),
            accepted_at,
            reached_at,
            engine_length=found.get("mean_acceptance_length"),
        ),
        where,
    )


def _histograms(found: Mapping[str, Any], where: str) -> dict[int, list[int]]:
    """{drafted tokens: rounds that accepted 0, 1, …}; {} if the log does not say how many each round drafted."""
    if isinstance(found.get(BY_LENGTH), Mapping):
        return {
            read_count({BY_LENGTH: int(k) if k.isdecimal() else k}, BY_LENGTH, where): (
                read_histogram(h, BY_LENGTH, where)
            )
            for k, h in found[BY_LENGTH].items()
        }
    histogram = read_histogram(found.get("acceptance_histogram"), "acceptance_histogram", where)
    k, rounds = len(histogram) - 1, sum(histogram)
    fixed = read_count(found, "num_draft_tokens", where) == k * rounds
    return {k: histogram} if fixed else {}


def from_dump(path: str, before: str = "") -> EngineLog:
    """The totals of a /metrics dump, less those of an earlier one."""
    samples = prometheus.read_dump(path, before)
    rounds, drafted, accepted = (
        prometheus.total(samples, PREFIX + name, path)
        for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    if drafted < rounds:
        raise UserError(
            f"{path}: {drafted} drafted tokens in {rounds} rounds with a draft: the log is damaged"
        )
    positions = prometheus.totals_by(samples, f"{PREFIX}accepted_tokens_per_pos", "position")
    accepted_at = tuple(positions[i] for i in sorted(positions))
    fixed = drafted == rounds * len(accepted_at)
    reached_at = (rounds, *accepted_at[:-1]) if fixed and accepted_at else ()
    counts = RequestCounts(rounds, drafted, accepted, accepted_at, reached_at)
    return EngineLog(path, "vllm", [checked(counts, path)], per_request=False)
