"""Decides from a report whether to switch speculative decoding on.

The rules of thumb are those that production guides repeat: switch it on below 50 % GPU use for replies above 100 tokens
if the draft fits in memory; use larger batches instead above 80 % GPU use or if memory is short; aim for 60 %
acceptance, and expect a slow-down below 50 %; choose a draft of 1/50 to 1/10 of the target's size. A measured speed-up
takes precedence over these rules, because it already contains everything that they estimate.
"""

from dataclasses import dataclass
from typing import Literal

from decode.common.progress import format_bytes
from decode.common.typed_json import Estimate
from eval.metrics import roofline
from eval.reporting.formatting import (
    NOT_MEASURED,
    format_estimate,
    format_number,
    format_percent,
)
from eval.results.report import EvalReport, MethodResult, ModelSizes

IDLE_UTILISATION, BUSY_UTILISATION = 0.5, 0.8
LONG_REPLY_TOKENS = 100
GOOD_ACCEPTANCE, HARMFUL_ACCEPTANCE = 0.6, 0.5
MIN_SIZE_RATIO, MAX_SIZE_RATIO = 1 / 50, 1 / 10

HEURISTIC_PHRASES = {
    "on": "switching it on",
    "batch": "larger batches instead",
    "between": "neither for nor against it",
}


@dataclass(frozen=True)
class DecisionInputs:
    """The values that the decision depends on; None where one was neither measured nor given."""

    speedup: Estimate
    utilisation: float | None  # share of time that the GPU was busy during plain decoding, 0 to 1
    reply_tokens: float | None  # mean tokens per reply
    needed_bytes: float | None  # memory of both models and their KV caches at the planned load
    available_bytes: float | None  # memory of the device

    @property
    def fits(self) -> bool | None:
        """Whether the draft fits in memory beside the target; None where unknown."""
        if self.needed_bytes is None or self.available_bytes is None:
            return None
        return self.needed_bytes <= self.available_bytes


def verdict_from_heuristic(inputs: DecisionInputs) -> Literal["on", "batch", "between", "missing"]:
    """The recommendation of the rules of thumb alone."""
    if inputs.fits is False or (
        inputs.utilisation is not None and inputs.utilisation > BUSY_UTILISATION
    ):
        return "batch"
    if inputs.utilisation is None or inputs.reply_tokens is None or inputs.fits is None:
        return "missing"
    idle, long = inputs.utilisation < IDLE_UTILISATION, inputs.reply_tokens > LONG_REPLY_TOKENS
    return "on" if idle and long else "between"


def verdict_from_measurement(speedup: Estimate) -> Literal["on", "off", "unclear", "missing"]:
    """The recommendation of the measurement alone: the speed-up's interval lies above 1, below 1, or contains 1."""
    if speedup.ci is None:
        return "missing"
    return "on" if speedup.ci[0] > 1 else "off" if speedup.ci[1] < 1 else "unclear"


def decide(inputs: DecisionInputs) -> tuple[Literal["on", "off", "batch", "measure"], list[str]]:
    """The recommendation and its reasons.

    Memory that does not suffice decides alone; next comes the measurement, and last the rules of thumb.
    """
    heuristic = verdict_from_heuristic(inputs)
    measured = verdict_from_measurement(inputs.speedup)
    value = format_estimate(inputs.speedup, 2, "×")
    if inputs.fits is False:
        return "batch", [f"Both models and their KV caches do not fit: {format_memory(inputs)}."]
    if measured in ("on", "off"):
        reasons = [f"Measured: {value} the speed of plain decoding."]
        if heuristic in {"on": ("batch", "between"), "off": ("on",)}[measured]:
            reasons.append(
                f"The rule of thumb recommends {HEURISTIC_PHRASES[heuristic]} (GPU use "
                f"{format_percent(inputs.utilisation)}, {format_number(inputs.reply_tokens, 0)} tokens per reply). "
                "The measurement contradicts it and takes precedence."
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
    report: EvalReport, m: MethodResult, memory: float | None, rows: int | None, length: int | None
) -> DecisionInputs:
    """The inputs of one entry's decision, with the planned load of `advise`."""
    gpu = roofline.GPU_SPECS.get(report.hardware.device or "")
    busy, mean, finish = report.gpu_utilisation, m.mean_reply_tokens, m.finish
    # Where the token limit cut most replies, their mean says only that they are long, if it is long all the same.
    cut = finish is None or finish.get("length", 0) > sum(finish.values()) / 2
    return DecisionInputs(
        speedup=m.speedup,
        utilisation=None if busy is None else busy / 100,
        reply_tokens=None if mean is None or (cut and mean <= LONG_REPLY_TOKENS) else mean,
        needed_bytes=needed_memory(report, m, rows, length),
        available_bytes=gpu.memory if memory is None and gpu is not None else memory,
    )


def needed_memory(
    report: EvalReport, m: MethodResult, rows: int | None, length: int | None
) -> int | None:
    """Bytes of weights and KV caches at the planned load; None where a model's size is unknown."""
    models, width = report.models, roofline.DTYPE_BYTES.get(m.dtype)
    if models is None or models.target is None or width is None:
        return None
    draft = models.drafts.get(m.name)
    if m.draft is not None and draft is None:
        return None
    tokens = length if length is not None else round(m.mean_reply_tokens or 0)
    parts = roofline.memory_breakdown(models.target, draft, rows or m.batch_size, tokens, width)
    return sum(parts.values())


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
    models = report.models or ModelSizes()
    draft = models.drafts.get(m.name)
    return draft.parameters / models.target.parameters if draft and models.target else None


def format_reply_length(inputs: DecisionInputs, m: MethodResult) -> str:
    """The mean tokens per reply, and whether the token limit cut most replies; – where unknown."""
    mean = m.mean_reply_tokens
    if mean is None or inputs.reply_tokens is not None:
        return format_number(mean, 0)
    return f"{mean:.0f}, cut at the run's limit"


def format_memory(inputs: DecisionInputs) -> str:
    """Memory needed and available, as text."""
    needed, available = inputs.needed_bytes, inputs.available_bytes
    first = "model sizes unknown" if needed is None else f"{format_bytes(needed)} needed"
    has = "memory unknown" if available is None else f"{format_bytes(available)} available"
    return f"{first}, {has}"


def format_size_ratio(ratio: float | None) -> str:
    """The draft's size over the target's as 1/n, above one half as a decimal number; – for None."""
    if ratio is None:
        return NOT_MEASURED
    return f"1/{1 / ratio:.0f}" if ratio <= 0.5 else f"{ratio:.2f}"
