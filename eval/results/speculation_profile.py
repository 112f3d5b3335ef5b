"""speculation_profile.json: how good a draft is, in the fields that NVIDIA Model-Optimizer proposes (schema 1.0).

Read there by simulators and by engines that set acceptance themselves: conditional rates (P(draft i accepted | those
before it)) and marginal ones (P(drafts 1 to i all accepted)), both over all rounds, with the histogram that they follow
from. Its lengths count the token that the target adds. docs/engine_logs.md says where the proposal was read; intervals,
τ and `other_profiles` are ours.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from decode.common.published import Digest, Name, Place, Revision, Version, Word
from decode.common.typed_json import Estimate
from decode.serving.vllm_engine import VLLM
from eval.results.report import EvalReport, MethodResult, TreeRecord

SCHEMA_VERSION = "1.0"
TOLERANCE = 0.02  # of the mean length, as in the proposal
DIGITS = 6
AUTOREGRESSIVE = frozenset(("causal", "eagle1", "eagle3", "mtp", "medusa", "early-exit", "layerskip"))  # fmt: skip
"""Families whose chain of K tokens begins with their chain of K − 1, so that one K says what shorter ones give."""


@dataclass(frozen=True)
class ProfiledDraft:
    name: Place | None
    sha256: Digest | None


@dataclass(frozen=True)
class ProfiledTarget:
    name: Place
    revision: Revision | None


@dataclass(frozen=True)
class CategoryProfile:
    """What a profile says of one task."""

    conditional_accept_rates: list[float]
    marginal_accept_rates: list[Estimate]
    mean_accept_length: Estimate
    tau: Estimate
    num_samples: int


@dataclass(frozen=True)
class MeasurementConditions:
    engine: Word
    temperature: float
    concurrency: int
    num_samples: int
    dtype: Word
    tree: TreeRecord | None
    seed: int


@dataclass(frozen=True)
class MeanConsistency:
    """Whether the mean is 1 + Σ marginal."""

    implied_mean_accept_length: float
    reported_mean_accept_length: float
    abs_delta: float
    tolerance: float
    passed: bool


@dataclass(frozen=True)
class MarginalMonotonicity:
    """Whether no marginal rate is above the one before it."""

    passed: bool
    violations: list[int]  # the positions of those that are


@dataclass(frozen=True)
class ProfileValidation:
    """The proposal's two checks."""

    mean_consistency: MeanConsistency
    marginal_monotonicity: MarginalMonotonicity


@dataclass(frozen=True)
class DraftProfile:
    """The profile of one method, K and temperature."""

    schema_version: Version
    measured: bool
    method: Word
    name: Name
    draft_checkpoint: ProfiledDraft
    target_model: ProfiledTarget
    num_speculative_tokens: int
    block_size: int | None
    max_supported_k: int
    verification_method: Word
    lossy: bool
    conditional_accept_rates: list[float]
    marginal_accept_rates: list[Estimate]
    alpha_by_position: list[Estimate]
    mean_accept_length: Estimate
    mean_accept_length_per_request: Estimate
    tau: Estimate
    accept_length_model: Word
    accept_length_by_k: dict[Name, float]
    acceptance_length_histogram: dict[Name, int]
    per_category: dict[Name, CategoryProfile]
    measurement_conditions: MeasurementConditions
    validation: ProfileValidation


@dataclass(frozen=True)
class SpeculationProfile(DraftProfile):
    """The fastest draft at the lowest temperature, and behind it every further method, K and temperature."""

    other_profiles: list[DraftProfile] = field(default_factory=list)


def speculation_profile(
    report: EvalReport, entries: Sequence[MethodResult] | None = None
) -> SpeculationProfile | None:
    """Of the report's entries, or of these; None if no real draft was measured."""
    measured = [m for m in (report.methods if entries is None else entries) if is_measured(m)]
    pooled = sorted(
        (m for m in measured if m.is_pooled),
        key=lambda m: (m.temperature, -(m.valid_speedup.value or 0)),
    )
    by_setting: dict[Any, list[MethodResult]] = {}
    for m in measured:
        key = (m.name, m.draft_sha256, m.k, str(m.tree), m.setting)
        by_setting.setdefault(key, []).append(m)
    peers = {id(m): own for own in by_setting.values() for m in own}
    profiles = [build_profile(report, m, peers[id(m)]) for m in pooled]
    return (
        SpeculationProfile(**vars(profiles[0]), other_profiles=profiles[1:]) if profiles else None
    )


