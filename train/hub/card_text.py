"""The sentences of a draft's model card, and the files that they are made from.

Every number comes from those files; a missing one is called not recorded or not measured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from decode.checkpoints.draft_vocab import VOCAB_FILE
from decode.common.template_choice import describe
from decode.common.typed_json import from_json, to_json
from decode.serving.engine import EngineServingConfig, ServedDraft
from eval.metrics.bootstrap import ALL_TASKS
from eval.reporting.formatting import format_value, format_with_interval
from eval.reporting.summary import assisted_generation_lines, lossless_verdict
from eval.results.report import EvalReport, unique_names
from eval.results.tuned import TunedReport
from eval.scaling.data_curve import DataCurve, doubling_lines
from train.families.registry import family_settings
from train.hub.card_tables import NOT_RECORDED, dataset_manifests, slowdown_lines
from train.hub.report_entries import (
    ReportEntry,
    draft_entries,
    entry_setting,
    pooled_entries,
)
from train.hub.upload import HubLabels


@dataclass(frozen=True)
class CardInputs:
    """The files that a card is made from."""

    draft: Mapping[str, Any]
    """The published fields of draftsmith.json."""
    config: Mapping[str, Any]
    """The draft's config.json."""
    report: Mapping[str, Any] | None
    """Those of report.json of eval/run.py."""
    referee: Mapping[str, Any] | None
    """The greedy result of scripts/referee.py."""
    checks: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """{engine: findings of its rules} for each engine that was checked."""
    tuned: Mapping[str, Any] | None = None
    """Those of tuned.json of eval/tune.py."""
    data_curve: Mapping[str, Any] | None = None
    """Those of data_curve.json of scripts/lab/data_curve.py."""
    forecast: Mapping[str, Any] | None = None
    """Those of forecast.json of eval/forecast.py."""
    hashed: Sequence[str] = ("model.safetensors", "config.json")
    """The files that `draft_sha256` is the checksum of."""

    @property
    def own_entries(self) -> list[ReportEntry]:
        """The report's entries that were measured with exactly these weights and nothing else that drafts."""
        return [] if self.report is None else draft_entries(self.report, self.draft["draft_sha256"])

    @property
    def tuned_chains(self) -> list[ReportEntry]:
        """The tuned draft length of these weights by temperature and domain; [] if they were not tuned."""
        sha = self.draft["draft_sha256"]
        if self.tuned is None:
            return []
        chains = from_json(TunedReport, self.tuned).fastest_chains(sha)
        return [{**to_json(c.cell), "held_out": c.held_out, "tried": c.tried} for c in chains]


def summary(facts: CardInputs, job: ServedDraft) -> str:
    """What the draft is, and the size of its training data."""
    revision = f" at revision {job.revision}" if job.revision else ""
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
    if facts.report is None:
        return ["Losslessness: not measured, no report was given.", "Speed-up: not measured."]
    lines = [
        lossless_verdict(from_json(EvalReport, {**facts.report, "methods": facts.own_entries}))
    ]
    timed = pooled_entries([m for m in facts.own_entries if m["speedup"] is not None])
    if len(timed) == 0:
        return [*lines, "Speed-up: not measured."]
    where = format_value(facts.report.get("hardware", {}).get("device"))
    for m in sorted(timed, key=lambda m: (m["temperature"], m["batch_size"], -m["speedup"])):
        lines.append(
            f"{format_with_interval(m['speedup'], m['speedup_ci'], 2, '×')} the speed of plain decoding "
            f"({m['name']}, K = {m['k']}, {'' if m['task'] == ALL_TASKS else m['task'] + ', '}{entry_setting(m)}, "
            f"n = {m['prompts']}, {where}, {m['mode']}, {m['dtype']}{', lossy' * m['lossy']})."
        )
    return lines


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
    if engine == "vLLM" and facts.referee is not None:
        result = facts.referee
        return (
            f"Run in vLLM {result['vllm']}: {result['same']} of {result['prompts']} prompts gave the tokens and "
            f"accepted counts of draftsmith's own decoder (K = {result['k']}; differing: {len(result['differ'])}, "
            f"ties of logits: {len(result['ties'])})."
        )
    if engine == "transformers" and facts.report is not None:
        lines = assisted_generation_lines(
            from_json(EvalReport, facts.report), [m["name"] for m in facts.own_entries]
        )
        if len(lines) > 0:
            return f"Run: {' '.join(lines)}"
    findings = facts.checks.get("vLLM" if engine == "Triton" else engine)
    if findings is None:
        return "Not run, and not checked."
    return f"Checked by rules only, not run: {'; '.join(findings) or 'nothing found wrong'}."


def unmeasured_note(facts: CardInputs) -> str:
    """The acceptance measured at the end of training, for a card without a report."""
    measured = facts.draft.get("measured_in_training") or {}
    if len(measured) == 0:
        return "Acceptance was not measured."
    check = facts.draft.get("training", {}).get("check", {})
    values = ", ".join(
        f"{name.removeprefix('accept/')} {value:.3f}" for name, value in measured.items()
    )
    return (
        f"Not measured on tasks. At the end of training, on {check.get('prompts', NOT_RECORDED)} prompts of the "
        f"training domains, temperature 1, K = {check.get('k', NOT_RECORDED)}, too few for an interval: {values}."
    )


