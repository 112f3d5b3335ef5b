"""The production checklist with a report's own numbers: baseline, draft, tuning, roll-out."""

from collections.abc import Sequence

from eval.metrics import roofline
from eval.metrics.bootstrap import ALL_TASKS
from eval.metrics.latency import LatencyMs
from eval.metrics.speedup_model import recommended_k_range
from eval.reporting.decision import (
    GOOD_ACCEPTANCE,
    DecisionInputs,
    contradictions,
    format_memory,
    format_reply_length,
    format_size_ratio,
    size_ratio,
)
from eval.reporting.formatting import (
    NOT_MEASURED,
    Table,
    format_estimate,
    format_number,
    format_percent,
)
from eval.reporting.summary import lossless_verdict
from eval.results.report import EvalReport, MethodResult
from eval.results.tuned import ChosenSetting, TunedReport


def build_checklist(
    report: EvalReport, m: MethodResult, inputs: DecisionInputs, tuned: TunedReport | None
) -> dict[str, list[str]]:
    """{step: lines}: what to do in each step, with the numbers of `m`, the draft that the advice is about."""
    peers = [x for x in report.pooled if x.setting == m.setting]
    plain = next((x for x in peers if x.is_plain), None)
    return {
        "1. Baseline": _baseline_lines(report, m, inputs, plain),
        "2. Draft": _draft_lines(report, m, inputs, peers),
        "3. Tuning": tuning_advice(tuned, m),
        "4. Roll-out": [*rollout_advice(m, plain, tuned), *verification_headroom(report, m)],
    }


def _baseline_lines(
    report: EvalReport, m: MethodResult, inputs: DecisionInputs, plain: MethodResult | None
) -> list[str]:
    speed = latency = "not measured"
    if plain is not None:
        waits = plain.latency_ms or LatencyMs()
        speed = (
            f"{format_number(plain.tokens_per_second.value, 1)} tokens/s, "
            f"{format_number(plain.ms_per_token, 2)} ms per token"
        )
        latency = (
            f"round {format_number(waits.p50, 1)} ms median, {format_number(waits.p95, 1)} ms p95, "
            f"first token {format_number(waits.first_token, 1)} ms"
        )
    use = inputs.utilisation
    return [
        f"Plain decoding of {report.target_name} by the same engine: {speed}; {latency}.",
        f"GPU use during plain decoding: {'not measured' if use is None else format_percent(use)}. "
        f"Tokens per reply: {format_reply_length(inputs, m)}.",
    ]


def _draft_lines(
    report: EvalReport, m: MethodResult, inputs: DecisionInputs, peers: Sequence[MethodResult]
) -> list[str]:
    others = [
        f"{x.name} {format_estimate(x.speedup, 2, '×')}"
        for x in peers
        if x.name not in ("plain", m.name)
    ]
    ratio, alpha = size_ratio(report, m), m.alpha.value
    size = "unknown" if ratio is None else f"{format_size_ratio(ratio)} of the target"
    lines = [
        f"{m.name}: τ {format_estimate(m.tau, 2)}, α {format_estimate(m.alpha, 3)}, "
        f"{format_estimate(m.speedup, 2, '×')}.",
        f"Other methods on the same prompts: {', '.join(others) or 'none'}.",
        f"Size: {'no weights of its own' if m.draft is None else size}. Memory: {format_memory(inputs)}.",
        lossless_verdict(report),
        *contradictions(m, ratio),
    ]
    if m.draft is not None and alpha is not None and alpha < GOOD_ACCEPTANCE:
        lines.append(
            f"α {alpha:.2f} is below the 60 % that guides aim for: distill the draft on the target's own answers to "
            "your prompts."
        )
    return lines


def tuned_table(chosen: Sequence[ChosenSetting]) -> Table:
    """The fastest setting of each method by domain, temperature and batch size, with the K that guides recommend."""
    rows = [
        [
            c.task,
            f"{c.temperature:g}",
            format_number(c.batch_size, 0),
            c.method,
            c.setting,
            format_number(c.prompts, 0),
            format_estimate(c.speedup, 2, "×"),
            format_number(c.held_out, 2, "×"),
            NOT_MEASURED if c.guide is None else f"K {c.guide[0]} to {c.guide[1]}",
        ]
        for c in chosen
    ]
    header = ["domain", "temperature", "batch", "method", "fastest setting", "n"]
    header += ["speed-up in rounds", "held out", "guides say"]
    return Table("Tuned settings", header, rows, prose=True)


def tuning_advice(tuned: TunedReport | None, m: MethodResult) -> list[str]:
    """The tuned settings of the method, with the K that guides recommend."""
    if tuned is None:
        guide = recommended_k_range("", m.alpha.value)
        advice = (
            f"; guides recommend K {guide[0]} to {guide[1]} at this acceptance" if guide else ""
        )
        return [f"Not tuned: K = {m.k} was given{advice}. Run eval/tune.py."]
    lines = []
    for c in tuned.chosen:
        if (c.method, c.temperature, c.batch_size) != (m.name, *m.setting):
            continue
        advice = f"; guides recommend K {c.guide[0]} to {c.guide[1]}" if c.guide else ""
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
        "Start with a small share of the traffic and compare with plain decoding, on the same prompts where possible."
    ]
    if m.tau.value is not None and m.speedup.value:
        break_even = max(1.0, m.tau.value / m.speedup.value)
        lines.append(
            f"Monitor tokens per target pass (τ; vLLM prints it as mean acceptance length): {m.tau.value:.2f} here. "
            f"At the measured cost of a round it breaks even at {break_even:.2f}: switch speculation off below that."
        )
    p95 = (m.latency_ms or LatencyMs()).p95
    if p95 is not None:
        plain_p95 = None if plain is None else (plain.latency_ms or LatencyMs()).p95
        lines.append(
            f"Monitor the p95 of a round: {p95:.1f} ms here, {format_number(plain_p95, 1)} ms in plain decoding. Under "
            "load it rises before throughput falls."
        )
    lines.append(batch_size_advice(m, tuned))
    lines.append(
        "Monitor acceptance by domain: it drops first where prompts are of a new kind. Then sample, distill and "
        "measure again."
    )
    return lines


def verification_headroom(report: EvalReport, m: MethodResult) -> list[str]:
    """How many tokens a pass can verify before computing takes longer than reading the weights; only for known GPUs."""
    gpu = roofline.GPU_SPECS.get(report.hardware.device or "")
    width = roofline.DTYPE_BYTES.get(m.dtype)
    if gpu is None or width != 2:  # GPU_SPECS holds the operations a second of 16-bit dtypes
        return []
    tokens = f"{roofline.ridge_point(gpu, width):.0f} tokens"
    return [
        f"By its data sheet this GPU computes {tokens} in the time that it reads the weights once: keep batch × tokens "
        f"verified per round well below that (here {m.batch_size} × {m.k + 1})."
    ]


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
