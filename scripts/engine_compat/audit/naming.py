"""Names what is wrong with a served draft, from the counts of each reading and of the engine and the broken rules.

Three things are evidence. A reading that accepts in each prompt what the engine accepted says how the engine reads the
files, if that is not as they are written. A reading that accepts significantly more than the files as they are written
(or than what is served, where we refuse those) says how they are meant: a draft is trained with one reading, and any
other accepts less. A broken rule of the checker says what the files lack or contradict. A suspect that the files
themselves give rise to goes before one that they do not.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from decode.serving.rules import IGNORED, Finding
from eval.metrics.bootstrap import Array
from eval.metrics.distribution_tests import PermutationTestResult, run_permutation_test
from scripts.engine_compat.audit.decoding import Outcome, ServedCounts
from scripts.engine_compat.vllm_parity import PromptCounts, sum_counts

LEVEL = 0.05
"""p-value below which two sides accept differently. Gains of several readings share it."""
OWN_RULES = ("changed-since-training", "unchecked")
"""Findings that name no cause: something was changed, or nothing is known."""
FIELDS = ("rounds", "accepted", "by_position")

Pairs = list[tuple[PromptCounts, PromptCounts]]


@dataclass
class Cause:
    """One thing that is wrong, with all evidence for it."""

    about: str
    evidence: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Agreement:
    """Our counts of one reading beside those of the engine."""

    prompts: int
    """Prompts that both sides answered with the same text, or all if the engine's text is not known."""
    same: int
    """Those with the same rounds and the same accepted tokens by position."""
    p_value: float | None
    """Of the permutation test that both accept alike; None where counts are compared exactly."""
    agrees: bool


def comparable(ours: Sequence[PromptCounts], theirs: Sequence[PromptCounts]) -> Pairs:
    """The prompts that both sides answered with the same text: after another token, other drafts are right."""
    pairs = zip(ours, theirs, strict=True)
    return [(a, b) for a, b in pairs if b.get("ids") is None or a["ids"] == b["ids"]]


def compare(ours: Sequence[PromptCounts], served: ServedCounts) -> Agreement:
    """Whether both accept alike: every count the same if the engine is `exact`, else not significantly apart."""
    pairs = comparable(ours, served.counts)
    same = sum(all(b[key] in (None, a[key]) for key in FIELDS) for a, b in pairs)
    if served.exact or same == len(pairs):
        return Agreement(len(pairs), same, None, 0 < same == len(pairs))
    p = permutation_test(pairs).p_value
    return Agreement(len(pairs), same, p, p >= LEVEL)


def permutation_test(pairs: Pairs) -> PermutationTestResult:
    """Of counts by position, or of all accepted tokens where one side has no positions."""
    positions = all(side["by_position"] is not None for pair in pairs for side in pair)

    def counts(side: int) -> Array:
        rows = [pair[side] for pair in pairs]
        kept = [x["by_position"] if positions else [x["accepted"]] for x in rows]
        return np.array([[x["rounds"], *y] for x, y in zip(rows, kept, strict=True)])

    return run_permutation_test(counts(0), counts(1), level=LEVEL)


def tau(counts: Sequence[PromptCounts]) -> float:
    total = sum_counts([{**x, "by_position": x["by_position"] or []} for x in counts])
    return 1 + float(total["accepted"]) / max(1, total["rounds"])


def gain(outcome: Outcome, base: Sequence[PromptCounts]) -> tuple[float, float]:
    """(what a reading adds to τ of the base, its p-value)."""
    pairs = comparable(outcome.counts, base)
    if not pairs:
        return 0.0, 1.0
    ours, theirs = ([pair[side] for pair in pairs] for side in (0, 1))
    return tau(ours) - tau(theirs), permutation_test(pairs).parts[-1].p_value


def name_causes(
    written: Outcome,
    outcomes: Sequence[Outcome],
    served: ServedCounts | None,
    findings: Sequence[Finding],
) -> list[Cause]:
    """The causes, [] for a draft that is served as it was trained, as far as its files and these prompts show."""
    causes: dict[str, Cause] = {}

    def add(about: str, text: str) -> None:
        causes.setdefault(about, Cause(about)).evidence.append(text)

    counted = [outcome for outcome in outcomes if outcome.counts]
    if served and served.counts:
        for outcome in reproducing(written, counted, served):
            at = compare(outcome.counts, served)
            share = f"{at.same} of {at.prompts} prompts the same"
            test = "" if at.p_value is None else f", p = {at.p_value:.2g}"
            text = f"decoding with {outcome.reading.says} accepts what {served.engine} accepts"
            add(outcome.reading.about, f"{text}: {share}{test}")
    base = written.counts or (served.counts if served else [])
    for outcome in improving(counted, base):
        more, p = gain(outcome, base)
        text = f"decoding with {outcome.reading.says} accepts more"
        change = f"τ {tau(base):.3f} becomes {tau(base) + more:.3f}"
        add(outcome.reading.about, f"{text}: {change}, p = {p:.2g}")
    for finding in findings:
        if finding.effect != IGNORED and finding.rule not in OWN_RULES:
            fitting = [o.reading for o in outcomes if finding.rule in o.reading.rules]
            fitting.sort(key=lambda reading: not reading.visible)
            about = fitting[0].about if fitting else finding.rule
            add(about, f"rule {finding.rule}: {finding.what}")
    return list(causes.values())


def reproducing(
    written: Outcome, counted: Sequence[Outcome], served: ServedCounts
) -> list[Outcome]:
    """The readings that accept what was served, if the files as they are written do not.

    Those that the files give rise to, if there are any. Others are left out where nothing was accepted at all: any
    wrong reading gives that.
    """
    if written.counts and compare(written.counts, served).agrees:
        return []
    found = [outcome for outcome in counted if compare(outcome.counts, served).agrees]
    visible = [outcome for outcome in found if outcome.reading.visible]
    accepted = sum(x["accepted"] for x in served.counts)
    return visible or (found if accepted else [])


def improving(counted: Sequence[Outcome], base: Sequence[PromptCounts]) -> list[Outcome]:
    """The readings that accept significantly more than `base` and at least nine tenths as much more as the best one."""
    if not base:
        return []
    gains = [(outcome, *gain(outcome, base)) for outcome in counted]
    better = [(outcome, more) for outcome, more, p in gains if more > 0 and p < LEVEL / len(gains)]
    best = max((more for _, more in better), default=0.0)
    return [outcome for outcome, more in better if more >= 0.9 * best]


def nearest(counted: Sequence[Outcome], served: ServedCounts) -> tuple[str, Agreement] | None:
    """What the reading says whose counts are nearest to the served ones, and how near; None without readings."""
    if not counted:
        return None
    found = [(outcome.reading.says, compare(outcome.counts, served)) for outcome in counted]
    return max(found, key=lambda one: (one[1].same, one[1].p_value or 0))


def outcome_row(outcome: Outcome, served: ServedCounts | None) -> dict[str, Any]:
    """An outcome for audit.json."""
    reading = outcome.reading
    row: dict[str, Any] = {
        "about": reading.about,
        "reading": reading.says,
        "visible": reading.visible,
    }
    if not outcome.counts:
        return row | {"refused": outcome.refused}
    total = sum_counts(outcome.counts)
    row |= {"tau": tau(outcome.counts), **total}
    if served and served.counts:
        row |= asdict(compare(outcome.counts, served))
    return row
