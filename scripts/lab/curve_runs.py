"""What data_curve.py does: drafts are trained on nested parts of the data and measured."""

import contextlib
import json
import math
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from decode.checkpoints.draft_folder import METADATA_FILE
from decode.common import files, provenance, run_dir
from decode.common.errors import UserError
from decode.common.typed_json import to_json
from decode.drafts.base import check_request
from decode.drafts.registry import DRAFT_FAMILIES, load_draft
from decode.engine.active_request import check_draft_length
from decode.model.loading import Target, load_target
from decode.verification.sampling import SamplingParams
from eval.metrics.bootstrap import Array
from eval.reporting import plots
from eval.reporting.formatting import table_markdown
from eval.scaling import data_curve
from eval.scaling.data_curve import DataCurve, TrainedPoint
from eval.scaling.transfer import count_acceptance
from eval.tasks.loading import TaskPrompt, load_fitting_prompts, task_version
from scripts.lab.cells import Cell, run_cells
from scripts.lab.settings import DataCurveConfig
from train import distill, training
from train.data import batching, mixture
from train.data.sample_store import SampleRow
from train.settings.data import MixturePart
from train.settings.training import TrainingPublishConfig
from train.trainer import launch
from train.trainer.settings import DistillConfig

COMMAND = "scripts/lab/data_curve.py"
OWNED_FILES = (
    "data_curve.json",
    "data_curve.md",
    "tau.svg",
    "alpha.svg",
    "journal.jsonl",
    "points/*.json",  # of earlier versions
    "drafts/**",
)
"""Patterns of the files that this command writes into its output folder."""


@dataclass(frozen=True)
class PlannedRun:
    """One training: on how many rows, which have how many supervised tokens, and for how many steps."""

    size: int
    seed: int
    rows: int
    tokens: int
    steps: int

    @property
    def name(self) -> str:
        return f"{self.size}-{self.seed}"


def geometric_sizes(total: int, count: int, span: float) -> list[int]:
    """`count` sizes from total ÷ span to `total`, each the same factor above the one before it."""
    return [round(size) for size in np.geomspace(total / span, total, count)]


def nested_rows(tokens: Sequence[int], sizes: Sequence[int], seed: int) -> list[Array]:
    """For each of the ascending `sizes` the indices, ascending, of the rows that make it up.

    `tokens` are the supervised tokens of each row. Rows are those of a `limit` (train/data/mixture.py) that is just
    high enough for `size` tokens. UserError for a size above the sum of `tokens`, and for two sizes with the same rows.
    """
    order = mixture.shuffled(len(tokens), seed)
    sums = np.cumsum(np.asarray(tokens)[order])
    if sizes[-1] > sums[-1]:
        raise UserError(
            f"sizes holds {sizes[-1]:,}, and the data have {sums[-1]:,} supervised tokens: give at most that"
        )
    counts = [int(np.searchsorted(sums, size)) + 1 for size in sizes]
    for i in range(1, len(sizes)):
        if counts[i] == counts[i - 1]:
            raise UserError(
                f"sizes {sizes[i - 1]:,} and {sizes[i]:,} are the same {counts[i]} rows: give fewer sizes, further "
                "apart, or sample more"
            )
    return [np.sort(order[:count]) for count in counts]


def check_and_plan(s: DataCurveConfig) -> tuple[list[PlannedRun], Target]:
    """(all runs, small ones first; the target). UserError for what would fail only in them, and for an evaluation
    prompt that is in the data."""
    sizes = sorted(s.sizes)
    if len(set(sizes)) < len(sizes) or len(sizes) == 1:
        raise UserError(f"sizes is {s.sizes}: give at least two, each once, or none")
    if not isinstance(s.distill.data, str):
        raise UserError("distill.data is a list: give one sampled set, which is divided")
    for name in ("seeds", "temperatures", "tasks"):
        values = list(map(str, vars(s)[name]))
        if not values or len(set(values)) < len(values):
            raise UserError(f"{name} is empty or names one twice: give at least one, each once")
    run = replace(run_settings(s, 1, 0, 0, ""), features="", overwrite=True)  # which writes nothing
    run, accelerator = launch.init_accelerator(run)
    if accelerator.num_processes > 1:
        raise UserError("several processes: start this command with python, in one process")
    _, parts = training.load_components(run, accelerator)
    check_draft_length(parts.target, s.k)
    for temperature in s.temperatures:
        check_request(parts.trainable.to_draft(), s.k, SamplingParams(temperature))
    rows, _ = training.load_rows(replace(run, supervise="answers"), parts.target)  # as they are
    check_held_out(load_fitting_prompts(s.tasks, parts.target), rows, s.distill.data)
    tokens = [len(batching.supervised_positions(row)) for row in parts.rows]
    sizes = sizes or geometric_sizes(sum(tokens), s.points, s.span)
    runs = [
        PlannedRun(size, seed, len(part), int(np.take(tokens, part).sum()), count_steps(s, len(part)))
        for seed in s.seeds
        for size, part in zip(sizes, nested_rows(tokens, sizes, seed), strict=True)
    ]  # fmt: skip
    return sorted(runs, key=lambda run: run.size), parts.target


def check_held_out(prompts: Sequence[TaskPrompt], rows: Sequence[SampleRow], data: str) -> None:
    """UserError for an evaluation prompt that is also the prompt of a row of the sampled set `data`."""
    known = {np.asarray(item.prompt_ids, dtype=np.int32).tobytes(): item for item in prompts}
    for row in rows:
        start = min(span[0] for span in row["loss_spans"])
        found = known.get(np.asarray(row["input_ids"][:start], dtype=np.int32).tobytes())
        if found is not None:
            raise UserError(
                f"prompt {found.id} of task {found.task!r} is in {data} too: give tasks that are held out"
            )


