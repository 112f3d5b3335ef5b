"""How three answers came about, token by token: which were drafted and accepted, which are the target's own."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decode.common.errors import UserError
from eval.reporting.formatting import Report
from eval.reporting.tables import real_draft_entries, report_sections, unique_names

MAX_TRACES = 3
MAX_PROMPT_CHARACTERS = 240
"""Letters of the prompt's end that are shown."""

OutputLine = dict[str, Any]
"""A line of outputs.jsonl."""


@dataclass(frozen=True)
class TraceSegment:
    """A stretch of an answer."""

    text: str
    kind: str
    """accepted: drafted, and the target agreed; own: the target's token, a correction or one behind a whole draft."""
    rejected: int = 0
    """Drafted tokens that fell just before it."""


@dataclass(frozen=True)
class TokenTrace:
    """One answer."""

    task: str
    method: str
    prompt: str
    """Its end."""
    pieces: list[TraceSegment]
    rounds: int
    tokens: int


def read_outputs(path: Path) -> list[OutputLine]:
    """The lines of outputs.jsonl; UserError naming a damaged one."""
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if line.strip():
            try:
                found.append(json.loads(line))
            except ValueError as error:
                raise UserError(f"{path}:{number} is not valid JSON") from error
    return found


def select_traces(report: Report, lines: Iterable[OutputLine], tokenizer: Any) -> list[TokenTrace]:
    """Traces of the fastest chain at the lowest temperature: the first prompt of each task, then the second, …"""
    chains = [
        m
        for section in report_sections(report)
        if section.task == "all"
        for m in real_draft_entries(section)
        if m["tree"] is None
    ]
    if not chains:
        return []
    name, temperature = chains[0]["name"], chains[0]["temperature"]
    own = [
        x
        for x in lines
        if x["method"] == name and x["temperature"] == temperature and len(x["rounds"]) > 0
    ]
    by_task = [
        [x for x in own if x["task"] == task] for task in unique_names([x["task"] for x in own])
    ]
    longest = max(map(len, by_task), default=0)
    order = [group[i] for i in range(longest) for group in by_task if i < len(group)]
    return [build_trace(line, tokenizer) for line in order[:MAX_TRACES]]


def build_trace(line: OutputLine, tokenizer: Any) -> TokenTrace:
    """One line of outputs.jsonl as coloured text."""
    prompt = tokenizer.decode(line["prompt_ids"], skip_special_tokens=True)
    return TokenTrace(
        line["task"],
        line["method"],
        ("… " if len(prompt) > MAX_PROMPT_CHARACTERS else "") + prompt[-MAX_PROMPT_CHARACTERS:],
        split_by_origin(line["output_ids"], line["rounds"], tokenizer),
        len(line["rounds"]),
        len(line["output_ids"]),
    )


def split_by_origin(
    ids: Sequence[int], rounds: Sequence[Sequence[int]], tokenizer: Any
) -> list[TraceSegment]:
    """The text of `ids` cut where the origin of its tokens changes; the first one comes from prefill.

    Rounds are (drafted, accepted), before trimming: the last one may say more than was kept.
    """
    cuts = [(1, "own", 0)]
    for drafted, accepted in rounds:
        start = cuts[-1][0]
        if accepted > 0:
            cuts.append((start + accepted, "accepted", 0))
        cuts.append((start + accepted + 1, "own", drafted - accepted))
    found, text = [], ""
    for end, kind, rejected in cuts:
        # Decoded from the start each time: a letter may be spread over tokens of two pieces.
        whole = tokenizer.decode(list(ids[:end]), skip_special_tokens=True).rstrip("\ufffd")
        if len(whole) > len(text) and whole.startswith(text):
            found.append(TraceSegment(whole[len(text) :], kind, rejected))
            text = whole
        if end >= len(ids):
            break
    return found
