"""What eval/tune.py does: it runs the sweep, chooses the fastest settings and writes them."""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table as RichTable
from rich.text import Text

from decode.checkpoints.draft_folder import trained_templates
from decode.common import files, provenance, run_dir
from decode.common.journal import Journal
from decode.common.progress import ProgressLog, progress_bars
from decode.common.settings import to_yaml
from decode.common.typed_json import to_json
from decode.engine.modes import pick_mode
from decode.model.loading import adopt_tokenizer, load_target
from eval.benchmark import config
from eval.benchmark.config import earlier_targets, open_journal
from eval.benchmark.methods import PLAIN_DECODING, Method, draft_checksums
from eval.benchmark.timing import TimingContext, TimingResult
from eval.metrics.acceptance import Acceptance
from eval.metrics.bootstrap import ALL_TASKS
from eval.metrics.roofline import measure_bandwidth
from eval.reporting.checklist import tuned_table
from eval.reporting.formatting import escape_markdown, format_percent, table_markdown
from eval.results.report import SCHEMA, TreeRecord, setting_title
from eval.results.tuned import PredictedCell, TreeLength, TunedReport
from eval.settings.evaluation import TreeConfig, TuneConfig
from eval.tasks import loading
from eval.tasks.loading import TaskPrompt
from eval.tuning.config import (
    chain_stages,
    check_config,
    load_methods,
    load_timing_context,
    to_eval_config,
    tree_stage,
)
from eval.tuning.selection import (
    cross_validated_predictions,
    every_other_prompt,
    filter_by_task,
    select_fastest_settings,
    summarize_predictions,
    sweep_cells,
)
from eval.tuning.sweep import SweepStage, full_batches, run_sweep

COMMAND = "eval/tune.py"
OWNED_FILES = ("journal.jsonl", "tuned.json", "tuned.md", "tuned.yaml", "settings/*.yaml")
"""Patterns of the files that this command writes into its output folder."""


def tune(
    s: TuneConfig,
    context: TimingContext,
    methods: Sequence[Method],
    journal: Journal,
    progress: Progress | ProgressLog,
) -> TunedReport:
    done: list[tuple[SweepStage, TimingResult]] = []
    predictions, trees = [], []

    def run(stage: SweepStage) -> TimingResult:
        title = f"{stage.name}, temperature {stage.temperature:g}, batch {stage.batch_size}"
        bar = progress.add_task(title, total=len(full_batches(context, stage.batch_size)))
        result = run_sweep(context, stage, journal, lambda: progress.advance(bar))
        done.append((stage, result))
        return result

    for temperature in s.temperatures:
        for stage in chain_stages(s, methods, temperature):
            predictions += predict_speedups(s, stage, run(stage))
        if s.tree_nodes:
            stage, expected = tree_stage(s, context, methods, temperature, journal)
            if stage.settings:
                trees += compare_tree_lengths(stage, run(stage), expected)
    return TunedReport(
        schema=SCHEMA,
        target=context.target.describe(),
        earlier_targets=earlier_targets(journal),
        tasks=[loading.task_version(task) for task in s.tasks],
        drafts=draft_checksums([m for m in s.methods if not m.lookup]),
        **vars(provenance.collect()),
        seed=s.seed,
        bandwidth=journal.get_or_measure(
            ["bandwidth"], lambda: measure_bandwidth(context.target.runner.device)
        ),
        repeated_turns=sum(result.repeated_turns for _, result in done),
        dropped_turns=dict(sum((Counter(x.dropped_turns) for _, x in done), Counter())),
        chosen=select_fastest_settings(done, s.seed),
        predictions=summarize_predictions(predictions),
        trees=trees,
        cells=[cell for stage, result in done for cell in sweep_cells(stage, result, s.seed)],
        refused={m.label: why for _, result in done for m, why in result.refused.items()},
        settings=to_yaml(s),
    )


def predict_speedups(s: TuneConfig, stage: SweepStage, result: TimingResult) -> list[PredictedCell]:
    """Predictions of every method's chains in a stage, on all prompts and on each domain."""
    predictions: list[PredictedCell] = []
    if result.void:
        return predictions
    tasks = dict.fromkeys(record.task for record in result.records[PLAIN_DECODING])
    for name, layers in dict.fromkeys((m.name, m.layers) for m in result.records):
        for task in [ALL_TASKS, *tasks] if name != PLAIN_DECODING.name else []:
            own = filter_by_task(result.records, task)
            by_k = {m.k: x for m, x in own.items() if (m.name, m.layers) == (name, layers)}
            predictions += cross_validated_predictions(
                {**by_k, 0: own[PLAIN_DECODING]}, s.calibrate, s.seed, method=name, layers=layers, task=task,
                temperature=stage.temperature, batch_size=stage.batch_size,
            )  # fmt: skip
    return predictions


