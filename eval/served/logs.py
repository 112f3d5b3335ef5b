"""Reads outputs.jsonl of eval/run.py, and a server's /metrics dump, as one kind of log."""

from dataclasses import replace
from typing import Any

from decode.common.errors import UserError
from decode.common.files import parse_jsonl, read_text
from decode.serving.log_counts import EngineLog, RequestCounts, checked, round_counts
from decode.serving.prometheus import DUMPS

NOTES = (
    "rounds are recorded before an answer is cut at its end",
    "report.json has τ cut at the end of answers, and α pooled.",
)
"""What to know of the figures of outputs.jsonl."""


def read_log(path: str, before: str = "") -> EngineLog:
    """The log in a file; `before` is an earlier dump of the same server, which is subtracted. UserError for a file of
    neither kind."""
    text = read_text(path)
    if text.lstrip().startswith("{"):
        if before:
            raise UserError(f"{path} holds answers: --before is for /metrics dumps, leave it out")
        return read_outputs(path)
    engines = [name for name in DUMPS if f"\n{name}:" in f"\n{text}"]
    if len(engines) != 1:
        raise UserError(
            f"{path} is neither outputs.jsonl nor a /metrics dump of vLLM, SGLang or llama.cpp: give one of these"
        )
    return DUMPS[engines[0]](path, before)


def read_outputs(path: str) -> EngineLog:
    """The answers in an outputs.jsonl, of one method. UserError for other lines, and where none drafted a token."""
    lines = list(parse_jsonl(read_text(path), path))
    requests = [_line_counts(line, where) for where, line in lines]
    seen = {f"{x.get('method', '')} {x.get('temperature', '')}".strip() for _, x in lines}
    if len(seen) > 1:  # their acceptance is not one figure
        raise UserError(f"{path} has lines of {' and '.join(sorted(seen))}: keep those of one")
    if all(r.drafted == 0 for r in requests):
        raise UserError(
            f"{path}: no answer drafted a token: keep the lines of a method that drafts"
        )
    return EngineLog(path, "draftsmith", requests, notes=NOTES)


def _line_counts(line: Any, where: str) -> RequestCounts:
    try:
        counts = round_counts([(drafted, accepted) for drafted, accepted in line["rounds"]])
        name, ids = f"{line.get('task', '')}/{line.get('id', '')}", line.get("prompt_ids")
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        raise UserError(
            f"{where} is no line of outputs.jsonl: its rounds are [drafted, accepted]"
        ) from None
    size = len(ids) if isinstance(ids, list) else None
    return replace(checked(counts, where), prompt=name, prompt_tokens=size)
