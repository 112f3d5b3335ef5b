"""Reads report.json and tuned.json (schema 1), and groups the entries of a report by task and setting."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decode.common import damage
from decode.common.errors import UserError
from decode.common.files import read_json_object
from eval.metrics.bootstrap import ALL_TASKS
from eval.metrics.roofline import with_model_sizes

Report = dict[str, Any]
"""The contents of report.json."""
ReportEntry = dict[str, Any]
"""One object of a report: a method at one task and setting, another engine, or the result of one check."""
Tuned = dict[str, Any]
"""The contents of tuned.json, as eval/tune.py writes it."""

METHOD_KEYS = frozenset(
    ("name", "draft", "k", "tree", "temperature", "batch_size", "task", "prompts", "tau", "tau_ci")
    + ("alpha", "alpha_ci", "alpha_by_position", "alpha_by_position_ci", "acceptance_rate")
    + ("counts", "latency_ms", "tokens_per_second", "ms_per_token", "speedup", "speedup_ci")
    + ("draft_sha256", "mode", "dtype", "verification", "lossy", "phase_ms", "lossless")
    + ("predicted_speedup",)
)
"""What every method of a report has, older reports included."""


def read_report(path: Path) -> Report:
    """A report of schema 1, with the sizes of its models added where they are on this disk; UserError otherwise."""
    what = "a report of eval/run.py"
    report = _read_measurements(
        path, what, ["methods"], ["target", "baseline", "versions", "hardware", "seed"]
    )
    for number, method in enumerate(report["methods"]):
        missing = sorted(METHOD_KEYS - method.keys())
        if missing:
            raise UserError(f"{path} is not {what}: method {number} has no {missing[0]!r}")
    return with_model_sizes(report)


def read_tuned(path: Path, report: Report | None = None) -> Tuned:
    """The content of a tuned.json of schema 1; UserError for anything else, or if its target is not the report's."""
    tuned = _read_measurements(
        path, "a tuned.json of eval/tune.py", ["chosen", "cells"], ["predictions", "target"]
    )
    both = [tuned] if report is None else [tuned, report]
    targets = [values["target"] for values in both if isinstance(values["target"], dict)]
    if len({target["tokenizer"] for target in targets if "tokenizer" in target}) > 1:
        raise UserError(f"{path} is about another target: give that of the report's target")
    weights = [target["weights"] for target in targets if "weights" in target]
    if len(set(weights)) > 1:
        damage.warn(f"{path} is of a target with weights {weights[0]}, the report of {weights[1]}")
    return tuned


def _read_measurements(
    path: Path, what: str, lists: list[str], others: list[str]
) -> dict[str, Any]:
    """The JSON object in `path`. UserError unless it has schema 1, `lists` of objects and the keys `others`."""
    values = read_json_object(path, what, ("schema", *others), lists)
    if values["schema"] != 1:
        raise UserError(f"{path} is not {what} of schema 1: make it again with this version")
    return values


def target_name(report: Report) -> str:
    """The target's name; older reports hold the name alone, newer ones an object with revision and tokenizer."""
    target = report["target"]
    return str(target["name"]) if isinstance(target, dict) else str(target or "–")


def get_nested(entry: ReportEntry, outer: str, inner: str) -> Any:
    """entry[outer][inner], or None where either is absent: older reports lack newer fields."""
    return (entry.get(outer) or {}).get(inner)


@dataclass(frozen=True)
class ReportSection:
    """The entries of one task and setting, fastest first. Speeds are comparable only within a section."""

    task: str
    setting: str
    entries: list[ReportEntry]

    @property
    def title(self) -> str:
        return f"{'all tasks' if self.task == ALL_TASKS else self.task}, {self.setting}"


def report_sections(report: Report) -> list[ReportSection]:
    """The report's entries by task ("all" first) and setting, each section sorted by speed-up."""
    sections = []
    for task in unique_names([m["task"] for m in report["methods"]]):
        of_task = [m for m in report["methods"] if m["task"] == task]
        for setting in measured_settings(of_task):
            entries = filter_by_setting(of_task, setting)
            entries.sort(key=lambda m: (m["speedup"] is None, -(m["speedup"] or 0)))
            sections.append(ReportSection(task, setting_title(*setting), entries))
    return sections


def pooled_sections(report: Report) -> list[ReportSection]:
    """The sections of all tasks together, one for each setting."""
    return [section for section in report_sections(report) if section.task == ALL_TASKS]


def real_draft_entries(section: ReportSection) -> list[ReportEntry]:
    """The entries with a measured speed-up and a real draft: neither plain decoding nor simulated acceptance."""
    return [
        m
        for m in section.entries
        if m["name"] != "plain" and m["speedup"] is not None and not m.get("simulated")
    ]


def fastest_entry(section: ReportSection) -> ReportEntry | None:
    """The fastest real draft of a section; None if no speed-up was measured."""
    return next(iter(real_draft_entries(section)), None)


def draft_entries(report: Mapping[str, Any], sha256: str | None) -> list[ReportEntry]:
    """The entries that measure the draft with this checksum alone: no lookup with it, no adaptive length, no mirror."""
    own = [m for m in report["methods"] if m["draft_sha256"] == sha256]
    changes = ("lookup", "adaptive", "mirror")
    return [m for m in own if all(m.get(change) is None for change in changes)]


def measured_settings(entries: Sequence[ReportEntry]) -> list[tuple[float, int]]:
    """The (temperature, batch_size) pairs that occur, sorted."""
    return sorted({(m["temperature"], m["batch_size"]) for m in entries})


def filter_by_setting(
    entries: Sequence[ReportEntry], setting: tuple[float, int]
) -> list[ReportEntry]:
    """The entries measured at this (temperature, batch_size)."""
    return [m for m in entries if (m["temperature"], m["batch_size"]) == setting]


def setting_title(temperature: float, batch_size: int) -> str:
    """A setting as text for titles."""
    return f"temperature {temperature:g}, batch {batch_size}"


def entry_setting(m: ReportEntry) -> str:
    """The setting that an entry was measured in, as text, with the limits of its sampling."""
    limits = [f"top-{key} {m[f'top_{key}']:g}" for key in ("k", "p") if m.get(f"top_{key}")]
    sampled = limits if m["temperature"] > 0 else []
    return ", ".join([setting_title(m["temperature"], m["batch_size"]), *sampled])


def pooled_entries(entries: Sequence[ReportEntry]) -> list[ReportEntry]:
    """Those of all tasks together; where a report has none, each task's own."""
    return [m for m in entries if m["task"] == ALL_TASKS] or list(entries)


def unique_names(names: Sequence[str]) -> list[str]:
    """Each name once, in order of first appearance, the pooled task "all" first."""
    return sorted(dict.fromkeys(names), key=lambda name: name != ALL_TASKS)
