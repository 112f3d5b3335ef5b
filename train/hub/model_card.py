"""The model card of a published draft: its metadata for the Hub and its page, from card_text and card_tables."""

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from decode.serving.engine import EngineServingConfig, ServedDraft
from eval.reporting.formatting import Table, escape_markdown
from eval.reporting.render import DEFINITIONS
from train.families.registry import family_settings
from train.hub import card_text
from train.hub.card_tables import (
    ACCEPTANCE_COLUMNS,
    SPEED_COLUMNS,
    card_images,
    cost_table,
    data_table,
    provenance_table,
    tables_by_setting,
    training_table,
    tuned_lengths_table,
)
from train.hub.card_text import CardInputs
from train.settings.training import HubLabels

DEFINED_TERMS = ("τ", "α_i", "α", "speed-up", "K", "identical", "[low, high]")


def render(
    facts: CardInputs,
    job: ServedDraft,
    k_source: str,
    configs: Sequence[EngineServingConfig],
    labels: HubLabels,
) -> ModelCard:
    """The card. `k_source` says where K comes from; the images must be saved as images/NAME beside it."""
    evidence = facts.evidence
    timed = [m for m in facts.own if m.valid_speedup.value is not None]
    images = card_images(facts.own, job.k)
    fields = {
        "title": job.repo.rpartition("/")[2],
        "summary": card_text.summary(facts, job),
        "headlines": card_text.headlines(facts),
        "k_line": f"K = {job.k} drafted tokens a round: {k_source}.",
        "tuned": tuned_lengths_table(facts.tuned_chains),
        "tuned_on": card_text.tuning_note(facts),
        "command": serving_command(job, configs),
        "engines": card_text.engine_lines(facts, configs),
        "acceptance": tables_by_setting(facts.own, ACCEPTANCE_COLUMNS, positions=True),
        "unmeasured": card_text.unmeasured_note(facts),
        "speed": tables_by_setting(timed, SPEED_COLUMNS),
        "images": [vars(image) for image in images],
        "keys": {
            kind: "; ".join(
                dict.fromkeys(f"{i.caption}: {i.key}." for i in images if i.name.startswith(kind))
            )
            for kind in ("acceptance", "speedup")
        },
        "training": training_table(facts.draft),
        "cost": cost_table(facts.draft),
        "data": data_table(facts.draft),
        "limits": card_text.limitations(facts, job, labels),
        "provenance": provenance_table(facts.draft, facts.hashed, evidence.report, evidence.tuned),
        "definitions": [f"**{word}**: {DEFINITIONS[word]}" for word in DEFINED_TERMS],
        "sources": card_text.source_files(evidence),
    }
    kept = ("command", "images", "keys")
    body = render_template(
        "card.md.j2", {k: v if k in kept else escape_text(v) for k, v in fields.items()}
    )
    return ModelCard(f"---\n{metadata(facts, job, configs, labels).to_yaml()}\n---\n\n{body}")


def serving_command(job: ServedDraft, configs: Sequence[EngineServingConfig]) -> str:
    """The command of the first engine that serves the draft; else that of this project."""
    commands = [
        text for config in configs for name, text in config.files.items() if name.endswith(".sh")
    ]
    words = ["python", "decode/generate.py", "--target", job.target, "--draft", job.repo]
    return commands[0].strip() if commands else f"{shlex.join(words)} --prompt TEXT"


def render_template(template: str, fields: Mapping[str, Any]) -> str:
    """A template of this folder with its fields, none of which may be missing."""
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
    facts: CardInputs, job: ServedDraft, configs: Sequence[EngineServingConfig], labels: HubLabels
) -> ModelCardData:
    """The YAML head of the card, which the Hub reads."""
    engines = [
        config.engine.lower()
        for config in configs
        if config.engine in ("vLLM", "SGLang") and config.files
    ]
    results = [
        EvalResult(
            task_type="text-generation",
            task_name="speculative decoding",
            dataset_type="draftsmith",
            dataset_name=(where := f"{m.task}, {m.setting_text}"),
            # Results of one configuration are listed under the name of the first.
            dataset_config=where,
            metric_type=metric,
            metric_name=", ".join([label, m.name, f"K {m.k}", *(["lossy"] * m.lossy)]),
            metric_value=value.value,
        )
        for m in card_text.pooled_or_all(facts.own)
        for metric, label, value in (
            ("tau", "τ", m.tau),
            ("alpha", "α", m.alpha),
            ("speedup", "speed-up", m.valid_speedup),
        )
        if value.value is not None
    ]
    # The Hub has no relation for drafts: heads need their target as adapters do, a small LM is trained on its output.
    family = family_settings(job.family)
    relation = "finetune" if family.is_language_model else "adapter"
    return ModelCardData(
        base_model=labels.base_model or None,
        base_model_relation=relation if labels.base_model else None,
        library_name="transformers" if family.is_language_model else "draftsmith",
        pipeline_tag="text-generation",
        license=labels.license or None,
        datasets=[labels.dataset] if labels.dataset else None,
        tags=["speculative-decoding", "draft-model", family.hub_tag, *engines],
        model_name=job.repo.rpartition("/")[2] if results else None,
        # A model-index: the Hub collects .eval_results/ for registered benchmarks only, and none measures drafts.
        eval_results=results or None,
    )


def escape_text(value: Any) -> Any:
    """Escapes all text in a value, so that names of tasks and models can neither break a table nor become HTML."""
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
