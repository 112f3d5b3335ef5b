"""What compare_trainers.py does: each trainer runs in a process of its own, in turns."""

import contextlib
import importlib.metadata
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from decode.common import files, provenance
from decode.common.errors import UserError
from decode.common.progress import progress_bars
from decode.common.run_dir import check_file
from decode.common.typed_json import to_json
from decode.model.loading import load_model, load_target
from eval.reporting.formatting import format_number
from scripts.lab import reference_trainers
from scripts.lab.cells import Cell, cells_beside, measure_apart, run_cells
from scripts.lab.reference_trainers import StepTimer
from scripts.lab.settings import CompareTrainersConfig
from train import training
from train.data import mixture
from train.data.sample_store import SampleRow
from train.families.base import TrainableHead
from train.families.settings.causal import CausalSettings
from train.families.settings.eagle import Eagle3Settings
from train.settings.training import LoopConfig
from train.trainer import launch
from train.trainer import on_policy as trainer_on_policy
from train.trainer.checkpoint import TrainingState
from train.trainer.loop import train
from train.trainer.settings import DistillConfig
from train.trainer.tracking import NullTracker

COMMAND = str(Path(__file__).with_name("compare_trainers.py"))


def distill_settings(s: CompareTrainersConfig, arm: str, folder: str) -> DistillConfig:
    """The settings of train/distill.py for a run of `arm` in `folder`."""
    steps = s.warm + s.steps
    on_policy = trainer_on_policy.OnPolicyConfig(
        share=1.0 if arm == "ours-on-policy" else 0.0,
        every=s.on_policy_every,
        max_new_tokens=s.max_new_tokens,
        batch_size=s.on_policy_every * s.batch_size,
    )
    eagle3 = Eagle3Settings(vocab=s.eagle_vocab, steps=s.eagle_steps)
    return DistillConfig(
        target=s.target, data=s.data, on_policy=on_policy, target_dtype=s.dtype, out=folder,
        draft=eagle3 if arm.startswith("eagle3") else CausalSettings(init=s.draft),
        features=str(Path(folder) / "features") if arm.endswith("features") else "",
        loop=LoopConfig(
            steps=steps, batch_size=s.batch_size, micro_batch=s.batch_size, max_length=s.max_length,
            lr=1e-5, warmup=0, log_every=1, eval_every=0, save_every=steps, pack=s.pack,
        ),
    )  # fmt: skip


def run_our_trainer(settings: DistillConfig, s: CompareTrainersConfig) -> dict[str, float]:
    """Runs this project's loop as train/distill.py does. Returns `StepTimer.results`, and with features the tokens per
    second of their pass and of `s.epochs` epochs together with it."""
    settings, accelerator = launch.init_accelerator(settings)
    settings, parts = training.load_components(settings, accelerator)
    begun = time.perf_counter()
    training.fill_feature_store(accelerator, parts, Console(stderr=True))
    pass_seconds = time.perf_counter() - begun
    ours = training.build_training(settings, accelerator, parts)
    clock = StepTimer(accelerator.device, s.warm, s.steps)

    def select_batch(step: int) -> Sequence[SampleRow]:
        rows = ours.select_batch(step)
        clock.tokens.append(sum(len(row["input_ids"]) for row in rows))
        return rows

    class StepTimerTracker(NullTracker):
        def log(self, step: int, values: Mapping[str, float]) -> None:
            clock.step()  # log_every is 1

    train(
        replace(ours, select_batch=select_batch), settings.loop,
        TrainingState(parts.target.fingerprint), Path(settings.out), StepTimerTracker(), dict,
        progress_bars(disable=True),
    )  # fmt: skip
    found = clock.results()
    if settings.features:
        pass_tokens = sum(len(parts.rows[i]["input_ids"]) for i in range(len(parts.rows)))
        found["pass_tokens_per_second"] = pass_tokens / pass_seconds
        seconds = 1 / found["tokens_per_second"] + pass_seconds / pass_tokens / s.epochs
        found["with_pass_tokens_per_second"] = 1 / seconds
    return found


def run_arm(s: CompareTrainersConfig, arm: str) -> dict[str, float]:
    """One run of a trainer in this process."""
    with tempfile.TemporaryDirectory(prefix="draftsmith-") as folder:
        settings = distill_settings(s, arm, folder)
        if arm.startswith("ours") or arm in ("eagle3", "eagle3-features"):
            return run_our_trainer(settings, s)
        if arm != "eagle3-trainer":
            return reference_trainers.train_reference(s, arm)
        parts = training.load_components(*launch.init_accelerator(settings))[1]
        assert isinstance(parts.trainable, TrainableHead)
        return reference_trainers.train_reference(s, arm, parts.trainable.net)


def compare(s: CompareTrainersConfig) -> None:
    """Runs the trainers in turns and prints their table, or one of them in this process."""
    if s.one:
        torch.manual_seed(0)
        with contextlib.redirect_stdout(sys.stderr):
            found = run_arm(s, s.arms[0])
        print(json.dumps(found))
        return
    if not s.arms:
        raise UserError("arms is empty: name at least one trainer")
    check_file(s.out)
    load_target(s.target, "cpu", s.dtype)  # UserError here rather than in every run
    if not all(arm.startswith("eagle3") for arm in s.arms):
        load_model(s.draft, "draft", "cpu", "float32")
    mixture.load(s.data, s.max_length)
    console, trl = Console(stderr=True), importlib.util.find_spec("trl") is not None
    arms = [arm for arm in s.arms if trl or not arm.startswith("gkd")]
    if len(arms) < len(s.arms):
        console.print("gkd is skipped: it needs `pip install trl`")

    def measure(arm: str, _: int) -> object:
        # A process of its own has a peak of memory of its own.
        return measure_apart(COMMAND, s, arms=[arm])

    cells = [Cell(arm, partial(measure, arm)) for arm in arms]
    table = Table(
        "trainer", "tokens/s", "least to most", "with the pass", "s a step", "memory added, GB", "in all"
    )  # fmt: skip
    with cells_beside(s.out, s) as kept:
        trained = {}
        for name, runs in run_cells(cells, kept, s.rounds).items():
            median = {key: statistics.median(one[key] for one in runs) for key in runs[0]}
            trained[name] = {"median": median, "runs": runs}
            speeds = [one["tokens_per_second"] for one in runs]
            table.add_row(
                name, f"{median['tokens_per_second']:,.0f}", f"{min(speeds):,.0f} to {max(speeds):,.0f}",
                format_number(median.get("with_pass_tokens_per_second"), 0),
                f"{median['seconds_per_step']:.3f}", f"{median['peak_bytes'] / 1e9:.2f}",
                f"{median['peak_bytes_in_all'] / 1e9:.2f}",
            )  # fmt: skip
        console.print(table)
        settings = {key: value for key, value in vars(s).items() if key not in ("one", "out")}
        made = to_json(provenance.collect())
        made["versions"]["trl"] = importlib.metadata.version("trl") if trl else None
        files.write_result(s.out, {"arms": trained, "settings": settings, **made})
