"""Which divergence and which data raise a small draft's acceptance, at equal supervised tokens and over several seeds.

    python scripts/experiments/compare_losses.py --config configs/compare/losses.yaml

Each draft is trained by train/distill.py and then decodes the bundled evaluation prompts, sampled and greedy. Stopped
at any point, the same command continues with what is missing. Intervals: 95 % bootstrap over prompts, each prompt's
counts summed over the seeds; the α of each seed is given as well.
"""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import psutil
import torch
from rich.console import Console
from rich.table import Table

from decode.common import files, lock, provenance, run_dir
from decode.common.command import Terminated, run_command
from decode.common.errors import UserError
from decode.common.progress import progress_bars
from decode.common.ranges import Count, CountOrZero, DraftLength, Seed, Temperature
from decode.drafts.base import METADATA_FILE
from decode.drafts.registry import load_draft
from decode.engine.engine import decode
from decode.engine.records import DecodeRecord
from decode.model.loading import load_target
from decode.verification.sampling import SamplingParams
from eval.metrics import acceptance, bootstrap
from eval.tasks.loading import Task, load_task_prompts
from train.data import mixture
from train.data.batching import supervised_token_count
from train.losses.divergences import LOSSES

ROOT = Path(__file__).resolve().parents[2]
BASELINE = "before"


@dataclass
class ComparedDataset:
    """One kind of training data, and the divergences to try on it."""

    data: str
    """Folder of samples from train/sample.py."""
    losses: list[str]
    words: list[str] = field(default_factory=list)
    """Further arguments of train/distill.py for this data."""


@dataclass
class CompareLossesConfig:
    sources: dict[str, ComparedDataset]
    target: str = "assets/target"
    init: str = "assets/draft"
    """The small LM that every run starts from."""
    recipe: str = ""
    """Config file of train/distill.py for every run; the arguments from this command's settings override it."""
    tokens: CountOrZero = 100000
    """Supervised tokens of each run, from which the number of steps follows; 0: the recipe's steps."""
    batch_size: Count = 16
    seeds: list[Seed] = field(default_factory=lambda: [0, 1, 2])
    k: DraftLength = 4
    max_new_tokens: Count = 64
    """Longest answer in evaluation, in tokens."""
    limit: CountOrZero = 0
    """Evaluation prompts per task; 0: all."""
    temperatures: list[Temperature] = field(default_factory=lambda: [0.0, 1.0])
    workers: Count = 1
    """Runs at a time, each with its share of the cores."""
    words: list[str] = field(default_factory=list)
    """Further arguments of train/distill.py for all runs."""
    drafts: str = "outputs/losses"
    """Folder of the drafts and of their evaluations."""
    out: str = "docs/results/losses.json"


def train_draft(s: CompareLossesConfig, name: str, loss: str, seed: int, steps: int | None) -> Path:
    """The folder of a draft, which is trained there unless it exists. UserError if training fails."""
    source, out = s.sources[name], Path(s.drafts) / f"{name}-{loss}-{seed}"
    if (out / METADATA_FILE).is_file():
        return out
    command = [sys.executable, str(ROOT / "train" / "distill.py")]
    command += ["--config", s.recipe] if s.recipe else []
    command += ["--target", s.target, "--data", source.data]
    command += ["--draft.init", s.init, "--loss", loss, "--seed", str(seed), "--out", str(out)]
    if steps:
        command += ["--loop.steps", str(steps), "--loop.batch_size", str(s.batch_size)]
    command += ["--loop.eval_every", "0", "--wandb", "disabled", *s.words, *source.words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"{out}: {last} (from {' '.join(command)})")
    return out


def evaluate_draft(s: CompareLossesConfig, folder: Path) -> dict[str, list[list[Any]]]:
    """{temperature: [[task, output tokens, rounds], …]} of every evaluation prompt, kept in drafts/NAME.json."""
    file = Path(s.drafts) / f"{folder.name}.json"
    settings = {"k": s.k, "max_new_tokens": s.max_new_tokens, "limit": s.limit}
    if file.is_file():
        kept = files.read_json_object(file, "a measurement of this command")
        if kept.pop("settings", None) != settings:
            raise UserError(f"{file} was measured with other settings than {settings}: delete it")
        return kept
    target = load_target(s.target, "auto")
    draft = load_draft(str(folder), target)
    tasks = [Task(name, limit=s.limit) for name in ("code", "prose", "arithmetic")]
    items = [item for task in tasks for item in load_task_prompts(task, target)]
    result = {}
    for temperature in s.temperatures:
        outputs = decode(
            target,
            draft,
            [item.prompt_ids for item in items],
            k=s.k,
            sampling=SamplingParams(temperature),
            max_new_tokens=s.max_new_tokens,
            rows=16,
        )
        result[str(temperature)] = [
            [item.task, len(o.output_ids), o.rounds] for item, o in zip(items, outputs, strict=True)
        ]
    files.write_atomically(file, json.dumps({"settings": settings} | result))
    return result


