"""The tables of a report: speed, acceptance by position, latency and phases; then checks, other engines and setup.

A value that was not measured is a dash; a column without any value is left out. COLUMNS are those of every table whose
rows are methods: of reports, model cards, the README and the terminal.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from decode.common.typed_json import to_json
from eval.metrics.bootstrap import ALL_TASKS
from eval.metrics.latency import LatencyMs, Spread
from eval.reporting.formatting import (
    NOT_MEASURED,
    Table,
    format_estimate,
    format_number,
    format_percent,
    format_positions,
    format_speedup,
    format_value,
    or_void,
)
from eval.results.report import (
    AlphaDifference,
    EngineResult,
    EvalReport,
    LawResult,
    LawVerdict,
    MethodResult,
    QualityScore,
    ReportSection,
    RivalSpeedup,
    TargetDrift,
    sections_of,
)

Column = Callable[[MethodResult], str]  # the cell of an entry


def format_method(m: MethodResult) -> str:
    """The name, marked where the output is not the target's, or the draft is not real, learned or stands behind a
    lookup."""
    lookup = m.lookup.name if m.lookup else ""
    marks = ["lossy"] * m.lossy + ["simulated"] * bool(m.simulated)
    marks += ["learning"] * bool(m.learned) + [f"after {lookup}"] * (lookup not in m.name)
    return f"{m.name} ({', '.join(marks)})" if marks else m.name


def format_identical(m: MethodResult) -> str:
    """As "40/40" or "39/40 + 1 tie" prompts with the reference's token ids, or –."""
    verdict = m.greedy
    if verdict is None or verdict.greedy_identical is None:
        return NOT_MEASURED
    ties = len(verdict.ties)
    tied = f" + {ties} tie{'s' if ties > 1 else ''}" if ties > 0 else ""
    return f"{verdict.identical}/{verdict.prompts}{tied}"


COLUMNS: dict[str, Column] = {
    "task": lambda m: m.task,
    "T": lambda m: f"{m.temperature:g}",
    "method": format_method,
    "K": lambda m: format_number(m.k, 0),
    "n": lambda m: format_number(m.prompts, 0),
    "speed-up": format_speedup,
    "predicted": lambda m: format_number(m.predicted_speedup, 2, "×"),
    "τ": lambda m: format_estimate(m.tau, 2),
    "α": lambda m: format_estimate(m.alpha, 3),
    "acceptance_rate": lambda m: format_estimate(m.acceptance_rate, 3),
    "tokens/s": lambda m: or_void(m, format_estimate(m.tokens_per_second, 1)),
    "ms/token": lambda m: or_void(m, format_number(m.ms_per_token, 2)),
    "first token ms": lambda m: format_number((m.latency_ms or LatencyMs()).first_token, 1),
    "identical": format_identical,
}
"""By heading."""
NARROW_COLUMNS: dict[str, Column] = COLUMNS | {
    "τ": lambda m: format_number(m.tau.value, 2),
    "α": lambda m: format_number(m.alpha.value, 3),
    "tok/s": lambda m: or_void(m, format_number(m.tokens_per_second.value, 0)),
    "pred.": lambda m: format_number(m.predicted_speedup, 2),
}
"""The same where there is no room for all intervals."""
SPEED_COLUMNS = (
    "method", "K", "n", "speed-up", "predicted", "τ", "α", "acceptance_rate", "tokens/s", "ms/token", "identical",
)  # fmt: skip


def method_table(
    title: str,
    entries: Sequence[MethodResult],
    columns: Sequence[str],
    *,
    positions: bool = False,
    detail: bool = False,
) -> Table:
    """A row for each entry with these of COLUMNS, and α by position behind them if `positions`."""
    k = max((len(m.alpha_by_position) for m in entries), default=0) if positions else 0
    rows = [
        [
            *(COLUMNS[name](m) for name in columns),
            *(format_estimate(x, 3) for x in m.alpha_by_position[:k]),
            *[NOT_MEASURED] * (k - len(m.alpha_by_position)),
        ]
        for m in entries
    ]
    return Table(title, [*columns, *(f"α_{i}" for i in range(1, k + 1))], rows, detail=detail)


