"""speculation_profile.json: how good a draft is, in the fields that NVIDIA Model-Optimizer proposes (schema 1.0).

Read there by simulators and by engines that set acceptance themselves: conditional rates (P(draft i accepted | those
before it)) and marginal ones (P(drafts 1 to i all accepted)), both over all rounds, with the histogram that they follow
from. Its lengths count the token that the target adds. docs/engine_logs.md says where the proposal was read; intervals,
τ and `other_profiles` are ours.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from decode.serving.vllm_engine import VLLM
from eval.metrics.bootstrap import ALL_TASKS

SCHEMA_VERSION = "1.0"
TOLERANCE = 0.02
"""Of the mean length, as in the proposal."""
DIGITS = 6
AUTOREGRESSIVE = frozenset(("causal", "eagle1", "eagle3", "mtp", "medusa", "early-exit", "layerskip"))  # fmt: skip
"""Families whose chain of K tokens begins with their chain of K − 1, so that one K says what shorter ones give."""

NEEDED = frozenset(("k", "histogram", "mean_accept_length", "unconditional_by_position_ci"))
"""What older reports lack in part."""

Entry = Mapping[str, Any]
"""One object of report["methods"]."""


def speculation_profile(
    report: Mapping[str, Any], entries: Sequence[Entry] | None = None
) -> dict[str, Any] | None:
    """The profile of the fastest draft at the lowest temperature; None if no real draft was measured.

    `other_profiles` has one for each further method, K and temperature. `entries` are those of the report by default.
    """
    measured = [m for m in (report["methods"] if entries is None else entries) if is_measured(m)]
    pooled = [m for m in measured if m["task"] == ALL_TASKS]
    if not pooled:
        return None
    pooled.sort(key=lambda m: (m["temperature"], -(m["speedup"] or 0)))
    profiles = [
        build_profile(report, m, [x for x in measured if _setting(x) == _setting(m)])
        for m in pooled
    ]
    return {**profiles[0], "other_profiles": profiles[1:]}


def is_measured(entry: Entry) -> bool:
    """Whether the entry has rounds of a real draft, and the fields of reports since this file exists."""
    return (
        entry.keys() >= NEEDED
        and entry["k"] > 0
        and not entry.get("simulated")
        and sum(entry["histogram"]) > 0
    )


def build_profile(
    report: Mapping[str, Any], entry: Entry, same_setting: Sequence[Entry]
) -> dict[str, Any]:
    """The profile of one entry of all tasks; `same_setting` has those of single tasks too."""
    k, length, target = entry["k"], entry["mean_accept_length"], report["target"]
    rates = position_rates(entry["histogram"])
    mean = round(length["pooled"], DIGITS)
    family = entry.get("family") or entry["name"]
    chain = entry["tree"] is None and entry.get("lookup") is None and family in AUTOREGRESSIVE
    return {
        "schema_version": SCHEMA_VERSION,
        "measured": True,
        "method": VLLM.method(family) or family,
        "name": entry["name"],
        "draft_checkpoint": {"name": entry["draft"], "sha256": entry["draft_sha256"]},
        "target_model": {"name": target["name"], "revision": target.get("revision")}
        if isinstance(target, Mapping)
        else {"name": target, "revision": None},
        "num_speculative_tokens": k,
        "block_size": None,
        "max_supported_k": k,
        "verification_method": "longest_prefix",
        "lossy": entry["lossy"],
        **rates,
        "marginal_accept_rates_ci": entry["unconditional_by_position_ci"],
        "alpha_by_position": entry["alpha_by_position"],
        "alpha_by_position_ci": entry["alpha_by_position_ci"],
        "mean_accept_length": mean,
        "mean_accept_length_ci": length["ci"],
        "mean_accept_length_per_request": round(length["per_request"], DIGITS),
        "mean_accept_length_per_request_ci": length["per_request_ci"],
        "tau": entry["tau"],
        "tau_ci": entry["tau_ci"],
        "accept_length_model": "chain_analytic" if chain else "measured_per_k",
        "accept_length_by_k": {str(k): mean},
        "acceptance_length_histogram": {str(i + 1): n for i, n in enumerate(entry["histogram"])},
        "per_category": {
            m["task"]: category(m) for m in same_setting if m["task"] != ALL_TASKS
        },
        "measurement_conditions": {
            "engine": "draftsmith",
            "temperature": entry["temperature"],
            "concurrency": entry["batch_size"],
            "num_samples": entry["prompts"],
            "dtype": entry["dtype"],
            "tree": entry["tree"],
            "seed": report.get("seed"),
        },
        "validation": validate(mean, rates["marginal_accept_rates"]),
    }  # fmt: skip


def category(entry: Entry) -> dict[str, Any]:
    """What a profile says of one task."""
    length = entry["mean_accept_length"]
    return {
        **position_rates(entry["histogram"]),
        "marginal_accept_rates_ci": entry["unconditional_by_position_ci"],
        "mean_accept_length": round(length["pooled"], DIGITS),
        "mean_accept_length_ci": length["ci"],
        "tau": entry["tau"],
        "tau_ci": entry["tau_ci"],
        "num_samples": entry["prompts"],
    }


def position_rates(histogram: Sequence[int]) -> dict[str, list[float]]:
    """Both lists of rates from the rounds that accepted 0, 1, … K drafts."""
    rounds = sum(histogram)
    marginal = [sum(histogram[i:]) / rounds for i in range(1, len(histogram))]
    before = [1.0, *marginal]
    conditional = [a / b if b > 0 else 0.0 for a, b in zip(marginal, before, strict=False)]
    return {
        "conditional_accept_rates": [round(x, DIGITS) for x in conditional],
        "marginal_accept_rates": [round(x, DIGITS) for x in marginal],
    }


def validate(mean: float, marginal: Sequence[float]) -> dict[str, Any]:
    """The proposal's two checks: the mean is 1 + Σ marginal, and no marginal rate is above the one before it."""
    implied = 1 + sum(marginal)
    rises = [
        {"position": i, "value": marginal[i], "previous": marginal[i - 1]}
        for i in range(1, len(marginal))
        if marginal[i] > marginal[i - 1]
    ]
    return {
        "mean_consistency": {
            "implied_mean_accept_length": round(implied, DIGITS),
            "reported_mean_accept_length": mean,
            "abs_delta": round(abs(implied - mean), DIGITS),
            "tolerance": TOLERANCE,
            "passed": abs(implied - mean) <= TOLERANCE,
        },
        "marginal_monotonicity": {"passed": not rises, "violations": rises},
    }


def _setting(entry: Entry) -> tuple[Any, ...]:
    """What entries of one profile have in common."""
    names = ("name", "draft_sha256", "k", "tree", "temperature", "batch_size")
    return tuple(str(entry[name]) for name in names)
