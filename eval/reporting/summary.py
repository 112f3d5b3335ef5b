"""The sentences at the head of a report: the fastest method, whether output is unchanged, which prompts failed."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from eval.metrics.round_cost import RoundCost
from eval.reporting.formatting import format_estimate, format_number, format_speedup
from eval.reporting.tables import format_identical, pooled_by_name
from eval.results.report import (
    LEAST_PROMPTS,
    PLAIN,
    EngineResult,
    EvalReport,
    GreedyVerdict,
    unique_names,
)


def summary_lines(report: EvalReport) -> list[str]:
    """One sentence or more a line, most important first; only what was measured or went wrong."""
    plain = report.baseline
    lines = [
        fastest_method_line(report),
        lossless_verdict(report),
        f"Plain decoding: {format_number(plain.tokens_per_second, 1)} tokens/s, "
        f"{format_number(plain.ms_per_token, 2)} ms per token.",
        distribution_verdict(report),
        *assisted_generation_lines(report),
        f"Prompts with images: {report.image_prompts:,}." if report.image_prompts else "",
        failed_prompts_line(report),
        dropped_turns_line(report),
        void_line(report),
        simulated_methods_line(report),
        *other_targets_lines(report),
        missing_predictions_line(report),
    ]
    return [line for line in lines if line]


def other_targets_lines(report: EvalReport) -> list[str]:
    """Which drafts were trained for another target, and whether measurements of another one are in the report."""
    weights, earlier = report.target.weights, report.earlier_targets
    drafts = unique_names([m.name for m in report.methods if m.trained_for not in (None, weights)])
    named = [f"weights {one.weights} in {one.dtype}" for one in earlier if one.weights is not None]
    lines = {
        f"Trained for another target than this one: {', '.join(drafts)}.": weights and drafts,
        f"Some measurements are of another target, as allowed: {', '.join(named)}.": named,
        "Some measurements may be of another target: they do not name it.": len(named)
        < len(earlier),
    }
    return [line for line, said in lines.items() if said]


def fastest_method_line(report: EvalReport) -> str:
    """The fastest method of the first section, and whether its interval lies above 1."""
    for section in report.sections[:1]:
        if best := section.fastest:
            few = f"At least {LEAST_PROMPTS} prompts are needed for a verdict; the best here is"
            slow = "No method is clearly faster than plain decoding; the best is"
            words = {"faster": "Fastest:", "few prompts": few}
            return (
                f"{words.get(best.verdict, slow)} {best.name}, {format_speedup(best)} the speed of "
                f"plain decoding (n = {best.prompts}, {section.title})."
            )
    voided = any(m.void for m in report.methods)
    return "No speed-up counts: see the void ones below." if voided else "No speed-up was measured."


def lossless_verdict(report: EvalReport) -> str:
    """Whether greedy output is the reference's (`GreedyVerdict.reference`), and which methods use a lossy rule."""
    lossy = unique_names([m.name for m in report.methods if m.is_real_draft and m.lossy])
    checked = [m for m in report.methods if m.is_real_draft and not m.lossy]
    verdicts = [(m, m.greedy) for m in checked if m.lossless.greedy_identical is not None]
    broken = [m for m, _ in verdicts if not m.lossless.greedy_identical]
    text = "Lossless: not checked."
    if verdicts:
        rounded = verdicts[0][0].is_rounded
        dtype = f" in {verdicts[0][0].dtype}"
        names = ", ".join(unique_names([m.name for m, _ in verdicts]))
        most = max(m.lossless.prompts for m, _ in verdicts)
        ties = {(t.task, t.id, t.position) for _, v in verdicts if v is not None for t in v.ties}
        whose = (
            f"plain decoding of the same weights{dtype}"
            if rounded
            else "transformers' own generate"
        )
        counted = f"({names}; n = {most}; ties of two logits: {len(ties)})"
        if broken:
            cases = ", ".join(f"{m.name} on {m.task} {format_identical(m)}" for m in broken)
            text = f"NOT identical to {whose.replace(' own ', ' ')}: {cases}. " + (
                f"In {'integers' if rounded else 'fp32'} this is a bug; in sums of lower precision it can also be a "
                "near-tie of two logits."
            )
        else:
            text = f"Lossless: greedy output equals {whose}, token by token {counted}."
        if rounded:
            text += f" {leaving_text(most, [v for _, v in verdicts if v is not None])}"
    return text + (f" Lossy by choice: {', '.join(lossy)}." if lossy else "")


def leaving_text(prompts: int, verdicts: Sequence[GreedyVerdict]) -> str:
    """How many texts leave transformers' generate, by which margins, and what an older report leaves unknown."""
    leaves = {(x.task, x.id): x for v in verdicts for x in v.leaves}
    if not leaves:
        return "No text leaves that of transformers' generate with these weights."
    gaps = sorted(abs(x.gap) for x in leaves.values() if x.gap is not None)
    margins = f" at margins of {gaps[0]:.3f} to {gaps[-1]:.3f} between two logits" if gaps else ""
    outside = sum(not x.tie for x in leaves.values())
    until = verdicts[0].reference == "until"
    text = (
        "Beside it, transformers' generate with these weights, whose passes round otherwise: "
        f"{len(leaves)} of {prompts} texts leave it{margins}, {outside} by more than its own passes differ."
    )
    return text + " Up to there they were compared with plain decoding." * until


