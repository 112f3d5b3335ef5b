"""The audit of one draft: each reading of its files decoded here, beside what an engine served (scripts/audit.py).

Three things are evidence. A reading that accepts in each prompt what the engine accepted says how the engine reads the
files, if that is not as they are written. A reading that accepts significantly more than the files as they are written
(or than what is served, where we refuse those) says how they are meant: a draft is trained with one reading, and any
other accepts less. A broken rule of the checker says what the files lack or contradict. A suspect that the files
themselves give rise to goes before one that they do not.
"""

import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from decode.checkpoints.draft_folder import (
    check_saved_tokenizer,
    check_tokenizer,
    draft_sha256,
    read_metadata,
)
from decode.common.errors import UserError, first_line
from decode.drafts.registry import load_draft
from decode.model.loading import Target
from decode.serving.log_counts import EngineLog, RequestCounts, pool
from decode.serving.rules import IGNORED, DraftFiles, Finding, read_draft, read_target
from decode.serving.running import vllm_client
from eval.served import suspects
from eval.served.parity import (
    BATCH_ROWS,
    counts_json,
    decode_counts,
    permutation_test,
    tau,
    with_positions,
)
from eval.served.reading import AS_WRITTEN, Reading, copy_files
from eval.settings.served import RefereeConfig
from eval.tasks.loading import TaskPrompt

LEVEL = 0.05  # p-value below which two sides accept differently. Gains of several readings share it
LOGGED = "the engine of the log"
OWN_RULES = ("changed-since-training", "unchecked")
"""Findings that name no cause: something was changed, or nothing is known."""
RULES = {
    "taps": ("taps", "taps-disagree", "taps-unread"),
    "norms": ("norm-flags", "nested-norm-flag", "norm-before-residual", "norm-before-fc"),
    "rope": ("rope", "rope-keys"),
    "vocabulary map": ("map", "map-missing", "map-dtype", "missing-tensor", "whole-head"),
    "tensors": ("missing-tensor", "unknown-tensor", "skipped-tensor"),
    "biases": ("bias-flags", "dropped-bias"),
    "matrices": ("shared-projection", "tied"),
}
"""{what is suspected: names of the checker's rules that speak of the same}."""

Pairs = list[tuple[RequestCounts, RequestCounts]]


@dataclass(frozen=True)
class Outcome:
    """What our decoder makes of one reading."""

    reading: Reading
    counts: list[RequestCounts]  # of each prompt; empty if the reading was refused
    refused: str = ""  # why our loader refuses it


@dataclass(frozen=True)
class ServedCounts:
    """What an engine made of the draft."""

    engine: str
    counts: list[RequestCounts] = field(default_factory=list)
    """Of each prompt, greedy; those of a log have no ids."""
    refused: str = ""  # the engine's error message, if it did not serve the draft
    other_prompts: str = ""
    """How the prompts that the engine read differ from ours; then their counts are not comparable."""
    exact: bool = True
    """Both sides computed in float32, so that equal functions accept equal tokens."""


@dataclass(frozen=True)
class Agreement:
    """Our counts of one reading beside those of the engine."""

    prompts: int
    """Prompts that both sides answered with the same text, or all if the engine's text is not known."""
    same: int  # those with the same rounds and the same accepted tokens by position
    p_value: float | None
    """Of the permutation test that both accept alike; None where counts are compared exactly."""
    agrees: bool


# ---- both sides ----


def vllm_counts(result: Mapping[str, Any], exact: bool) -> ServedCounts:
    if "error" in result:
        return ServedCounts("vLLM", refused=" ".join(result["error"].split())[:300], exact=exact)
    return ServedCounts(f"vLLM {result['vllm']}", vllm_client.answer_counts(result), exact=exact)


