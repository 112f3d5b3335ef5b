"""llama.cpp: responses of llama-server with timings.draft_n and timings.draft_n_accepted, and the server's own log.

Verification steps are not in the response. Each pass after prefill emits its accepted drafts and one more token, so
they are predicted_n − 1 − draft_n_accepted; passes that drafted nothing are among them, and the last one may have been
cut at the end of the answer. Positions are not in the response either. The log of newer versions tells the rounds with
a draft and the positions too.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from decode.common.errors import UserError
from eval.engine_logs.counts import EngineLog, RequestCounts, checked, read_count
from eval.engine_logs.printed import PrintedLine, log_lines, number, numbers, recover

LINE = re.compile(r"\bdraft acceptance(?: rate)? = ")
"""A line of the server's log that counts the drafts of a request."""
TASK = re.compile(r"\bid +\d+ \| task +(-?\d+) \|")
LONGEST_DRAFT = 64
"""Tokens of the longest draft of any kind that llama-server has by default: so many a stop string may cut off."""


def from_response(body: Mapping[str, Any], where: str) -> RequestCounts:
    """The counts of one response. UserError without timings. A response without draft_n drafted nothing."""
    timings = body.get("timings")
    if not isinstance(timings, Mapping):
        raise UserError(f"{where} has no timings: log what llama-server answers")
    predicted = read_count(timings, "predicted_n", where)
    if "draft_n" not in timings:
        return RequestCounts(max(0, predicted - 1), 0, 0)
    drafted, accepted = (read_count(timings, key, where) for key in ("draft_n", "draft_n_accepted"))
    checked(RequestCounts(None, drafted, accepted), where)
    stop = str(body.get("stop_type", "")), _finish_reason(body)
    cut = LONGEST_DRAFT if "word" in stop or "stop" in stop else 0
    return checked(
        RequestCounts(_rounds(predicted, drafted, accepted, cut, where), drafted, accepted), where
    )


def check_usage(body: Mapping[str, Any], tokens: int, where: str) -> None:
    """UserError if the timings are of an answer of another length than the response's usage says."""
    predicted = body["timings"].get("predicted_n")
    if predicted != tokens:
        raise UserError(
            f"{where}: timings of {predicted} tokens contradict the answer's length of {tokens}: the counts are of "
            "another request, or the log is damaged"
        )


def _finish_reason(body: Mapping[str, Any]) -> str:
    choices = body.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    return str(choice.get("finish_reason")) if isinstance(choice, Mapping) else ""


def _rounds(tokens: int, drafted: int, accepted: int, cut: int, where: str) -> int:
    """Passes after prefill of an answer of `tokens`. UserError if it is shorter than its accepted tokens.

    A stop string may have cut off up to `cut` of them.
    """
    if accepted > max(0, tokens - 1) + cut:
        raise UserError(
            f"{where}: {accepted} accepted of {drafted} drafted tokens contradict the answer's length of {tokens}: "
            "the counts are of another request, or the log is damaged"
        )
    return max(int(drafted > 0), tokens - 1 - accepted)


@dataclass
class _PrintedRequest:
    """What the log says of one request."""

    task: int
    tokens: int | None = None
    line: PrintedLine | None = None
    where: str = ""


def from_text(text: str, path: str) -> EngineLog:
    """The requests in a server's log, in the order in which they were asked. UserError that names a line whose figures
    contradict each other. A request without a line on drafts drafted nothing."""
    current: dict[int, _PrintedRequest] = {}
    requests: list[_PrintedRequest] = []
    task = -1
    for where, line in log_lines(text, path):
        named = TASK.search(line)
        task = int(named[1]) if named else task  # older versions name it once, above several lines
        if "prompt eval time =" in line and "tokens (" in line:
            current[task] = _PrintedRequest(task)
            requests.append(current[task])
        elif "eval time =" in line and task in current:
            tokens = number(r"/ +(\d+) tokens", line, where)
            current[task].tokens = None if tokens is None else int(tokens)
        elif LINE.search(line):
            if (
                task not in current or current[task].line is not None
            ):  # the log begins or goes on here
                current[task] = _PrintedRequest(task)
                requests.append(current[task])
            current[task].line, current[task].where = _printed_line(line, where), where
        elif "acc per pos = (" in line and task in current and current[task].line is not None:
            known, rates = current[task].line, numbers(r"acc per pos = \(([\d., ]*)\)", line)
            assert known is not None
            current[task].line = PrintedLine(known.drafted, known.accepted, known.length, rates)
    told = [x for x in requests if x.tokens is not None or x.line is not None]
    if len({x.task for x in told}) == len(told):  # else the server was started again
        told.sort(key=lambda x: x.task)
    counts = [_read_printed(x) for x in told]
    if not any(x.drafted for x in counts):
        raise UserError(f"{path}: no request drafted a token: speculative decoding was off")
    notes = [
        "rounds derived: tokens of the answer − 1 − accepted; a request without a line on drafts drafted nothing"
    ]
    if any(x.rounds is None for x in counts):
        notes.append(
            "not every request has its eval time in this log, so its rounds and τ are not known"
        )
    return EngineLog(path, "llamacpp", counts, notes=tuple(notes))


def _printed_line(line: str, where: str) -> PrintedLine:
    found = re.search(r"= *([\d.]+) *\( *(\d+) accepted / *(\d+) generated\)", line)
    if found is None:
        raise UserError(
            f"{where} has no numbers of accepted and generated tokens: the line is cut off, drop it"
        )
    rate, accepted, drafted = float(found[1]), int(found[2]), int(found[3])
    if drafted == 0 or abs(accepted / drafted - rate) > 2e-5:
        raise UserError(
            f"{where}: {accepted} accepted of {drafted} drafted tokens are not {found[1]}: the line is damaged"
        )
    length = number(r"mean (?:len|acceptance length) = *([\d.]+)", line, where, float)
    rates = numbers(r"acceptance rate per position = \(([\d., ]*)\)", line)
    return PrintedLine(drafted, accepted, length, rates)


def _read_printed(request: _PrintedRequest) -> RequestCounts:
    tokens, line = request.tokens, request.line
    if line is None:
        return RequestCounts(max(0, (tokens or 0) - 1), 0, 0)
    counts = recover(line, request.where).counts
    if tokens is None:
        return RequestCounts(None, line.drafted, line.accepted, engine_length=line.length)
    # a stop string cuts off no more than a draft has positions
    rounds = _rounds(tokens, line.drafted, line.accepted, len(line.rates), request.where)
    known = counts.rounds or 0
    if known > rounds + max(1, len(line.rates)):
        raise UserError(
            f"{request.where}: {known} rounds with a draft and {line.accepted} accepted tokens contradict the answer's "
            f"length of {tokens}: the log is damaged"
        )
    return checked(
        replace(counts, rounds=max(rounds, known), engine_length=line.length), request.where
    )
