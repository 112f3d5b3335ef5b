"""Reads a log of any engine: JSON lines of responses, streams of them, a /metrics dump, or what a server printed."""

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from decode.common.errors import UserError
from decode.common.files import parse_json, parse_jsonl, read_text
from decode.common.secret_patterns import redact
from eval.engine_logs import llamacpp_log, own_log, sglang_log, spec_counters, streams, vllm_log
from eval.engine_logs.counts import EngineLog, FailedRequest, RequestCounts, check_answer
from eval.engine_logs.printed import COLOURS

Format = Literal["auto", "vllm", "sglang", "llamacpp", "draftsmith"]
RESPONSES = {
    "vllm": vllm_log.from_response,
    "sglang": sglang_log.from_response,
    "llamacpp": llamacpp_log.from_response,
    "draftsmith": own_log.from_output,
}
DUMPS: dict[str, Callable[[str, str], EngineLog]] = {
    "vllm": partial(spec_counters.read_totals, "vllm"),
    "sglang": sglang_log.from_dump,
    "llamacpp": partial(spec_counters.read_totals, "llamacpp"),
}
TEXTS: dict[str, Callable[[str, str], EngineLog]] = {
    "vllm": vllm_log.from_text,
    "sglang": sglang_log.from_text,
    "llamacpp": llamacpp_log.from_text,
}
MARKS = {
    "vllm": re.compile(re.escape(vllm_log.LINE)),
    "sglang": re.compile(r"Decode batch.*\baccept len: "),
    "llamacpp": re.compile(r"\bdraft acceptance(?: rate)? = |\bprint_timings?: +id "),
}
"""What only this engine's own log has in a line."""
COUNTED = {"timings", "meta_info", "metrics", "rounds"}
"""A response has one of these beside its answer."""
MOST_NAMED = 5
"""Failed requests that a note names."""
PROMPT_KEYS = ("custom_id", "prompt_id", "prompt")
"""What may name a line's prompt; a server's own ids are random and name nothing."""
NOTES = {
    "vllm": "vLLM's rounds are those with a draft",
    "sglang": "α is that of chains (--speculative-eagle-topk 1)",
    "llamacpp": "rounds derived: predicted_n − 1 − draft_n_accepted; no positions in these responses, so no α",
    "draftsmith": "rounds are recorded before an answer is cut at its end",
}


def read_log(path: str, engine: Format = "auto", before: str = "") -> EngineLog:
    """The log in a file. UserError that says what is missing if it is of no engine, or not of `engine`.

    `before` is an earlier dump of the same server, which is subtracted. Requests that failed are named, and left out.
    """
    text = COLOURS.sub("", _without_docker(read_text(path), path))
    if not text.strip():
        raise UserError(f"{path} is empty: give a log of vLLM, SGLang or llama.cpp")
    printed = _engine_of_text(text, engine, path)
    lines = [] if printed else _responses(text, path)
    if before and (printed or lines):
        kind = "a server's own log" if printed else "responses"
        raise UserError(f"{path} holds {kind}: --before is for /metrics dumps, leave it out")
    if printed:
        return TEXTS[printed](text, path)
    if not lines:
        if text.lstrip()[0] in "{[":
            raise UserError(f"{path} has no response: give a log of vLLM, SGLang or llama.cpp")
        name = engine if engine != "auto" else _engine_of_dump(text, path)
        if name not in DUMPS:
            raise UserError(f"{path} is no JSON: give the lines of outputs.jsonl")
        return DUMPS[name](path, before)
    return _read_responses(lines, engine, path)


