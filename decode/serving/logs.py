"""Reads a log of any engine: JSON lines of responses, batch files, streams of events, a /metrics dump, or what a server
printed; and which requests failed.
"""

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from decode.common.errors import UserError
from decode.common.files import parse_json, parse_jsonl, read_text
from decode.common.secret_patterns import redact
from decode.serving import log_counts as log
from decode.serving.checker import ENGINES
from decode.serving.engine import LogReader
from decode.serving.log_counts import EngineLog, FailedRequest, Format, RequestCounts, Response

OWN = "draftsmith"
COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
PREFIX, END = "data:", "[DONE]"  # what begins a server-sent event, and the last event of a stream
BROKE_OFF = "the stream broke off"
HOLDERS = ("response", "body")
"""Under these keys lines of batch files hold a response, one within the other."""

Line = tuple[str, Any]
"""("path:line", value) of one request: a JSON value, or a text that stands in place of one."""


def _own_counts(line: Response, where: str) -> RequestCounts:
    """Of a line of our outputs.jsonl, with positions. UserError for rounds that are no pairs of counts."""
    histograms: dict[int, list[int]] = {}
    try:
        rounds = [(drafted, accepted) for drafted, accepted in line["rounds"]]
        for drafted, accepted in rounds:
            histograms.setdefault(drafted, [0] * (drafted + 1))[range(drafted + 1)[accepted]] += 1
    except (KeyError, TypeError, ValueError, IndexError):
        raise UserError(
            f"{where} is no line of outputs.jsonl: its rounds are [drafted, accepted]"
        ) from None
    drafted, accepted = (sum(pair[i] for pair in rounds) for i in (0, 1))
    counts = RequestCounts(len(rounds), drafted, accepted, *log.by_position(histograms))
    return replace(
        log.checked(counts, where), prompt=f"{line.get('task', '')}/{line.get('id', '')}"
    )


READERS: dict[str, LogReader] = {
    **{name: engine.log for name, engine in ENGINES.items() if engine.log is not None},
    OWN: LogReader(
        lambda body: all(isinstance(body.get(key), list) for key in ("rounds", "output_ids")),
        _own_counts,
        note="rounds are recorded before an answer is cut at its end",
        figures="report.json has τ cut at the end of answers, and α pooled.",
    ),
}
"""By the names in settings, our own outputs.jsonl among them."""


def read_log(path: str, engine: Format = "auto", before: str = "") -> EngineLog:
    """The log in a file. UserError that says what is missing if it is of no engine, or not of `engine`. `before` is an
    earlier dump of the same server, which is subtracted. Requests that failed are named, and left out."""
    text = read_text(path)
    if text.lstrip().startswith('{"log":"'):  # Docker's own log of what a container printed
        text = "".join(str(value.get("log", "")) for _, value in parse_jsonl(text, path))
    text = COLOURS.sub("", text)
    if not text.strip():
        raise UserError(f"{path} is empty: give a log of vLLM, SGLang or llama.cpp")
    name = _printed_by(text, engine, path)
    lines = [] if name else read_lines(text, path)
    if before and (name or lines):
        kind = "a server's own log" if name else "responses"
        raise UserError(f"{path} holds {kind}: --before is for /metrics dumps, leave it out")
    if lines:
        return _read_responses(lines, engine, path)
    if not name and text.lstrip()[0] in "{[":
        raise UserError(f"{path} has no response: give a log of vLLM, SGLang or llama.cpp")
    printed = READERS[name].printed if name else None
    if printed is not None:
        return printed(text, path)
    dumps = [n for n, x in READERS.items() if x.dump and f"\n{n}:" in f"\n{text}"]
    if engine == "auto" and len(dumps) != 1:
        raise UserError(
            f"{path} is no log of vLLM, SGLang or llama.cpp: give JSON lines or a /metrics dump"
        )
    dump = READERS[dumps[0] if engine == "auto" else engine].dump
    if dump is None:
        raise UserError(f"{path} is no JSON: give the lines of outputs.jsonl")
    return dump(path, before)