def compare_tree_lengths(
    stage: SweepStage, result: TimingResult, expected: dict[Method, float]
) -> list[TreeLength]:
    """Tokens a round of fixed trees: predicted from one half of the prompts, measured on the other."""
    test = every_other_prompt(result.records, 1)
    return [
        TreeLength(x.name, x.description, stage.temperature, expected[x], Acceptance.of(own).tau.value)
        for x, own in test.items()
        if x in expected
    ]  # fmt: skip


def write_eval_configs(
    s: TuneConfig, items: Sequence[TaskPrompt], tuned: TunedReport, out: Path
) -> None:
    """A configuration of eval/run.py for each temperature, batch size and domain: every method at its fastest."""
    folder, by_name = out / "settings", {m.name: m for m in s.methods}
    folder.mkdir(exist_ok=True)
    places = dict.fromkeys((c.temperature, c.batch_size, c.task) for c in tuned.chosen)
    for place in places:
        temperature, batch, task = place
        own = [c for c in tuned.chosen if (c.temperature, c.batch_size, c.task) == place]
        best = max(own, key=lambda c: c.speedup.value or 0.0)
        methods = [
            replace(
                by_name[c.method],
                k=c.k,
                tree=TreeConfig(**to_json(c.tree or TreeRecord())),
                layers=c.layers or by_name[c.method].layers,
            )
            for c in own
        ]
        holding = {item.task for item in items if task in (ALL_TASKS, item.domain or item.task)}
        chosen = replace(
            to_eval_config(s), methods=methods, tasks=[x for x in s.tasks if x.name in holding],
            temperatures=[temperature], batch_size=batch, out=f"{s.out}/report",
        )  # fmt: skip
        text = (
            "# command: eval/run.py\n"
            f"# Written by eval/tune.py: {task}, temperature {temperature:g}, batch {batch}. "
            f"Fastest: {best.method}, {best.setting}, {best.speedup.value:.2f}x in rounds.\n"
            + to_yaml(chosen)
        )
        name = f"T{temperature:g}-B{batch}-{task}.yaml"
        files.write_atomically(folder / name.replace("/", "_"), text)
        if place == (s.temperatures[0], 1, ALL_TASKS) or len(places) == 1:
            files.write_atomically(out / "tuned.yaml", text)


def render_markdown(tuned: TunedReport) -> str:
    """tuned.md: the chosen settings, and the median error of predictions from the other half of the prompts."""
    error, counted = format_percent(tuned.predictions.median_error), tuned.predictions.counted
    void = {
        f"{c.stage}, {setting_title(c.temperature, c.batch_size)} ({c.void})": 0
        for c in tuned.cells
        if c.void
    }
    parts = [
        f"# Tuned speculative decoding of {escape_markdown(tuned.target.name)}",
        table_markdown(tuned_table(tuned.chosen)),
        "Held out: chosen on one half of the prompts, measured on the other. Median error of predictions from other "
        f"prompts at other draft lengths: {error} (n = {counted} that were measured closely enough).",
        "Turns in which a setting stalled or the machine was busy: "
        f"{tuned.repeated_turns} measured again, {sum(tuned.dropped_turns.values())} dropped.",
        *([f"VOID, so without a speed-up: {', '.join(void)}."] if void else []),
    ]
    return "\n\n".join(parts) + "\n"


def search(s: TuneConfig) -> None:
    """Runs the sweep and writes its results. UserError for settings that make none."""
    check_config(s)
    adopt_tokenizer(s.target, s.tokenizer, s.revision)
    loaded = load_target(s.target, s.device, s.dtype, s.revision)
    target = loaded.with_template(s.template, trained_templates(m.draft for m in s.methods))
    methods = load_methods(s, target)  # every mistake shows before the folder is changed
    context = load_timing_context(s, target)
    drafts = [method.draft for method in methods]
    context = replace(context, mode=pick_mode(s.mode, target, [None, *drafts]))
    console, out = Console(stderr=True), Path(s.out)
    with run_dir.open_run(s, COMMAND, OWNED_FILES, config.input_paths(to_eval_config(s))) as run:
        checksums = draft_checksums(s.methods)
        journal = open_journal(run, target.rendering_identity, checksums, s.allow_changed)
        with progress_bars(console) as progress:
            tuned = tune(s, context, methods, journal, progress)
        files.write_atomically(
            out / "tuned.json", json.dumps(to_json(tuned), indent=1, ensure_ascii=False) + "\n"
        )
        write_eval_configs(s, context.items, tuned, out)
        files.write_atomically(out / "tuned.md", render_markdown(tuned))
    table = tuned_table([c for c in tuned.chosen if c.batch_size == 1])
    rich = RichTable(*table.header, title=table.title)
    for row in table.rows:
        rich.add_row(*map(Text, row))  # Text: no markup in names
    console.print(rich)
    line = {
        "tuned": str(out / "tuned.json"),
        "counted": tuned.predictions.counted,
        "median_error": tuned.predictions.median_error,
    }
    sys.stdout.write(json.dumps(line) + "\n")
