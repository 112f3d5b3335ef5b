"""report.json of eval/run.py (schema 1) as types: what was measured, and its entries by task and setting."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from decode.common.errors import UserError
from decode.common.files import read_json_object
from decode.common.provenance import Hardware
from decode.common.published import (
    Digest,
    Name,
    Place,
    Private,
    PromptId,
    Sentence,
    Version,
    Withheld,
    Word,
)
from decode.common.target_record import ModelFingerprint, TargetRecord
from decode.common.target_settings import QUANTIZED_DTYPES
from decode.common.typed_json import (
    Estimate,
    IntervalKey,
    Omitted,
    WrongTypeError,
    from_json,
)
from decode.engine.records import DecodeRecord
from eval.metrics.acceptance import Acceptance, seconds_per_token, speedup, timed_places
from eval.metrics.bootstrap import ALL_TASKS, MS_PER_SECOND, Ratio, mean_of_ratios, ratio_or_none
from eval.metrics.latency import DecodeThroughput, LatencyMs, Throughput, prefill_and_decode
from eval.metrics.roofline import ModelSize, read_model_size

T = TypeVar("T", bound="Measured")
SCHEMA = 1
PLAIN = "plain"
LEAST_PROMPTS = 12
"""A verdict on fewer prompts would be one on their luck."""


@dataclass(frozen=True)
class TreeRecord:
    """A tree of drafts: one grown by confidence, or a fixed one by the ranks on the way to each node."""

    width: Omitted[int] = None
    nodes: Omitted[int] = None
    paths: Omitted[list[list[int]]] = None


@dataclass(frozen=True)
class LookupRecord:
    """A lookup in front of a draft, and the tokens that it must find again."""

    name: Word
    min_match: int


@dataclass(frozen=True)
class AdaptiveRecord:
    """What ends chains before K tokens. Reports of earlier versions have other ways than confidence, and then None."""

    by: Word
    confidence: float | None


@dataclass(frozen=True)
class MirrorRecord:
    """Drafting while the target verifies, and what of it was of use."""

    exit_layer: int
    branches: int
    overlap: bool
    reuse_rate: Omitted[float] = None
    exit_hit_rate: Omitted[float] = None
    hidden_share: Omitted[float] = None


@dataclass(frozen=True)
class AcceptLength:
    """1 + accepted ÷ rounds, pooled and as the mean of the prompts' own."""

    pooled: Annotated[Estimate, IntervalKey("ci")]
    per_request: Estimate


@dataclass(frozen=True)
class Counts:
    """The sums of the ratios: τ = emitted ÷ rounds, α_i = accepted_by_position ÷ rounds_by_position."""

    rounds: int
    drafted: int
    accepted: int
    forced: int = 0
    emitted: int = 0
    output_tokens: int | None = None
    rounds_by_position: list[int] = field(default_factory=list)  # rounds that reached a position
    accepted_by_position: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class FailedPrompt:
    """A prompt that a method could not decode, and why."""

    task: Name
    id: PromptId
    error: Withheld


@dataclass(frozen=True)
class QualityScore:
    """Mean score of answers that have a reference, beside that of plain decoding on the same prompts."""

    metric: Name
    prompts: int
    value: Annotated[Estimate, IntervalKey("ci")]
    plain: float
    difference: Estimate


@dataclass(frozen=True)
class PhaseMs:
    """Mean milliseconds a round."""

    draft: float
    verify: float
    overhead: float

    @property
    def total(self) -> float:
        return self.draft + self.verify + self.overhead


@dataclass(frozen=True)
class GreedyMismatch:
    """The first position at which an output differs from the reference."""

    task: Name
    id: PromptId
    position: int
    gap: float | None = None
    """Logit of the reference's token minus that of the output's, in the wider dtype. None if one of them has ended."""
    noise: float | None = None
    """Largest difference between `gap` and the same gap in the model's dtype, over passes of several widths."""
    tie: bool = True  # whether |gap| is at most the noise


@dataclass(frozen=True)
class NotCompared:
    """Greedy output that was not compared: sampled."""

    greedy_identical: bool | None
    prompts: int


@dataclass(frozen=True)
class GreedyVerdict(NotCompared):
    """How many outputs equal the reference; `greedy_identical` is True if every difference is a tie."""

    identical: int
    ties: list[GreedyMismatch]
    failures: list[GreedyMismatch] = field(default_factory=list)
    exact: float = 0.0  # share of prompts, as `tied` and `failed`
    tied: float = 0.0
    failed: float = 0.0
    noise: float | None = None  # the largest of the differing prompts
    reference: Word = "transformers"
    """Whose text was compared: transformers' generate of a floating-point target; of one with rounded weights `plain`
    decoding of the same weights here, or `until`: plain decoding's up to where both leave transformers' (older)."""
    leaves: list[GreedyMismatch] = field(default_factory=list)
    """Beside `plain`: the texts that leave transformers' generate, whose passes round otherwise, and where."""


