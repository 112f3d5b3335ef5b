"""The production checklist with a report's own numbers: baseline, draft, tuning, roll-out."""

from eval.metrics import roofline
from eval.metrics.bootstrap import ALL_TASKS
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
    format_number,
    format_percent,
    format_with_interval,
)
from eval.reporting.summary import lossless_verdict
from eval.results.report import (
    Report,
    ReportEntry,
    Tuned,
    filter_by_setting,
    get_nested,
    target_name,
)


def build_checklist(
    report: Report, entry: ReportEntry, inputs: DecisionInputs, tuned: Tuned | None
) -> dict[str, list[str]]:
    """{step: lines}: what to do in each step, with the numbers of `entry`, the draft that the advice is about."""
    pooled = [m for m in report["methods"] if m["task"] == ALL_TASKS]
    peers = filter_by_setting(pooled, (entry["temperature"], entry["batch_size"]))
    plain = next((m for m in peers if m["name"] == "plain"), None)
    return {
        "1. Baseline": _baseline_lines(report, entry, inputs, plain),
        "2. Draft": _draft_lines(report, entry, inputs, peers),
        "3. Tuning": tuning_advice(tuned, entry),
        "4. Roll-out": [
            *rollout_advice(entry, plain, tuned),
            *verification_headroom(report, entry),
        ],
    }


def _baseline_lines(
    report: Report, entry: ReportEntry, inputs: DecisionInputs, plain: ReportEntry | None
) -> list[str]:
    speed = latency = "not measured"
    if plain is not None:
        speed = (
            f"{format_number(plain['tokens_per_second'], 1)} tokens/s, "
            f"{format_number(plain['ms_per_token'], 2)} ms per token"
        )
        latency = (
            f"round {format_number(get_nested(plain, 'latency_ms', 'p50'), 1)} ms median, "
            f"{format_number(get_nested(plain, 'latency_ms', 'p95'), 1)} ms p95, "
            f"first token {format_number(get_nested(plain, 'latency_ms', 'first_token'), 1)} ms"
        )
    use = inputs.utilisation
    return [
        f"Plain decoding of {target_name(report)} by the same engine: {speed}; {latency}.",
        f"GPU use during plain decoding: {'not measured' if use is None else format_percent(use)}. "
        f"Tokens per reply: {format_reply_length(inputs, entry)}.",
    ]


def _draft_lines(
    report: Report, entry: ReportEntry, inputs: DecisionInputs, peers: list[ReportEntry]
) -> list[str]:
    others = [
        f"{m['name']} {format_with_interval(m['speedup'], m['speedup_ci'], 2, '×')}"
        for m in peers
        if m["name"] not in ("plain", entry["name"])
    ]
    lines = [
        f"{entry['name']}: τ {format_with_interval(entry['tau'], entry['tau_ci'], 2)}, "
        f"α {format_with_interval(entry['alpha'], entry['alpha_ci'], 3)}, "
        f"{format_with_interval(entry['speedup'], entry['speedup_ci'], 2, '×')}.",
        f"Other methods on the same prompts: {', '.join(others) or 'none'}.",
        f"Size: {_draft_size_text(report, entry)}. Memory: {format_memory(inputs)}.",
        lossless_verdict(report),
        *contradictions(entry, size_ratio(report, entry)),
    ]
    alpha = entry["alpha"]
    if entry["draft"] is not None and alpha is not None and alpha < GOOD_ACCEPTANCE:
        lines.append(
            f"α {alpha:.2f} is below the 60 % that guides aim for: distill the draft on the target's own answers to "
            "your prompts."
        )
    return lines


def _draft_size_text(report: Report, entry: ReportEntry) -> str:
    if entry["draft"] is None:
        return "no weights of its own"
    ratio = size_ratio(report, entry)
    return "unknown" if ratio is None else f"{format_size_ratio(ratio)} of the target"


def tuned_table(tuned: Tuned) -> Table:
    """The fastest setting of each method by domain, temperature and batch size, with the K that guides recommend."""
    rows = [
        [
            c["task"],
            f"{c['temperature']:g}",
            format_number(c["batch_size"], 0),
            c["method"],
            c["setting"],
            format_number(c["prompts"], 0),
            format_with_interval(c["speedup"], c["ci"], 2, "×"),
            format_number(c["held_out"], 2, "×"),
            NOT_MEASURED if c["guide"] is None else f"K {c['guide'][0]} to {c['guide'][1]}",
        ]
        for c in tuned["chosen"]
    ]
    header = ["domain", "temperature", "batch", "method", "fastest setting", "n"]
    header += ["speed-up in rounds", "held out", "guides say"]
    return Table("Tuned settings", header, rows, prose=True)


