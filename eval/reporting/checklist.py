"""The production checklist, filled in with a report's own numbers: baseline, draft, tuning, roll-out."""

from typing import Any

from eval.metrics import roofline
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
    Report,
    ReportEntry,
    Table,
    format_number,
    format_percent,
    format_with_interval,
    get_nested,
    target_name,
)
from eval.reporting.summary import lossless_verdict


def build_checklist(
    report: Report, entry: ReportEntry, facts: DecisionInputs, tuned: dict[str, Any] | None
) -> dict[str, list[str]]:
    """Baseline, draft, tuning, roll-out: what to do, with the report's numbers in it."""
    same = (entry["temperature"], entry["batch_size"], "all")
    peers = [m for m in report["methods"] if (m["temperature"], m["batch_size"], m["task"]) == same]
    plain = next((m for m in peers if m["name"] == "plain"), None)
    others = [
        f"{m['name']} {format_with_interval(m['speedup'], m['speedup_ci'], 2, '×')}"
        for m in peers
        if m["name"] not in ("plain", entry["name"])
    ]
    latency = (
        ["not measured"]
        if plain is None
        else [
            f"round {format_number(get_nested(plain, 'latency_ms', 'p50'), 1)} ms median, "
            f"{format_number(get_nested(plain, 'latency_ms', 'p95'), 1)} ms p95, "
            f"first token {format_number(get_nested(plain, 'latency_ms', 'first_token'), 1)} ms"
        ]
    )
    return {
        "1. Baseline": [
            f"Plain decoding of {target_name(report)} by the same engine: "
            f"{format_number(None if plain is None else plain['tokens_per_second'], 1)} tokens/s, "
            f"{format_number(None if plain is None else plain['ms_per_token'], 2)} ms a token; {latency[0]}.",
            f"GPU use during it: {_format_or_missing(facts.utilisation, format_percent)}. "
            f"Tokens of a reply: {format_reply_length(facts, entry)}.",
        ],
        "2. Draft": [
            f"{entry['name']}: τ {format_with_interval(entry['tau'], entry['tau_ci'], 2)}, "
            f"α {format_with_interval(entry['alpha'], entry['alpha_ci'], 3)}, "
            f"{format_with_interval(entry['speedup'], entry['speedup_ci'], 2, '×')}.",
            f"Beside it on the same prompts: {', '.join(others) or 'nothing'}.",
            f"Size: {_draft_size_text(report, entry)}. Memory: {format_memory(facts)}.",
            lossless_verdict(report),
            *contradictions(entry, size_ratio(report, entry)),
            *_retraining_advice(entry),
        ],
        "3. Tuning": tuning_advice(tuned, entry),
        "4. Roll-out": [
            *rollout_advice(entry, plain, tuned),
            *verification_headroom(report, entry),
        ],
    }


def tuned_table(tuned: dict[str, Any]) -> Table:
    """The fastest setting of each method by domain, temperature and batch size, beside what guides say."""
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


def tuning_advice(tuned: dict[str, Any] | None, entry: ReportEntry) -> list[str]:
    """The settings that were chosen, beside what guides say."""
    if tuned is None:
        guess = recommended_k_range("", entry["alpha"])
        said = f"; guides say {guess[0]} to {guess[1]} for a draft as strong" if guess else ""
        return [f"Not tuned: K = {entry['k']} was given{said}. Run eval/tune.py."]
    found = []
    for c in tuned["chosen"]:
        place = (c["method"], c["temperature"], c["batch_size"])
        if place != (entry["name"], entry["temperature"], entry["batch_size"]):
            continue
        said = f"; guides say K {c['guide'][0]} to {c['guide'][1]}" if c["guide"] else ""
        found.append(
            f"{c['task']}: {c['setting']}, {format_with_interval(c['speedup'], c['ci'], 2, '×')} in rounds; "
            f"chosen on one half of the prompts and measured on the other: {format_number(c['held_out'], 2, '×')}{said}."
        )
    if not found:
        setting = f"temperature {entry['temperature']:g}, batch {entry['batch_size']}"
        return [f"{entry['name']} was not tuned at {setting}."]
    foretold = tuned["predictions"]
    if foretold["median_error"] is not None:
        found.append(
            f"Other prompts foretold speed-ups within {format_percent(foretold['median_error'])} (median of "
            f"{foretold['counted']} draft lengths that were measured closely enough to judge by)."
        )
    return found