class Measured:
    """What every entry says: a method or engine at one temperature, on the prompts of a task or of all together.

    No dataclass, since its fields would come first in the JSON of those that have them.
    """

    name: str
    temperature: float
    batch_size: int
    task: str
    prompts: int
    speedup: Estimate
    void: str
    failed: list[FailedPrompt]

    @property
    def setting(self) -> tuple[float, int]:
        return self.temperature, self.batch_size

    @property
    def valid_speedup(self) -> Estimate:
        """The speed-up, without a value where the row is void: what every view and verdict takes."""
        return Estimate() if self.void else self.speedup

    @property
    def verdict(self) -> Literal["faster", "slower", "unclear", "few prompts", "not measured"]:
        """Than plain decoding: by an interval that lies above or below 1, on prompts enough."""
        ci = self.valid_speedup.ci
        if ci is None:
            return "not measured"
        if self.prompts < LEAST_PROMPTS:
            return "few prompts"
        return "faster" if ci[0] > 1 else "slower" if ci[1] < 1 else "unclear"

    @property
    def is_pooled(self) -> bool:
        return self.task == ALL_TASKS

    @property
    def is_plain(self) -> bool:
        return self.name == PLAIN


@dataclass(frozen=True, kw_only=True)
class MethodResult(Measured):
    """A method on the prompts of one task or domain. A field that older reports lack has a default."""

    name: Name
    draft: Place | None
    family: Word | None = None  # None for plain decoding
    k: int  # tokens drafted a round, of a tree its depth; 0 for plain decoding
    tree: TreeRecord | None
    lookup: LookupRecord | None = None
    adaptive: AdaptiveRecord | None = None
    mirror: MirrorRecord | None = None
    learned: Omitted[bool] = None
    """True: the draft learned while it decoded, and is not the one that is saved."""
    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    batch_size: int
    task: Name
    domain: Name | None = None
    prompts: int
    tau: Estimate
    alpha: Estimate
    alpha_by_position: list[Estimate]
    acceptance_rate: Estimate
    unconditional_by_position: list[Estimate] = field(default_factory=list)
    """Accepted at position i ÷ all rounds."""
    mean_accept_length: AcceptLength | None = None
    histogram: list[int] | None = None  # rounds that accepted 0, 1, … k drafted tokens
    counts: Counts
    mean_output_tokens: float | None = None
    latency_ms: LatencyMs | None
    prefill: Throughput | None = None
    decode: DecodeThroughput | None = None
    tokens_per_second: Estimate
    ms_per_token: float | None
    speedup: Estimate  # against plain decoding of the same prompts
    speedup_of_sums: float | None = None  # of all prompts, those of dropped turns too
    stalled: int = 0  # prompts of dropped turns: their seconds count nowhere else
    void: Sentence = ""
    """Why its seconds say nothing; "" if they do. Every view shows its speed-up as void."""
    finish: dict[Word, int] | None = None
    tokens_after_eos: int = 0
    failed: list[FailedPrompt] = field(default_factory=list)
    quality: list[QualityScore] = field(default_factory=list)
    draft_sha256: Digest | None
    draft_altered: bool = False
    trained_for: Digest | None = None
    mode: Word
    dtype: Word
    draft_dtype: Word | None = None
    verification: Word
    lossy: bool
    simulated: list[float] | None = (
        None  # earlier versions could make up the acceptance by position
    )
    predicted_speedup: float | None
    prediction_missing: Sentence | None = None
    phase_ms: PhaseMs | None
    lossless: GreedyVerdict | NotCompared
    repeated_turns: int = 0
    dropped_turns: dict[Name, int] = field(default_factory=dict)
    """Turns of its setting whose seconds count for no method, by reason."""

    @classmethod
    def measure(
        cls,
        records: Sequence[DecodeRecord],
        plain: Sequence[DecodeRecord],
        k: int,
        seed: int,
        **facts: Any,
    ) -> "MethodResult":
        """From records with `k` positions, and plain decoding of (at least) the same prompts; `facts` are the fields
        that do not follow from them."""
        found = Acceptance.of(records, k)
        places, void = timed_places([r.untimed for r in records])
        timed = [records[i] for i in places]
        length, rate = found.accept_length, seconds_per_token(timed)
        seconds = rate.value
        prefill, decode = prefill_and_decode(timed)
        return cls(
            k=k,
            prompts=len(records),
            tau=found.tau.estimate(seed),
            alpha=found.alpha.estimate(seed),
            alpha_by_position=[x.estimate(seed) for x in found.alpha_by_position],
            acceptance_rate=found.rate.estimate(seed),
            unconditional_by_position=[x.estimate(seed) for x in found.unconditional_by_position],
            mean_accept_length=AcceptLength(length.estimate(seed), mean_of_ratios(*length, seed)),
            histogram=found.histogram,
            counts=Counts(
                rounds=int(found.rounds.sum()),
                drafted=int(found.drafted.sum()),
                accepted=int(found.accepted.sum()),
                forced=sum(sum(r.forced) for r in records),
                emitted=int(found.emitted.sum()),
                output_tokens=sum(r.output_tokens for r in records),
                rounds_by_position=found.reached_at.sum(0).tolist(),
                accepted_by_position=found.accepted_at.sum(0).tolist(),
            ),
            mean_output_tokens=ratio_or_none(sum(r.output_tokens for r in records), len(records)),
            latency_ms=LatencyMs.measure(timed),
            prefill=prefill,
            decode=decode,
            tokens_per_second=Ratio(rate.denominators, rate.numerators).estimate(seed),
            ms_per_token=None if seconds is None else MS_PER_SECOND * seconds,
            speedup=speedup(timed, plain, seed),
            speedup_of_sums=speedup(records, plain, seed).value,
            stalled=sum(bool(r.untimed) for r in records),
            void=void,
            finish=dict(sorted(Counter(r.finish_reason for r in records).items())),
            **facts,
        )

    def __post_init__(self) -> None:
        low = self.speedup.ci[0] if self.speedup.ci else 0.0
        if not self.void and low > (self.tau.value or math.inf):
            why = f"no method is faster than its {self.tau.value:.2f} tokens a round"
            object.__setattr__(self, "void", why)

    @property
    def is_real_draft(self) -> bool:
        """Neither plain decoding nor simulated acceptance."""
        return not self.is_plain and not self.simulated

    @property
    def drafts_alone(self) -> bool:
        """Whether nothing but its draft decides what is drafted: no lookup, no adaptive length, no mirror, and nothing
        that it learned."""
        alone = self.lookup is None and self.adaptive is None and self.mirror is None
        return alone and not self.learned

    @property
    def measures_draft(self) -> bool:
        """Whether it is about the saved draft: alone, or behind a lookup."""
        return self.drafts_alone or bool(self.lookup and not self.learned)

    @property
    def is_rounded(self) -> bool:
        """Whether the target's weights were rounded here, so that its text is that of our own plain decoding."""
        return self.dtype in QUANTIZED_DTYPES

    @property
    def greedy(self) -> GreedyVerdict | None:
        return self.lossless if isinstance(self.lossless, GreedyVerdict) else None

    @property
    def mean_reply_tokens(self) -> float | None:
        """Mean tokens per reply as measured, cut by the token limit or not."""
        if self.mean_output_tokens is not None or self.counts.output_tokens is None:
            return self.mean_output_tokens
        return ratio_or_none(self.counts.output_tokens, self.prompts)

    @property
    def setting_text(self) -> str:
        """The setting that it was measured in, with the limits of its sampling."""
        limits = [f"top-{x} {y:g}" for x, y in (("k", self.top_k), ("p", self.top_p)) if y]
        return ", ".join([setting_title(*self.setting), *limits * (self.temperature > 0)])


