"""Reads a log of any engine: JSON lines of responses, or a /metrics dump."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from decode.common.errors import UserError
from decode.common.files import parse_jsonl, read_text
from eval.engine_logs import llamacpp_log, own_log, sglang_log, spec_counters, vllm_log
from eval.engine_logs.counts import EngineLog, RequestCounts

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

    `before` is an earlier dump of the same server, which is subtracted.
    """
    text = read_text(path)
    if not text.strip():
        raise UserError(f"{path} is empty: give a log of vLLM, SGLang or llama.cpp")
    if text.lstrip()[0] not in "{[":
        name = engine if engine != "auto" else _engine_of_dump(text, path)
        if name not in DUMPS:
            raise UserError(f"{path} is no JSON: give the lines of outputs.jsonl")
        return DUMPS[name](path, before)
    if before:
        raise UserError(f"{path} holds responses: --before is for /metrics dumps, leave it out")
    lines = [
        (where, line)
        for where, value in parse_jsonl(text, path)
        for line in (value if isinstance(value, list) else [value])
    ]
    if not lines:
        raise UserError(f"{path} has no response: give a log of vLLM, SGLang or llama.cpp")
    name = engine if engine != "auto" else _engine_of_response(response_of(*lines[0]), lines[0][0])
    requests = [_read_request(name, line, where) for where, line in lines]
    if name == "draftsmith":
        own_log.check_one_method([line for _, line in lines], path)
    if all(r.drafted == 0 for r in requests):
        raise UserError(f"{path}: no response drafted a token: speculative decoding was off")
    return EngineLog(path, name, requests, notes=(NOTES[name],))


def response_of(where: str, line: Any) -> Mapping[str, Any]:
    """The response in a line: the line itself, or `response` or `response.body` of it, as batch files have them."""
    for key in ("response", "body"):
        if isinstance(line, Mapping) and isinstance(line.get(key), Mapping):
            line = line[key]
    if not isinstance(line, Mapping):
        raise UserError(f"{where} is no response: write one JSON object per line")
    return line


def _read_request(name: str, line: Any, where: str) -> RequestCounts:
    body = response_of(where, line)
    usage = body.get("usage") or sglang_log.meta_info(body)
    source = usage if isinstance(usage, Mapping) else {}
    tokens = source.get("prompt_tokens", body.get("tokens_evaluated"))
    ids = [holder[key] for key in PROMPT_KEYS for holder in (line, body) if holder.get(key)]
    if name == "draftsmith":
        ids = [f"{line.get('task', '')}/{line.get('id', '')}"]
    return replace(
        RESPONSES[name](body, where),
        prompt=str(ids[0]) if ids else "",
        prompt_tokens=tokens if isinstance(tokens, int) else None,
    )


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
