"""The main tables of a report: speed, acceptance by position, latency and phases, by section.

A value that was not measured is a dash; a column without any value is left out.
"""

from eval.metrics.records import ALL_TASKS
from eval.reporting.detail_tables import supporting_tables
from eval.reporting.formatting import (
    NOT_MEASURED,
    Table,
    format_identical,
    format_number,
    format_with_interval,
)
from eval.reporting.report_data import (
    Report,
    ReportEntry,
    ReportSection,
    get_nested,
    pooled_sections,
    report_sections,
)


def report_tables(report: Report) -> list[Table]:
    """Every table of the report that has a row, most important first."""
    pooled = pooled_sections(report)
    tables = [
        *(_speed_table(section) for section in report_sections(report)),
        *(_position_table(section) for section in pooled),
        *(_latency_table(section) for section in pooled),
        *(_phase_table(section) for section in pooled),
        *_domain_tables(report),
        *supporting_tables(report),
    ]
    return [table for table in tables if len(table.rows) > 0]


def _speed_table(section: ReportSection) -> Table:
    header = ["method", "K", "n", "speed-up", "τ", "α", "acceptance_rate", "tokens/s", "ms/token"]
    header += ["identical"]
    rows = [
        [
            m["name"],
            format_number(m["k"], 0),
            format_number(m["prompts"], 0),
            format_with_interval(m["speedup"], m["speedup_ci"], 2, "×"),
            format_with_interval(m["tau"], m["tau_ci"], 2),
            format_with_interval(m["alpha"], m["alpha_ci"], 3),
            format_with_interval(m["acceptance_rate"], m.get("acceptance_rate_ci"), 3),
            format_with_interval(m["tokens_per_second"], m.get("tokens_per_second_ci"), 1),
            format_number(m["ms_per_token"], 2),
            format_identical(m["lossless"]),
        ]
        for m in section.entries
    ]
    return Table(f"Results: {section.title}", header, rows, detail=section.task != ALL_TASKS)


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
    """Milliseconds of a round, a token and the first token, with tokens per reply."""
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
    """Results by domain; none if there are no more domains than tasks (which include the pooled "all")."""
    domains = report.get("domains") or []
    tasks = {m["task"] for m in report["methods"]}
    if len({m["domain"] for m in domains}) < len(tasks):
        return []
    by_domain = {**report, "methods": [{**m, "task": m["domain"]} for m in domains if m["prompts"]]}
    return [_speed_table(section) for section in report_sections(by_domain)]
