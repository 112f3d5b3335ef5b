"""The sentences of a draft's model card, and the files that they are made from.

Every number comes from those files; a missing one is called not recorded or not measured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from decode.checkpoints.draft_folder import DraftMetadata
from decode.checkpoints.draft_vocab import VOCAB_FILE
from decode.common.chat.choice import describe
from decode.serving.engine import EngineServingConfig, ServedDraft
from eval.metrics.bootstrap import ALL_TASKS
from eval.reporting.formatting import format_speedup, format_value
from eval.reporting.summary import assisted_generation_lines, lossless_verdict
from eval.results.report import MethodResult, unique_names
from eval.results.tuned import TunedChain
from train.families.registry import family_settings
from train.hub.card_tables import NOT_RECORDED, dataset_manifests, slowdown_lines
from train.hub.evidence import Evidence
from train.settings.training import HubLabels


@dataclass(frozen=True)
class CardInputs:
    """What a card is made from: published fields alone."""

    draft: DraftMetadata
    config: Mapping[str, Any]  # the draft's config.json
    evidence: Evidence = Evidence()
    checks: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """{engine: findings of its rules} for each engine that was checked."""
    hashed: Sequence[str] = ("model.safetensors", "config.json")
    """The files that `draft_sha256` is the checksum of."""

    @cached_property
    def own(self) -> list[MethodResult]:
        """The report's entries that were measured with exactly these weights and nothing else that drafts."""
        report = self.evidence.report
        return [] if report is None else report.of_draft(self.draft.draft_sha256)

    @cached_property
    def tuned_chains(self) -> list[TunedChain]:
        """The tuned draft length of these weights by temperature and domain; [] if they were not tuned."""
        tuned = self.evidence.tuned
        return [] if tuned is None else tuned.fastest_chains(str(self.draft.draft_sha256))


def summary(facts: CardInputs, job: ServedDraft) -> str:
    """What the draft is, and the size of its training data."""
    revision = f" at revision {job.revision}" if job.revision else ""
    if facts.draft.target is not None:
        revision += facts.draft.target.rounding
    sets = [made for _, made in dataset_manifests(facts.draft)]
    counts = [made.get("counts", {}).get("answered") for made in sets]
    known = len(counts) > 0 and None not in counts
    answers = " + ".join(f"{count:,}" for count in counts) if known else NOT_RECORDED
    # train/sample.py records how it sampled, and nothing for texts that it was given.
    kinds = {
        "texts that it did not write" if made.get("sampling") == {} else "answers of that target"
        for made in sets
    }
    data = " and ".join(sorted(kinds)) or "answers of that target"
    description = family_settings(job.family).description
    return (
        f"A draft for `{job.target}`{revision}: {description} that proposes tokens which the target verifies in one "
        f"forward pass. Distilled on {data} (number of answers: {answers}). Use it with no other target."
    )


def headlines(facts: CardInputs) -> list[str]:
    """Losslessness, and the speed-up of each method and setting over all tasks, or by task where none is of all."""
    report = facts.evidence.report
    if report is None:
        return ["Losslessness: not measured, no report was given.", "Speed-up: not measured."]
    lines = [lossless_verdict(replace(report, methods=facts.own))]
    timed = pooled_or_all([m for m in facts.own if m.valid_speedup.value is not None])
    if len(timed) == 0:
        return [*lines, "Speed-up: not measured."]
    where = format_value(report.hardware.device)
    for m in sorted(timed, key=lambda m: (*m.setting, -(m.valid_speedup.value or 0))):
        lines.append(
            "Too few prompts for a verdict: "
            * (m.verdict == "few prompts")
            + f"{format_speedup(m)} the speed of plain decoding "
            f"({m.name}, K = {m.k}, {'' if m.is_pooled else m.task + ', '}{m.setting_text}, "
            f"n = {m.prompts}, {where}, {m.mode}, {m.dtype}{', lossy' * m.lossy})."
        )
    return lines


def pooled_or_all(entries: list[MethodResult]) -> list[MethodResult]:
    """Those of all tasks together; where there are none, each task's own."""
    return [m for m in entries if m.is_pooled] or entries


def engine_lines(facts: CardInputs, configs: Sequence[EngineServingConfig]) -> list[str]:
    """A line for each engine: its files and how they were checked, or why it cannot serve the draft."""
    lines = []
    for config in configs:
        if len(config.files) == 0:
            lines.append(f"**{config.engine}**: cannot serve it, {config.note}.")
            continue
        names = ", ".join(f"`serving/{name}`" for name in config.files)
        status = serving_status(facts, config.engine)
        lines.append(f"**{config.engine}** ({config.note}): {names}. {status}")
    return lines


def serving_status(facts: CardInputs, engine: str) -> str:
    """Whether this engine was run with the draft, or its rules were checked, or neither."""
    report, result = facts.evidence.report, facts.evidence.referee
    if engine == "vLLM" and result is not None:
        return (
            f"Run in vLLM {result.vllm}: {result.same} of {result.prompts} prompts gave the tokens and accepted counts "
            f"of draftsmith's own decoder (K = {result.k}; differing: {len(result.differ)}, ties of logits: "
            f"{len(result.ties)})."
        )
    if engine == "transformers" and report is not None:
        lines = assisted_generation_lines(report, [m.name for m in facts.own])
        if len(lines) > 0:
            return f"Run: {' '.join(lines)}"
    findings = facts.checks.get("vLLM" if engine == "Triton" else engine)
    if findings is None:
        return "Not run, and not checked."
    return f"Checked by rules only, not run: {'; '.join(findings) or 'nothing found wrong'}."