def rollout_advice(
    entry: ReportEntry, plain: ReportEntry | None, tuned: dict[str, Any] | None
) -> list[str]:
    """What to watch, and the values at which to act."""
    found = [
        "Begin with a small share of traffic, plain decoding beside it, on the same prompts where possible."
    ]
    if entry["tau"] is not None and entry["speedup"]:
        low = max(1.0, entry["tau"] / entry["speedup"])
        found.append(
            f"Watch tokens a target pass (τ; vLLM prints it as mean acceptance length): {entry['tau']:.2f} here. "
            f"At the measured cost of a round it breaks even at {low:.2f}: switch off below."
        )
    p95 = get_nested(entry, "latency_ms", "p95")
    if p95 is not None:
        beside = get_nested(plain, "latency_ms", "p95") if plain is not None else None
        found.append(
            f"Watch the p95 of a round: {p95:.1f} ms here, {format_number(beside, 1)} ms plain. It rises with load before "
            "throughput falls."
        )
    found.append(batch_size_advice(entry, tuned))
    found.append(
        "Watch acceptance by domain: a new kind of prompt shows there first. Sample, distill and measure again."
    )
    return found


def verification_headroom(report: Report, entry: ReportEntry) -> list[str]:
    """How many tokens a pass may verify before arithmetic costs more than reading weights, on a known GPU."""
    gpu = roofline.GPU_SPECS.get(report["hardware"].get("device"))
    width = roofline.DTYPE_BYTES.get(entry["dtype"])
    if gpu is None or width != 2:  # the table's arithmetic is that of bf16
        return []
    tokens = f"{roofline.ridge_point(gpu, width):.0f} tokens"
    return [
        f"By the data sheet this GPU reads weights as long as it computes {tokens}: keep batch × tokens verified a "
        f"round well below (here {entry['batch_size']} × {entry['k'] + 1})."
    ]


def batch_size_advice(entry: ReportEntry, tuned: dict[str, Any] | None) -> str:
    """Up to which batch size the method was measured to help."""
    cells = [
        c
        for c in (tuned or {}).get("cells", [])
        if c["method"] == entry["name"]
        and c["task"] == "all"
        and c["temperature"] == entry["temperature"]
        and c["speedup"] is not None
    ]
    sizes = sorted({c["batch_size"] for c in cells})
    if len(sizes) < 2:
        only = f"Measured at batch {entry['batch_size']} only"
        return f"{only}: speed-ups fall as batches grow. Run eval/tune.py with several batch_sizes."
    best = {b: max(c["speedup"] for c in cells if c["batch_size"] == b) for b in sizes}
    helps = [b for b in sizes if best[b] > 1]
    shown = ", ".join(f"{b}: {x:.2f}×" for b, x in best.items())
    if len(helps) == 0:
        return f"It helped at no measured batch size ({shown})."
    return f"By batch size: {shown}. Switch off above {max(helps)} requests at a time."


def _retraining_advice(entry: ReportEntry) -> list[str]:
    if entry["alpha"] is None or entry["alpha"] >= GOOD_ACCEPTANCE or entry["draft"] is None:
        return []
    return [
        f"α {entry['alpha']:.2f} is below the 60 % to aim for: distill on the target's own answers to your prompts."
    ]


def _draft_size_text(report: Report, entry: ReportEntry) -> str:
    if entry["draft"] is None:
        return "no weights of its own"
    ratio = size_ratio(report, entry)
    return "not known" if ratio is None else f"{format_size_ratio(ratio)} of the target"


def _format_or_missing(value: Any, form: Any) -> str:
    return "not measured" if value is None else form(value)
