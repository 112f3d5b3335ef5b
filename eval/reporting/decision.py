"""Decides from a report whether to switch speculative decoding on.

The rules of thumb are those that production guides repeat: switch it on below 50 % GPU use for replies above 100 tokens
if the draft fits in memory; use larger batches instead above 80 % GPU use or if memory is short; aim for 60 %
acceptance, and expect a slow-down below 50 %; choose a draft of 1/50 to 1/10 of the target's size. A measured speed-up
takes precedence over these rules, because it already contains everything that they estimate.
"""

from dataclasses import dataclass
from typing import Literal

from decode.common.typed_json import Estimate
from eval.metrics import roofline
from eval.reporting.formatting import (
    NOT_MEASURED,
    format_bytes,
    format_estimate,
    format_number,
    format_percent,
)
from eval.results.report import EvalReport, MethodResult

IDLE_UTILISATION, BUSY_UTILISATION = 0.5, 0.8
LONG_REPLY_TOKENS = 100
GOOD_ACCEPTANCE, HARMFUL_ACCEPTANCE = 0.6, 0.5
MIN_SIZE_RATIO, MAX_SIZE_RATIO = 1 / 50, 1 / 10

HeuristicVerdict = Literal["on", "batch", "between", "missing"]
MeasuredVerdict = Literal["on", "off", "unclear", "missing"]
Recommendation = Literal["on", "off", "batch", "measure"]

HEURISTIC_PHRASES = {
    "on": "switching it on",
    "batch": "larger batches instead",
    "between": "neither for nor against it",
}


@dataclass(frozen=True)
class DecisionInputs:
    """The values that the decision depends on; None where one was neither measured nor given."""

    speedup: Estimate
    utilisation: float | None
    """Share of time that the GPU was busy during plain decoding, 0 to 1."""
    reply_tokens: float | None
    """Mean tokens per reply."""
    needed_bytes: float | None
    """Memory of both models and their KV caches at the planned load."""
    available_bytes: float | None
    """Memory of the device."""

    @property
    def fits(self) -> bool | None:
        """Whether the draft fits in memory beside the target; None where unknown."""
        if self.needed_bytes is None or self.available_bytes is None:
            return None
        return self.needed_bytes <= self.available_bytes


def verdict_from_heuristic(inputs: DecisionInputs) -> HeuristicVerdict:
    """The recommendation of the rules of thumb alone."""
    if inputs.fits is False or (
        inputs.utilisation is not None and inputs.utilisation > BUSY_UTILISATION
    ):
        return "batch"
    if inputs.utilisation is None or inputs.reply_tokens is None or inputs.fits is None:
        return "missing"
    idle, long = inputs.utilisation < IDLE_UTILISATION, inputs.reply_tokens > LONG_REPLY_TOKENS
    return "on" if idle and long else "between"


def verdict_from_measurement(speedup: Estimate) -> MeasuredVerdict:
    """The recommendation of the measurement alone: the speed-up's interval lies above 1, below 1, or contains 1."""
    if speedup.ci is None:
        return "missing"
    return "on" if speedup.ci[0] > 1 else "off" if speedup.ci[1] < 1 else "unclear"


def decide(inputs: DecisionInputs) -> tuple[Recommendation, list[str]]:
    """The recommendation and its reasons.

    Memory that does not suffice decides alone; next comes the measurement, and last the rules of thumb.
    """
    heuristic = verdict_from_heuristic(inputs)
    measured = verdict_from_measurement(inputs.speedup)
    value = format_estimate(inputs.speedup, 2, "×")
    if inputs.fits is False:
        needed = f"{format_bytes(inputs.needed_bytes or 0)} needed"
        available = f"{format_bytes(inputs.available_bytes or 0)} available"
        return "batch", [f"Both models and their KV caches do not fit: {needed}, {available}."]
    if measured in ("on", "off"):
        reasons = [f"Measured: {value} the speed of plain decoding."]
        if heuristic in {"on": ("batch", "between"), "off": ("on",)}[measured]:
            use = format_percent(inputs.utilisation)
            reply = format_number(inputs.reply_tokens, 0)
            reasons.append(
                f"The rule of thumb recommends {HEURISTIC_PHRASES[heuristic]} (GPU use {use}, {reply} tokens per "
                "reply). The measurement contradicts it and takes precedence."
            )
        return ("on" if measured == "on" else "off"), reasons
    why = (
        f"The measured {value} is not clearly above or below 1: measure on more prompts."
        if measured == "unclear"
        else "The report has no confidence interval of the speed-up."
    )
    if heuristic == "missing":
        values = {
            "GPU use": inputs.utilisation,
            "the length of replies": inputs.reply_tokens,
            "memory (give --memory_gb)": inputs.fits,
        }
        missing = ", ".join(name for name, x in values.items() if x is None)
        return "measure", [why, f"The rule of thumb cannot be applied, missing: {missing}."]
    if heuristic == "between":
        return "measure", [why, "The rule of thumb does not decide here either."]
    return heuristic, [why, f"The rule of thumb recommends {HEURISTIC_PHRASES[heuristic]}."]