def _read_responses(lines: Sequence[Line], engine: Format, path: str) -> EngineLog:
    """The log of responses; `lines` has a text in place of each answer that is no JSON."""
    failed, good = list[FailedRequest](), list[tuple[str, Response, Any]]()
    for index, (where, line) in enumerate(lines):
        reason = failure(line)
        if reason is None:
            good.append((where, response_of(where, line), line))
        else:
            failed.append(FailedRequest(where, reason, index, prompt_of(line)))
    if not good:
        raise UserError(
            f"{path}: all {len(lines)} requests failed, the first with {failed[0].reason!r}: ask again"
        )
    where, first, _ = good[0]
    wrote = (name for name, reader in READERS.items() if reader.wrote(first))
    name = engine if engine != "auto" else next(wrote, "")
    if not name:
        raise UserError(
            f"{where} has neither metrics (vLLM), meta_info (SGLang) nor timings (llama.cpp): log whole responses"
        )
    reader, requests = READERS[name], []
    for where, body, line in good:
        counts = reader.response(body, where)
        requests.append(replace(counts, prompt=counts.prompt or prompt_of(line)))
    if name == OWN:  # the acceptance of several methods or temperatures is not one figure
        seen = {f"{x.get('method', '')} {x.get('temperature', '')}".strip() for _, x, _ in good}
        if len(seen) > 1:
            raise UserError(f"{path} has lines of {' and '.join(sorted(seen))}: keep those of one")
    if all(r.drafted == 0 for r in requests):
        raise UserError(f"{path}: no response drafted a token: speculative decoding was off")
    notes = [reader.note]
    if failed:
        named = ", ".join(f"{x.where} ({x.reason})" for x in failed[:5])
        more = f" and {len(failed) - 5} more" if len(failed) > 5 else ""
        notes.append(
            f"{len(failed)} of {len(lines)} requests failed and are in no figure: {named}{more}"
        )
    return EngineLog(path, name, requests, notes=tuple(notes), failed=tuple(failed))


def _printed_by(text: str, engine: Format, path: str) -> str:
    """The engine whose own log this is; empty for JSON and dumps. UserError for a log of two engines."""
    own = [line for line in text.split("\n") if not line.startswith(("{", '"', PREFIX))]
    names = {n for n, x in READERS.items() if x.mark and any(map(x.mark.search, own))}
    if engine in names:
        return engine
    if len(names) > 1:
        raise UserError(
            f"{path} has lines of {' and '.join(sorted(names))}: say --format, or give one server's log"
        )
    return names.pop() if names and engine == "auto" else ""


# ---- files of responses ----


def read_lines(text: str, path: str) -> list[Line]:
    """Each response of JSON lines or of a stream; none for a text that is neither. A line of text among JSON lines,
    such as "Internal Server Error", is what a request was answered with. So is a last line that was cut off."""
    if _is_stream(text):
        return _streamed_answers(text, path)
    numbered = [(f"{path}:{n}", x.strip()) for n, x in enumerate(text.split("\n"), 1) if x.strip()]
    if not any(line.startswith(("{", "[")) for _, line in numbered):
        return []
    values = _json_values(text, path, numbered)
    flat = [(w, x) for w, value in values for x in (value if isinstance(value, list) else [value])]
    objects = [str(x.get("object", "")) if isinstance(x, Mapping) else "" for _, x in flat]
    if flat and all(x.endswith(".chunk") for x in objects):  # of a streamed chat
        return _merge_chunks(flat)
    return [(where, _with_stream(value, where)) for where, value in flat]


def _json_values(text: str, path: str, numbered: Sequence[tuple[str, str]]) -> list[Line]:
    """The value of each line, a text where it is no JSON; of a file of one value over several lines that value."""
    with contextlib.suppress(UserError):
        return [(f"{path}:1", parse_json(text, path, ""))]
    values: list[Line] = []
    for where, line in numbered:
        try:
            is_json = line[0] in "{["
            value = parse_json(line, where, "write one JSON value per line") if is_json else line
        except UserError:
            if where != numbered[-1][0] or not values:
                raise
            value = BROKE_OFF
        values.append((where, value))
    return values


def _with_stream(line: Any, where: str) -> Any:
    """The line, with a response that was saved as the text of its stream put together."""
    for key in HOLDERS if isinstance(line, Mapping) else ():
        saved = line.get(key)
        if isinstance(saved, str) and _is_stream(saved):
            made = _streamed_answers(saved, where)
            return {**line, key: made[0][1] if made else None}
    return line


# ---- streams ----


@dataclass
class _Answer:
    where: str
    body: dict[str, Any] = field(default_factory=dict)
    finished: bool = False


def _is_stream(text: str) -> bool:
    return any(line.startswith(PREFIX) for line in text.split("\n"))