def tuning_advice(tuned: Tuned | None, entry: ReportEntry) -> list[str]:
    """The tuned settings of the entry's method, with the K that guides recommend."""
    if tuned is None:
        guide = recommended_k_range("", entry["alpha"])
        advice = (
            f"; guides recommend K {guide[0]} to {guide[1]} at this acceptance" if guide else ""
        )
        return [f"Not tuned: K = {entry['k']} was given{advice}. Run eval/tune.py."]
    lines = []
    for c in tuned["chosen"]:
        setting = (c["method"], c["temperature"], c["batch_size"])
        if setting != (entry["name"], entry["temperature"], entry["batch_size"]):
            continue
        advice = f"; guides recommend K {c['guide'][0]} to {c['guide'][1]}" if c["guide"] else ""
        held_out = format_number(c["held_out"], 2, "×")
        lines.append(
            f"{c['task']}: {c['setting']}, {format_with_interval(c['speedup'], c['ci'], 2, '×')} in rounds; chosen on "
            f"one half of the prompts and measured on the other half: {held_out}{advice}."
        )
    if not lines:
        setting_text = f"temperature {entry['temperature']:g}, batch {entry['batch_size']}"
        return [f"{entry['name']} was not tuned at {setting_text}."]
    predictions = tuned["predictions"]
    if predictions["median_error"] is not None:
        lines.append(
            f"Speed-ups predicted from other prompts were off by {format_percent(predictions['median_error'])} (median "
            f"of the {predictions['counted']} draft lengths with a precise enough measurement)."
        )
    return lines


def rollout_advice(entry: ReportEntry, plain: ReportEntry | None, tuned: Tuned | None) -> list[str]:
    """What to monitor in production, and the values at which to act."""
    lines = [
        "Start with a small share of the traffic and compare with plain decoding, on the same prompts where possible."
    ]
    if entry["tau"] is not None and entry["speedup"]:
        break_even = max(1.0, entry["tau"] / entry["speedup"])
        lines.append(
            f"Monitor tokens per target pass (τ; vLLM prints it as mean acceptance length): {entry['tau']:.2f} here. "
            f"At the measured cost of a round it breaks even at {break_even:.2f}: switch speculation off below that."
        )
    p95 = get_nested(entry, "latency_ms", "p95")
    if p95 is not None:
        plain_p95 = None if plain is None else get_nested(plain, "latency_ms", "p95")
        lines.append(
            f"Monitor the p95 of a round: {p95:.1f} ms here, {format_number(plain_p95, 1)} ms in plain decoding. Under "
            "load it rises before throughput falls."
        )
    lines.append(batch_size_advice(entry, tuned))
    lines.append(
        "Monitor acceptance by domain: it drops first where prompts are of a new kind. Then sample, distill and "
        "measure again."
    )
    return lines


def verification_headroom(report: Report, entry: ReportEntry) -> list[str]:
    """How many tokens a pass can verify before computing takes longer than reading the weights; only for known GPUs."""
    gpu = roofline.GPU_SPECS.get(report["hardware"].get("device"))
    width = roofline.DTYPE_BYTES.get(entry["dtype"])
    if gpu is None or width != 2:  # GPU_SPECS holds the operations a second of 16-bit dtypes
        return []
    tokens = f"{roofline.ridge_point(gpu, width):.0f} tokens"
    return [
        f"By its data sheet this GPU computes {tokens} in the time that it reads the weights once: keep batch × tokens "
        f"verified per round well below that (here {entry['batch_size']} × {entry['k'] + 1})."
    ]


def batch_size_advice(entry: ReportEntry, tuned: Tuned | None) -> str:
    """Up to which batch size the method was measured to be faster than plain decoding."""
    cells = [
        c
        for c in (tuned or {}).get("cells", [])
        if c["method"] == entry["name"]
        and c["task"] == ALL_TASKS
        and c["temperature"] == entry["temperature"]
        and c["speedup"] is not None
    ]
    sizes = sorted({c["batch_size"] for c in cells})
    if len(sizes) < 2:
        return (
            f"Measured at batch {entry['batch_size']} only, and speed-ups fall as batches grow: run eval/tune.py with "
            "several batch_sizes."
        )
    best = {b: max(c["speedup"] for c in cells if c["batch_size"] == b) for b in sizes}
    helps = [b for b in sizes if best[b] > 1]
    shown = ", ".join(f"{b}: {x:.2f}×" for b, x in best.items())
    if not helps:
        return f"It was slower than plain decoding at every measured batch size ({shown})."
    return f"By batch size: {shown}. Switch off above {max(helps)} concurrent requests."