def log_counts(log: EngineLog, prompts: Sequence[list[int]], k: int) -> ServedCounts:
    """The requests of a log, which answer the prompts in their order. UserError if there are not as many."""
    if not log.per_request or len(log.requests) != len(prompts):
        raise UserError(
            f"{log.path} has {len(log.requests)} answers and there are {len(prompts)} prompts: give the answers to the "
            "prompts of --tasks, in their order"
        )
    counts = []
    for number, (request, prompt) in enumerate(zip(log.requests, prompts, strict=True), start=1):
        if request.prompt_tokens not in (None, len(prompt)):
            return ServedCounts(
                LOGGED,
                other_prompts=f"answer {number} is to {request.prompt_tokens} prompt tokens, and that prompt has "
                f"{len(prompt)} here: another chat template, tokenizer or prompt",
                exact=False,
            )
        counts.append(with_positions(request, k) if request.accepted_at else request)
    return ServedCounts(LOGGED, counts, exact=False)


def decode_reading(
    s: RefereeConfig,
    target: Target,
    d: DraftFiles,
    reading: Reading,
    prompts: Sequence[list[int]],
    dtype: str,
    out: str,
) -> Outcome:
    """The counts of a reading, from a copy of the files that lies in the folder `out` meanwhile. The draft computes in
    `dtype`, unless the reading has another."""
    with tempfile.TemporaryDirectory(dir=out, prefix="copy-") as scratch:
        folder = Path(scratch) / "draft"
        copy_files(d, folder)
        reading.edit(folder)
        try:
            with warnings.catch_warnings():
                # A copy names no tokenizer; that of the draft was compared with the target's.
                warnings.filterwarnings("ignore", message=".*was not made here.*")
                draft = load_draft(str(folder), target, dtype=reading.dtype or dtype)
                if reading.adjust is not None:
                    reading.adjust(draft)
                return Outcome(reading, decode_counts(s, target, draft, prompts, BATCH_ROWS))
        except UserError as error:
            return Outcome(reading, [], first_line(error).replace(str(folder), d.path))


# ---- what they show ----


def comparable(ours: Sequence[RequestCounts], theirs: Sequence[RequestCounts]) -> Pairs:
    """The prompts that both sides answered with the same text: after another token, other drafts are right."""
    pairs = zip(ours, theirs, strict=True)
    return [(a, b) for a, b in pairs if b.output_ids in ((), a.output_ids)]


def shown_counts(x: RequestCounts, theirs: RequestCounts) -> dict[str, object]:
    keys = ["rounds", "accepted", *["by_position"] * bool(theirs.accepted_at)]
    return {key: counts_json(x)[key] for key in keys}


def differing(ours: RequestCounts, theirs: RequestCounts) -> list[str]:
    own = shown_counts(ours, theirs)
    return [key for key, value in shown_counts(theirs, theirs).items() if own[key] != value]


def compare(ours: Sequence[RequestCounts], served: ServedCounts) -> Agreement:
    """Whether both accept alike: every count the same if the engine is `exact`, else not significantly apart."""
    pairs = comparable(ours, served.counts)
    same = sum(not differing(a, b) for a, b in pairs)
    if served.exact or same == len(pairs):
        return Agreement(len(pairs), same, None, 0 < same == len(pairs))
    first, second = zip(*pairs, strict=True)
    p = permutation_test(first, second, LEVEL).p_value
    return Agreement(len(pairs), same, p, p >= LEVEL)


def gain(outcome: Outcome, base: Sequence[RequestCounts]) -> tuple[float, float]:
    """(what a reading adds to τ of the base, its p-value)."""
    pairs = comparable(outcome.counts, base)
    if not pairs:
        return 0.0, 1.0
    ours, theirs = zip(*pairs, strict=True)
    test = permutation_test(ours, theirs, LEVEL)
    return tau(pool(ours)) - tau(pool(theirs)), test.parts[-1].p_value