def report_tables(report: EvalReport) -> list[Table]:
    """Every table of the report that has a row, most important first."""
    pooled, methods = report.pooled_sections, report.entries
    by_task = {m.task for m in methods}
    tables = [
        *map(_speed_table, report.sections),
        *map(_position_table, pooled),
        *map(_latency_table, pooled),
        *map(_phase_table, pooled),
        *_domain_tables(report),
        _engine_table([e for e in report.engines if e.is_pooled]),
        _rival_table(report.rivals),
        _acceptance_difference_table([c for c in report.comparisons if c.task in by_task]),
        *([] if report.law is None else [_sampling_distribution_table(report.law)]),
        _answer_quality_table(methods),
        *([] if report.target_quality is None else [_target_drift_table(report.target_quality)]),
        _failure_table(report),
        _setup_table(methods),
        _environment_table(report),
    ]
    return [table for table in tables if len(table.rows) > 0]


def _speed_table(section: ReportSection) -> Table:
    single = section.task != ALL_TASKS
    return method_table(f"Results: {section.title}", section.entries, SPEED_COLUMNS, detail=single)


def _position_table(section: ReportSection) -> Table:
    entries = [m for m in section.entries if m.alpha.value is not None]
    title = f"Acceptance by position: {section.title}"
    return method_table(title, entries, ("method", "n"), positions=True, detail=True)


def _latency_table(section: ReportSection) -> Table:
    """Milliseconds of a round, a token and the first token, with tokens per reply."""
    names = ("mean", "p50", "p95", "variance")
    measured = [(m, m.latency_ms) for m in section.entries if m.latency_ms is not None]
    spreads = [(x, x.token or Spread()) for _, x in measured]
    columns: dict[str, list[float | None]] = {
        **{f"round {name}": [vars(x)[name] for x, _ in spreads] for name in names},
        **{f"token {name}": [vars(token)[name] for _, token in spreads] for name in names},
        "first token": [x.first_token for x, _ in spreads],
        "first token p95": [x.first_token_p95 for x, _ in spreads],
    }
    shown = {name: values for name, values in columns.items() if any(x is not None for x in values)}
    cells = [[format_number(x, 2) for x in row] for row in zip(*shown.values(), strict=True)]
    rows = [
        [m.name, *own, format_number(m.mean_output_tokens, 1)]
        for (m, _), own in zip(measured, cells or [[]] * len(measured), strict=True)
    ]
    header = ["method", *shown, "tokens a reply"]
    return Table(f"Latency in ms, variances in ms²: {section.title}", header, rows, detail=True)


def _phase_table(section: ReportSection) -> Table:
    phases = ("draft", "verify", "overhead")
    timed = [m for m in section.entries if m.phase_ms is not None]
    rows = [[m.name, *(format_number(vars(m.phase_ms)[x], 3) for x in phases)] for m in timed]
    title = f"Milliseconds by phase (separate instrumented pass): {section.title}"
    return Table(title, ["method", *phases], rows, detail=True)


def _domain_tables(report: EvalReport) -> list[Table]:
    """Results by domain; none if there are no more domains than tasks (which include the pooled "all")."""
    if len({m.domain for m in report.domains}) < len({m.task for m in report.methods}):
        return []
    by_domain = [replace(m, task=m.domain or "") for m in report.domains if m.prompts]
    return list(map(_speed_table, sections_of(by_domain)))