def _read_responses(lines: Sequence[tuple[str, Any]], engine: Format, path: str) -> EngineLog:
    """The log of responses; `lines` has a text in place of each answer that is no JSON."""
    failed = [
        FailedRequest(where, reason, index, _prompt_of(line))
        for index, (where, line) in enumerate(lines)
        if (reason := failure(line)) is not None
    ]
    gone = {x.index for x in failed}
    good = [pair for index, pair in enumerate(lines) if index not in gone]
    if not good:
        raise UserError(
            f"{path}: all {len(lines)} requests failed, the first with {failed[0].reason!r}: ask again"
        )
    name = engine if engine != "auto" else _engine_of_response(response_of(*good[0]), good[0][0])
    requests = [_read_request(name, line, where) for where, line in good]
    if name == "draftsmith":
        own_log.check_one_method([line for _, line in good], path)
    if all(r.drafted == 0 for r in requests):
        raise UserError(f"{path}: no response drafted a token: speculative decoding was off")
    notes = [NOTES[name]]
    if failed:
        named = ", ".join(f"{x.where} ({x.reason})" for x in failed[:MOST_NAMED])
        more = f" and {len(failed) - MOST_NAMED} more" if len(failed) > MOST_NAMED else ""
        notes.append(
            f"{len(failed)} of {len(lines)} requests failed and are in no figure: {named}{more}"
        )
    return EngineLog(path, name, requests, notes=tuple(notes), failed=tuple(failed))


def _responses(text: str, path: str) -> list[tuple[str, Any]]:
    """("path:line", value) of each response of JSON lines or of a stream; none for a text that is neither.

    A line of text among JSON lines, such as "Internal Server Error", is what a request was answered with. So is a last
    line that was cut off.
    """
    if streams.is_stream(text):
        return list(streams.answers(text, path))
    numbered = [(f"{path}:{n}", x.strip()) for n, x in enumerate(text.split("\n"), 1) if x.strip()]
    if not any(line.startswith(("{", "[")) for _, line in numbered):
        return []
    values = _json_values(text, path, numbered)
    flat = [(w, x) for w, value in values for x in (value if isinstance(value, list) else [value])]
    if flat and all(streams.is_chunk(value) for _, value in flat):
        return list(streams.merge(flat))
    return [(where, _with_stream(value, where)) for where, value in flat]


def _json_values(
    text: str, path: str, numbered: Sequence[tuple[str, str]]
) -> list[tuple[str, Any]]:
    """The value of each line, a text where it is no JSON; of a file of one value over several lines that value."""
    with contextlib.suppress(UserError):
        return [(f"{path}:1", parse_json(text, path, ""))]
    values: list[tuple[str, Any]] = []
    for where, line in numbered:
        try:
            is_json = line[0] in "{["
            value = parse_json(line, where, "write one JSON value per line") if is_json else line
        except UserError:
            if where != numbered[-1][0] or not values:
                raise
            value = streams.BROKE_OFF
        values.append((where, value))
    return values


def _with_stream(line: Any, where: str) -> Any:
    """The line, with a response that was saved as the text of its stream put together."""
    if isinstance(line, Mapping):
        for key in ("response", "body"):
            saved = line.get(key)
            if isinstance(saved, str) and streams.is_stream(saved):
                made = streams.answers(saved, where)
                return {**line, key: made[0][1] if made else None}
    return line


def _without_docker(text: str, path: str) -> str:
    """The text that a container printed, if the file is Docker's own log of it."""
    if not text.lstrip().startswith('{"log":"'):
        return text
    return "".join(str(value.get("log", "")) for _, value in parse_jsonl(text, path))


def failure(line: Any) -> str | None:
    """Why the request of this line has no answer; None if it has one."""
    if isinstance(line, str):
        return _short(line)
    holders = _levels(line)
    for holder in holders:
        if holder is None or isinstance(holder, str):
            error = line.get("error") if isinstance(line, Mapping) else None
            return _short(_message(error or holder or "no response"))
        if not isinstance(holder, Mapping):
            return None
        code = holder.get("status_code", holder.get("status"))
        if isinstance(code, int) and code >= 400:
            said = _message(holder.get("error") or holder.get("body") or "")
            return _short(f"HTTP {code} {said}".strip())
        if holder.get("error"):
            return _short(_message(holder["error"]))
        if holder.get("object") == "error" or set(holder) == {"detail"}:
            return _short(_message(holder))
    meta, choices = sglang_log.meta_info(holders[-1]) or {}, holders[-1].get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else {}
    reasons = [x.get("finish_reason") for x in (meta, choice) if isinstance(x, Mapping)]
    kinds = [x.get("type") if isinstance(x, Mapping) else x for x in reasons]
    return next(
        (_short(f"ended with {kind!r}") for kind in kinds if kind in ("abort", "error")), None
    )


