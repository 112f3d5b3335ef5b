"""SGLang: responses with meta_info (spec_verify_ct and others), and /metrics dumps.

Its spec_accept_length is completion_tokens ÷ verification steps: the first token, which prefill gives, counts there and
not here. Its gauges are of the last interval, not of the whole run.
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

ACCEPTED = ("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num")
DRAFTED = ("spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num")
HISTOGRAM = ("spec_correct_drafts_histogram", "spec_accept_histogram")
"""Newest name first."""


def meta_info(body: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """meta_info of /generate, or that of the first choice of a chat or completion."""
    choices = body.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    for holder in (body, choice):
        if isinstance(holder, Mapping) and isinstance(holder.get("meta_info"), Mapping):
            found: Mapping[str, Any] = holder["meta_info"]
            return found
    return None


def from_response(body: Mapping[str, Any], where: str) -> RequestCounts:
    """The counts of one response. UserError without meta_info, or if it says nothing of speculation."""
    found = meta_info(body)
    if found is None:
        raise UserError(f"{where} has no meta_info: log what /generate of SGLang answers")
    if "spec_verify_ct" not in found and read_count(found, "completion_tokens", where) <= 1:
        return RequestCounts(0, 0, 0)  # the answer ended with prefill's token
    rounds = read_count(found, "spec_verify_ct", where)
    accepted, drafted = (_first(found, names, where) for names in (ACCEPTED, DRAFTED))
    accepted_at: tuple[int, ...] = ()
    reached_at: tuple[int, ...] = ()
    key = next((name for name in HISTOGRAM if name in found), None)
    if key is not None and rounds > 0:
        histogram = read_histogram(found[key], key, where)
        k = drafted // rounds
        histogram += [0] * (k + 1 - len(histogram))
        if sum(histogram) != rounds:
            raise UserError(f"{where}: {key} is not of {rounds} steps: the log is damaged")
        accepted_at, reached_at = by_position({len(histogram) - 1: histogram})
        if drafted != k * rounds or len(histogram) != k + 1:
            reached_at = ()  # rounds of several lengths
    length = found.get("spec_accept_length")
    return checked(
        RequestCounts(rounds, drafted, accepted, accepted_at, reached_at, engine_length=length),
        where,
    )


def _first(found: Mapping[str, Any], names: tuple[str, ...], where: str) -> int:
    """The count under the first of the names that is there."""
    return read_count(found, next((name for name in names if name in found), names[0]), where)


def from_dump(path: str, before: str = "") -> EngineLog:
    """The totals of a /metrics dump, less those of an earlier one; with its gauges.

    SGLang counts neither drafted nor accepted tokens there. Accepted ones follow from generated tokens: each request
    has one from prefill and each verification step one that the target adds.
    """
    samples = prometheus.read_dump(path, before)
    rounds, generated, requests = (
        prometheus.total(samples, f"sglang:{name}", path)
        for name in ("spec_verify_calls", "generation_tokens", "num_requests")
    )
    accepted = generated - requests - rounds
    if accepted < 0:
        raise UserError(
            f"{path}: {generated} tokens of {requests} requests in {rounds} steps: not all were speculated"
        )
    gauges: dict[str, list[float]] = {}
    for (name, _), value in samples.items():
        if name in prometheus.GAUGES:
            gauges.setdefault(name, []).append(value)
    return EngineLog(
        path,
        "sglang",
        [RequestCounts(rounds, 0, accepted)],
        per_request=False,
        gauges={name: sum(values) / len(values) for name, values in gauges.items()},
        notes=("accepted tokens derived: generated − requests − verification steps",),
    )