@dataclass(frozen=True, kw_only=True)
class EngineResult(Measured):
    """Another engine on the same prompts, one at a time."""

    engine: Word
    name: Name  # of its draft
    k: int
    temperature: float
    batch_size: int
    in_turn: bool = False  # timed in turn with our methods, not apart from them
    task: Name
    prompts: int
    output_tokens: int = 0
    tau: float | None
    tokens_per_second: float | None
    ms_per_token: float | None = None
    speedup: Estimate
    speedup_of_sums: float | None = None
    gain: Estimate = Estimate()  # against the same engine without a draft
    gain_of_sums: float | None = None
    stalled: int = 0
    void: Sentence = ""
    same_as_ours: int | None = None
    failed: list[FailedPrompt] = field(default_factory=list)
    transformers: Version | None = None
    repaired: list[Name] = field(default_factory=list)  # functions that were corrected there
    version: Omitted[Version] = None  # of llama.cpp
    served: Omitted[Name] = None
    """llama.cpp's GGUF file of the target, or the dtype in which that was written; vLLM's model and dtype."""
    alpha_by_position: Omitted[list[float | None]] = None
    """Of vLLM: rounds that accepted a position ÷ rounds that accepted all before it."""


@dataclass(frozen=True)
class RivalSpeedup:
    """A method over another engine's best arm: that one's seconds per token ÷ ours, on the same prompts."""

    method: Name
    engine: Word
    arm: Name
    task: Name
    temperature: float
    prompts: int
    speedup: Estimate


