"""vLLM: responses with metrics.speculative_decoding (--per-request-spec-decode-metrics), and the server's own log.

vLLM counts a round where drafts were scheduled, so steps without a draft are in no figure. Dumps and its log line are
pooled over all requests; the field mean_acceptance_length is of one request.
"""

from collections.abc import Mapping
from typing import Any

from decode.common.errors import UserError
from eval.engine_logs.counts import (
    EngineLog,
    RequestCounts,
    by_position,
    checked,
    pool,
    read_count,
    read_histogram,
)
from eval.engine_logs.printed import PrintedLine, log_lines, number, numbers, recover

LINE = "SpecDecoding metrics:"
"""What a line of vLLM's log has that counts drafts. It is printed every few seconds, and counts those alone."""


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


def from_text(text: str, path: str) -> EngineLog:
    """The sums of all intervals in a server's log. UserError that names a line whose figures contradict each other."""
    found = []
    for where, line in log_lines(text, path):
        if LINE not in line:
            continue
        drafted, accepted = (
            number(rf"\b{x}: (\d+) tokens", line, where) for x in ("Drafted", "Accepted")
        )
        if drafted is None or accepted is None:
            raise UserError(
                f"{where} has no numbers of accepted and drafted tokens: the line is cut off, drop it"
            )
        if drafted == 0 == accepted:
            continue
        rate = number(r"[Dd]raft acceptance rate: ([\d.]+)%", line, where, float)
        if rate is not None and (drafted == 0 or abs(100 * accepted / drafted - rate) > 0.051):
            raise UserError(
                f"{where}: {accepted} accepted of {drafted} drafted tokens are not {rate}%: the line is damaged"
            )
        length = number(r"Mean acceptance length: ([\d.]+)", line, where, float)
        rates = numbers(r"Per-position acceptance rate: ([\d., ]+)", line)
        found.append(recover(PrintedLine(int(drafted), int(accepted), length, rates), where))
    if not found:
        raise UserError(
            f"{path} drafted no token: speculative decoding was off, or nothing was asked"
        )
    total = pool([x.counts for x in found])
    notes = [
        f"totals of {len(found)} intervals that vLLM logged; its rounds are those with a draft"
    ]
    if total.rounds is None:
        notes.append("these lines do not tell the rounds, so there is no τ: take /metrics")
    elif any(x.fewest < x.most for x in found):
        low, high = (
            1 + total.accepted / sum(rounds)
            for rounds in ([x.most for x in found], [x.fewest for x in found])
        )
        notes.append(
            "rounds follow from lengths of two digits (/metrics has them exactly), so τ lies between "
            f"{low - 5e-5:.4f} and {high + 5e-5:.4f}"
        )
    return EngineLog(path, "vllm", [total], per_request=False, notes=tuple(notes))
