"""Decides from a report whether to switch speculative decoding on.

What was measured decides: enough prompts, an interval above 1 and an acceptance that production guides do not call
harmful; where one is lacking, that is the answer. The rules of thumb that the guides repeat (on below 50 % GPU use for
replies above 100 tokens if the draft fits in memory; larger batches above 80 % or if memory is short; 60 % acceptance;
a draft of 1/50 to 1/10 of the target's size) stand beside it and never switch it on.
"""

from dataclasses import dataclass
from typing import Literal

from decode.common.progress import format_bytes
from eval.metrics import roofline
from eval.reporting.formatting import (
    NOT_MEASURED,
    format_number,
    format_percent,
    format_speedup,
)
from eval.results.report import LEAST_PROMPTS, EvalReport, MethodResult, ModelSizes
from eval.results.tuned import TunedReport

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


def lacking(m: MethodResult) -> list[str]:
    """What the measurement lacks to switch the method on; empty if nothing."""
    alpha = m.alpha.value
    found = {
        f"{LEAST_PROMPTS} prompts (here {m.prompts})": m.prompts < LEAST_PROMPTS,
        "a confidence interval of the speed-up": m.valid_speedup.ci is None,
        f"an interval above 1 (here {format_speedup(m)})": m.valid_speedup.ci is not None
        and m.valid_speedup.ci[0] <= 1,
        f"an acceptance of 50 % (here α {format_number(alpha, 2)})": alpha is None
        or alpha < HARMFUL_ACCEPTANCE,
    }
    return [what for what, lacks in found.items() if lacks]


def decide(
    m: MethodResult, inputs: DecisionInputs
) -> tuple[Literal["on", "off", "batch", "measure"], list[str]]:
    """The recommendation and its reasons. Memory that does not suffice decides alone; next comes the measurement."""
    heuristic = verdict_from_heuristic(inputs)
    if inputs.fits is False:
        return "batch", [f"Both models and their KV caches do not fit: {format_memory(inputs)}."]
    missing = lacking(m)
    if m.verdict == "slower" or not missing:
        on = m.verdict == "faster"
        reasons = [f"Measured: {format_speedup(m)} the speed of plain decoding, n = {m.prompts}."]
        if heuristic in (("batch", "between") if on else ("on",)):
            reasons.append(
                f"The rule of thumb recommends {HEURISTIC_PHRASES[heuristic]} (GPU use "
                f"{format_percent(inputs.utilisation)}, {format_number(inputs.reply_tokens, 0)} tokens per reply). "
                "The measurement contradicts it and takes precedence."
            )
        return ("on" if on else "off"), reasons
    why = f"The measurement lacks {', '.join(missing)}."
    if heuristic == "missing":
        return "measure", [why]
    rule = f"The rule of thumb recommends {HEURISTIC_PHRASES[heuristic]}."
    return ("batch" if heuristic == "batch" else "measure"), [why, rule]


def collect_decision_inputs(
    report: EvalReport, m: MethodResult, memory: float | None, rows: int | None, length: int | None
) -> DecisionInputs:
    """The inputs of one entry's decision, with the planned load of `advise`."""
    gpu = roofline.GPU_SPECS.get(report.hardware.device or "")
    busy, mean, finish = report.gpu_utilisation, m.mean_reply_tokens, m.finish
    # Where the token limit cut most replies, their mean says only that they are long, if it is long all the same.
    cut = finish is None or finish.get("length", 0) > sum(finish.values()) / 2
    return DecisionInputs(
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


def memory_bandwidth(report: EvalReport, tuned: TunedReport | None) -> float | None:
    """Memory bandwidth in bytes/s: by the data sheet of a known GPU, or as tuning measured it on the same device."""
    device = report.hardware.device or ""
    known = roofline.GPU_SPECS.get(device)
    if known is not None:
        return known.bandwidth
    return tuned.bandwidth if tuned is not None and tuned.hardware.device == device else None


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
