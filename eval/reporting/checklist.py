"""The production checklist with a report's own numbers: baseline, draft, tuning, roll-out."""

from collections.abc import Callable, Sequence

from eval.metrics import roofline
from eval.metrics.bootstrap import ALL_TASKS
from eval.metrics.latency import LatencyMs
from eval.metrics.round_cost import expected_tokens, recommended_k_range
from eval.reporting.decision import memory_bandwidth
from eval.reporting.formatting import (
    NOT_MEASURED,
    Table,
    format_estimate,
    format_number,
    format_percent,
    format_speedup,
)
from eval.reporting.summary import lossless_verdict
from eval.results.report import EvalReport, MethodResult
from eval.results.tuned import ChosenSetting, TunedReport


def build_checklist(
    report: EvalReport, m: MethodResult, tuned: TunedReport | None
) -> dict[str, list[str]]:
    """{step: lines}: what to know and to do, with the numbers of `m`, the draft that the advice is about."""
    peers = [x for x in report.pooled if x.setting == m.setting]
    plain = next((x for x in peers if x.is_plain), None)
    return {
        "Measured": _measured_lines(report, m, peers, plain),
        "Limits": [*_round_lines(m), *roofline_lines(report, m, plain, tuned)],
        "Tuning": tuning_advice(tuned, m),
        "Roll-out": rollout_advice(m, plain, tuned),
    }


def _measured_lines(
    report: EvalReport, m: MethodResult, peers: Sequence[MethodResult], plain: MethodResult | None
) -> list[str]:
    """Plain decoding, the draft, the other methods, and the tasks on which it is not shown to be faster."""
    speed = "not measured"
    if plain is not None:
        first = format_number((plain.latency_ms or LatencyMs()).first_token, 1)
        speed = (
            f"{format_number(plain.tokens_per_second.value, 1)} tokens/s, "
            f"{format_number(plain.ms_per_token, 2)} ms per token, first token {first} ms"
        )
    others = [f"{x.name} {format_speedup(x)}" for x in peers if x.name not in ("plain", m.name)]
    doubtful = [
        f"{x.task} {format_speedup(x)} (n = {x.prompts})"
        for x in report.entries
        if (x.name, x.setting) == (m.name, m.setting) and not x.is_pooled
        if x.valid_speedup.ci is None or x.valid_speedup.ci[0] <= 1
    ]
    return [
        f"Plain decoding of {report.target_name} by the same engine: {speed}.",
        f"{m.name}: τ {format_estimate(m.tau, 2)}, α {format_estimate(m.alpha, 3)}, {format_speedup(m)}; "
        f"others on the same prompts: {', '.join(others) or 'none'}.",
        *([f"Not shown to be faster on {', '.join(doubtful)}."] if doubtful else []),
        lossless_verdict(report),
    ]


def _round_lines(m: MethodResult) -> list[str]:
    """Expected tokens a round beside those measured, and what a round costs."""
    alpha, tau, speedup = m.alpha.value, m.tau.value, m.valid_speedup.value
    lines = []
    if alpha is not None and tau is not None and m.k and m.tree is None:
        expected = expected_tokens([alpha], m.k)
        lines.append(
            f"Expected tokens a round, 1 + α + … + α^{m.k}: {expected:.2f}; measured: τ {tau:.2f}. More than K + 1 = "
            f"{m.k + 1} is impossible."
        )
    if tau is not None and speedup:
        lines.append(
            f"A round costs {tau / speedup:.2f} steps of plain decoding (τ ÷ speed-up): below a τ of "
            f"{max(1.0, tau / speedup):.2f} it loses, so switch it off there (vLLM prints τ as mean acceptance length)."
        )
    return lines


def tuned_table(chosen: Sequence[ChosenSetting]) -> Table:
    """The fastest setting of each method by domain, temperature and batch size, with the K that guides recommend."""
    columns: dict[str, Callable[[ChosenSetting], str]] = {
        "domain": lambda c: c.task,
        "temperature": lambda c: f"{c.temperature:g}",
        "batch": lambda c: format_number(c.batch_size, 0),
        "method": lambda c: c.method,
        "fastest setting": lambda c: c.setting,
        "n": lambda c: format_number(c.prompts, 0),
        "speed-up in rounds": lambda c: format_estimate(c.speedup, 2, "×"),
        "held out": lambda c: format_number(c.held_out, 2, "×"),
        "guides say": lambda c: guided_length(c.guide) or NOT_MEASURED,
    }
    return Table.of("Tuned settings", columns, chosen, prose=True)