def distribution_verdict(report: EvalReport) -> str:
    """Whether sampled output follows the target's distribution, by the tests; empty if they were not run."""
    law = report.law
    if law is None:
        return ""
    exact = [m for m in law.methods if not m.lossy]
    wrong = [m.name for m in exact if not m.passed]
    undetected = [m.name for m in exact if m.control_caught is False]
    setting = f"at temperature {law.temperature:g}, level {law.level:g}"
    if wrong:
        return f"Sampled output does NOT follow the target's distribution: {', '.join(wrong)} ({setting})."
    if undetected:
        return (
            f"The test of the target's distribution is too weak for {', '.join(undetected)}: it did not detect a lossy "
            f"rule either ({setting}). Set check_law to more tokens."
        )
    names = ", ".join(m.name for m in exact)
    return (
        f"Sampled output follows the target's distribution ({names}; {setting}; the same test detected a lossy rule "
        "for each draft)."
    )


def is_output_changed(report: EvalReport) -> bool:
    """Whether a method that claims to be lossless failed the greedy comparison or the distribution tests."""
    exact = [m for m in report.methods if m.is_real_draft and not m.lossy]
    tested = [] if report.law is None else report.law.methods
    greedy = any(m.lossless.greedy_identical is False for m in exact)
    return greedy or any(not m.lossy and not m.passed for m in tested)


def failed_prompts_line(report: EvalReport) -> str:
    failed = [f"{name} {len(m.failed)}" for name, m in pooled_by_name(report) if m.failed]
    text = "Failed prompts, excluded from that method's numbers and listed below"
    return f"{text}: {', '.join(failed)}." if failed else ""


def assisted_generation_lines(report: EvalReport, names: Sequence[str] | None = None) -> list[str]:
    """For each of these drafts (None: all), whether it makes transformers' own `generate` faster, and why or why not.

    The expected speed-up is τ ÷ (1 + K c), where c is the time of a draft step over that of a target step, both as
    measured in our engine. Empty unless the report has runs of the engine hf-assisted.
    """
    return [
        f"transformers with assistant_model = {e.name} (K = {e.k}, temperature {e.temperature:g}): "
        f"{format_estimate(e.gain, 2, '×')} the speed of its own generate, n = {e.prompts}. "
        + _explain_assisted_speedup(report, e, e.tau, e.gain.value)
        for e in report.engines
        if e.engine == "hf-assisted" and e.is_pooled
        if e.tau is not None and e.gain.value is not None and not e.void
        if names is None or e.name in names
    ]


def _explain_assisted_speedup(report: EvalReport, e: EngineResult, tau: float, gain: float) -> str:
    """Splits the speed-up of assisted generation into tokens per round and time per round in target steps."""
    low, high = e.gain.ci or (0.0, math.inf)
    claim = "It is faster" if low > 1 else "It is slower" if high < 1 else "No clear difference"
    text = (
        f"{claim}: a round accepts {tau - 1:.2f} drafted tokens (τ {tau:.2f}) and takes as long as {tau / gain:.2f} "
        "steps of generate."
    )
    timed = {m.name: m.phase_ms for m in report.pooled if m.temperature == e.temperature}
    own, plain = timed.get(e.name), timed.get(PLAIN)
    if own is None or plain is None or plain.total == 0:
        return text
    cost = own.draft / e.k / plain.total
    expected = tau / RoundCost(1, cost).at(e.k)
    text += (
        f" A draft step costs {cost:.2f} of a target step in our engine, so the expected speed-up is "
        f"τ ÷ (1 + K c) = {expected:.2f}×"
    )
    if max(expected, gain) <= 1:
        return f"{text}: the draft is too slow for its acceptance."
    if expected > gain:
        text += "; the difference is the time to verify K + 1 tokens and transformers' own work per round"
    return f"{text}."


def dropped_turns_line(report: EvalReport) -> str:
    """How many turns were measured again, and how many count for no method and why; empty if none did."""
    of_setting = {m.setting: m for m in report.pooled}.values()
    repeated, dropped = sum(m.repeated_turns for m in of_setting), Counter[str]()
    for m in of_setting:
        dropped.update(m.dropped_turns)
    edited = sum(m.stalled for _, m in pooled_by_name(report))
    if edited and not dropped:
        return f"Measured by an earlier version, which took stalls off the seconds of {edited} answers."
    if not (repeated or dropped):
        return ""
    why = ", ".join(f"{reason} {count}" for reason, count in dropped.most_common())
    return (
        f"Turns in which a method stalled or the machine was busy: {repeated} measured again for all methods, "
        f"{dropped.total()} dropped for all{f' ({why})' * bool(why)}."
    )


def void_line(report: EvalReport) -> str:
    """Which speed-ups say nothing, and why; empty if all do."""
    found = names_by_reason([(m.void, name) for name, m in pooled_by_name(report) if m.void])
    text = f"VOID, their seconds say nothing: {found}. Measure again on a quiet machine."
    return text if found else ""


def names_by_reason(pairs: Iterable[tuple[str, str]]) -> str:
    """`a, b (why); c (why)` of (why, name)."""
    reasons: dict[str, dict[str, None]] = {}
    for reason, name in pairs:
        reasons.setdefault(reason, {})[name] = None
    return "; ".join(f"{', '.join(names)} ({reason})" for reason, names in reasons.items())


def simulated_methods_line(report: EvalReport) -> str:
    names = unique_names([m.name for m in report.methods if m.simulated])
    text = (
        f"Simulated acceptance, no real draft: {', '.join(names)}. These entries show the speed of the engine at a "
        "configured acceptance, not that of a draft."
    )
    return text if names else ""


def missing_predictions_line(report: EvalReport) -> str:
    """Why methods have no predicted speed-up on all tasks; empty if all have one, or for a report without reasons."""
    drafted = [m for m in report.pooled if not m.is_plain]
    found = names_by_reason((m.prediction_missing, m.name) for m in drafted if m.prediction_missing)
    return f"No predicted speed-up: {found}." if found else ""