def _levels(line: Any) -> list[Any]:
    """The line, and what lies in its `response` and `body`: not an answer's text, which has its counts beside it."""
    levels = [line]
    for key in ("response", "body"):
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


def _short(text: str) -> str:
    return redact(" ".join(text.split()))[:80]


def response_of(where: str, line: Any) -> Mapping[str, Any]:
    """The response in a line: the line itself, or `response` or `response.body` of it, as batch files have them."""
    for key in ("response", "body"):
        if isinstance(line, Mapping) and isinstance(line.get(key), Mapping):
            line = line[key]
    if not isinstance(line, Mapping):
        raise UserError(f"{where} is no response: write one JSON object per line")
    return line


def _prompt_of(line: Any) -> str:
    """What names the prompt of a line; empty: nothing does."""
    holders = [x for x in _levels(line) if isinstance(x, Mapping)]
    names = [x[key] for key in PROMPT_KEYS for x in (*holders[:1], *holders[-1:]) if x.get(key)]
    return str(names[0]) if names else ""


def _read_request(name: str, line: Any, where: str) -> RequestCounts:
    body = response_of(where, line)
    usage = body.get("usage") or sglang_log.meta_info(body)
    source = usage if isinstance(usage, Mapping) else {}
    tokens = source.get("prompt_tokens", body.get("tokens_evaluated"))
    prompt = (
        f"{line.get('task', '')}/{line.get('id', '')}" if name == "draftsmith" else _prompt_of(line)
    )
    counts = RESPONSES[name](body, where)
    choices, length = body.get("choices"), source.get("completion_tokens")
    one_answer = not isinstance(choices, list) or len(choices) < 2
    if name in ("vllm", "sglang") and one_answer and type(length) is int:
        check_answer(counts, length, name == "sglang", where)
    if name == "llamacpp" and one_answer and type(length) is int:
        llamacpp_log.check_usage(body, length, where)
    return replace(counts, prompt=prompt, prompt_tokens=tokens if isinstance(tokens, int) else None)


def _engine_of_text(text: str, engine: Format, path: str) -> str:
    """The engine whose own log this is; empty for JSON and dumps. UserError for a log of two engines."""
    names: set[str] = set()
    for line in text.split("\n"):
        if not line.startswith(("{", '"', streams.PREFIX)):
            names |= {name for name, pattern in MARKS.items() if pattern.search(line)}
    if engine in names:
        return engine
    if len(names) > 1:
        raise UserError(
            f"{path} has lines of {' and '.join(sorted(names))}: say --format, or give one server's log"
        )
    return names.pop() if names and engine == "auto" else ""


def _engine_of_dump(text: str, path: str) -> str:
    names = [name for name in DUMPS if f"\n{name}:" in f"\n{text}"]
    if len(names) != 1:
        raise UserError(
            f"{path} is no log of vLLM, SGLang or llama.cpp: give JSON lines or a /metrics dump"
        )
    return names[0]


def _engine_of_response(body: Mapping[str, Any], where: str) -> str:
    if isinstance(body.get("timings"), Mapping):
        return "llamacpp"
    if sglang_log.meta_info(body) is not None:
        return "sglang"
    if isinstance(body.get("metrics"), Mapping):
        return "vllm"
    if own_log.is_output_line(body):
        return "draftsmith"
    raise UserError(
        f"{where} has neither metrics (vLLM), meta_info (SGLang) nor timings (llama.cpp): log whole responses"
    )