def guided_length(guide: tuple[int, int] | None) -> str:
    """`K 3 to 4`, or nothing."""
    return f"K {guide[0]} to {guide[1]}" if guide else ""


def tuning_advice(tuned: TunedReport | None, m: MethodResult) -> list[str]:
    """The tuned settings of the method, with the K that guides recommend."""
    if tuned is None:
        guide = guided_length(recommended_k_range("", m.alpha.value))
        advice = f"; guides recommend {guide} at this acceptance" if guide else ""
        return [f"Not tuned: K = {m.k} was given{advice}. Run eval/tune.py."]
    lines = []
    for c in tuned.chosen:
        if (c.method, c.temperature, c.batch_size) != (m.name, *m.setting):
            continue
        advice = f"; guides recommend {guided_length(c.guide)}" if c.guide else ""
        held_out = format_number(c.held_out, 2, "×")
        lines.append(
            f"{c.task}: {c.setting}, {format_estimate(c.speedup, 2, '×')} in rounds; chosen on one half of the prompts "
            f"and measured on the other half: {held_out}{advice}."
        )
    if not lines:
        return [f"{m.name} was not tuned at temperature {m.temperature:g}, batch {m.batch_size}."]
    error = tuned.predictions.median_error
    if error is not None:
        lines.append(
            f"Speed-ups predicted from other prompts were off by {format_percent(error)} (median of the "
            f"{tuned.predictions.counted} draft lengths with a precise enough measurement)."
        )
    return lines


def rollout_advice(
    m: MethodResult, plain: MethodResult | None, tuned: TunedReport | None
) -> list[str]:
    """What to monitor in production, and the values at which to act."""
    lines = [
        "Start with a small share of the traffic and monitor τ by domain: it drops first where prompts are of a new "
        "kind; then sample, distill and measure again."
    ]
    p95 = (m.latency_ms or LatencyMs()).p95
    if p95 is not None:
        plain_p95 = None if plain is None else (plain.latency_ms or LatencyMs()).p95
        lines.append(
            f"Monitor the p95 of a round: {p95:.1f} ms here, {format_number(plain_p95, 1)} ms in plain decoding. Under "
            "load it rises before throughput falls."
        )
    return [*lines, batch_size_advice(m, tuned)]


def roofline_lines(
    report: EvalReport, m: MethodResult, plain: MethodResult | None, tuned: TunedReport | None
) -> list[str]:
    """The tokens/s that reading the weights allows, and how many tokens a pass can verify before computing takes
    longer: of a GPU by its data sheet, of other devices by eval/tune.py."""
    gpu, width = (
        roofline.GPU_SPECS.get(report.hardware.device or ""),
        roofline.DTYPE_BYTES.get(m.dtype),
    )
    size = report.models.target if report.models else None
    bandwidth = memory_bandwidth(report, tuned)
    lines = []
    if size is not None and not size.experts and width and bandwidth:
        top = bandwidth / (size.parameters * width)
        here = None if plain is None else plain.tokens_per_second.value
        lines.append(
            f"Roofline: reading all weights at {bandwidth / 1e9:,.0f} GB/s allows {top:,.1f} passes/s, as many plain "
            f"tokens/s (measured {format_number(here, 1)}) and τ times as many with a draft that costs nothing."
        )
    if gpu is not None and width == 2:  # GPU_SPECS holds the operations a second of 16-bit dtypes
        lines.append(
            f"By its data sheet this GPU computes {roofline.ridge_point(gpu, width):.0f} tokens in the time that it "
            "reads the weights once: keep batch × tokens verified per round well below that (here "
            f"{m.batch_size} × {m.k + 1})."
        )
    return lines


def batch_size_advice(m: MethodResult, tuned: TunedReport | None) -> str:
    """Up to which batch size the method was measured to be faster than plain decoding."""
    best: dict[int, float] = {}
    for c in [] if tuned is None else tuned.cells:
        place = (c.method, c.task, c.temperature)
        if place == (m.name, ALL_TASKS, m.temperature) and c.speedup.value is not None:
            best[c.batch_size] = max(c.speedup.value, best.get(c.batch_size, 0.0))
    if len(best) < 2:
        return (
            f"Measured at batch {m.batch_size} only, and speed-ups fall as batches grow: run eval/tune.py with several "
            "batch_sizes."
        )
    shown = ", ".join(f"{size}: {best[size]:.2f}×" for size in sorted(best))
    helps = [size for size, speedup in best.items() if speedup > 1]
    if not helps:
        return f"It was slower than plain decoding at every measured batch size ({shown})."
    return f"By batch size: {shown}. Switch off above {max(helps)} concurrent requests."