def count_steps(s: DataCurveConfig, rows: int) -> int:
    """Optimiser steps of a run on this many rows."""
    by_passes = math.ceil(s.passes * rows / s.distill.loop.batch_size)
    return s.steps or max(s.least_steps, by_passes)


def run_settings(s: DataCurveConfig, steps: int, seed: int, rows: int, out: str) -> DistillConfig:
    """The settings of train/distill.py for one run on this many rows; 0: all."""
    data = [MixturePart(str(s.distill.data), limit=rows)]
    loop = replace(s.distill.loop, steps=steps, epochs=0.0, eval_every=0, keep_best=False)
    return replace(
        s.distill, data=data, loop=loop, seed=seed, out=out, tracker="none",
        publish=TrainingPublishConfig(), resume=False, overwrite=False, dry_run=False,
    )  # fmt: skip


def measure_draft(s: DataCurveConfig, run: PlannedRun, folder: str) -> object:
    """The TrainedPoint of the draft in `folder`, which `run` has trained."""
    name, revision = s.distill.target, s.distill.revision
    if s.distill.draft.trains_target:
        name, revision = str(Path(folder) / s.distill.draft.target_folder), None
    target = load_target(name, "auto", s.distill.target_dtype, revision)
    prompts = load_fitting_prompts(s.tasks, target)
    draft = load_draft(folder, target)
    counts = count_acceptance(target, draft, prompts, s.temperatures, s.k, s.max_new_tokens)
    return asdict(TrainedPoint(run.size, run.seed, run.tokens, run.rows, run.steps, counts))


def measure_run(s: DataCurveConfig, run: PlannedRun, _: int) -> object:
    """Trains the run's draft unless it is finished, and measures it. What only training needs is deleted."""
    out = Path(s.out) / "drafts" / run.name
    if not (out / METADATA_FILE).is_file():
        with contextlib.redirect_stdout(sys.stderr):
            distill.main(run_settings(s, run.steps, run.seed, run.rows, str(out)))
    found = measure_draft(s, run, str(out))
    shutil.rmtree(out / "checkpoints", ignore_errors=True)
    return found


def curve_cells(s: DataCurveConfig, runs: Sequence[PlannedRun]) -> list[Cell]:
    """A cell for each run; before them one for the draft that training starts from, if it starts from one."""
    cells = [
        Cell(
            run.name,
            partial(measure_run, s, run),
            f"{run.tokens:,} supervised tokens in {run.rows:,} rows, seed {run.seed}, {run.steps:,} steps",
        )
        for run in runs
    ]
    if (begun := s.distill.draft.continues) != "":
        untrained = PlannedRun(0, 0, 0, 0, 0)
        cells.insert(0, Cell("before", lambda _: measure_draft(s, untrained, begun)))
    return cells


def write_results(out: Path, facts: DataCurve) -> str:
    """Writes data_curve.json, data_curve.md and both figures; returns the Markdown."""
    lines = "\n".join(f"- {line}" for line in data_curve.doubling_lines(facts))
    tables = (data_curve.points_table(facts), data_curve.laws_table(facts))
    figures = " ".join(f"![{metric}]({metric}.svg)" for metric in data_curve.METRICS)
    key = f"{data_curve.marker_line(facts)}; dashed: fitted."
    parts = ["# Data curve", lines, figures, key, *map(table_markdown, tables)]
    page = "\n\n".join(parts) + "\n"
    files.write_atomically(out / "data_curve.md", page)
    for metric in data_curve.METRICS:
        svg = plots.recolor(data_curve.curve_panel(facts, metric)).rstrip("\n")
        files.write_atomically(out / f"{metric}.svg", svg + "\n")
    text = json.dumps(to_json(facts), indent=1, ensure_ascii=False, allow_nan=False)
    files.write_atomically(out / "data_curve.json", text + "\n")
    return page


def measure_curve(s: DataCurveConfig) -> None:
    """Trains and measures what is missing, and writes the curve."""
    run_dir.check_folder(Path(s.out))
    runs, target = check_and_plan(s)
    reads = [*training.input_paths(s.distill), *(task.path for task in s.tasks)]
    with run_dir.open_run(s, COMMAND, OWNED_FILES, reads) as run:
        found = run_cells(curve_cells(s, runs), run.journal(of_machine=False))
        points = [TrainedPoint(**kept) for (kept,) in found.values()]
        before = points.pop(0) if s.distill.draft.continues else None
        names = ("max_new_tokens", "seeds", "passes", "least_steps", "steps")
        curve = data_curve.build_curve(
            points,
            before,
            s.temperatures,
            s.k,
            s.worth,
            target=target.describe(),
            data=s.distill.data,
            family=DRAFT_FAMILIES[s.distill.draft.family].saved_name,
            loss=s.distill.loss,
            tasks=[task_version(task) for task in s.tasks],
            **{name: vars(s)[name] for name in names},
            **vars(provenance.collect()),
        )
        print(write_results(run.path, curve))
    gains = {
        f"{f.temperature:g}": {"gain": f.gain.value, "gain_ci": f.gain.ci, "verdict": f.verdict}
        for f in curve.forecasts
        if f.metric == "tau"
    }
    path = str(run.path / "data_curve.json")
    print(json.dumps({"curve": path, "doubling": gains, "verdict": curve.verdict}))