def _engine_table(engines: Sequence[EngineResult]) -> Table:
    """Other engines on the same prompts, timed in turn with our methods or in a later pass."""
    columns: dict[str, Callable[[EngineResult], str]] = {
        "engine": lambda e: (
            e.engine
            + f", serves {e.served}" * bool(e.served)
            + f", {' '.join(e.repaired)} repaired" * bool(e.repaired)
        ),
        "draft": lambda e: e.name,
        "K": lambda e: format_number(e.k, 0),
        "temperature": lambda e: f"{e.temperature:g}",
        "n": lambda e: format_number(e.prompts, 0),
        "τ": lambda e: format_number(e.tau, 2),
        "α by position": lambda e: format_positions(e.alpha_by_position or []),
        "tokens/s": lambda e: or_void(e, format_number(e.tokens_per_second, 1)),
        "× our plain": format_speedup,
        "× itself undrafted": lambda e: or_void(e, format_estimate(e.gain, 2, "×")),
        "timed": lambda e: "in turn with ours" if e.in_turn else "apart, after ours",
        "texts as ours": lambda e: (
            NOT_MEASURED if e.same_as_ours is None else f"{e.same_as_ours}/{e.prompts}"
        ),
        "failed": lambda e: format_number(len(e.failed), 0),
    }
    return Table.of("Other engines on the same prompts", columns, engines)


def _rival_table(rivals: Sequence[RivalSpeedup]) -> Table:
    columns: dict[str, Callable[[RivalSpeedup], str]] = {
        "T": lambda r: f"{r.temperature:g}",
        "method": lambda r: r.method,
        "over the best arm": lambda r: r.arm,
        "task": lambda r: r.task,
        "n": lambda r: str(r.prompts),
        "speed-up": lambda r: format_estimate(r.speedup, 2, "×"),
    }
    return Table.of("Over the best arm of other engines", columns, rivals, detail=True)


def _sampling_distribution_table(law: LawResult) -> Table:
    """Tests that sampled text follows the target's distribution; the control is the same draft with a lossy rule."""
    tests = {x.name: [test for test in law.tests if test.method == x.name] for x in law.methods}
    columns: dict[str, Callable[[LawVerdict], str]] = {
        "method": lambda x: x.name + " (lossy)" * x.lossy,
        "smallest p": lambda x: format_number(
            min((y.p_value for y in tests[x.name]), default=None), 4
        ),
        "tokens": lambda x: format_number(max((y.tokens for y in tests[x.name]), default=None), 0),
        "passed": lambda x: format_value(x.passed),
        "control was caught": lambda x: format_value(x.control_caught),
    }
    setting = f"temperature {law.temperature:g}, level {law.level:g}"
    title = f"Sampled text against the target's distribution, {setting}"
    return Table.of(title, columns, law.methods)


def _answer_quality_table(methods: Sequence[MethodResult]) -> Table:
    """Mean scores of answers that have a reference, with plain decoding's scores on the same prompts."""
    columns: dict[str, Callable[[tuple[MethodResult, QualityScore]], str]] = {
        "method": lambda x: x[0].name,
        "task": lambda x: x[0].task,
        "temperature": lambda x: f"{x[0].temperature:g}",
        "metric": lambda x: x[1].metric,
        "n": lambda x: format_number(x[1].prompts, 0),
        "score": lambda x: format_estimate(x[1].value, 3),
        "plain": lambda x: format_number(x[1].plain, 3),
        "difference": lambda x: format_estimate(x[1].difference, 3, signed=True),
    }
    scored = [(m, score) for m in methods if not m.is_plain for score in m.quality]
    return Table.of("Quality beside plain decoding", columns, scored, detail=True)


def pooled_by_name(report: EvalReport) -> list[tuple[str, MethodResult | EngineResult]]:
    """(name, entry) of every method and engine on all tasks together."""
    engines = [(f"{e.engine} {e.name}", e) for e in report.engines if e.is_pooled]
    return [*((m.name, m) for m in report.pooled), *engines]


def _failure_table(report: EvalReport) -> Table:
    """Prompts that a method or engine could not decode, with the first line of the error."""
    rows = [
        [name, f"{m.temperature:g}", f.task, f.id, f.error]
        for name, m in pooled_by_name(report)
        for f in m.failed
    ]
    header = ["method", "temperature", "task", "prompt", "error"]
    return Table("Prompts that failed", header, rows, prose=True)


