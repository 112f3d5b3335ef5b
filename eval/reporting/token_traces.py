"""Traces of a few answers: which tokens were drafted and accepted, and which the target added itself."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from decode.common.errors import UserError
from decode.common.files import parse_jsonl, read_text
from decode.engine.text_stream import TraceSegment, split_by_origin
from eval.results.report import EvalReport, unique_names

MAX_TRACES = 3
MAX_PROMPT_CHARACTERS = 240  # only the end of a longer prompt is shown

OutputLine = dict[str, Any]  # A line of outputs.jsonl, as eval/run.py writes it
OUTPUT_KEYS = {"task", "method", "temperature", "prompt_ids", "output_ids", "rounds"}


@dataclass(frozen=True)
class TokenTrace:
    """One answer with the origin of its text."""

    task: str
    method: str
    prompt: str  # the end of the prompt's text
    segments: list[TraceSegment]
    rounds: int
    tokens: int


def read_outputs(path: Path) -> list[OutputLine]:
    """The lines of outputs.jsonl; UserError names a line that is not one of them."""
    lines = []
    for where, line in parse_jsonl(read_text(path), path):
        if not isinstance(line, dict) or OUTPUT_KEYS - line.keys():
            raise UserError(f"{where} is not a line of eval/run.py: restore the file or remove it")
        lines.append(line)
    return lines


def select_traces(
    report: EvalReport, lines: Iterable[OutputLine], tokenizer: Any
) -> list[TokenTrace]:
    """MAX_TRACES traces of the fastest chain draft at the lowest temperature.

    They are of the first prompt of each task, then of the second of each, and so on. Empty without such a draft.
    """
    chains = [m for section in report.pooled_sections for m in section.real_drafts if not m.tree]
    if not chains:
        return []
    wanted = chains[0].name, chains[0].temperature
    by_task: dict[str, list[OutputLine]] = {}
    for line in lines:
        if (line["method"], line["temperature"]) == wanted and len(line["rounds"]) > 0:
            by_task.setdefault(line["task"], []).append(line)
    groups = [by_task[task] for task in unique_names([*by_task])]
    ordered = [line for turn in zip_longest(*groups) for line in turn if line is not None]
    traces = []
    for line in ordered[:MAX_TRACES]:
        prompt = tokenizer.decode(line["prompt_ids"], skip_special_tokens=True)
        shown = "… " * (len(prompt) > MAX_PROMPT_CHARACTERS) + prompt[-MAX_PROMPT_CHARACTERS:]
        ids, rounds = line["output_ids"], line["rounds"]
        segments = split_by_origin(ids, rounds, tokenizer, line["prompt_ids"])
        traces.append(
            TokenTrace(line["task"], line["method"], shown, segments, len(rounds), len(ids))
        )
    return traces
