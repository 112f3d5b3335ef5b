"""The tables of a report: speed, acceptance by position, latency and phases; then checks, other engines and setup.

A value that was not measured is a dash; a column without any value is left out.
"""

from collections.abc import Sequence

from eval.metrics.bootstrap import ALL_TASKS
from eval.reporting.formatting import (
    NOT_MEASURED,
    Table,
    format_identical,
    format_method,
    format_number,
    format_percent,
    format_value,
    format_with_interval,
)
from eval.results.report import (
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
    header = ["method", "K", "n", "speed-up", "predicted", "τ", "α", "acceptance_rate"]
    header += ["tokens/s", "ms/token", "identical"]
    rows = [
        [
            format_method(m),
            format_number(m["k"], 0),
            format_number(m["prompts"], 0),
            format_with_interval(m["speedup"], m["speedup_ci"], 2, "×"),
            format_number(m["predicted_speedup"], 2, "×"),
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


def supporting_tables(report: Report) -> list[Table]:
    """All of these tables, those without rows included."""
    return [
        _engine_table(report.get("engines") or []),
        _acceptance_difference_table(report.get("comparisons") or []),
        _sampling_distribution_table(report.get("law")),
        _answer_quality_table(report["methods"]),
        _target_drift_table(report.get("target_quality")),
        _failure_table(report["methods"], report.get("engines") or []),
        _setup_table(report["methods"]),
        _environment_table(report),
    ]


def _engine_table(engines: Sequence[ReportEntry]) -> Table:
    """Other engines on the same prompts, all tasks pooled, timed in turn with our methods or in a later pass."""
    rows = [
        [
            e["engine"] + (f", {' '.join(e['repaired'])} repaired" if e.get("repaired") else ""),
            e["name"],
            format_number(e["k"], 0),
            f"{e['temperature']:g}",
            format_number(e["prompts"], 0),
            format_number(e["tau"], 2),
            format_number(e["tokens_per_second"], 1),
            format_with_interval(e["speedup"], e.get("speedup_ci"), 2, "×"),
            format_with_interval(e.get("gain"), e.get("gain_ci"), 2, "×"),
            "in turn with ours" if e.get("in_turn") else "apart, after ours",
            NOT_MEASURED if e["same_as_ours"] is None else f"{e['same_as_ours']}/{e['prompts']}",
            format_number(len(e["failed"]), 0),
        ]
        for e in engines
        if e["task"] == ALL_TASKS
    ]
    header = ["engine", "draft", "K", "temperature", "n", "τ", "tokens/s", "× our plain"]
    header += ["× itself undrafted", "timed", "texts as ours", "failed"]
    return Table("Other engines on the same prompts", header, rows)


def _sampling_distribution_table(law: ReportEntry | None) -> Table:
    """Tests that sampled text follows the target's distribution; the control is the same draft with a lossy rule."""
    header = ["method", "smallest p", "tokens", "passed", "control was caught"]
    if law is None:
        return Table("", header, [])
    rows = []
    for verdict in law["methods"]:
        own = [test for test in law["tests"] if test["method"] == verdict["name"]]
        rows.append(
            [
                verdict["name"] + (" (lossy)" if verdict["lossy"] else ""),
                format_number(min((test["p_value"] for test in own), default=None), 4),
                format_number(max((test["tokens"] for test in own), default=None), 0),
                format_value(verdict["passed"]),
                format_value(verdict["control_caught"]),
            ]
        )
    setting = f"temperature {law['temperature']:g}, level {law['level']:g}"
    title = f"Sampled text against the target's distribution, {setting}"
    return Table(title, header, rows)


def _answer_quality_table(methods: Sequence[ReportEntry]) -> Table:
    """Mean scores of answers that have a reference, with plain decoding's scores on the same prompts."""
    rows = [
        [
            m["name"],
            m["task"],
            f"{m['temperature']:g}",
            q["metric"],
            format_number(q["prompts"], 0),
            format_with_interval(q["value"], q["ci"], 3),
            format_number(q["plain"], 3),
            format_with_interval(q["difference"], q["difference_ci"], 3, signed=True),
        ]
        for m in methods
        if m["name"] != "plain"
        for q in m.get("quality") or []
    ]
    header = ["method", "task", "temperature", "metric", "n", "score", "plain", "difference"]
    return Table("Quality beside plain decoding", header, rows, detail=True)


def _failure_table(methods: Sequence[ReportEntry], engines: Sequence[ReportEntry]) -> Table:
    """Prompts that a method or engine could not decode, with the first line of the error."""
    named = [(m["name"], m) for m in methods] + [(f"{e['engine']} {e['name']}", e) for e in engines]
    rows = [
        [name, f"{m['temperature']:g}", f["task"], f["id"], f["error"]]
        for name, m in named
        if m["task"] == ALL_TASKS
        for f in m.get("failed") or []
    ]
    header = ["method", "temperature", "task", "prompt", "error"]
    return Table("Prompts that failed", header, rows, prose=True)


def _acceptance_difference_table(comparisons: Sequence[ReportEntry]) -> Table:
    """Paired differences of a metric between two methods on the same prompts."""
    rows = [
        [
            f"{c['a']} − {c['b']}",
            c["task"],
            f"{c['temperature']:g}",
            c["metric"],
            format_with_interval(c["difference"], c["ci"], 3, signed=True),
            format_number(c["prompts"], 0),
        ]
        for c in comparisons
    ]
    header = ["methods", "task", "temperature", "metric", "difference", "n"]
    return Table("Differences on the same prompts", header, rows)


def _target_drift_table(quality: ReportEntry | None) -> Table:
    """A target that was trained itself (Medusa-2, LayerSkip), compared with the original target."""
    header = ["before", "now", "n", "perplexity before", "now", "change of log perplexity", "KL"]
    if quality is None:
        return Table("", header, [])
    row = [
        quality["old"],
        quality["new"],
        format_number(quality["prompts"], 0),
        format_number(quality["perplexity_old"], 3),
        format_number(quality["perplexity_new"], 3),
        format_with_interval(
            quality["log_perplexity_change"],
            quality["log_perplexity_change_ci"],
            4,
            signed=True,
        ),
        format_number(quality["kl"], 4),
    ]
    title = "Change of the target by training it, per token of the original's answers"
    return Table(title, header, [row])


def _setup_table(methods: Sequence[ReportEntry]) -> Table:
    """Draft weights, K, tree, mode, dtype and verification rule of each method."""
    fields = [
        "name",
        "draft",
        "draft_sha256",
        "k",
        "tree",
        "mode",
        "dtype",
        "verification",
        "lossy",
    ]
    rows: list[list[str]] = []
    for m in methods:
        altered = ", altered after training" if m.get("draft_altered") else ""
        shown = {**m, "draft_sha256": (m["draft_sha256"] or "")[:12] + altered or None}
        if paths := (m["tree"] or {}).get("paths"):
            shown["tree"] = f"fixed, {len(paths)} nodes"
        if m.get("draft_dtype", m["dtype"]) != m["dtype"]:
            shown["dtype"] = f"{m['dtype']}, draft {m['draft_dtype']}"
        if lookup := m.get("lookup"):
            own = m["draft"] or m["name"]
            shown["draft"] = f"{own}, after {lookup['name']} from {lookup['min_match']} tokens on"
        if adaptive := m.get("adaptive"):
            shown["k"] = f"up to {m['k']}, by {adaptive['by']}"
        if mirror := m.get("mirror"):
            shown["k"] = describe_mirror_setting(m["k"], mirror)
        row = [format_value(shown[field]) for field in fields]
        if row not in rows:
            rows.append(row)
    header = ["method", "draft", "draft sha256", "K", "tree", *fields[5:]]
    return Table("Methods", header, rows, prose=True, detail=True)


def describe_mirror_setting(k: int, mirror: ReportEntry) -> str:
    """K, exit layer and branches of a method with mirror, and its reuse rate ρ and hidden share where measured."""
    parts = [f"{k}, mirror at layer {mirror['exit_layer']}", f"{mirror['branches']} branches"]
    for name, words in (("reuse_rate", "ρ"), ("hidden_share", "hidden share of drafting")):
        if mirror.get(name) is not None:
            parts.append(f"{words} {mirror[name]:.2f}")
    return ", ".join(parts)


def _environment_table(report: Report) -> Table:
    """Seed, target, hardware, versions, tasks and git revision of the run."""
    rows = [["seed", format_value(report["seed"])]]
    for part in ("target", "hardware", "versions"):
        value = report[part]
        fields = value.items() if isinstance(value, dict) else [("", value)]
        rows += [[f"{part} {key}".strip(), format_value(text)] for key, text in fields]
    rows += [[name, format_value(report[name])] for name in ("tasks", "git") if report.get(name)]
    if report.get("gpu_utilisation") is not None:
        rows.append(
            ["GPU use during plain decoding", format_percent(report["gpu_utilisation"] / 100)]
        )
    if report.get("resumed"):
        count = format_number(report["resumed"], 0)
        rows.append(["resumed from an interrupted run", f"{count} measurements"])
    return Table("Hardware and versions", ["what", "value"], rows, prose=True)
