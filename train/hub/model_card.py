"""The card of a published draft, from draftsmith.json, report.json and, if there is one, a referee's result.

No number is typed here: each comes out of those files, and one that they lack is called missing.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from eval.reporting.formatting import (
    Table,
    escape_markdown,
    format_value,
    format_with_interval,
)
from eval.reporting.render import DEFINITIONS
from eval.reporting.report_data import ReportEntry, setting_title
from eval.reporting.summary import assisted_generation_lines, lossless_verdict
from eval.tuning.selection import fastest_chains
from train.hub.card_tables import (
    NOT_RECORDED,
    acceptance_tables,
    card_images,
    cost_table,
    data_table,
    dataset_manifests,
    provenance_table,
    slowdown_lines,
    speed_tables,
    training_table,
    tuned_lengths_table,
)
from train.hub.serving_configs import EngineServingConfig, ServedDraft
from train.hub.upload import HubLabels

FAMILY_DESCRIPTIONS = {
    "causal": "a small language model",
    "medusa": "Medusa heads",
    "eagle1": "an EAGLE-1 head",
    "eagle3": "an EAGLE-3 head",
}
FAMILY_TAGS = {
    "causal": "assisted-generation",
    "medusa": "medusa",
    "eagle1": "eagle",
    "eagle3": "eagle3",
}
DEFINED_TERMS = ("τ", "α_i", "α", "speed-up", "K", "identical", "[low, high]")


@dataclass(frozen=True)
class CardInputs:
    """All that a card is made of."""

    draft: Mapping[str, Any]
    """draftsmith.json, already without local paths."""
    config: Mapping[str, Any]
    """config.json of the draft."""
    report: Mapping[str, Any] | None
    """report.json, already without local paths."""
    referee: Mapping[str, Any] | None
    """Result of scripts/referee.py."""
    checks: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """What rules of an engine find wrong, for each engine that was checked."""
    tuned: Mapping[str, Any] | None = None
    """tuned.json of eval/tune.py, already without local paths."""

    @property
    def own(self) -> list[ReportEntry]:
        """Entries of the report that were measured with just these weights."""
        entries = [] if self.report is None else self.report["methods"]
        return [m for m in entries if m["draft_sha256"] == self.draft["draft_sha256"]]

    @property
    def chains(self) -> list[ReportEntry]:
        """The tuned draft length of these weights by temperature and domain; none if they were not tuned."""
        sha = self.draft["draft_sha256"]
        return [] if self.tuned is None else fastest_chains(self.tuned, sha)


def render(
    facts: CardInputs,
    job: ServedDraft,
    k_source: str,
    found: Sequence[EngineServingConfig],
    labels: HubLabels,
) -> ModelCard:
    """The card; its images are those of `images`."""
    drawn = card_images(facts.own, job.k)
    fields = {
        "title": job.repo.rpartition("/")[2],
        "summary": summary(facts, job),
        "headlines": headlines(facts),
        "k_line": f"K = {job.k} drafted tokens a round: {k_source}.",
        "tuned": tuned_lengths_table(facts.chains),
        "tuned_on": tuning_note(facts),
        "command": found[0].files["vllm.sh"].strip(),
        "engines": engine_lines(facts, found),
        "acceptance": acceptance_tables(facts.own),
        "unmeasured": unmeasured_note(facts),
        "speed": speed_tables(facts.own),
        "images": [vars(image) for image in drawn],
        "keys": {
            kind: "; ".join(
                dict.fromkeys(f"{i.caption}: {i.key}." for i in drawn if i.name.startswith(kind))
            )
            for kind in ("acceptance", "speedup")
        },
        "training": training_table(facts.draft),
        "cost": cost_table(facts.draft),
        "data": data_table(facts.draft),
        "limits": limitations(facts, job, labels),
        "provenance": provenance_table(facts.draft, facts.report, facts.tuned),
        "definitions": [f"**{word}**: {DEFINITIONS[word]}" for word in DEFINED_TERMS],
        "sources": source_files(facts),
    }
    kept = ("command", "images", "keys")
    body = render_template(
        "card.md.j2", {k: v if k in kept else escape_text(v) for k, v in fields.items()}
    )
    return ModelCard(f"---\n{metadata(facts, job, found, labels).to_yaml()}\n---\n\n{body}")


def render_template(template: str, fields: Mapping[str, Any]) -> str:
    """A template of this folder with its fields, each of which must be there."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    text = environment.get_template(template).render(fields)
    return re.sub(r"\n{3,}", "\n\n", text)


