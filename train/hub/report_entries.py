"""The entries of a report's JSON that a card is made from, by setting."""

from collections.abc import Mapping, Sequence
from typing import Any

from decode.common.typed_json import from_json
from eval.metrics.bootstrap import ALL_TASKS
from eval.reporting import tables
from eval.results.report import MethodResult, setting_title

ReportEntry = dict[str, Any]


def get_nested(entry: ReportEntry, outer: str, inner: str) -> Any:
    """entry[outer][inner], or None where either is absent: older reports lack newer fields."""
    return (entry.get(outer) or {}).get(inner)


def format_identical(entry: ReportEntry) -> str:
    return tables.format_identical(from_json(MethodResult, entry))


def draft_entries(report: Mapping[str, Any], sha256: str | None) -> list[ReportEntry]:
    """The entries that measure the draft with this checksum alone: no lookup with it, no adaptive length, no mirror."""
    own = [m for m in report["methods"] if m["draft_sha256"] == sha256]
    changes = ("lookup", "adaptive", "mirror")
    return [m for m in own if all(m.get(change) is None for change in changes)]


def measured_settings(entries: Sequence[ReportEntry]) -> list[tuple[float, int]]:
    """The (temperature, batch_size) pairs that occur, sorted."""
    return sorted({(m["temperature"], m["batch_size"]) for m in entries})


def entry_setting(m: ReportEntry) -> str:
    """The setting that an entry was measured in, as text, with the limits of its sampling."""
    limits = [f"top-{key} {m[f'top_{key}']:g}" for key in ("k", "p") if m.get(f"top_{key}")]
    sampled = limits if m["temperature"] > 0 else []
    return ", ".join([setting_title(m["temperature"], m["batch_size"]), *sampled])


def pooled_entries(entries: Sequence[ReportEntry]) -> list[ReportEntry]:
    """Those of all tasks together; where a report has none, each task's own."""
    return [m for m in entries if m["task"] == ALL_TASKS] or list(entries)
