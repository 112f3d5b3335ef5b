"""SGLang: responses with meta_info (spec_verify_ct and others), /metrics dumps, and the server's own log.

Its spec_accept_length is completion_tokens ÷ verification steps: the first token, which prefill gives, counts there and
not here. Its gauges are of the last interval, not of the whole run.
"""

import re
from collections.abc import Mapping, Sequence
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
from eval.engine_logs.printed import LENGTH_ERROR, log_lines

ACCEPTED = ("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num")
DRAFTED = ("spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num")
HISTOGRAM = ("spec_correct_drafts_histogram", "spec_accept_histogram")
"""Newest name first."""
LINE = re.compile(r"Decode batch.*?\baccept len: (\S+?),(?: accept rate: (\S+?),)?")
"""A line of the server's log that tells how a few dozen steps were accepted."""
MOST_DRAFTS = 256
"""Tokens that a round drafts at most when their number is looked for."""


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


def from_text(text: str, path: str) -> EngineLog:
    """The figures of a server's log, as means over its lines: SGLang prints no counts there, so nothing is pooled.

    Its accept len is τ of some dozens of steps. Its accept rate counts the target's token among the accepted and the
    drafted ones in older versions and not in newer ones; ours follows from accept len, and from the number of drafts
    that makes both figures agree in every line under one of these readings. If more than one does, it is not given.
    """
    pairs: list[tuple[float, float | None]] = []
    for where, line in log_lines(text, path):
        found = LINE.search(line)
        if found is None:
            continue
        try:
            length, rate = float(found[1]), None if found[2] is None else float(found[2])
        except ValueError:
            raise UserError(
                f"{where}: accept len or rate is no number: the line is damaged"
            ) from None
        if not 1 <= length < MOST_DRAFTS or not (rate is None or 0 <= rate <= 1):
            raise UserError(
                f"{where}: an accept len of {found[1]} with an accept rate of {found[2]} is impossible: the line is "
                "damaged"
            )
        pairs.append((length, rate))
    if not pairs:
        raise UserError(f"{path} has no accept len: speculative decoding was off")
    lengths = [length for length, _ in pairs]
    figures = {"tau": sum(lengths) / len(lengths)}
    drafts = _drafts_per_round(pairs)
    if drafts is not None:
        figures["acceptance_rate"] = (figures["tau"] - 1) / drafts
    one = len(pairs) == 1
    notes = [
        "SGLang's log has no counts, so intervals cannot be pooled: take meta_info or /metrics"
    ]
    if drafts is None:
        notes.append(
            "these lines do not tell how many tokens a round drafts, so there is no acceptance rate"
        )
    return EngineLog(
        path,
        "sglang",
        [],
        per_request=False,
        gauges={} if one else figures,
        gauges_of=f"mean of {len(pairs)} intervals",
        given=figures if one else {},
        notes=tuple(notes),
    )


def _drafts_per_round(pairs: Sequence[tuple[float, float | None]]) -> int | None:
    """Drafted tokens of a round that explain all pairs of accept len and rate; None unless exactly one number does."""
    if any(rate is None for _, rate in pairs):
        return None
    found: set[int] = set()
    for drafts in range(1, MOST_DRAFTS):
        # (what is not counted of the length, what the rate divides by), in older and newer versions
        for bonus, divisor in ((0, drafts + 1), (1, drafts)):
            if all(
                abs((length - bonus) / divisor - rate) <= LENGTH_ERROR * (1 + 1 / divisor)
                for length, rate in pairs
                if rate is not None
            ):
                found.add(drafts)
    return found.pop() if len(found) == 1 else None
