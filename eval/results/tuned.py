"""tuned.json of eval/tune.py as types: settings that were timed in turn, predictions of them, and the fastest ones."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from decode.common import damage
from decode.common.errors import UserError
from decode.common.provenance import Hardware
from decode.common.published import Digest, Name, Private, Sentence, Setting, Version, Word
from decode.common.target_record import ModelFingerprint, TargetRecord
from decode.common.typed_json import Estimate, IntervalKey
from eval.metrics.latency import Spread
from eval.results.report import EvalReport, TreeRecord, read_measurements


@dataclass(frozen=True)
class RoundMs:
    """Milliseconds of rounds: the fields of a Spread, in the order of this file."""

    mean: float | None = None
    p50: float | None = None
    p95: float | None = None
    variance: float | None = None


@dataclass(frozen=True, kw_only=True)
class SweepCell:
    """One setting on the prompts of a domain, in rounds without prefill; plain decoding is K = 1."""

    stage: Word
    method: Name
    setting: Setting
    k: int
    layers: int = 0
    tree: TreeRecord | None
    temperature: float
    batch_size: int
    task: Name
    prompts: int
    tau: float | None
    alpha: float | None
    speedup: Annotated[Estimate, IntervalKey("ci")]
    speedup_of_sums: float | None = None
    tokens_per_second: float | None = None
    void: Sentence = ""
    """Why its seconds say nothing, so that it has no speed-up; "" if they do."""
    round_ms: RoundMs = RoundMs()
    token_ms: Spread = Spread()


@dataclass(frozen=True, kw_only=True)
class ChosenSetting:
    """The fastest setting of a method for one domain, temperature and batch size."""

    temperature: float
    batch_size: int
    task: Name
    method: Name
    setting: Setting
    k: int
    layers: int = 0
    tree: TreeRecord | None
    rule: Word
    prompts: int
    speedup: Annotated[Estimate, IntervalKey("ci")]
    speedup_of_sums: float | None = None
    held_out: float | None  # chosen on one half of the prompts, measured on the other
    tau: float | None
    alpha: float | None
    guide: tuple[int, int] | None  # draft lengths that guides recommend, from and to


@dataclass(frozen=True, kw_only=True)
class PredictedCell:
    """A speed-up on one half of the prompts, and its prediction from two draft lengths on the other."""

    method: Name
    layers: int = 0
    task: Name
    temperature: float
    batch_size: int
    fold: int
    k: int
    predicted: float
    measured: Annotated[Estimate, IntervalKey("ci")]
    error: float
    counted: bool  # whether the measurement is precise enough, and none of the two lengths


@dataclass(frozen=True)
class Predictions:
    cells: list[PredictedCell]
    counted: int
    median_error: float | None


@dataclass(frozen=True)
class TreeLength:
    """Tokens a round of a fixed tree: predicted from one half of the prompts, measured on the other."""

    method: Name
    setting: Setting
    temperature: float
    predicted_tau: float
    tau: float | None


@dataclass(frozen=True)
class TunedChain:
    """The fastest lossless chain of one draft at a temperature, on a domain; `tried` are the lengths compared."""

    cell: SweepCell
    held_out: float | None
    tried: list[int]


@dataclass(frozen=True, kw_only=True)
class TunedReport:
    """tuned.json."""

    schema: int
    target: TargetRecord
    earlier_targets: list[ModelFingerprint] = field(default_factory=list)
    tasks: list[Name] = field(default_factory=list)
    drafts: dict[Name, Digest | None] = field(default_factory=dict)
    argv: Private[list[str]] = field(default_factory=list)
    git: Digest | None = None
    versions: dict[Word, Version] = field(default_factory=dict)
    hardware: Hardware = Hardware()
    seed: int = 0
    bandwidth: float = 0.0  # bytes a second that the device reads
    repeated_turns: int = 0
    dropped_turns: dict[Name, int] = field(default_factory=dict)  # by reason
    chosen: list[ChosenSetting]
    predictions: Predictions
    trees: list[TreeLength] = field(default_factory=list)
    cells: list[SweepCell]
    refused: Private[dict[str, str]] = field(default_factory=dict)
    settings: Private[str] = ""

    def fastest_chains(self, sha: str) -> list[TunedChain]:
        """The fastest lossless chain of the draft with this sha256, by temperature and domain.

        At the smallest batch size. Faster trees are left out, since serving engines draft chains.
        """
        from decode.verification.registry import find_rule  # loads torch, which advice does without

        lossy = {c.method for c in self.chosen if not find_rule(c.rule).lossless}
        names = {name for name, own in self.drafts.items() if own == sha} - lossy
        cells = [c for c in self.cells if c.method in names and c.tree is None]
        cells = [c for c in cells if c.speedup.value is not None]
        smallest = min((c.batch_size for c in cells), default=0)
        cells = [c for c in cells if c.batch_size == smallest]
        found = []
        for temperature in sorted({c.temperature for c in cells}):
            for task in dict.fromkeys(c.task for c in cells):
                own = [c for c in cells if (c.temperature, c.task) == (temperature, task)]
                best = max(own, key=lambda c: c.speedup.value or 0.0)
                place = ("temperature", "batch_size", "task", "method", "k", "tree")
                chosen = (c for c in self.chosen if all(vars(c)[x] == vars(best)[x] for x in place))
                held = next((c.held_out for c in chosen), None)
                found.append(TunedChain(best, held, sorted({c.k for c in own})))
        return found


def read_tuned(path: Path, report: EvalReport | None = None) -> TunedReport:
    """UserError for another file than a tuned.json of schema 1, or if its target is not the report's."""
    tuned: TunedReport = read_measurements(TunedReport, path, "a tuned.json of eval/tune.py")
    ours, theirs = tuned.target, tuned.target if report is None else report.target
    if None not in (ours.tokenizer, theirs.tokenizer) and ours.tokenizer != theirs.tokenizer:
        raise UserError(f"{path} is about another target: give that of the report's target")
    if None not in (ours.weights, theirs.weights) and ours.weights != theirs.weights:
        damage.warn(
            f"{path} is of a target with weights {ours.weights}, the report of {theirs.weights}"
        )
    return tuned
