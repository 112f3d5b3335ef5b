"""What eval/forecast.py does: it measures chains and costs, or reads them, and writes what follows."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from decode.checkpoints.draft_folder import draft_sha256
from decode.common import files, provenance, run_dir
from decode.common.errors import UserError
from decode.common.journal import Journal
from decode.common.typed_json import to_json
from decode.drafts import causal
from decode.drafts.base import Draft
from decode.drafts.registry import pick_draft
from decode.engine.trained_template import rendering_identity, use_template
from decode.model.loading import Target, load_target
from decode.serving.running import vllm_client
from eval.benchmark.journal import earlier_targets, open_journal
from eval.forecasting import costs
from eval.forecasting.chains import (
    LOOKUPS,
    ChainSettings,
    VllmNgramDraft,
    check_draft,
    check_room,
    measure_chains,
)
from eval.forecasting.pages import forecast_markdown
from eval.forecasting.rounds import ENGINE_RULES, TextChains, rules_of, text_from_json, text_to_json
from eval.forecasting.rows import forecast_rows
from eval.metrics.bootstrap import ALL_TASKS
from eval.results.forecast import (
    CostPoint,
    EngineRule,
    ForecastDraft,
    ForecastReport,
    ForecastRow,
    KSchedule,
)
from eval.results.report import SCHEMA
from eval.settings.evaluation import ForecastConfig
from eval.tasks.loading import TaskPrompt, load_fitting_prompts, task_version

COMMAND = "eval/forecast.py"
OWNED_FILES = ("journal.jsonl", "forecast.json", "forecast.md")
"""Patterns of the files that this command writes into its output folder."""


def check(s: ForecastConfig) -> None:
    """UserError for settings that contradict each other."""
    rules_of(s.engines)
    for name in ("k", "temperatures", "batches", "contexts"):
        values = vars(s)[name]
        if not values or len(set(values)) < len(values):
            raise UserError(f"{name} is {values}: give at least one value and each one once")
    if s.prompt_lookup_min > s.prompt_lookup_max:
        raise UserError("prompt_lookup_min is above prompt_lookup_max: exchange them")
    if s.costs == "vllm":
        vllm_client.find_interpreter(s.vllm_python)
    elif s.costs != "ours":
        given_costs(s.costs)


def load(s: ForecastConfig, target: Target) -> Draft:
    """The draft of the settings, as their engines run it. UserError for one that cannot be forecast."""
    if s.draft == "vllm-ngram":
        return VllmNgramDraft(s.prompt_lookup_max, s.prompt_lookup_min)
    draft = pick_draft(s.draft, target, s.draft_dtype)
    if draft is None:
        raise UserError("draft none: give a draft's folder, ngram or vllm-ngram")
    # Our engine drafts the tokens of a reduced vocabulary, the others those of the whole LM head.
    size = target.runner.vocab_size
    reduced = draft.name == "causal" and causal.load_ids(s.draft, size) is not None
    if reduced and s.engines != ["draftsmith"]:
        if "draftsmith" in s.engines:
            raise UserError(
                f"{s.draft} drafts from a reduced vocabulary here and from its whole LM head in other engines: "
                "forecast them apart, with --engines '[draftsmith]' or without draftsmith among them"
            )
        device = str(target.runner.device)
        draft = causal.load(s.draft, target, device, s.draft_dtype, full_head=True)
    check_draft(draft)
    return draft


def measure_texts(
    s: ForecastConfig, target: Target, draft: Draft, items: Sequence[TaskPrompt], journal: Journal
) -> dict[float, list[TextChains]]:
    """{temperature: chains along the answers}; what the journal has is not measured again."""

    def measure(temperature: float) -> object:
        asked = [*items] * (s.answers if temperature > 0 else 1)
        settings = ChainSettings(max(s.k), temperature, s.max_new_tokens, s.rows)
        return [text_to_json(x) for x in measure_chains(target, draft, asked, settings, s.seed)]

    kept = {t: journal.get_or_measure(["chains", t], partial(measure, t)) for t in s.temperatures}
    return {temperature: [*map(text_from_json, texts)] for temperature, texts in kept.items()}


def speculative_config(s: ForecastConfig, k: int) -> dict[str, Any]:
    """vLLM's speculative_config of this draft. UserError for a draft that vLLM does not have."""
    if s.draft == "ngram":
        raise UserError(
            "vLLM has other n-grams than ours: give --draft vllm-ngram, or other --costs"
        )
    if s.draft != "vllm-ngram":
        return vllm_client.speculative_config(s.draft, k)
    lengths = {name: vars(s)[name] for name in ("prompt_lookup_max", "prompt_lookup_min")}
    return {"method": "ngram", "num_speculative_tokens": k, **lengths}