def run_cell(
    s: CompareLossesConfig, name: str, loss: str, seed: int, steps: int | None, threads: int
) -> None:
    """Trains and evaluates one draft; runs in a process of its own."""
    os.environ["OMP_NUM_THREADS"] = str(threads)  # for the training process
    torch.set_num_threads(threads)
    evaluate_draft(s, Path(s.init) if name == BASELINE else train_draft(s, name, loss, seed, steps))


def ignore_ctrl_c() -> None:
    """Makes a worker leave Ctrl-C to the training that it waits for, which saves its last step."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def stop_children() -> Iterator[None]:
    """Ends the workers and their trainings when the block is stopped, and waits until the latter have saved."""
    try:
        yield
    except (KeyboardInterrupt, Terminated):
        workers = {worker.pid for worker in multiprocessing.active_children()}
        below = psutil.Process().children(recursive=True)
        trainings = [process for process in below if process.ppid() in workers]
        for process in below:
            process.terminate()
        psutil.wait_procs(trainings)  # not for multiprocessing's tracker, which no signal ends
        raise


def to_records(kept: dict[str, list[list[Any]]], temperature: float) -> list[DecodeRecord]:
    """One record for each prompt. Neither its clocks nor its token ids were kept: the ids are zeros."""
    return [
        DecodeRecord([], [0] * length, rounds, task=task, id=str(i))
        for i, (task, length, rounds) in enumerate(kept[str(temperature)])
    ]


def pool_seeds(
    s: CompareLossesConfig, seeds: Sequence[list[DecodeRecord]], before: list[DecodeRecord]
) -> dict[str, Any]:
    """τ and α over the seeds of one draft, and the gain in α over the draft before training."""

    def sums(count: Any) -> Any:
        return sum(count(samples) for samples in seeds)

    def accepted(samples: Sequence[DecodeRecord]) -> Any:
        return acceptance.accepted_by_position(samples, s.k).sum(1)

    def reached(samples: Sequence[DecodeRecord]) -> Any:
        return acceptance.reached_by_position(samples, s.k).sum(1)

    emitted, rounds = sums(acceptance.emitted_tokens), sums(acceptance.round_counts)
    accepts, reaches = sums(accepted), sums(reached)
    base = accepted(before), reached(before)
    alpha, alpha_before = accepts.sum() / reaches.sum(), base[0].sum() / base[1].sum()
    return {
        "tau": emitted.sum() / rounds.sum(),
        "tau_ci": bootstrap.ratio_interval(emitted, rounds, 0),
        "alpha": alpha,
        "alpha_ci": bootstrap.ratio_interval(accepts, reaches, 0),
        "alpha_seeds": [acceptance.alpha(samples, s.k) for samples in seeds],
        "gain": alpha - alpha_before,
        "gain_ci": bootstrap.paired_difference_interval(accepts, reaches, *base, 0),
        "relative_gain": alpha / alpha_before - 1,
    }


def build_table(s: CompareLossesConfig, steps: dict[str, int | None]) -> list[dict[str, Any]]:
    """One entry for each kind of data, divergence, task and temperature."""
    before = evaluate_draft(s, Path(s.init))
    rows = []
    for temperature in s.temperatures:
        base = to_records(before, temperature)
        arms = [(BASELINE, "", [base])]
        for name, source in s.sources.items():
            for loss in source.losses:
                folders = [Path(s.drafts) / f"{name}-{loss}-{seed}" for seed in s.seeds]
                arms.append(
                    (name, loss, [to_records(evaluate_draft(s, f), temperature) for f in folders])
                )
        for name, loss, seeds in arms:
            for task in ("all", *sorted({x.task for x in base})):
                of_task = [[x for x in samples if task in ("all", x.task)] for samples in seeds]
                base_of_task = [x for x in base if task in ("all", x.task)]
                cell = {"data": name, "loss": loss, "task": task, "temperature": temperature}
                cell |= {"steps": steps.get(name), "prompts": len(base_of_task)}
                rows.append(cell | pool_seeds(s, of_task, base_of_task))
    return rows


def print_table(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    """Prints the rows over all tasks."""
    sheet = Table("T", "data", "loss", "steps", "τ", "α", "seeds", "α − before")
    for row in (row for row in rows if row["task"] == "all"):
        low, high = row["gain_ci"] or (float("nan"),) * 2
        seeds = " ".join(f"{x:.3f}" for x in row["alpha_seeds"])
        gain = f"{row['gain']:+.3f} [{low:+.3f}, {high:+.3f}]"
        numbers = [f"{row['tau']:.2f}", f"{row['alpha']:.3f}", seeds, gain]
        sheet.add_row(
            f"{row['temperature']:g}", row["data"], row["loss"], str(row["steps"] or "–"), *numbers
        )
    console.print(sheet)


def main(s: CompareLossesConfig) -> None:
    """Trains and evaluates what is missing in `drafts`. UserError while another run uses that folder."""
    steps = check_and_plan(s)
    drafts = Path(s.drafts)
    run_dir.check_folder(drafts)
    drafts.mkdir(parents=True, exist_ok=True)
    with lock.hold(drafts / lock.LOCK_FILE, drafts):
        try:
            compare(s, steps)
        except (KeyboardInterrupt, Terminated) as error:
            error.add_note(f"finished drafts are kept in {drafts}, and the same command goes on")
            raise


def check_and_plan(s: CompareLossesConfig) -> dict[str, int | None]:
    """{data: steps of its runs; None: the recipe's}. UserError for what would fail only in the runs."""
    run_dir.check_file(s.out)
    for setting in ("sources", "seeds", "temperatures"):
        if not vars(s)[setting]:
            raise UserError(f"{setting} is empty: give at least one")
    if s.recipe:
        files.read_yaml(s.recipe)
    load_draft(s.init, load_target(s.target, "cpu"))
    steps: dict[str, int | None] = dict.fromkeys((BASELINE, *s.sources))
    for name, source in s.sources.items():
        if not source.losses or not set(source.losses) <= set(LOSSES):
            raise UserError(
                f"sources.{name}.losses {source.losses}: give some of {', '.join(LOSSES)}"
            )
        samples, _ = mixture.load(source.data, 512)
        if s.tokens:
            tokens = supervised_token_count(samples)
            steps[name] = round(s.tokens * len(samples) / (s.batch_size * tokens))
    return steps


def compare(s: CompareLossesConfig, steps: dict[str, int | None]) -> None:
    """The whole comparison, without what earlier runs finished."""
    console = Console(stderr=True)
    cells = [
        (name, loss, seed)
        for seed in s.seeds
        for name, source in s.sources.items()
        for loss in source.losses
    ]
    first = [(name, source.losses[0], s.seeds[0]) for name, source in s.sources.items()]
    waves = [
        [(BASELINE, "", 0)],
        *([cell] for cell in first),
    ]  # one run creates a folder of features before others share it
    waves.append([cell for cell in cells if cell not in first])
    threads = max(1, (os.cpu_count() or 1) // s.workers)
    fresh = multiprocessing.get_context("spawn")
    with progress_bars(console) as progress:
        task = progress.add_task("training and evaluating drafts", total=len(cells) + 1)
        for wave in waves:
            pool = ProcessPoolExecutor(s.workers, fresh, ignore_ctrl_c, max_tasks_per_child=1)
            with pool, stop_children():
                jobs = [pool.submit(run_cell, s, *cell, steps[cell[0]], threads) for cell in wave]
                for job in as_completed(jobs):
                    job.result()
                    progress.advance(task)
    rows = build_table(s, steps)
    facts = {"tokens": s.tokens, "seeds": s.seeds, "k": s.k, "max_new_tokens": s.max_new_tokens}
    facts |= {"command": " ".join(["python", *sys.argv]), **provenance.collect(), "cells": rows}
    files.write_atomically(Path(s.out), json.dumps(facts, indent=1) + "\n")
    print_table(console, rows)


if __name__ == "__main__":
    run_command(main, CompareLossesConfig, __doc__)
