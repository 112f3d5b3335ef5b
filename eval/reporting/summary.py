"""What a report comes down to, a sentence each: what is fastest, whether output is unchanged, what failed."""

import math
from collections.abc import Sequence

from eval.metrics.records import ratio_or_none
from eval.reporting.formatting import (
    Report,
    ReportEntry,
    format_identical,
    format_number,
    format_with_interval,
    get_nested,
)
from eval.reporting.tables import real_draft_entries, report_sections, unique_names


def summary_lines(report: Report) -> list[str]:
    """Most important first; a line only for what was measured or went wrong."""
    plain = report["baseline"]
    lines = [
        fastest_method_line(report),
        lossless_verdict(report),
        f"Plain decoding: {format_number(plain['tokens_per_second'], 1)} tokens/s, "
        f"{format_number(plain['ms_per_token'], 2)} ms per token.",
        distribution_verdict(report),
        *assisted_generation_lines(report),
        failed_prompts_line(report),
        simulated_methods_line(report),
    ]
    return [line for line in lines if line]


def fastest_method_line(report: Report) -> str:
    """The fastest method of the first section, or that none is clearly faster than plain."""
    for section in report_sections(report)[:1]:
        real = real_draft_entries(section)
        if len(real) > 0:
            best = real[0]
            sure = best["speedup_ci"] is not None and best["speedup_ci"][0] > 1
            claim = "Fastest:" if sure else "No method is clearly faster than plain; the best is"
            value = format_with_interval(best["speedup"], best["speedup_ci"], 2, "×")
            scope = f"n = {best['prompts']}, {section.title}"
            return f"{claim} {best['name']}, {value} the speed of plain decoding ({scope})."
    return "No speed-up was measured."


def lossless_verdict(report: Report) -> str:
    """Whether greedy output equals transformers' own, and which methods change it by choice."""
    drafts = [m for m in report["methods"] if m["name"] != "plain" and not m.get("simulated")]
    lossy = unique_names([m["name"] for m in drafts if m["lossy"]])
    checked = [
        m
        for m in drafts
        if not m["lossy"] and get_nested(m, "lossless", "greedy_identical") is not None
    ]
    broken = [m for m in checked if not m["lossless"]["greedy_identical"]]
    if len(checked) == 0:
        text = "Lossless: not checked."
    elif len(broken) == 0:
        names = ", ".join(unique_names([m["name"] for m in checked]))
        most = max(m["lossless"]["prompts"] for m in checked)
        ties = {(t["task"], t["id"], t["position"]) for m in checked for t in m["lossless"]["ties"]}
        claim = "Lossless: greedy output equals transformers' own generate, token by token"
        text = f"{claim} ({names}; n = {most}; {len(ties)} ties of logits)."
    else:
        cases = ", ".join(
            f"{m['name']} on {m['task']} {format_identical(m['lossless'])}" for m in broken
        )
        text = (
            f"NOT identical to transformers' generate: {cases}. In fp32 this is a bug; in lower precision "
            "near-ties of logits can flip."
        )
    return text + (f" Lossy by choice: {', '.join(lossy)}." if len(lossy) > 0 else "")


def distribution_verdict(report: Report) -> str:
    """Whether sampled output follows the target's law, by the statistical tests; empty if they were not run."""
    law = report.get("law")
    if law is None:
        return ""
    exact = [m for m in law["methods"] if not m["lossy"]]
    wrong = [m["name"] for m in exact if not m["passed"]]
    blind = [m["name"] for m in exact if m["control_caught"] is False]
    setting = f"at temperature {law['temperature']:g}, level {law['level']:g}"
    if wrong:
        return f"Sampled output does NOT follow the target's law: {', '.join(wrong)} ({setting})."
    if blind:
        return (
            f"The test of the target's law is blind for {', '.join(blind)}: a lossy rule passed it too ({setting}); "
            "give check_law more tokens."
        )
    names = ", ".join(m["name"] for m in exact)
    return f"Sampled output follows the target's law ({names}; {setting}; a lossy rule was caught each time)."


def failed_prompts_line(report: Report) -> str:
    """How many prompts failed, of which methods; empty if none did."""
    named = [(m["name"], m) for m in report["methods"]]
    named += [(f"{e['engine']} {e['name']}", e) for e in report.get("engines") or []]
    failed = {name: len(m["failed"]) for name, m in named if m["task"] == "all" and m.get("failed")}
    if not failed:
        return ""
    counts = ", ".join(f"{name} {count}" for name, count in failed.items())
    return f"Failed prompts, left out of that method's numbers and named below: {counts}."


def assisted_generation_lines(report: Report, names: Sequence[str] | None = None) -> list[str]:
    """Whether these drafts (None: all) make transformers' own `generate` faster, and if not why: a line for each.

    What was to be expected is τ ÷ (1 + K c), c being a draft step over a target step, both as our engine measured them.
    Only of reports that compared with hf and hf-assisted.
    """
    return [
        f"transformers with assistant_model = {e['name']} (K = {e['k']}, temperature {e['temperature']:g}): "
        f"{format_with_interval(e['gain'], e['gain_ci'], 2, '×')} the speed of its own generate, n = {e['prompts']}. "
        + _explain_assisted_speedup(report, e)
        for e in report.get("engines") or []
        if e["engine"] == "hf-assisted"
        and e["task"] == "all"
        and e.get("gain") is not None
        and (names is None or e["name"] in names)
    ]


def _explain_assisted_speedup(report: Report, e: ReportEntry) -> str:
    """The speed-up of an assisted element by its parts: tokens a round, and what a round costs in target steps."""
    low, high = e["gain_ci"] or (0.0, math.inf)
    claim = "It is faster" if low > 1 else "It is slower" if high < 1 else "No clear difference"
    text = (
        f"{claim}: a round accepts {e['tau'] - 1:.2f} drafted tokens (τ {e['tau']:.2f}) and takes as long as "
        f"{e['tau'] / e['gain']:.2f} steps of generate."
    )
    cost = draft_step_cost(report, e["name"], e["temperature"])
    if cost is None:
        return text
    expected = e["tau"] / (1 + e["k"] * cost)
    text += (
        f" A draft step costs {cost:.2f} of a target step in our engine, so τ ÷ (1 + K c) = {expected:.2f}× was to be "
        "expected"
    )
    if max(expected, e["gain"]) <= 1:
        return f"{text}: the draft is too dear for what is accepted."
    if expected > e["gain"]:
        text += "; the rest goes to verifying K + 1 tokens and to transformers' own work a round"
    return f"{text}."


def draft_step_cost(report: Report, name: str, temperature: float) -> float | None:
    """Time of a draft step over that of a target step, from the phases of this chain and of plain decoding.

    None where phases were not timed.
    """
    found = {
        m["name"]: m
        for m in report["methods"]
        if (m["task"], m["temperature"]) == ("all", temperature) and m.get("phase_ms")
    }
    if name not in found or "plain" not in found:
        return None
    step = sum(found["plain"]["phase_ms"].values())
    return ratio_or_none(found[name]["phase_ms"]["draft"] / found[name]["k"], step)


def simulated_methods_line(report: Report) -> str:
    """Which methods accept what they were told to; empty if none does."""
    names = unique_names([m["name"] for m in report["methods"] if m.get("simulated")])
    if not names:
        return ""
    return f"Simulated acceptance, no real draft: {', '.join(names)}. It says what the engine is worth."


def is_output_changed(report: Report) -> bool:
    """Whether some method that claims to be lossless was seen to change the output."""
    return "NOT" in lossless_verdict(report) + distribution_verdict(report)
