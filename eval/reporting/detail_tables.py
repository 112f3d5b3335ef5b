"""Tables behind the results: other engines, checks of losslessness and answer quality, failures, setup, versions."""

from collections.abc import Sequence

from eval.metrics.records import ALL_TASKS
from eval.reporting.formatting import (
    NOT_MEASURED,
    Table,
    format_number,
    format_percent,
    format_value,
    format_with_interval,
)
from eval.reporting.report_data import Report, ReportEntry


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
    """A target that was trained together with its heads (Medusa-2), compared with the original target."""
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
    title = (
        "Change of the target by training it with its heads, per token of the original's answers"
    )
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
        shown = {**m, "draft_sha256": (m["draft_sha256"] or "")[:12] or None}
        if paths := (m["tree"] or {}).get("paths"):
            shown["tree"] = f"fixed, {len(paths)} nodes"
        row = [format_value(shown[field]) for field in fields]
        if row not in rows:
            rows.append(row)
    header = ["method", "draft", "draft sha256", "K", "tree", *fields[5:]]
    return Table("Methods", header, rows, prose=True, detail=True)


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