@dataclass(frozen=True)
class AlphaDifference:
    """The pooled α of `a` minus that of `b` on the same prompts."""

    a: Name
    b: Name
    task: Name
    temperature: float
    metric: Word
    difference: Annotated[Estimate, IntervalKey("ci")]
    prompts: int


@dataclass(frozen=True)
class LawVerdict:
    """Whether a method's sampled text follows the target's distribution; None: it has no control."""

    name: Name
    lossy: bool
    passed: bool
    control_caught: bool | None


@dataclass(frozen=True)
class LawTest:
    """A Kolmogorov-Smirnov test of one order of the tokens."""

    method: Name
    order: Name
    tokens: int
    distance: float
    p_value: float
    impossible: float  # share of the tokens to which the target gives no probability
    passed: bool = False
    detects: float = 0.0  # the smallest shift of the distribution that it finds


@dataclass(frozen=True)
class LawResult:
    """The tests that sampled text follows the target's distribution."""

    temperature: float
    top_k: int
    top_p: float
    level: float
    passed: bool
    methods: list[LawVerdict]
    tests: list[LawTest]


@dataclass(frozen=True)
class TargetDrift:
    """A target that was trained itself, beside the original target: means over tokens of the original's answers."""

    old: Place
    new: Place
    prompts: int
    tokens: int
    perplexity_old: float
    perplexity_new: float
    log_perplexity_change: Estimate
    kl: float  # KL(old || new) in nats
    same_top1: Private[float] = 0.0


@dataclass(frozen=True)
class PlainSpeed:
    """Plain decoding, pooled, at the first temperature."""

    tokens_per_second: float | None
    ms_per_token: float | None


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of the target and of each method's draft, where they are on this disk."""

    target: ModelSize | None = None
    drafts: dict[Name, ModelSize] = field(default_factory=dict)


@dataclass(frozen=True)
class ReportSection:
    """The entries of one task and setting, fastest first. Speeds are comparable only within a section."""

    task: str
    setting: str
    entries: list[MethodResult]

    @property
    def title(self) -> str:
        return f"{'all tasks' if self.task == ALL_TASKS else self.task}, {self.setting}"

    @property
    def real_drafts(self) -> list[MethodResult]:
        return [m for m in self.entries if m.is_real_draft and m.valid_speedup.value is not None]

    @property
    def fastest(self) -> MethodResult | None:
        """The fastest real draft."""
        return next(iter(self.real_drafts), None)