def given_costs(source: str) -> list[CostPoint]:
    """The points of a JSON file; [] for none. UserError if it is not such a file."""
    if source == "none":
        return []
    what = "costs: give ours, vllm, none, or a JSON file with a list `points`"
    return costs.read_points(files.read_json_object(source, what, lists=["points"])["points"])


def measure_costs(
    s: ForecastConfig, target: Target, draft: Draft, items: Sequence[TaskPrompt], journal: Journal
) -> list[CostPoint]:
    """Points at each batch and context with K = 0, the shortest and the longest; [] for costs none."""
    if s.costs not in ("ours", "vllm"):
        return given_costs(s.costs)
    prompts = [item.prompt_ids for item in items[-s.cost_prompts :]]
    ks = sorted({min(s.k), max(s.k)} | ({max(s.k) + 2} if len(s.k) == 1 else set()))

    def measure(context: int, batch: int) -> object:
        texts = costs.context_prompts(prompts, context)
        shape = costs.CostShape(batch, context, s.cost_tokens)
        if s.costs == "ours":
            plain = replace(target, eos=frozenset())
            found = costs.measure_ours(plain, draft, texts, shape, (0, *ks))
        else:
            configs = {k: speculative_config(s, k) for k in ks}
            found = costs.measure_vllm(s.vllm_python, s.target, configs, texts, shape, s.dtype)
        return to_json(found)

    return [
        point
        for at in itertools.product(s.contexts, s.batches)
        for point in costs.read_points(
            journal.get_or_measure(["costs", s.costs, *at], partial(measure, *at))
        )
    ]


def schedules(
    rows: Sequence[ForecastRow], by_shape: dict[tuple[int, int], costs.EngineCost]
) -> list[KSchedule]:
    """Throughput and the best K by batch size for each temperature, rule and context with several batch sizes."""
    found = []
    tau: dict[tuple[float, str], dict[int, float]] = {}
    for x in rows:
        if x.task == ALL_TASKS:
            own = tau.setdefault((x.temperature, x.rule), {})
            own |= {} if x.tau.value is None else {x.k: x.tau.value}
    for context in sorted({context for context, _ in by_shape}):
        at = {batch: cost for (own, batch), cost in by_shape.items() if own == context}
        found += [costs.k_schedule(at, lengths, *key, context) for key, lengths in tau.items()]
    return found


def forecast(
    s: ForecastConfig, target: Target, draft: Draft, items: Sequence[TaskPrompt], journal: Journal
) -> ForecastReport:
    texts = measure_texts(s, target, draft, items, journal)
    points = measure_costs(s, target, draft, items, journal)
    by_shape = costs.group_costs(points)
    rules = ["greedy"] if draft.name in LOOKUPS else rules_of(s.engines)
    rows = forecast_rows(
        texts, sorted(s.k), rules=rules, seed=s.seed, cost=by_shape.get((min(s.contexts), 1))
    )
    return ForecastReport(
        schema=SCHEMA,
        target=target.describe(),
        earlier_targets=earlier_targets(journal),
        draft=ForecastDraft(s.draft, draft.name, draft_sha256(s.draft)),
        tasks=[task_version(task) for task in s.tasks],
        max_new_tokens=s.max_new_tokens,
        engines=[
            EngineRule(engine, rule, setting)
            for engine, accepts in ENGINE_RULES.items()
            for rule, setting in accepts.items()
            if engine in s.engines and rule in rules
        ],
        rows=rows,
        costs={"from": s.costs, "points": points},
        schedules=schedules(rows, by_shape),
        seed=s.seed,
        **vars(provenance.collect()),
    )


def write_forecast(s: ForecastConfig) -> None:
    """Writes forecast.json and forecast.md and prints the latter."""
    check(s)
    out = Path(s.out)
    inputs = [s.target, s.draft, s.costs, *(task.path for task in s.tasks)]
    target = use_template(load_target(s.target, s.device, s.dtype), s.template, [s.draft])
    draft = load(s, target)  # every mistake shows before the folder is changed
    items = load_fitting_prompts(s.tasks, target)
    check_room(target, items, ChainSettings(max(s.k), 0.0, s.max_new_tokens, s.rows))
    with run_dir.open_run(s, COMMAND, OWNED_FILES, inputs) as run:
        checksums = {s.draft: draft_sha256(s.draft)}
        journal = open_journal(run, rendering_identity(target), checksums, s.allow_changed)
        result = forecast(s, target, draft, items, journal)
        text = json.dumps(to_json(result), indent=1, ensure_ascii=False, allow_nan=False)
        files.write_atomically(out / "forecast.json", text + "\n")
        page = forecast_markdown(result)
        files.write_atomically(out / "forecast.md", page)
    Console(highlight=False, soft_wrap=True).print(page, markup=False)