def _streamed_answers(text: str, path: str) -> list[Line]:
    """Each streamed answer, with the newest value of each field of its chunks. Chunks of several answers may alternate
    if they have ids. An answer that ended before its last chunk has an "error": that of an event which is no JSON, or
    that it broke off, as in the middle of the last line. Lines that are neither events nor JSON objects, such as
    comments and headers, are passed over."""
    values: list[Line] = []
    lines = text.rstrip().split("\n")
    for number, raw in enumerate(lines, start=1):
        line, where = raw.strip(), f"{path}:{number}"
        data = line.removeprefix(PREFIX).strip()
        if data == END:
            values.append((where, END))
        elif data.startswith("{"):
            try:
                values.append((where, parse_json(data, where, "save the stream as it came")))
            except UserError:
                if number < len(lines):
                    raise
                values.append((where, {"error": BROKE_OFF}))
        elif data and line.startswith(PREFIX):
            values.append((where, {"error": data}))
    return _merge_chunks(values)


def _merge_chunks(values: Iterable[Line]) -> list[Line]:
    """The answers that these chunks make; a value that is END closes those that are complete."""
    open_answers: dict[str, _Answer] = {}
    found: list[_Answer] = []
    for where, chunk in values:
        if chunk == END:
            closing = {k: x for k, x in open_answers.items() if x.finished} or open_answers
            for key in list(closing):
                open_answers.pop(key).finished = True
            continue
        own, slot = chunk.get("id") or log.part(chunk, "meta_info").get("id"), chunk.get("id_slot")
        key = str(own) if own is not None else "" if slot is None else f"slot {slot}"
        if not key and open_answers:  # such as an error that ends the stream
            key = next(reversed(open_answers))
        if key not in open_answers:
            open_answers[key] = _Answer(where)
            found.append(open_answers[key])
        answer = open_answers[key]
        answer.body |= {name: value for name, value in chunk.items() if value not in (None, [])}
        choice, last = log.first_choice(chunk), chunk.get("stop") is True
        reasons = (choice.get("finish_reason"), log.part(chunk, "meta_info").get("finish_reason"))
        answer.finished |= last or "message" in choice or reasons != (None, None)
        if last or chunk.get("error"):  # of /completion of llama-server, or of any that failed
            open_answers.pop(key)
    for answer in found:
        if not answer.finished:
            answer.body.setdefault("error", BROKE_OFF)
    return [(answer.where, answer.body) for answer in found]


# ---- one line ----


def response_of(where: str, line: Any) -> Response:
    """The response in a line: the line itself, or `response` or `response.body` of it."""
    for key in HOLDERS:
        line = log.part(line, key) or line
    if not isinstance(line, Mapping):
        raise UserError(f"{where} is no response: write one JSON object per line")
    return line


def prompt_of(line: Any) -> str:
    """What names the prompt of a line; empty: nothing does. A server's own ids are random and name nothing."""
    holders = [x for x in _levels(line) if isinstance(x, Mapping)]
    keys = ("custom_id", "prompt_id", "prompt")
    names = [x[key] for key in keys for x in (*holders[:1], *holders[-1:]) if x.get(key)]
    return str(names[0]) if names else ""


def failure(line: Any) -> str | None:
    """Why the request of this line has no answer; None if it has one."""
    if isinstance(line, str):
        return _short(line)
    holders = _levels(line)
    for holder in holders:
        if holder is None or isinstance(holder, str):
            error = line.get("error") if isinstance(line, Mapping) else None
            return _short(error or holder or "no response")
        if not isinstance(holder, Mapping):
            return None
        code = holder.get("status_code", holder.get("status"))
        if isinstance(code, int) and code >= 400:
            said = _message(holder.get("error") or holder.get("body") or "")
            return _short(f"HTTP {code} {said}".strip())
        if holder.get("error"):
            return _short(holder["error"])
        if holder.get("object") == "error" or set(holder) == {"detail"}:
            return _short(holder)
    choice = log.first_choice(holders[-1])
    for answer in (log.part(holders[-1], "meta_info"), log.part(choice, "meta_info"), choice):
        end = log.part(answer, "finish_reason").get("type") or answer.get("finish_reason")
        if end in ("abort", "error"):
            return _short(f"ended with {end!r}")
    return None


def _levels(line: Any) -> list[Any]:
    """The line, and what lies in its HOLDERS: not an answer's text, which has its counts beside it."""
    levels = [line]
    for key in HOLDERS:
        outer = levels[-1]
        if isinstance(outer, Mapping) and key in outer:
            counted = outer.keys() & {"timings", "meta_info", "metrics", "rounds"}
            if isinstance(outer[key], Mapping) or not counted:
                levels.append(outer[key])
    return levels


def _message(error: Any) -> str:
    """What an error says, of any of the forms in which servers write it."""
    while isinstance(error, Mapping):
        keys = ("error", "message", "detail", "code", "type")
        error = next((error[key] for key in keys if error.get(key)), "error")
    return str(error)


def _short(error: Any) -> str:
    return redact(" ".join(_message(error).split()))[:80]
