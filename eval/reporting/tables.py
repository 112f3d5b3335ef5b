"""The tables of a report; what was not measured has no column, or a dash."""

from collections.abc import Sequence
from dataclasses import dataclass

from eval.reporting.detail_tables import supporting_tables
from eval.reporting.formatting import (
    NOT_MEASURED,
    Report,
    ReportEntry,
    Table,
    format_identical,
    format_number,
    format_with_interval,
    get_nested,
)


@dataclass(frozen=True)
class ReportSection:
    """The entries of one task and setting, the only ones whose speeds compare; fastest first."""

    task: str
    setting: str
    entries: list[ReportEntry]

    @property
    def title(self) -> str:
        return f"{'all tasks' if self.task == 'all' else self.task}, {self.setting}"


def unique_names(names: Sequence[str]) -> list[str]:
    """Each name once, in order of first appearance, the pooled task "all" first."""
    return sorted(dict.fromkeys(names), key=lambda name: name != "all")


def measured_settings(methods: Sequence[ReportEntry]) -> list[tuple[float, int]]:
    """The (temperature, batch_size) pairs that occur, in order: numbers compare only within one."""
    return sorted({(m["temperature"], m["batch_size"]) for m in methods})


def setting_title(temperature: float, batch_size: int) -> str:
    """The words for one setting in titles."""
    return f"temperature {temperature:g}, batch {batch_size}"


def report_sections(report: Report) -> list[ReportSection]:
    """The report's entries by task ("all" first) and setting, each sorted by speed-up."""
    found = []
    for task in unique_names([m["task"] for m in report["methods"]]):
        of_task = [m for m in report["methods"] if m["task"] == task]
        for setting in measured_settings(of_task):
            entries = [m for m in of_task if (m["temperature"], m["batch_size"]) == setting]
            entries.sort(key=lambda m: (m["speedup"] is None, -(m["speedup"] or 0)))
            found.append(ReportSection(task, setting_title(*setting), entries))
    return found


def real_draft_entries(section: ReportSection) -> list[ReportEntry]:
    """The entries of a section that stand for real drafts with a measured speed-up; simulated ones promise nothing."""
    return [
        m
        for m in section.entries
        if m["name"] != "plain" and m["speedup"] is not None and not m.get("simulated")
    ]


def report_tables(report: Report) -> list[Table]:
    """Every table of the report that has a row, most important first."""
    by_section = report_sections(report)
    pooled = [section for section in by_section if section.task == "all"]
    found = [
        *(_speed_table(section) for section in by_section),
        *(_position_table(section) for section in pooled),
        *(_latency_table(section) for section in pooled),
        *(_phase_table(section) for section in pooled),
        *(_domain_tables(report)),
        *supporting_tables(report),
    ]
    return [table for table in found if len(table.rows) > 0]


def _speed_table(section: ReportSection) -> Table:
    predicted = any(m["predicted_speedup"] is not None for m in section.entries)
    header = ["method", "K", "n", "speed-up", *(["predicted"] if predicted else []), "τ", "α"]
    header += ["acceptance_rate", "tokens/s", "ms/token", "identical"]
    rows = [
        [
            m["name"],
            format_number(m["k"], 0),
            format_number(m["prompts"], 0),
            format_with_interval(m["speedup"], m["speedup_ci"], 2, "×"),
            *([format_number(m["predicted_speedup"], 2, "×")] if predicted else []),
            format_with_interval(m["tau"], m["tau_ci"], 2),
            format_with_interval(m["alpha"], m["alpha_ci"], 3),
            format_with_interval(m["acceptance_rate"], m.get("acceptance_rate_ci"), 3),
            format_with_interval(m["tokens_per_second"], m.get("tokens_per_second_ci"), 1),
            format_number(m["ms_per_token"], 2),
            format_identical(m["lossless"]),
        ]
        for m in section.entries
    ]
    return Table(f"Results: {section.title}", header, rows, detail=section.task != "all")


def _position_table(section: ReportSection) -> Table:
    entries = [m for m in section.entries if m["alpha"] is not None]
    k = max((len(m["alpha_by_position"]) for m in entries), default=0)
    rows = []
    for m in entries:
        pairs = zip(m["alpha_by_position"], m["alpha_by_position_ci"], strict=True)
        cells = [format_with_interval(value, interval, 3) for value, interval in pairs]
        cells += [NOT_MEASURED] * (k - len(cells))
        rows.append([m["name"], format_number(m["prompts"], 0), *cells])
    header = ["method", "n", *(f"α_{i}" for i in range(1, k + 1))]
    return Table(f"Acceptance by position: {section.title}", header, rows, detail=True)


def _latency_table(section: ReportSection) -> Table:
    """What a user waits for: a round, a token, the first token, a whole reply. Columns without a value are left out."""
    names = ("mean", "p50", "p95", "variance")
    measured = [m for m in section.entries if m["latency_ms"] is not None]
    columns = {
        **{
            f"round {name}": [get_nested(m, "latency_ms", name) for m in measured] for name in names
        },
        **{f"token {name}": [_token_latency(m, name) for m in measured] for name in names},
        "first token": [get_nested(m, "latency_ms", "first_token") for m in measured],
        "first token p95": [get_nested(m, "latency_ms", "first_token_p95") for m in measured],
    }
    shown = {name: values for name, values in columns.items() if any(x is not None for x in values)}
    rows = [
        [
            m["name"],
            *(format_number(values[at], 2) for values in shown.values()),
            format_number(m.get("mean_output_tokens"), 1),
        ]
        for at, m in enumerate(measured)
    ]
    header = ["method", *shown, "tokens a reply"]
    return Table(f"Latency in ms, variances in ms²: {section.title}", header, rows, detail=True)


def _token_latency(entry: ReportEntry, name: str) -> float | None:
    return (get_nested(entry, "latency_ms", "token") or {}).get(name)


def _phase_table(section: ReportSection) -> Table:
    phases = ("draft", "verify", "overhead")
    rows = [
        [m["name"], *(format_number(get_nested(m, "phase_ms", phase), 3) for phase in phases)]
        for m in section.entries
        if m["phase_ms"] is not None
    ]
    title = f"Milliseconds by phase (separate instrumented pass): {section.title}"
    return Table(title, ["method", *phases], rows, detail=True)


def _domain_tables(report: Report) -> list[Table]:
    """Results by domain, where a task has several; `tasks` hold the pooled one besides."""
    domains = report.get("domains") or []
    tasks = {m["task"] for m in report["methods"]}
    if len({m["domain"] for m in domains}) < len(tasks):
        return []
    by_domain = {**report, "methods": [{**m, "task": m["domain"]} for m in domains if m["prompts"]]}
    return [_speed_table(section) for section in report_sections(by_domain)]
