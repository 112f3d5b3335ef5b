"""What a client saved of its requests: JSON lines, batch files, streams of events; and which requests failed."""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from decode.common.errors import UserError
from decode.common.files import parse_json, parse_jsonl
from decode.common.secret_patterns import redact
from decode.serving.log_counts import Response, first_choice, part

PREFIX = "data:"
"""Begins a server-sent event."""
END = "[DONE]"
BROKE_OFF = "the stream broke off"
HOLDERS = ("response", "body")
"""Under these keys lines of batch files hold a response, one within the other."""
COUNTED = {"timings", "meta_info", "metrics", "rounds"}
"""A response has one of these beside its answer."""
PROMPT_KEYS = ("custom_id", "prompt_id", "prompt")
"""What may name a line's prompt; a server's own ids are random and name nothing."""

Line = tuple[str, Any]
"""("path:line", value) of one request: a JSON value, or a text that stands in place of one."""


def read_lines(text: str, path: str) -> list[Line]:
    """Each response of JSON lines or of a stream; none for a text that is neither.

    A line of text among JSON lines, such as "Internal Server Error", is what a request was answered with. So is a last
    line that was cut off.
    """
    if _is_stream(text):
        return _streamed_answers(text, path)
    numbered = [(f"{path}:{n}", x.strip()) for n, x in enumerate(text.split("\n"), 1) if x.strip()]
    if not any(line.startswith(("{", "[")) for _, line in numbered):
        return []
    values = _json_values(text, path, numbered)
    flat = [(w, x) for w, value in values for x in (value if isinstance(value, list) else [value])]
    if flat and all(_is_chunk(value) for _, value in flat):
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
    if isinstance(line, Mapping):
        for key in HOLDERS:
            saved = line.get(key)
            if isinstance(saved, str) and _is_stream(saved):
                made = _streamed_answers(saved, where)
                return {**line, key: made[0][1] if made else None}
    return line


def without_docker(text: str, path: str) -> str:
    """The text that a container printed, if the file is Docker's own log of it."""
    if not text.lstrip().startswith('{"log":"'):
        return text
    return "".join(str(value.get("log", "")) for _, value in parse_jsonl(text, path))


# ---- streams ----


@dataclass
class _Answer:
    where: str
    body: dict[str, Any] = field(default_factory=dict)
    finished: bool = False


def _is_stream(text: str) -> bool:
    return any(line.startswith(PREFIX) for line in text.split("\n"))


def _is_chunk(line: Any) -> bool:
    """Whether a JSON value is one chunk of a streamed chat."""
    return isinstance(line, Mapping) and str(line.get("object", "")).endswith(".chunk")


def _streamed_answers(text: str, path: str) -> list[Line]:
    """Each streamed answer, with the newest value of each field of its chunks.

    Chunks of several answers may alternate if they have ids. An answer that ended before its last chunk has an "error":
    that of an event which is no JSON, or that it broke off, as in the middle of the last line. Lines that are neither
    events nor JSON objects, such as comments and headers, are passed over.
    """
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
        key = _chunk_key(chunk)
        if not key and open_answers:  # such as an error that ends the stream
            key = next(reversed(open_answers))
        if key not in open_answers:
            open_answers[key] = _Answer(where)
            found.append(open_answers[key])
        answer = open_answers[key]
        answer.body |= {name: value for name, value in chunk.items() if value not in (None, [])}
        answer.finished = answer.finished or _finishes(chunk)
        # The last chunk of /completion of llama-server, or of any that failed.
        if chunk.get("stop") is True or chunk.get("error"):
            open_answers.pop(key)
    for answer in found:
        if not answer.finished:
            answer.body.setdefault("error", BROKE_OFF)
    return [(answer.where, answer.body) for answer in found]


def _chunk_key(chunk: Response) -> str:
    own = chunk.get("id") or part(chunk, "meta_info").get("id")
    return str(own if own is not None else f"slot {chunk['id_slot']}" if "id_slot" in chunk else "")


def _finishes(chunk: Response) -> bool:
    choice = first_choice(chunk)
    ends = (choice.get("finish_reason"), part(chunk, "meta_info").get("finish_reason"))
    return "message" in choice or chunk.get("stop") is True or any(x is not None for x in ends)


# ---- one line ----


def response_of(where: str, line: Any) -> Response:
    """The response in a line: the line itself, or `response` or `response.body` of it."""
    for key in HOLDERS:
        if isinstance(line, Mapping) and isinstance(line.get(key), Mapping):
            line = line[key]
    if not isinstance(line, Mapping):
        raise UserError(f"{where} is no response: write one JSON object per line")
    return line


def prompt_of(line: Any) -> str:
    """What names the prompt of a line; empty: nothing does."""
    holders = [x for x in _levels(line) if isinstance(x, Mapping)]
    names = [x[key] for key in PROMPT_KEYS for x in (*holders[:1], *holders[-1:]) if x.get(key)]
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
    choice = first_choice(holders[-1])
    for answer in (part(holders[-1], "meta_info"), part(choice, "meta_info"), choice):
        end = part(answer, "finish_reason").get("type") or answer.get("finish_reason")
        if end in ("abort", "error"):
            return _short(f"ended with {end!r}")
    return None


def _levels(line: Any) -> list[Any]:
    """The line, and what lies in its HOLDERS: not an answer's text, which has its counts beside it."""
    levels = [line]
    for key in HOLDERS:
        outer = levels[-1]
        if not isinstance(outer, Mapping) or key not in outer:
            continue
        if isinstance(outer[key], Mapping) or not COUNTED & outer.keys():
            levels.append(outer[key])
    return levels


def _message(error: Any) -> str:
    """What an error says, of any of the forms in which servers write it."""
    while isinstance(error, Mapping):
        error = next(
            (error[k] for k in ("error", "message", "detail", "code", "type") if error.get(k)),
            "error",
        )
    return str(error)


def _short(error: Any) -> str:
    return redact(" ".join(_message(error).split()))[:80]