def reproducing(
    written: Outcome, counted: Sequence[Outcome], served: ServedCounts
) -> list[Outcome]:
    """The readings that accept what was served, if the files as they are written do not. Those that the files give rise
    to, if there are any. Others are left out where nothing was accepted at all: any wrong reading gives that."""
    if written.counts and compare(written.counts, served).agrees:
        return []
    found = [outcome for outcome in counted if compare(outcome.counts, served).agrees]
    visible = [outcome for outcome in found if outcome.reading.visible]
    return visible or (found if pool(served.counts).accepted else [])


def improving(counted: Sequence[Outcome], base: Sequence[RequestCounts]) -> list[Outcome]:
    """The readings that accept significantly more than `base` and at least nine tenths as much more as the best one."""
    if not base:
        return []
    gains = [(outcome, *gain(outcome, base)) for outcome in counted]
    better = [(outcome, more) for outcome, more, p in gains if more > 0 and p < LEVEL / len(gains)]
    best = max((more for _, more in better), default=0.0)
    return [outcome for outcome, more in better if more >= 0.9 * best]


def name_causes(
    written: Outcome,
    outcomes: Sequence[Outcome],
    served: ServedCounts | None,
    findings: Sequence[Finding],
) -> dict[str, list[str]]:
    """{what is wrong: all evidence}, {} for a draft that is served as it was trained, as far as its files and these
    prompts show."""
    causes: dict[str, list[str]] = {}
    counted = [outcome for outcome in outcomes if outcome.counts]
    if served and served.counts:
        for outcome in reproducing(written, counted, served):
            at = compare(outcome.counts, served)
            share = f"{at.same} of {at.prompts} prompts the same"
            test = "" if at.p_value is None else f", p = {at.p_value:.2g}"
            text = f"decoding with {outcome.reading.says} accepts what {served.engine} accepts"
            causes.setdefault(outcome.reading.about, []).append(f"{text}: {share}{test}")
    base = written.counts or (served.counts if served else [])
    for outcome in improving(counted, base):
        more, p = gain(outcome, base)
        text = f"decoding with {outcome.reading.says} accepts more"
        change = f"τ {tau(pool(base)):.3f} becomes {tau(pool(base)) + more:.3f}"
        causes.setdefault(outcome.reading.about, []).append(f"{text}: {change}, p = {p:.2g}")
    readings = [outcome.reading for outcome in outcomes]
    for finding in findings:
        if finding.effect != IGNORED and finding.rule not in OWN_RULES:
            fitting = [x for x in readings if finding.rule in RULES.get(x.about, ())]
            fitting.sort(key=lambda reading: not reading.visible)
            about = fitting[0].about if fitting else finding.rule
            causes.setdefault(about, []).append(f"rule {finding.rule}: {finding.what}")
    return causes


def verdict(
    written: Outcome,
    outcomes: Sequence[Outcome],
    served: ServedCounts | None,
    causes: Sequence[str],
) -> str:
    """What was found, in one or two sentences; the evidence stands beside it."""
    named = f"suspect: {', '.join(causes)}" if causes else "nothing is suspect"
    if not written.counts:
        named = f"our decoder refuses the files as they are written ({written.refused}); {named}"
    if served is None:
        return f"no engine was asked; {named}"
    if served.refused:
        return f"{served.engine} refuses the draft ({served.refused}); {named}"
    if served.other_prompts:
        return f"the prompts are not the same: {served.other_prompts}; {named}"
    if not written.counts:
        return f"{served.engine} serves the draft; {named}"
    agreement = compare(written.counts, served)
    where = f"in {agreement.same} of {agreement.prompts} prompts"
    if agreement.prompts == 0:
        return f"{served.engine} answered every prompt with another text: its target is not ours; {named}"
    if agreement.agrees:
        same = f"{served.engine} accepts what our decoder accepts ({where} the same counts)"
        return f"{same}: both read the files alike; {named}"
    text = (
        f"{served.engine} accepts other tokens than our decoder ({where} the same counts); {named}"
    )
    near = [(compare(o.counts, served), o.reading.says) for o in outcomes if o.counts]
    if not near or any(at.agrees for at, _ in near):
        return text
    at, says = max(near, key=lambda one: (one[0].same, one[0].p_value or 0))
    return f"{text}; no single suspect gives what is served, the nearest is {says} ({at.same} of {at.prompts})"