def metadata(
    facts: CardInputs, job: ServedDraft, found: Sequence[EngineServingConfig], labels: HubLabels
) -> ModelCardData:
    """The head of the card, as the Hub reads it."""
    engines = [
        way.engine.lower() for way in found if way.engine in ("vLLM", "SGLang") and way.files
    ]
    results = [
        EvalResult(
            task_type="text-generation",
            task_name="speculative decoding",
            dataset_type="draftsmith",
            dataset_name=f"{m['task']}, {setting_title(m['temperature'], m['batch_size'])}",
            metric_type=metric,
            metric_name=f"{label}, {m['name']}, K {m['k']}",
            metric_value=m[metric],
        )
        for m in facts.own
        if m["task"] == "all"
        for metric, label in (("tau", "τ"), ("alpha", "α"), ("speedup", "speed-up"))
        if m[metric] is not None
    ]
    # The Hub has no word for drafts: heads hang on their target as adapters do, a small LM learns from it.
    relation = "finetune" if job.family == "causal" else "adapter"
    return ModelCardData(
        base_model=labels.base_model or None,
        base_model_relation=relation if labels.base_model else None,
        library_name="transformers" if job.family == "causal" else "draftsmith",
        pipeline_tag="text-generation",
        license=labels.license or None,
        datasets=[labels.dataset] if labels.dataset else None,
        tags=["speculative-decoding", "draft-model", FAMILY_TAGS[job.family], *engines],
        model_name=job.repo.rpartition("/")[2] if results else None,
        eval_results=results or None,
    )


def summary(facts: CardInputs, job: ServedDraft) -> str:
    """What it is, in a sentence."""
    revision = f" at revision {job.revision}" if job.revision else ""
    counts = [made.get("counts", {}).get("answered") for _, made in dataset_manifests(facts.draft)]
    known = len(counts) > 0 and None not in counts
    answers = " + ".join(f"{count:,}" for count in counts) if known else NOT_RECORDED
    return (
        f"A draft for `{job.target}`{revision}: {FAMILY_DESCRIPTIONS[job.family]} that proposes tokens which the target checks in "
        f"one pass. Distilled on answers of that target (number of answers: {answers}). Use it with no other."
    )


def headlines(facts: CardInputs) -> list[str]:
    """Losslessness, and the best and the worst speed-up of the pooled tasks."""
    if facts.report is None:
        return ["Losslessness: not measured, no report was given.", "Speed-up: not measured."]
    lines = [lossless_verdict({**facts.report, "methods": facts.own})]
    timed = [m for m in facts.own if m["task"] == "all" and m["speedup"] is not None]
    if len(timed) == 0:
        return [*lines, "Speed-up: not measured."]
    where = format_value(facts.report.get("hardware", {}).get("device"))
    for m in sorted(timed, key=lambda m: (m["temperature"], m["batch_size"], -m["speedup"])):
        lines.append(
            f"{format_with_interval(m['speedup'], m['speedup_ci'], 2, '×')} the speed of plain decoding "
            f"({m['name']}, K = {m['k']}, {setting_title(m['temperature'], m['batch_size'])}, "
            f"n = {m['prompts']}, {where}, {m['mode']}, {m['dtype']})."
        )
    return lines


def engine_lines(facts: CardInputs, found: Sequence[EngineServingConfig]) -> list[str]:
    """A line for each engine: where its files are and what is known of them."""
    lines = []
    for way in found:
        if len(way.files) == 0:
            lines.append(f"**{way.engine}**: cannot serve it, {way.note}.")
            continue
        names = ", ".join(f"`serving/{name}`" for name in way.files)
        lines.append(f"**{way.engine}** ({way.note}): {names}. {serving_status(facts, way)}")
    return lines


