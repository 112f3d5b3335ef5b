"""Answers that were saved as they were streamed: server-sent events, or their chunks as JSON lines."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from decode.common.errors import UserError
from decode.common.files import parse_json

PREFIX = "data:"
END = "[DONE]"
BROKE_OFF = "the stream broke off"


@dataclass
class _Answer:
    where: str
    body: dict[str, Any] = field(default_factory=dict)
    finished: bool = False


def is_stream(text: str) -> bool:
    """Whether the text has lines of server-sent events."""
    return any(line.startswith(PREFIX) for line in text.split("\n"))


def is_chunk(line: Any) -> bool:
    """Whether a JSON value is one chunk of a streamed chat."""
    return isinstance(line, Mapping) and str(line.get("object", "")).endswith(".chunk")


def answers(text: str, path: str) -> list[tuple[str, dict[str, Any]]]:
    """("path:line", answer) for each streamed answer, with the newest value of each field of its chunks.

    Chunks of several answers may alternate if they have ids. An answer that ended before its last chunk has an "error":
    that of an event which is no JSON, or that it broke off, as in the middle of the last line. Lines that are neither
    events nor JSON objects, such as comments and headers, are passed over.
    """
    values: list[tuple[str, Any]] = []
    lines = text.rstrip().split("\n")
    for number, raw in enumerate(lines, start=1):
        line, where = raw.strip(), f"{path}:{number}"
        data = line.removeprefix(PREFIX).strip() if line.startswith(PREFIX) else line
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
    return merge(values)


def merge(values: Iterable[tuple[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """The answers that these chunks make; a value that is END closes those that are complete."""
    open_answers: dict[str, _Answer] = {}
    found: list[_Answer] = []
    for where, chunk in values:
        if chunk == END:
            closing = {k: x for k, x in open_answers.items() if x.finished} or open_answers
            for key in list(closing):
                open_answers.pop(key).finished = True
            continue
        key = _key(chunk)
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


def _key(chunk: Mapping[str, Any]) -> str:
    meta = chunk.get("meta_info")
    own = chunk.get("id") or (meta.get("id") if isinstance(meta, Mapping) else None)
    return str(own if own is not None else f"slot {chunk['id_slot']}" if "id_slot" in chunk else "")


def _finishes(chunk: Mapping[str, Any]) -> bool:
    choices, meta = chunk.get("choices"), chunk.get("meta_info")
    choice = choices[0] if isinstance(choices, list) and choices else None
    ends = [x.get("finish_reason") for x in (choice, meta) if isinstance(x, Mapping)]
    whole = isinstance(choice, Mapping) and "message" in choice
    return whole or chunk.get("stop") is True or any(x is not None for x in ends)