def unmeasured_note(facts: CardInputs) -> str:
    """The acceptance measured at the end of training, for a card without a report."""
    measured = facts.draft.measured_in_training or {}
    if len(measured) == 0:
        return "Acceptance was not measured."
    check = (facts.draft.training or {}).get("check", {})
    values = ", ".join(
        f"{name.removeprefix('accept/')} {value:.3f}" for name, value in measured.items()
    )
    return (
        f"Not measured on tasks. At the end of training, on {check.get('prompts', NOT_RECORDED)} prompts of the "
        f"training domains, temperature 1, K = {check.get('k', NOT_RECORDED)}, too few for an interval: {values}."
    )


def other_targets(facts: CardInputs) -> list[str]:
    """A sentence for each file of measurements that is about another target than this draft's."""
    own, *known = (x and x.weights for x in (facts.draft.target, facts.draft.original_target))
    sentences = []
    for name, content in vars(facts.evidence).items():
        found = None if content is None or name == "referee" else content.target.weights
        if own is not None and found not in (None, own, *known):
            sentences.append(
                f"{name}.json was measured on a target with weights {found}; the draft was trained for one with {own}."
            )
    return sentences


def limitations(facts: CardInputs, job: ServedDraft, labels: HubLabels) -> list[str]:
    """The draft's limits, as far as the files contain them."""
    draft, report = facts.draft, facts.evidence.report
    tokenizer = draft.tokenizer_hash or NOT_RECORDED
    lines = [
        f"For `{job.target}` alone, and its tokenizer {tokenizer}: another target accepts almost none of its tokens."
    ]
    if report is not None:
        tasks = unique_names([m.task for m in facts.own])
        named = ", ".join(name for name in tasks if name != ALL_TASKS) or "the tasks above"
        lines.append(f"Acceptance was measured on {named}; on other text it differs.")
        if any(m.valid_speedup.value is not None for m in facts.own):
            lines.append(
                f"Speed-ups are of draftsmith's engine on {format_value(report.hardware.device)}; on other hardware "
                "or in another engine they differ."
            )
    lines += other_targets(facts)
    lines += slowdown_lines(facts.own)
    if facts.config.get("max_position_embeddings"):
        lines.append(f"Texts up to {facts.config['max_position_embeddings']:,} tokens.")
    vocabulary = draft.vocabulary
    if vocabulary is not None:
        size = facts.config.get("text_config", facts.config)["vocab_size"]
        lines.append(
            f"It drafts {vocabulary.size:,} of {size:,} tokens, which make up {vocabulary.coverage:.1%} of its "
            "training text; the target's output is not restricted."
        )
        if draft.family == "causal":
            lines.append(
                f"These tokens are in `{VOCAB_FILE}`, which draftsmith's decoder reads. Other engines draft with the "
                "whole LM head, whose other rows were not trained: they accept other numbers of tokens than measured "
                "here. `scripts/export.py --format hf` (or gguf) writes a copy that keeps to these tokens there too."
            )
    chats = [made.get("chat_template_hash", "") for _, made in dataset_manifests(draft)]
    if len(chats) > 0 and set(chats) == {None}:
        lines.append("Trained on plain text, without a chat template.")
    templates = draft.templates or []
    if any(templates):
        settings = " and ".join(describe(one) for one in templates)
        lines.append(
            f"Its training prompts were rendered with these settings of the target's chat template: {settings}. Other "
            "settings give other prompts, after which it may accept fewer tokens."
        )
    if draft.original_target is not None:
        inside = family_settings(job.family).target_folder
        where = "this folder is that target" if inside == "." else f"serve the one in `{inside}/`"
        lines.append(
            f"The target was trained together with it: {where}, which is not the original."
        )
    if not labels.base_model:
        lines.append(
            "The target was a local folder in training: replace it in the commands by your copy."
        )
    if not labels.license:
        lines.append(
            "No licence was stated when this was published; that of the target applies to what is derived from it."
        )
    return lines


def tuning_note(facts: CardInputs) -> str:
    """The hardware and tasks of the tuning, for the line above its table; "" if it was not tuned."""
    tuned = facts.evidence.tuned
    if tuned is None:
        return ""
    batch = "".join(f", batch {chain.cell.batch_size}" for chain in facts.tuned_chains[:1])
    tasks = ", ".join(tuned.tasks) or NOT_RECORDED
    return f"Tuned on {tuned.hardware.device or NOT_RECORDED}{batch}, prompts of {tasks}."


def source_files(evidence: Evidence) -> str:
    """The card's sources besides draftsmith.json, as the end of a sentence."""
    names = [f", `{name}.json`" for name, content in vars(evidence).items() if content is not None]
    return "".join(names) + ("; there was no report" if evidence.report is None else "")