@dataclass(frozen=True, kw_only=True)
class EvalReport:
    """report.json."""

    schema: int
    target: TargetRecord
    earlier_targets: list[ModelFingerprint] = field(default_factory=list)
    """Other targets that measurements in it may be of, because it was allowed; an empty one does not say which."""
    tasks: list[Name] = field(default_factory=list)
    image_prompts: Omitted[int] = None  # how many prompts hold images; None: none does
    argv: Private[list[str]] = field(default_factory=list)
    git: Digest | None = None
    versions: dict[Word, Version]
    hardware: Hardware
    seed: int
    resumed: int = 0  # measurements of an earlier start of the run
    baseline: PlainSpeed
    methods: list[MethodResult]
    domains: list[MethodResult] = field(default_factory=list)
    gpu_utilisation: float | None = None  # percent, during plain decoding
    comparisons: list[AlphaDifference] = field(default_factory=list)
    engines: list[EngineResult] = field(default_factory=list)
    rivals: list[RivalSpeedup] = field(default_factory=list)
    law: LawResult | None = None
    target_quality: Omitted[TargetDrift] = None
    settings: Private[str | None] = None
    models: Omitted[ModelSizes] = None

    @property
    def target_name(self) -> str:
        """The target's name for titles: the last part of its path or Hub name, and how its weights were rounded."""
        return re.split(r"[/\\]", self.target.name.rstrip("/\\"))[-1] + self.target.rounding

    @property
    def entries(self) -> list[MethodResult]:
        """`methods` with equal ones once: those of an only task are those of all tasks together."""
        one_task = len({m.task for m in self.methods}) == 2
        return (self.pooled if one_task else []) or self.methods

    @cached_property
    def sections(self) -> list[ReportSection]:
        """The entries by task ("all" first) and setting, each section sorted by speed-up."""
        return sections_of(self.entries)

    @property
    def pooled_sections(self) -> list[ReportSection]:
        return [section for section in self.sections if section.task == ALL_TASKS]

    @property
    def pooled(self) -> list[MethodResult]:
        return [m for m in self.methods if m.is_pooled]

    def of_draft(self, sha256: str | None) -> list[MethodResult]:
        """The entries that measure the draft with this checksum: alone, or where none does, behind a lookup too."""
        own = [m for m in self.methods if m.draft_sha256 == sha256]
        return [m for m in own if m.drafts_alone] or [m for m in own if m.measures_draft]

    def with_own_texts(self) -> "EvalReport":
        """Of a report older than the comparison of rounded targets with plain decoding: with what it says of it."""
        plain = {
            (m.task, m.domain, m.batch_size): m for m in self.methods if m.is_plain and m.greedy
        }

        def verdict(m: MethodResult) -> GreedyVerdict | NotCompared:
            base, own = plain.get((m.task, m.domain, m.batch_size)), m.greedy
            if own is None or own.reference != "transformers" or not m.is_rounded:
                return m.lossless
            found = [*own.ties, *own.failures]
            places = {(x.task, x.id): x for x in found}
            others = [*base.greedy.ties, *base.greedy.failures] if base and base.greedy else []
            theirs = {(x.task, x.id): x for x in others}
            apart = [
                places.get(key) or theirs[key]
                for key in {**places, **theirs}
                if (places.get(key) and (places[key].position, places[key].gap))
                != (theirs.get(key) and (theirs[key].position, theirs[key].gap))
            ]
            return replace(
                own, greedy_identical=not apart, identical=own.prompts - len(apart), ties=[], failures=apart,
                exact=1 - len(apart) / own.prompts, tied=0.0, failed=len(apart) / own.prompts,
                reference="until", leaves=found,
            )  # fmt: skip

        return replace(self, methods=[replace(m, lossless=verdict(m)) for m in self.methods])

    def with_models(self) -> "EvalReport":
        """With the sizes of models that are on this disk."""
        if self.models is not None:
            return self
        sizes = {m.name: read_model_size(m.draft) for m in self.methods if m.draft}
        drafts = {name: size for name, size in sizes.items() if size is not None}
        return replace(self, models=ModelSizes(read_model_size(self.target.name), drafts))


def read_report(path: Path) -> EvalReport:
    """UserError for another file than a report of schema 1."""
    report: EvalReport = read_measurements(EvalReport, path, "a report of eval/run.py")
    return report.with_own_texts().with_models()


def read_measurements(kind: Any, path: Path, what: str) -> Any:
    """The file as a `kind`, which has a schema and a target. UserError unless it is `what`, of schema 1."""
    values = read_json_object(path, what, ["schema"])
    if values["schema"] != SCHEMA:
        raise UserError(f"{path} is not {what} of schema 1: make it again with this version")
    if isinstance(values.get("target"), str):  # older files hold the name alone
        values["target"] = {"name": values["target"]}
    try:
        return from_json(kind, values)
    except WrongTypeError as error:
        raise UserError(f"{path} is not {what}: {error}") from None


def sections_of(entries: Sequence[MethodResult]) -> list[ReportSection]:
    sections = []
    for task in unique_names([m.task for m in entries]):
        of_task = [m for m in entries if m.task == task]
        for setting, own in by_setting(of_task).items():
            own.sort(key=lambda m: (m.valid_speedup.value is None, -(m.valid_speedup.value or 0)))
            sections.append(ReportSection(task, setting_title(*setting), own))
    return sections


def by_setting(entries: Sequence[T]) -> dict[tuple[float, int], list[T]]:
    """{(temperature, batch size): its entries}, in rising order."""
    settings = sorted({m.setting for m in entries})
    return {setting: [m for m in entries if m.setting == setting] for setting in settings}


def setting_title(temperature: float, batch_size: int) -> str:
    return f"temperature {temperature:g}, batch {batch_size}"


def unique_names(names: Sequence[str]) -> list[str]:
    """Each name once, in order of first appearance, the pooled task "all" first."""
    return sorted(dict.fromkeys(names), key=lambda name: name != ALL_TASKS)
