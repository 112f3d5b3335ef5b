"""vLLM: responses with metrics.speculative_decoding (--per-request-spec-decode-metrics).

vLLM counts a round where drafts were scheduled, so steps without a draft are in no figure. Dumps and its log line are
pooled over all requests; the field mean_acceptance_length is of one request.
"""

from collections.abc import Mapping
from typing import Any

from decode.common.errors import UserError
from eval.engine_logs.counts import (
    RequestCounts,
    by_position,
    checked,
    read_count,
    read_histogram,
)


def from_response(body: Mapping[str, Any], where: str) -> RequestCounts:
    """The counts of one response. UserError without metrics.speculative_decoding."""
    metrics = body.get("metrics")
    found = metrics.get("speculative_decoding") if isinstance(metrics, Mapping) else None
    if not isinstance(found, Mapping):
        raise UserError(
            f"{where} has no metrics.speculative_decoding: start vLLM with --per-request-spec-decode-metrics summary, "
            "and ask for one answer a request"
        )
    rounds, drafted, accepted = (
        read_count(found, key, where)
        for key in ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
    )
    histogram = read_histogram(found.get("acceptance_histogram"), "acceptance_histogram", where)
    k = len(histogram) - 1
    accepted_at, reached_at = by_position({k: histogram})
    by_length = found.get("acceptance_histogram_by_draft_length")
    if isinstance(by_length, Mapping):
        reached_at = by_position(_read_lengths(by_length, where))[1]
        reached_at += (0,) * (k - len(reached_at))
    elif drafted != k * rounds:
        reached_at = ()  # rounds of several lengths, and nothing says how many of each
    if sum(histogram) != rounds:
        raise UserError(f"{where}: the histogram is not of {rounds} steps: the log is damaged")
    length = found.get("mean_acceptance_length")
    counts = RequestCounts(rounds, drafted, accepted, accepted_at, reached_at, engine_length=length)
    return checked(counts, where)


def _read_lengths(by_length: Mapping[str, Any], where: str) -> dict[int, list[int]]:
    """{drafted tokens: rounds that accepted 0, 1, … of them}."""
    lengths = {k: int(k) if k.isdecimal() else k for k in by_length}
    return {
        read_count(lengths, k, where): read_histogram(rounds, f"draft length {k}", where)
        for k, rounds in by_length.items()
    }