def is_measured(m: MethodResult) -> bool:
    """Whether the entry has rounds of a real draft, and the fields of reports since this file exists."""
    known = m.mean_accept_length is not None and len(m.unconditional_by_position) == m.k
    return known and m.k > 0 and not m.simulated and sum(m.histogram or []) > 0


def build_profile(
    report: EvalReport, m: MethodResult, same_setting: Sequence[MethodResult]
) -> DraftProfile:
    """The profile of one entry of all tasks; `same_setting` has those of single tasks too."""
    assert m.mean_accept_length is not None
    own, family, histogram = category(m), m.family or m.name, m.histogram or []
    mean = own.mean_accept_length.value or 0.0
    chain = m.tree is None and m.lookup is None and family in AUTOREGRESSIVE
    return DraftProfile(
        schema_version=SCHEMA_VERSION,
        measured=True,
        method=VLLM.method(family) or family,
        name=m.name,
        draft_checkpoint=ProfiledDraft(m.draft, m.draft_sha256),
        target_model=ProfiledTarget(report.target.name, report.target.revision),
        num_speculative_tokens=m.k,
        block_size=None,
        max_supported_k=m.k,
        verification_method="longest_prefix",
        lossy=m.lossy,
        conditional_accept_rates=own.conditional_accept_rates,
        marginal_accept_rates=own.marginal_accept_rates,
        alpha_by_position=m.alpha_by_position,
        mean_accept_length=own.mean_accept_length,
        mean_accept_length_per_request=_rounded(m.mean_accept_length.per_request),
        tau=m.tau,
        accept_length_model="chain_analytic" if chain else "measured_per_k",
        accept_length_by_k={str(m.k): mean},
        acceptance_length_histogram={str(i + 1): n for i, n in enumerate(histogram)},
        per_category={x.task: category(x) for x in same_setting if not x.is_pooled},
        measurement_conditions=MeasurementConditions(
            "draftsmith", m.temperature, m.batch_size, m.prompts, m.dtype, m.tree, report.seed
        ),
        validation=validate(mean, position_rates(histogram)[1]),
    )


def category(m: MethodResult) -> CategoryProfile:
    assert m.mean_accept_length is not None
    conditional, marginal = position_rates(m.histogram or [])
    return CategoryProfile(
        conditional,
        [Estimate(a, x.ci) for a, x in zip(marginal, m.unconditional_by_position, strict=True)],
        _rounded(m.mean_accept_length.pooled),
        m.tau,
        m.prompts,
    )


def position_rates(histogram: Sequence[int]) -> tuple[list[float], list[float]]:
    """(conditional, marginal) rates from the rounds that accepted 0, 1, … K drafts."""
    rounds = sum(histogram)
    marginal = [sum(histogram[i:]) / rounds for i in range(1, len(histogram))]
    before = [1.0, *marginal]
    conditional = [a / b if b > 0 else 0.0 for a, b in zip(marginal, before, strict=False)]
    return [round(x, DIGITS) for x in conditional], [round(x, DIGITS) for x in marginal]


def validate(mean: float, marginal: Sequence[float]) -> ProfileValidation:
    implied = 1 + sum(marginal)
    rises = [i for i in range(1, len(marginal)) if marginal[i] > marginal[i - 1]]
    apart = abs(implied - mean)
    return ProfileValidation(
        MeanConsistency(
            round(implied, DIGITS), mean, round(apart, DIGITS), TOLERANCE, apart <= TOLERANCE
        ),
        MarginalMonotonicity(not rises, rises),
    )


def _rounded(x: Estimate) -> Estimate:
    return Estimate(None if x.value is None else round(x.value, DIGITS), x.ci)
