"""The decision: whether to switch speculation on, by what was measured and by rules of thumb beside it.

The rules are those that guides to production repeat: switch on below 50 % GPU use for replies above 100 tokens with a
draft that fits, batch instead above 80 % or when memory is short; aim for 60 % acceptance, below 50 % it may harm; a
draft of 1/50 to 1/10 of the target. A measured speed-up overrules them: it already contains what they guess at.
"""

from dataclasses import dataclass
from typing import Any, Literal

from eval.metrics import roofline
from eval.reporting.formatting import (
    NOT_MEASURED,
    Report,
    ReportEntry,
    format_bytes,
    format_number,
    format_percent,
    format_with_interval,
)

IDLE_UTILISATION, BUSY_UTILISATION = 0.5, 0.8
LONG_REPLY_TOKENS = 100
GOOD_ACCEPTANCE, HARMFUL_ACCEPTANCE = 0.6, 0.5
MIN_SIZE_RATIO, MAX_SIZE_RATIO = 1 / 50, 1 / 10

HeuristicVerdict = Literal["on", "batch", "between", "missing"]
MeasuredVerdict = Literal["on", "off", "unclear", "missing"]
Recommendation = Literal["on", "off", "batch", "measure"]


@dataclass(frozen=True)
class DecisionInputs:
    """What the decision rests on; None where it was not measured or not said."""

    speedup: float | None
    ci: tuple[float, float] | None
    utilisation: float | None
    """Share of time that the GPU was busy during plain decoding, 0 to 1."""
    reply: float | None
    """Tokens of a reply, on average."""
    needed: float | None
    """Bytes of both models and their caches at the planned load."""
    available: float | None
    """Bytes of memory."""

    @property
    def fits(self) -> bool | None:
        """Whether the draft fits beside the target."""
        if self.needed is None or self.available is None:
            return None
        return self.needed <= self.available


@dataclass(frozen=True)
class RuleOfThumb:
    """A rule of thumb beside the measured value."""

    name: str
    recommended: str
    value: str
    holds: str
    """yes, no, missing, or – where it does not apply."""


def verdict_from_heuristic(facts: DecisionInputs) -> HeuristicVerdict:
    """The rule of thumb alone."""
    if facts.fits is False or (
        facts.utilisation is not None and facts.utilisation > BUSY_UTILISATION
    ):
        return "batch"
    if None in (facts.utilisation, facts.reply, facts.fits):
        return "missing"
    idle = facts.utilisation is not None and facts.utilisation < IDLE_UTILISATION
    long = facts.reply is not None and facts.reply > LONG_REPLY_TOKENS
    return "on" if idle and long else "between"


def verdict_from_measurement(ci: tuple[float, float] | None) -> MeasuredVerdict:
    """The measurement alone: the interval of the speed-up lies above 1, below 1, or around it."""
    if ci is None:
        return "missing"
    return "on" if ci[0] > 1 else "off" if ci[1] < 1 else "unclear"


def decide(facts: DecisionInputs) -> tuple[Recommendation, list[str]]:
    """The verdict and why. Memory that does not suffice decides alone, then the measurement, then the rule."""
    by_rule, by_measurement = verdict_from_heuristic(facts), verdict_from_measurement(facts.ci)
    value = format_with_interval(facts.speedup, facts.ci, 2, "×")
    if facts.fits is False:
        short = f"{format_bytes(facts.needed or 0)} are needed and {format_bytes(facts.available or 0)} are there"
        return "batch", [f"Both models and their caches do not fit: {short}."]
    if by_measurement in ("on", "off"):
        reasons = [f"Measured: {value} the speed of plain decoding."]
        against = {"on": ("batch", "between"), "off": ("on",)}[by_measurement]
        if by_rule in against:
            use, reply = format_percent(facts.utilisation), format_number(facts.reply, 0)
            reasons.append(
                f"The rule of thumb says {HEURISTIC_PHRASES[by_rule]} (GPU use {use}, {reply} tokens a reply); the measurement "
                "contradicts it and wins."
            )
        return ("on" if by_measurement == "on" else "off"), reasons
    why = (
        f"The measured {value} may be above or below 1: more prompts would tell."
        if by_measurement == "unclear"
        else "No interval of the speed-up was measured."
    )
    if by_rule == "missing":
        lacking = [name for name, x in _heuristic_inputs(facts).items() if x is None]
        return "measure", [why, f"The rule of thumb lacks {', '.join(lacking)}."]
    if by_rule == "between":
        return "measure", [why, "The rule of thumb does not decide here either."]
    return by_rule, [why, f"The rule of thumb says {HEURISTIC_PHRASES[by_rule]}."]