def collect_decision_inputs(
    report: EvalReport,
    m: MethodResult,
    available_bytes: float | None,
    rows: int | None,
    length: int | None,
) -> DecisionInputs:
    """The inputs of one entry's decision.

    available_bytes: memory of the device; None takes that of the data sheet if the report's GPU is a known one.
    rows, length: planned concurrent requests and tokens of each, as for `estimate_memory`.
    """
    gpu = roofline.GPU_SPECS.get(report.hardware.device or "")
    if available_bytes is None and gpu is not None:
        available_bytes = gpu.memory
    parts = estimate_memory(report, m, rows, length)
    busy = report.gpu_utilisation
    return DecisionInputs(
        speedup=m.speedup,
        utilisation=None if busy is None else busy / 100,
        reply_tokens=untruncated_reply_tokens(m),
        needed_bytes=None if parts is None else sum(parts.values()),
        available_bytes=available_bytes,
    )


def untruncated_reply_tokens(m: MethodResult) -> float | None:
    """Mean tokens per reply; None if the token limit cut most replies, unless their mean is long all the same."""
    mean, finish = m.mean_reply_tokens, m.finish
    cut = finish is None or finish.get("length", 0) > sum(finish.values()) / 2
    return None if mean is None or (cut and mean <= LONG_REPLY_TOKENS) else mean


def estimate_memory(
    report: EvalReport, m: MethodResult, rows: int | None, length: int | None
) -> dict[str, int] | None:
    """Bytes of weights and KV caches by part at the planned load; None where a model's size is unknown.

    rows: concurrent requests (None: the measured batch size). length: tokens of prompt and reply of each (None: the
    mean reply).
    """
    models, width = report.models, roofline.DTYPE_BYTES.get(m.dtype)
    if models is None or models.target is None or width is None:
        return None
    draft = models.drafts.get(m.name)
    if m.draft is not None and draft is None:
        return None
    tokens = length if length is not None else round(m.mean_reply_tokens or 0)
    return roofline.memory_breakdown(models.target, draft, rows or m.batch_size, tokens, width)


def contradictions(m: MethodResult, ratio: float | None) -> list[str]:
    """Sentences about rules on acceptance or draft size (`ratio`) that the measured speed-up contradicts."""
    measured, alpha = verdict_from_measurement(m.speedup), m.alpha.value
    value = format_estimate(m.speedup, 2, "×")
    cases = []
    if alpha is not None and alpha < HARMFUL_ACCEPTANCE and measured == "on":
        cases.append(f"α {alpha:.2f} is below the 50 % that guides require, yet {value}")
    if alpha is not None and alpha >= GOOD_ACCEPTANCE and measured == "off":
        cases.append(f"α {alpha:.2f} reaches the 60 % that guides aim for, yet {value}")
    if ratio is not None and not MIN_SIZE_RATIO <= ratio <= MAX_SIZE_RATIO and measured == "on":
        size = f"The draft is {format_size_ratio(ratio)} of the target"
        cases.append(f"{size}, outside the 1/50 to 1/10 of guides, yet {value}")
    return [f"{case} was measured. The measurement takes precedence." for case in cases]


def size_ratio(report: EvalReport, m: MethodResult) -> float | None:
    """Parameters of the draft ÷ those of the target; None where either is unknown or there is no draft."""
    draft = None if report.models is None else report.models.drafts.get(m.name)
    if report.models is None or draft is None or report.models.target is None:
        return None
    return draft.parameters / report.models.target.parameters


def format_reply_length(inputs: DecisionInputs, m: MethodResult) -> str:
    """The mean tokens per reply, and whether the token limit cut most replies; – where unknown."""
    mean = m.mean_reply_tokens
    if mean is None or inputs.reply_tokens is not None:
        return format_number(mean, 0)
    return f"{mean:.0f}, cut at the run's limit"


def format_memory(inputs: DecisionInputs) -> str:
    """Memory needed and available, as text."""
    needed, available = (
        None if count is None else format_bytes(count)
        for count in (inputs.needed_bytes, inputs.available_bytes)
    )
    first = "model sizes unknown" if needed is None else f"{needed} needed"
    return first + (", memory unknown" if available is None else f", {available} available")


def format_size_ratio(ratio: float | None) -> str:
    """The draft's size over the target's as 1/n, above one half as a decimal number; – for None."""
    if ratio is None:
        return NOT_MEASURED
    return f"1/{1 / ratio:.0f}" if ratio <= 0.5 else f"{ratio:.2f}"