def _acceptance_difference_table(comparisons: Sequence[AlphaDifference]) -> Table:
    """Paired differences of a metric between two methods on the same prompts."""
    columns: dict[str, Callable[[AlphaDifference], str]] = {
        "methods": lambda c: f"{c.a} − {c.b}",
        "task": lambda c: c.task,
        "temperature": lambda c: f"{c.temperature:g}",
        "metric": lambda c: c.metric,
        "difference": lambda c: format_estimate(c.difference, 3, signed=True),
        "n": lambda c: format_number(c.prompts, 0),
    }
    return Table.of("Differences on the same prompts", columns, comparisons)


def _target_drift_table(drift: TargetDrift) -> Table:
    """A target that was trained itself (Medusa-2, LayerSkip), compared with the original target."""
    header = ["before", "now", "n", "perplexity before", "now", "change of log perplexity", "KL"]
    change = format_estimate(drift.log_perplexity_change, 4, signed=True)
    perplexities = [format_number(x, 3) for x in (drift.perplexity_old, drift.perplexity_new)]
    prompts, kl = format_number(drift.prompts, 0), format_number(drift.kl, 4)
    title = "Change of the target by training it, per token of the original's answers"
    return Table(title, header, [[drift.old, drift.new, prompts, *perplexities, change, kl]])


def _setup_table(methods: Sequence[MethodResult]) -> Table:
    """Draft weights, K, tree, mode, dtype and verification rule of each method."""
    columns: dict[str, Column] = {
        "method": lambda m: m.name,
        "draft": lambda m: (
            m.draft or NOT_MEASURED
            if m.lookup is None
            else f"{m.draft or m.name}, after {m.lookup.name} from {m.lookup.min_match} tokens on"
        ),
        "draft sha256": lambda m: (
            (m.draft_sha256 or "")[:12] + ", altered after training" * m.draft_altered
            or NOT_MEASURED
        ),
        "K": _length_text,
        "tree": lambda m: (
            f"fixed, {len(m.tree.paths)} nodes"
            if m.tree is not None and m.tree.paths
            else format_value(to_json(m.tree))
        ),
        "mode": lambda m: m.mode,
        "dtype": lambda m: (
            m.dtype + f", draft {m.draft_dtype}" * (m.draft_dtype not in (None, m.dtype))
        ),
        "verification": lambda m: m.verification,
        "lossy": lambda m: format_value(m.lossy),
    }
    table = Table.of("Methods", columns, methods, prose=True, detail=True)
    once = dict.fromkeys(map(tuple, table.rows))
    return replace(table, rows=[[*row] for row in once])


def _length_text(m: MethodResult) -> str:
    """K; with how it adapts, or the exit layer and branches of mirror, its reuse rate ρ and hidden share."""
    if m.mirror is None:
        return str(m.k) if m.adaptive is None else f"up to {m.k}, by {m.adaptive.by}"
    parts = [f"{m.k}, mirror at layer {m.mirror.exit_layer}", f"{m.mirror.branches} branches"]
    if m.mirror.reuse_rate is not None:
        parts.append(f"ρ {m.mirror.reuse_rate:.2f}")
    if m.mirror.hidden_share is not None:
        parts.append(f"hidden share of drafting {m.mirror.hidden_share:.2f}")
    return ", ".join(parts)


def _environment_table(report: EvalReport) -> Table:
    """Seed, target, hardware, versions, tasks and git revision of the run."""
    facts: dict[str, object] = {"seed": report.seed}
    for part in ("target", "hardware", "versions"):
        facts |= {f"{part} {key}": x for key, x in to_json(vars(report)[part]).items()}
    facts |= {key: x for key, x in (("tasks", report.tasks), ("git", report.git)) if x}
    if report.gpu_utilisation is not None:
        use = format_percent(report.gpu_utilisation / 100)
        facts["GPU use during plain decoding"] = use
    if report.resumed:
        facts["resumed from an interrupted run"] = f"{report.resumed:,} measurements"
    rows = [[what, format_value(value)] for what, value in facts.items()]
    return Table("Hardware and versions", ["what", "value"], rows, prose=True)