HEURISTIC_PHRASES = {
    "on": "to switch it on",
    "batch": "to batch instead",
    "between": "neither on nor off",
}


def collect_decision_inputs(
    report: Report, entry: ReportEntry, memory: float | None, rows: int | None, length: int | None
) -> DecisionInputs:
    """The facts about one entry; memory by the data sheet where the GPU is a known one."""
    known = roofline.GPU_SPECS.get(report["hardware"].get("device"))
    parts = estimate_memory(report, entry, rows, length)
    return DecisionInputs(
        speedup=entry["speedup"],
        ci=None
        if entry["speedup_ci"] is None
        else (entry["speedup_ci"][0], entry["speedup_ci"][1]),
        utilisation=gpu_utilisation(report),
        reply=untruncated_reply_tokens(entry),
        needed=None if parts is None else sum(parts.values()),
        available=memory if memory is not None or known is None else known.memory,
    )


def gpu_utilisation(report: Report) -> float | None:
    """Share of time that the GPU was busy during plain decoding, 0 to 1; None where it was not measured."""
    value = report.get("gpu_utilisation")
    return None if value is None else value / 100


def untruncated_reply_tokens(entry: ReportEntry) -> float | None:
    """Mean tokens of a reply; None where most were cut at the run's limit, unless even so they are long."""
    mean = mean_reply_tokens(entry)
    finish = entry.get("finish") or {}
    cut = finish.get("length", 0) > sum(finish.values()) / 2 or "finish" not in entry
    return None if mean is None or (cut and mean <= LONG_REPLY_TOKENS) else mean


def mean_reply_tokens(entry: ReportEntry) -> float | None:
    """Mean tokens of a reply as measured, cut or not."""
    if entry.get("mean_output_tokens") is not None:
        return float(entry["mean_output_tokens"])
    total = entry["counts"].get("output_tokens")
    return total / entry["prompts"] if total is not None and entry["prompts"] else None


def estimate_memory(
    report: Report, entry: ReportEntry, rows: int | None, length: int | None
) -> dict[str, int] | None:
    """Bytes by what holds them at the planned load (default: the measured batch, replies alone); None if unknown."""
    models, reply = report.get("models") or {}, mean_reply_tokens(entry)
    target, width = models.get("target"), roofline.DTYPE_BYTES.get(entry["dtype"])
    draft = models.get("drafts", {}).get(entry["name"])
    if target is None or width is None or (entry["draft"] is not None and draft is None):
        return None
    tokens = length if length is not None else round(reply or 0)
    sizes = [None if x is None else roofline.ModelSize(**x) for x in (target, draft)]
    assert sizes[0] is not None
    return roofline.memory_breakdown(sizes[0], sizes[1], rows or entry["batch_size"], tokens, width)


