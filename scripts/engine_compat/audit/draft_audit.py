"""The whole audit of one draft: each reading of its files decoded here, what an engine served, and the verdict."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from decode.checkpoints.draft_folder import (
    check_saved_tokenizer,
    check_tokenizer,
    draft_sha256,
    read_metadata,
)
from decode.model.loading import Target
from decode.serving.rules import DraftFiles, Finding, read_draft, read_target
from eval.tasks.loading import TaskPrompt
from scripts.engine_compat.audit import naming
from scripts.engine_compat.audit.decoding import Outcome, ServedCounts, decode_reading
from scripts.engine_compat.audit.naming import Cause
from scripts.engine_compat.audit.reading import AS_WRITTEN, Reading
from scripts.engine_compat.audit.suspects import readings
from scripts.engine_compat.vllm_parity import PromptCounts, VllmParityConfig, sum_counts

LOWER_DTYPES = ("bfloat16", "float16")
"""What else the engine may have computed the draft in, where that is not known."""


def audit_draft(
    s: VllmParityConfig,
    target: Target,
    items: Sequence[TaskPrompt],
    served: ServedCounts | None,
    findings: Sequence[Finding],
    dtype: str,
    out: str,
) -> dict[str, Any]:
    """Everything that audit.json says of the draft `s.draft`, `causes` and `verdict` among it.

    Greedy: `s.temperature` is 0. UserError for a draft of another tokenizer and for files that nobody could read.
    """
    check_saved_tokenizer(s.draft)
    facts = read_metadata(s.draft)
    recorded = facts.tokenizer_hash
    # A causal draft has a tokenizer of its own, and loading it compares the vocabularies.
    if recorded is not None and facts.family != "causal":
        check_tokenizer(s.draft, recorded, target)
    d = read_draft(s.draft, read_target(s.target, tokenizer=False))
    written, outcomes = decode_readings(s, target, d, items, served, dtype, out)
    causes = naming.name_causes(written, outcomes, served, findings)
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
        "served": served_row(served),
        "written": naming.outcome_row(written, served),
        "first_difference": first_difference(items, written, served),
        "readings": [naming.outcome_row(outcome, served) for outcome in outcomes],
        "causes": [asdict(cause) for cause in causes],
        "verdict": verdict(written, outcomes, served, causes),
    }


def decode_readings(
    s: VllmParityConfig,
    target: Target,
    d: DraftFiles,
    items: Sequence[TaskPrompt],
    served: ServedCounts | None,
    dtype: str,
    out: str,
) -> tuple[Outcome, list[Outcome]]:
    """The files as they are written, and all readings of them; in other dtypes too if the engine's is not known."""
    prompts = [item.prompt_ids for item in items]
    suspects = readings(d)
    if served is not None and not served.exact:
        others = [name for name in LOWER_DTYPES if name != dtype]
        lower = replace(AS_WRITTEN, about="dtype")
        suspects += [replace(lower, says=f"the draft in {name}", dtype=name) for name in others]

    def decode(reading: Reading) -> Outcome:
        return decode_reading(s, target, d, reading, prompts, dtype, out)

    return decode(AS_WRITTEN), [decode(reading) for reading in suspects]


def served_row(served: ServedCounts | None) -> dict[str, Any] | None:
    """What an engine made of the draft, for audit.json."""
    if served is None:
        return None
    row: dict[str, Any] = {"engine": served.engine, "exact": served.exact}
    if served.refused or served.other_prompts:
        return row | {
            "refused": served.refused or None,
            "other_prompts": served.other_prompts or None,
        }
    full = [{**x, "by_position": x["by_position"] or []} for x in served.counts]
    return row | {"tau": naming.tau(served.counts), **sum_counts(full)}


def first_difference(
    items: Sequence[TaskPrompt], written: Outcome, served: ServedCounts | None
) -> dict[str, Any] | None:
    """The first prompt in which the engine and our decoder, which reads the files as they are written, differ."""
    if served is None or not served.counts or not written.counts:
        return None
    for item, a, b in zip(items, written.counts, served.counts, strict=True):
        keys = [key for key in ("ids", *naming.FIELDS) if b.get(key) not in (None, a[key])]
        if keys:
            shown = [key for key in naming.FIELDS if b[key] is not None]
            return {"task": item.task, "id": item.id, "differs_in": keys,
                    "ours": {key: a[key] for key in shown}, "served": {key: b[key] for key in shown}}  # fmt: skip
    return None


def verdict(
    written: Outcome,
    outcomes: Sequence[Outcome],
    served: ServedCounts | None,
    causes: Sequence[Cause],
) -> str:
    """What was found, in one or two sentences; the evidence stands beside it."""
    names = ", ".join(cause.about for cause in causes)
    named = f"suspect: {names}" if causes else "nothing is suspect"
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
    agreement = naming.compare(written.counts, served)
    where = f"in {agreement.same} of {agreement.prompts} prompts"
    if agreement.prompts == 0:
        return f"{served.engine} answered every prompt with another text: its target is not ours; {named}"
    if agreement.agrees:
        same = f"{served.engine} accepts what our decoder accepts ({where} the same counts)"
        return f"{same}: both read the files alike; {named}"
    text = (
        f"{served.engine} accepts other tokens than our decoder ({where} the same counts); {named}"
    )
    counted = [outcome for outcome in outcomes if outcome.counts]
    near = naming.nearest(counted, served)
    if near is None or any(naming.compare(o.counts, served).agrees for o in counted):
        return text
    says, at = near
    return f"{text}; no single suspect gives what is served, the nearest is {says} ({at.same} of {at.prompts})"


def show_counts(counts: PromptCounts) -> list[str]:
    """τ, rounds and accepted tokens by position for a table; of a reading that was refused, why."""
    if "tau" not in counts:
        return ["–", "–", str(counts.get("refused") or counts.get("other_prompts") or "")]
    accepted = counts["by_position"] or counts["accepted"]
    return [f"{counts['tau']:.3f}", str(counts["rounds"]), str(accepted)]
