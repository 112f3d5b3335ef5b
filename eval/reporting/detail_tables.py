"""Tables of what stands behind the results: other engines, checks of losslessness and quality, failures, the setup."""

from collections.abc import Sequence

from eval.reporting.formatting import (
    Report,
    ReportEntry,
    Table,
    format_number,
    format_percent,
    format_value,
    format_with_interval,
)


def supporting_tables(report: Report) -> list[Table]:
    """Every such table, also empty ones."""
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
    """Other engines on the same prompts, all tasks pooled, and how they were timed."""
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
            "–" if e["same_as_ours"] is None else f"{e['same_as_ours']}/{e['prompts']}",
            format_number(len(e["failed"]), 0),
        ]
        for e in engines
        if e["task"] == "all"
    ]
    header = ["engine", "draft", "K", "temperature", "n", "τ", "tokens/s", "× our plain"]
    header += ["× itself undrafted", "timed", "texts as ours", "failed"]
    return Table("Other engines on the same prompts", header, rows)


def _sampling_distribution_table(law: ReportEntry | None) -> Table:
    """Whether sampled text follows the target's law; the control is the same draft with a rule known to be lossy."""
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
    title = f"Sampled text against the target's law, temperature {law['temperature']:g}, level {law['level']:g}"
    return Table(title, header, rows)


def _answer_quality_table(methods: Sequence[ReportEntry]) -> Table:
    """Answers that have a reference: scores of each method beside plain decoding's on the same prompts."""
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
    named = [(m["name"], m) for m in methods] + [(f"{e['engine']} {e['name']}", e) for e in engines]
    rows = [
        [name, f"{m['temperature']:g}", f["task"], f["id"], f["error"]]
        for name, m in named
        if m["task"] == "all"
        for f in m.get("failed") or []
    ]
    header = ["method", "temperature", "task", "prompt", "error"]
    return Table("Prompts that failed", header, rows, prose=True)


def _acceptance_difference_table(comparisons: Sequence[ReportEntry]) -> Table:
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
    """The target beside the one it was before its heads were trained with it."""
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
    title = "The target was trained with its heads: on answers of the one before, a token"
    return Table(title, header, [row])


def _setup_table(methods: Sequence[ReportEntry]) -> Table:
    fields = (
        "name",
        "draft",
        "draft_sha256",
        "k",
        "tree",
        "mode",
        "dtype",
        "verification",
        "lossy",
    )
    short = [{**m, "draft_sha256": (m["draft_sha256"] or "")[:12] or None} for m in methods]
    for m in short:
        if paths := (m["tree"] or {}).get("paths"):
            m["tree"] = f"fixed, {len(paths)} nodes"
    rows = {
        tuple(format_value(m[field]) for field in fields): None for m in short
    }  # unique, in order
    header = ["method", "draft", "draft sha256", "K", "tree", *fields[5:]]
    return Table("Methods", header, [list(row) for row in rows], prose=True, detail=True)


def _environment_table(report: Report) -> Table:
    rows = [["seed", format_value(report["seed"])]]
    for part in ("target", "hardware", "versions"):
        value = report[part]
        fields = value.items() if isinstance(value, dict) else [("", value)]
        rows += [[f"{part} {key}".strip(), format_value(text)] for key, text in fields]
    rows += [[name, format_value(report[name])] for name in ("tasks", "git") if report.get(name)]
    if report.get("gpu_utilisation") is not None:
        rows.append(["GPU use in plain decoding", format_percent(report["gpu_utilisation"] / 100)])
    if report.get("resumed"):
        rows.append(
            ["kept of an interrupted run", format_number(report["resumed"], 0) + " measurements"]
        )
    return Table("Hardware and versions", ["what", "value"], rows, prose=True)