# ---- audit.json ----


def audit_draft(
    s: RefereeConfig,
    target: Target,
    items: Sequence[TaskPrompt],
    served: ServedCounts | None,
    findings: Sequence[Finding],
    dtype: str,
    out: str,
) -> dict[str, object]:
    """Everything that audit.json says of the draft `s.draft`, `causes` and `verdict` among it. Greedy: `s.temperature`
    is 0. UserError for a draft of another tokenizer and for files that nobody could read."""
    check_saved_tokenizer(s.draft)
    facts = read_metadata(s.draft)
    recorded = facts.tokenizer_hash
    # A causal draft has a tokenizer of its own, and loading it compares the vocabularies.
    if recorded is not None and facts.family != "causal":
        check_tokenizer(s.draft, recorded, target)
    d = read_draft(s.draft, read_target(s.target, tokenizer=False))
    prompts, others = [item.prompt_ids for item in items], suspects.readings(d)
    if served is not None and not served.exact:
        lower = replace(AS_WRITTEN, about="dtype")
        dtypes = [name for name in ("bfloat16", "float16") if name != dtype]
        others += [replace(lower, says=f"the draft in {name}", dtype=name) for name in dtypes]
    written, *outcomes = (
        decode_reading(s, target, d, reading, prompts, dtype, out)
        for reading in (AS_WRITTEN, *others)
    )
    causes = name_causes(written, outcomes, served, findings)
    return {
        "draft": s.draft,
        "draft_sha256": draft_sha256(s.draft),
        "family": d.family,
        "target": s.target,
        "k": s.k,
        "prompts": len(items),
        "max_new_tokens": s.max_new_tokens,
        "measured_in_training": read_metadata(d.path).measured_in_training,
        "checker": [asdict(finding) for finding in findings],
        "served": _served_row(served),
        "written": _outcome_row(written, served),
        "first_difference": _first_difference(items, written, served),
        "readings": [_outcome_row(outcome, served) for outcome in outcomes],
        "causes": [{"about": about, "evidence": evidence} for about, evidence in causes.items()],
        "verdict": verdict(written, outcomes, served, list(causes)),
    }


def _served_row(served: ServedCounts | None) -> dict[str, object] | None:
    if served is None:
        return None
    row: dict[str, object] = {"engine": served.engine, "exact": served.exact}
    if served.refused or served.other_prompts:
        refused, others = served.refused or None, served.other_prompts or None
        return row | {"refused": refused, "other_prompts": others}
    return row | _sums(served.counts)


def _sums(counts: Sequence[RequestCounts]) -> dict[str, object]:
    return {"tau": tau(pool(counts)), **counts_json(pool(counts))}


def _outcome_row(outcome: Outcome, served: ServedCounts | None) -> dict[str, object]:
    reading = outcome.reading
    row = {"about": reading.about, "reading": reading.says, "visible": reading.visible}
    if not outcome.counts:
        return row | {"refused": outcome.refused}
    row |= _sums(outcome.counts)
    if served and served.counts:
        row |= asdict(compare(outcome.counts, served))
    return row


def _first_difference(
    items: Sequence[TaskPrompt], written: Outcome, served: ServedCounts | None
) -> dict[str, object] | None:
    """The first prompt in which the engine and our decoder, which reads the files as they are written, differ."""
    if served is None or not served.counts or not written.counts:
        return None
    for item, a, b in zip(items, written.counts, served.counts, strict=True):
        keys = ["ids"] * (b.output_ids not in ((), a.output_ids)) + list(differing(a, b))
        if keys:
            ours, theirs = (shown_counts(x, b) for x in (a, b))
            return {"task": item.task, "id": item.id, "differs_in": keys, "ours": ours, "served": theirs}  # fmt: skip
    return None