def other_targets(facts: CardInputs) -> list[str]:
    """A sentence for each file of measurements that is about another target than this draft's."""
    own = [(facts.draft.get(key) or {}).get("weights") for key in ("target", "original_target")]
    measured = {"report.json": facts.report, "tuned.json": facts.tuned}
    measured |= {"data_curve.json": facts.data_curve, "forecast.json": facts.forecast}
    sentences = []
    for file, content in measured.items():
        found = ((content or {}).get("target") or {}).get("weights")
        if own[0] is not None and found not in (None, *own):
            sentences.append(
                f"{file} was measured on a target with weights {found}; the draft was trained for one with {own[0]}."
            )
    return sentences


def limitations(facts: CardInputs, job: ServedDraft, labels: HubLabels) -> list[str]:
    """The draft's limits, as far as the files contain them."""
    tokenizer = facts.draft.get("tokenizer_hash", NOT_RECORDED)
    lines = [
        f"For `{job.target}` alone, and its tokenizer {tokenizer}: another target accepts almost none of its tokens."
    ]
    if facts.report is not None:
        tasks = unique_names([m["task"] for m in facts.own_entries])
        named = ", ".join(name for name in tasks if name != ALL_TASKS) or "the tasks above"
        lines.append(f"Acceptance was measured on {named}; on other text it differs.")
    if any(m["speedup"] is not None for m in facts.own_entries):
        device = format_value((facts.report or {}).get("hardware", {}).get("device"))
        lines.append(
            f"Speed-ups are of draftsmith's engine on {device}; on other hardware or in another engine they differ."
        )
    lines += other_targets(facts)
    lines += slowdown_lines(facts.own_entries)
    if facts.config.get("max_position_embeddings"):
        lines.append(f"Texts up to {facts.config['max_position_embeddings']:,} tokens.")
    vocabulary = facts.draft.get("vocabulary")
    if vocabulary is not None:
        size = facts.config.get("text_config", facts.config)["vocab_size"]
        lines.append(
            f"It drafts {vocabulary['size']:,} of {size:,} tokens, which make up {vocabulary['coverage']:.1%} of its "
            "training text; the target's output is not restricted."
        )
        if facts.draft["family"] == "causal":
            lines.append(
                f"These tokens are in `{VOCAB_FILE}`, which draftsmith's decoder reads. Other engines draft with the "
                "whole LM head, whose other rows were not trained: they accept other numbers of tokens than measured "
                "here. `scripts/export.py --format hf` (or gguf) writes a copy that keeps to these tokens there too."
            )
    chats = [made.get("chat_template_hash", "") for _, made in dataset_manifests(facts.draft)]
    if len(chats) > 0 and set(chats) == {None}:
        lines.append("Trained on plain text, without a chat template.")
    templates = facts.draft.get("templates") or []
    if any(templates):
        settings = " and ".join(describe(one) for one in templates)
        lines.append(
            f"Its training prompts were rendered with these settings of the target's chat template: {settings}. Other "
            "settings give other prompts, after which it may accept fewer tokens."
        )
    if facts.draft.get("original_target"):
        inside = family_settings(facts.draft["family"]).target_folder
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
    """The hardware and tasks of the tuning, for the line above its table."""
    tuned = facts.tuned or {}
    tasks = ", ".join(tuned.get("tasks", [])) or NOT_RECORDED
    device = format_value(tuned.get("hardware", {}).get("device", NOT_RECORDED))
    batches = sorted({chain["batch_size"] for chain in facts.tuned_chains})
    batch = f", batch {batches[0]}" if batches else ""
    return f"Tuned on {device}{batch}, prompts of {tasks}."


def data_curve_note(facts: CardInputs) -> str:
    """How acceptance grew with the training data, and what twice as much would give; "" without a data curve."""
    curve = facts.data_curve
    if curve is None:
        return ""
    made = f"Drafts of this family were trained on parts of {curve.get('data') or NOT_RECORDED}"
    tasks = ", ".join(curve.get("tasks") or []) or NOT_RECORDED
    return f"{made} and decoded prompts of {tasks}. {' '.join(doubling_lines(from_json(DataCurve, curve)))}"


def source_files(facts: CardInputs) -> str:
    """The card's sources besides draftsmith.json, as the end of a sentence."""
    measured = {
        "report.json": facts.report,
        "referee.json": facts.referee,
        "tuned.json": facts.tuned,
        "data_curve.json": facts.data_curve,
        "forecast.json": facts.forecast,
    }
    names = [f"`{name}`" for name, content in measured.items() if content is not None]
    return (f", {', '.join(names)}" if names else "") + (
        "; there was no report" if facts.report is None else ""
    )
