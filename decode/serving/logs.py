"""Reads a log of any engine: JSON lines of responses, streams of them, a /metrics dump, or what a server printed."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from decode.common.errors import UserError
from decode.common.files import read_text
from decode.serving.checker import ENGINES
from decode.serving.engine import LogReader
from decode.serving.log_counts import (
    EngineLog,
    FailedRequest,
    RequestCounts,
    Response,
    by_position,
    checked,
)
from decode.serving.log_responses import (
    PREFIX,
    Line,
    failure,
    prompt_of,
    read_lines,
    response_of,
    without_docker,
)

Format = Literal["auto", "vllm", "sglang", "llamacpp", "draftsmith"]
OWN = "draftsmith"
COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
MOST_NAMED = 5
"""Failed requests that a note names."""


def _is_round(pair: Any) -> bool:
    whole = isinstance(pair, list) and len(pair) == 2 and all(type(n) is int for n in pair)
    return whole and 0 <= pair[1] <= pair[0]


def _own_counts(line: Response, where: str) -> RequestCounts:
    """Of a line of our outputs.jsonl, with positions. UserError for rounds that are no pairs of counts."""
    rounds = line.get("rounds")
    if not isinstance(rounds, list) or not all(_is_round(pair) for pair in rounds):
        raise UserError(f"{where} is no line of outputs.jsonl: its rounds are [drafted, accepted]")
    histograms: dict[int, list[int]] = {}
    for drafted, accepted in rounds:
        histograms.setdefault(drafted, [0] * (drafted + 1))[accepted] += 1
    drafted, accepted = (sum(pair[i] for pair in rounds) for i in (0, 1))
    counts = RequestCounts(len(rounds), drafted, accepted, *by_position(histograms))
    name = f"{line.get('task', '')}/{line.get('id', '')}"
    return replace(checked(counts, where), prompt=name)


READERS: dict[str, LogReader] = {
    **{name: engine.log for name, engine in ENGINES.items() if engine.log is not None},
    OWN: LogReader(
        lambda body: (
            isinstance(body.get("rounds"), list) and isinstance(body.get("output_ids"), list)
        ),
        _own_counts,
        note="rounds are recorded before an answer is cut at its end",
        figures="report.json has τ cut at the end of answers, and α pooled.",
    ),
}
"""By the names in settings, our own outputs.jsonl among them."""


def read_log(path: str, engine: Format = "auto", before: str = "") -> EngineLog:
    """The log in a file. UserError that says what is missing if it is of no engine, or not of `engine`.

    `before` is an earlier dump of the same server, which is subtracted. Requests that failed are named, and left out.
    """
    text = COLOURS.sub("", without_docker(read_text(path), path))
    if not text.strip():
        raise UserError(f"{path} is empty: give a log of vLLM, SGLang or llama.cpp")
    printed = _engine_of_text(text, engine, path)
    lines = [] if printed else read_lines(text, path)
    if before and (printed or lines):
        kind = "a server's own log" if printed else "responses"
        raise UserError(f"{path} holds {kind}: --before is for /metrics dumps, leave it out")
    if lines:
        return _read_responses(lines, engine, path)
    if not printed and text.lstrip()[0] in "{[":
        raise UserError(f"{path} has no response: give a log of vLLM, SGLang or llama.cpp")
    name = printed or (engine if engine != "auto" else _engine_of_dump(text, path))
    reader = READERS[name]
    if printed and reader.printed:
        return reader.printed(text, path)
    if reader.dump is None:
        raise UserError(f"{path} is no JSON: give the lines of outputs.jsonl")
    return reader.dump(path, before)


def _read_responses(lines: Sequence[Line], engine: Format, path: str) -> EngineLog:
    """The log of responses; `lines` has a text in place of each answer that is no JSON."""
    failed = [
        FailedRequest(where, reason, index, prompt_of(line))
        for index, (where, line) in enumerate(lines)
        if (reason := failure(line)) is not None
    ]
    gone = {x.index for x in failed}
    good = [(w, response_of(w, x), x) for i, (w, x) in enumerate(lines) if i not in gone]
    if not good:
        raise UserError(
            f"{path}: all {len(lines)} requests failed, the first with {failed[0].reason!r}: ask again"
        )
    name = engine if engine != "auto" else _engine_of_response(good[0][1], good[0][0])
    reader = READERS[name]
    requests = []
    for where, body, line in good:
        counts = reader.response(body, where)
        requests.append(replace(counts, prompt=counts.prompt or prompt_of(line)))
    if name == OWN:
        _check_one_method([body for _, body, _ in good], path)
    if all(r.drafted == 0 for r in requests):
        raise UserError(f"{path}: no response drafted a token: speculative decoding was off")
    notes = [reader.note]
    if failed:
        named = ", ".join(f"{x.where} ({x.reason})" for x in failed[:MOST_NAMED])
        more = f" and {len(failed) - MOST_NAMED} more" if len(failed) > MOST_NAMED else ""
        notes.append(
            f"{len(failed)} of {len(lines)} requests failed and are in no figure: {named}{more}"
        )
    return EngineLog(path, name, requests, notes=tuple(notes), failed=tuple(failed))


def _check_one_method(lines: Sequence[Response], path: str) -> None:
    """UserError for lines of several methods or temperatures, whose acceptance is not one figure."""
    seen = sorted({f"{x.get('method', '')} {x.get('temperature', '')}".strip() for x in lines})
    if len(seen) > 1:
        raise UserError(f"{path} has lines of {' and '.join(seen)}: keep those of one")


def _engine_of_text(text: str, engine: Format, path: str) -> str:
    """The engine whose own log this is; empty for JSON and dumps. UserError for a log of two engines."""
    names: set[str] = set()
    for line in text.split("\n"):
        if not line.startswith(("{", '"', PREFIX)):
            names |= {name for name, x in READERS.items() if x.mark and x.mark.search(line)}
    if engine in names:
        return engine
    if len(names) > 1:
        raise UserError(
            f"{path} has lines of {' and '.join(sorted(names))}: say --format, or give one server's log"
        )
    return names.pop() if names and engine == "auto" else ""


def _engine_of_dump(text: str, path: str) -> str:
    names = [name for name, x in READERS.items() if x.dump and f"\n{name}:" in f"\n{text}"]
    if len(names) != 1:
        raise UserError(
            f"{path} is no log of vLLM, SGLang or llama.cpp: give JSON lines or a /metrics dump"
        )
    return names[0]


def _engine_of_response(body: Response, where: str) -> str:
    for name, reader in READERS.items():
        if reader.wrote(body):
            return name
    raise UserError(
        f"{where} has neither metrics (vLLM), meta_info (SGLang) nor timings (llama.cpp): log whole responses"
    )