def serving_status(facts: CardInputs, way: EngineServingConfig) -> str:
    """Whether this engine has decoded with the draft, or only rules say that it will."""
    if way.engine == "vLLM" and facts.referee is not None:
        done = facts.referee
        return (
            f"Served for real by vLLM {done['vllm']}: {done['same']} of {done['prompts']} prompts gave the tokens and "
            f"accepted counts of draftsmith's own decoder (K = {done['k']}; differing: {len(done['differ'])}, ties of "
            f"logits: {len(done['ties'])})."
        )
    if way.engine == "transformers" and facts.report is not None:
        seen = assisted_generation_lines(dict(facts.report), [m["name"] for m in facts.own])
        if len(seen) > 0:
            return f"Run for real: {' '.join(seen)}"
    found = facts.checks.get("vLLM" if way.engine == "Triton" else way.engine)
    if found is None:
        return "Not run, and not checked."
    return f"Checked against rules only, not run: {'; '.join(found) or 'nothing found wrong'}."


def unmeasured_note(facts: CardInputs) -> str:
    """What stands where no report does: the few prompts that training looks at, if it did."""
    seen = facts.draft.get("measured_in_training") or {}
    if len(seen) == 0:
        return "Acceptance was not measured."
    check = facts.draft.get("training", {}).get("check", {})
    values = ", ".join(
        f"{name.removeprefix('accept/')} {value:.3f}" for name, value in seen.items()
    )
    return (
        f"Not measured on tasks. At the end of training, on {check.get('prompts', NOT_RECORDED)} prompts of the training "
        f"domains, greedy, K = {check.get('k', NOT_RECORDED)}, too few for an interval: {values}."
    )


def limitations(facts: CardInputs, job: ServedDraft, labels: HubLabels) -> list[str]:
    """What the files say it cannot do."""
    tokenizer = facts.draft.get("tokenizer_hash", NOT_RECORDED)
    lines = [
        f"For `{job.target}` alone, and its tokenizer {tokenizer}: another target accepts next to nothing."
    ]
    if facts.report is not None:
        tasks = ", ".join(facts.report.get("tasks", [])) or "those above"
        lines.append(
            f"Acceptance was measured on {tasks}; on other text it differs. Speed-ups are of draftsmith's engine on "
            f"{format_value(facts.report.get('hardware', {}).get('device'))}; a server on other hardware gives others."
        )
    lines += slowdown_lines(facts.own)
    if facts.config.get("max_position_embeddings"):
        lines.append(f"Texts up to {facts.config['max_position_embeddings']:,} tokens.")
    vocabulary = facts.draft.get("vocabulary")
    if vocabulary is not None:
        lines.append(
            f"It can say {vocabulary['size']:,} of {facts.config['vocab_size']:,} tokens, which make up "
            f"{vocabulary['coverage']:.1%} of its training text; the target itself still says all."
        )
    chats = [made.get("chat_template_hash", "") for _, made in dataset_manifests(facts.draft)]
    if len(chats) > 0 and set(chats) == {None}:
        lines.append("Trained on plain text, without a chat template.")
    if facts.draft.get("original_target"):
        lines.append(
            "The target was trained along with it: serve the one in `target/`, which is not the original."
        )
    if not labels.base_model:
        lines.append(
            "The target was a folder of the trainer's machine: put your copy of it in the commands' place."
        )
    if not labels.license:
        lines.append(
            "No licence was stated when this was published; that of the target applies to what is made from it."
        )
    return lines


def tuning_note(facts: CardInputs) -> str:
    """Where the draft lengths were tuned, for the line above their table."""
    made = facts.tuned or {}
    tasks = ", ".join(made.get("tasks", [])) or NOT_RECORDED
    return f"Tuned on {format_value(made.get('hardware', {}).get('device', NOT_RECORDED))}, prompts of {tasks}."


def source_files(facts: CardInputs) -> str:
    """The files behind the card besides draftsmith.json."""
    measured = {
        "report.json": facts.report,
        "referee.json": facts.referee,
        "tuned.json": facts.tuned,
    }
    names = [f"`{name}`" for name, content in measured.items() if content is not None]
    return (f", {', '.join(names)}" if names else "") + (
        "; there was no report" if facts.report is None else ""
    )


def escape_text(value: Any) -> Any:
    """Text that can neither break a table nor become HTML: names of tasks and models come from outside."""
    if isinstance(value, Table):
        return Table(
            escape_text(value.title),
            escape_text(value.header),
            [escape_text(row) for row in value.rows],
        )
    if isinstance(value, list):
        return [escape_text(item) for item in value]
    if isinstance(value, str):
        return escape_markdown(value)
    return value
