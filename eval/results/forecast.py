"""forecast.json of eval/forecast.py as types: acceptance for every K and rule, costs of rounds, schedules."""

from dataclasses import dataclass, field

from decode.common.provenance import Hardware
from decode.common.published import Digest, Name, Place, Private, Version, Word
from decode.common.target_record import ModelFingerprint, TargetRecord
from decode.common.typed_json import Estimate
from decode.serving.engine import KRange

SpeculativeConfig = dict[str, int | list[KRange] | dict[int, int]]


@dataclass(frozen=True)
class ForecastDraft:
    name: Place
    family: Word
    sha256: Digest | None = None


@dataclass(frozen=True)
class EngineRule:
    """One way in which an engine accepts chains at a temperature above 0, and the setting that chooses it."""

    engine: str
    rule: str
    setting: str


@dataclass(frozen=True)
class ForecastCounts:
    """Expected sums over texts; `accepted` by position."""

    emitted: float
    rounds: float
    drafting_rounds: float
    accepted: list[float]


@dataclass(frozen=True)
class ForecastRow:
    """What a rule and K give on the prompts of one task, or of all.

    `tau` is trimmed at the end of answers; `mean_accept_length` is 1 + accepted ÷ rounds that drafted, which engines
    print; `unconditional_by_position` divides by the same rounds.
    """

    task: Name
    temperature: float
    k: int
    rule: Word
    prompts: int
    texts: int
    tau: Estimate
    mean_accept_length: Estimate
    alpha: Estimate
    alpha_by_position: list[Estimate]
    unconditional_by_position: list[Estimate]
    acceptance_rate: float | None
    counts: ForecastCounts
    speedup: Private[Estimate] = Estimate()
    """Of whole requests one at a time; of one machine, as costs are."""


@dataclass(frozen=True)
class CostPoint:
    """The mean round of one engine, batch, context and K; its JSON form is what --costs reads."""

    batch: int  # requests that are decoded together
    context: int  # tokens of each prompt; 0: the prompts of the tasks
    k: int  # 0: plain decoding
    drafted: float
    """Tokens that a round drafted for one request, over rounds that drafted: K, or fewer for n-grams."""
    round_ms: float  # milliseconds of such a round, of the whole batch
    prefill_ms: float  # milliseconds to the first token


@dataclass(frozen=True)
class EngineSchedule:
    """An engine's own form of the best K by batch size; {} where no K pays."""

    version: str
    speculative_config: SpeculativeConfig


@dataclass(frozen=True)
class SglangSchedule:
    flags: list[str]


@dataclass(frozen=True)
class KSchedule:
    """Throughput at the measured batch sizes, and the best K for each."""

    temperature: float
    rule: str
    context: int
    batches: list[int]
    tokens_per_second: dict[str, list[float]]  # by K, for each of `batches`
    best_k: list[KRange]
    vllm: EngineSchedule
    tensorrt_llm: EngineSchedule
    sglang: SglangSchedule


@dataclass(frozen=True, kw_only=True)
class ForecastReport:
    """forecast.json."""

    schema: int
    target: TargetRecord
    earlier_targets: list[ModelFingerprint] = field(default_factory=list)
    draft: ForecastDraft
    tasks: list[Name] = field(default_factory=list)
    max_new_tokens: int = 0
    engines: Private[list[EngineRule]] = field(default_factory=list)
    rows: list[ForecastRow]
    costs: Private[dict[str, str | list[CostPoint]]] = field(default_factory=dict)
    """{from: where they come from, points}."""
    schedules: Private[list[KSchedule]] = field(default_factory=list)
    seed: int = 0
    argv: Private[list[str]] = field(default_factory=list)
    git: Digest | None = None
    versions: dict[Word, Version] = field(default_factory=dict)
    hardware: Hardware = Hardware()