def rules_of_thumb(report: Report, entry: ReportEntry, facts: DecisionInputs) -> list[RuleOfThumb]:
    """The rules of thumb with the report's values in them."""
    ratio = size_ratio(report, entry)
    alpha, rate = entry["alpha"], entry["acceptance_rate"]
    accepts = f"α {format_number(alpha, 3)}; accepted ÷ drafted {format_number(rate, 3)}"
    harmful = None if alpha is None else alpha >= HARMFUL_ACCEPTANCE
    share = "no weights of its own" if entry["draft"] is None else format_size_ratio(ratio)
    inside_ratio = None if ratio is None else MIN_SIZE_RATIO <= ratio <= MAX_SIZE_RATIO
    known = {
        "GPU use below 50 %": None
        if facts.utilisation is None
        else facts.utilisation < IDLE_UTILISATION,
        "replies above 100 tokens": None
        if facts.reply is None
        else facts.reply > LONG_REPLY_TOKENS,
        "the draft fits": facts.fits,
    }
    values = {
        "GPU use below 50 %": format_percent(facts.utilisation),
        "replies above 100 tokens": format_reply_length(facts, entry),
        "the draft fits": format_memory(facts),
    }
    found = [
        RuleOfThumb(name, "yes", values[name], _format_holds(holds))
        for name, holds in known.items()
    ]
    found += [
        RuleOfThumb(
            "acceptance to aim for",
            "at least 60 %",
            accepts,
            _format_holds(_at_least(alpha, GOOD_ACCEPTANCE)),
        ),
        RuleOfThumb("acceptance that harms", "not below 50 %", accepts, _format_holds(harmful)),
        RuleOfThumb(
            "size of the draft",
            "1/50 to 1/10 of the target",
            share,
            NOT_MEASURED if entry["draft"] is None else _format_holds(inside_ratio),
        ),
    ]
    return found


def contradictions(entry: ReportEntry, ratio: float | None) -> list[str]:
    """Where acceptance or size say one thing and the measured speed-up another: the measurement wins."""
    measured, alpha = verdict_from_measurement(entry["speedup_ci"]), entry["alpha"]
    value = format_with_interval(entry["speedup"], entry["speedup_ci"], 2, "×")
    found = []
    if alpha is not None and alpha < HARMFUL_ACCEPTANCE and measured == "on":
        found.append(f"α {alpha:.2f} is below 50 %, said to harm, yet {value} was measured.")
    if alpha is not None and alpha >= GOOD_ACCEPTANCE and measured == "off":
        found.append(
            f"α {alpha:.2f} reaches the 60 % to aim for, yet {value} was measured: drafting costs more than it saves."
        )
    if ratio is not None and not MIN_SIZE_RATIO <= ratio <= MAX_SIZE_RATIO and measured == "on":
        found.append(
            f"The draft is {format_size_ratio(ratio)} of the target, outside the rule, yet {value} was measured."
        )
    return [f"{text} The measurement wins." for text in found]


def size_ratio(report: Report, entry: ReportEntry) -> float | None:
    """Parameters of the draft ÷ those of the target; None where either is unknown or there is no draft."""
    models = report.get("models") or {}
    draft, target = models.get("drafts", {}).get(entry["name"]), models.get("target")
    if draft is None or target is None:
        return None
    return float(draft["parameters"] / target["parameters"])


def format_reply_length(facts: DecisionInputs, entry: ReportEntry) -> str:
    """The mean length of a reply, and whether the run cut it; – where nothing is known."""
    mean = mean_reply_tokens(entry)
    if mean is None or facts.reply is not None:
        return format_number(mean, 0)
    return f"{mean:.0f}, cut at the run's limit"


def _heuristic_inputs(facts: DecisionInputs) -> dict[str, Any]:
    return {
        "GPU use": facts.utilisation,
        "the length of replies": facts.reply,
        "memory (give --memory_gb)": facts.fits,
    }


def format_memory(facts: DecisionInputs) -> str:
    needed = "sizes unknown" if facts.needed is None else f"{format_bytes(facts.needed)} needed"
    there = (
        "memory not known" if facts.available is None else f"{format_bytes(facts.available)} there"
    )
    return f"{needed}, {there}"


def format_size_ratio(ratio: float | None) -> str:
    return (
        NOT_MEASURED if ratio is None else f"1/{1 / ratio:.0f}" if ratio <= 0.5 else f"{ratio:.2f}"
    )


def _at_least(value: float | None, least: float) -> bool | None:
    return None if value is None else value >= least


def _format_holds(holds: bool | None) -> str:
    return "missing" if holds is None else "yes" if holds else "no"
