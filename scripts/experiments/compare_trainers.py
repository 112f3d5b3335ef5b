"""Our training beside the usual trainers: tokens a second and peak memory, on the very same batches.

    python scripts/experiments/compare_trainers.py --out docs/results/trainers.json
    python scripts/experiments/compare_trainers.py --arms '[ours-on-policy, gkd-on-policy]'

ours: train/trainer/loop.py with a causal draft. ours-features: the same with what the target says from disk, where an earlier
pass put it (--features of train/distill.py). trainer: transformers' Trainer, whose loss is the KL at the supervised
positions. gkd: TRL's GKDTrainer at lmbda 0 and beta 0, the same KL; left out, with a word, unless `pip install trl` was
run. All train every weight of the same draft on the same samples in the same order, all but ours-features against the
live target. In the on-policy arms the draft writes what it reads: GKD before every step (lmbda 1), ours for
on_policy_every steps at once.

Each run is a process of its own; arms take turns. Memory is what training adds to what lies there before its first
step. The last line is JSON.
"""

import contextlib
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from decode.common import files, run_dir
from decode.common.cli import run_command
from decode.common.errors import UserError
from decode.model.loading import load_target
from scripts.experiments import reference_trainers
from scripts.experiments.step_timer import StepTimer
from train import distill
from train.data.sample_store import SampleRow
from train.families.config import DraftConfig
from train.trainer import on_policy as trainer_on_policy
from train.trainer.checkpoint import TrainingState
from train.trainer.loop import LoopConfig, train
from train.trainer.tracking import NullTracker

TrainerName = Literal["ours", "ours-features", "trainer", "gkd", "ours-on-policy", "gkd-on-policy"]


@dataclass
class CompareTrainersConfig:
    target: str = "assets/target"
    draft: str = "assets/draft"
    """The small LM that is trained."""
    data: str = "outputs/reproduce/samples"
    """A sampled set from train/sample.py."""
    arms: list[TrainerName] = field(default_factory=lambda: ["ours", "trainer", "gkd"])  # type: ignore[arg-type]
    rounds: int = 3
    """Times that each arm runs."""
    warm: int = 3
    """Steps before the clock starts."""
    steps: int = 20
    """Steps that are timed."""
    batch_size: int = 8
    max_length: int = 256
    """Longer samples are cut."""
    max_new_tokens: int = 64
    """On policy: longest continuation."""
    features: str = "outputs/features"
    """ours-features: folder of what the target says, made at the arm's first run."""
    on_policy_every: int = 10
    """On policy, ours: steps whose texts are written together."""
    dtype: str = "float32"
    """Of the target; drafts train in fp32, on a GPU in mixed bf16."""
    out: str = ""
    """File for the JSON of the last line; empty writes none."""
    one: bool = False
    """Run the first arm here and print its JSON."""


def run_our_trainer(s: CompareTrainersConfig, on_policy: bool, features: str) -> dict[str, float]:
    """Our loop, as train/distill.py runs it."""
    steps = s.warm + s.steps
    loop = LoopConfig(
        steps=steps, batch_size=s.batch_size, micro_batch=s.batch_size, max_length=s.max_length,
        lr=1e-5, warmup=0, log_every=1, eval_every=0, save_every=steps,
    )  # fmt: skip
    own = trainer_on_policy.OnPolicyConfig(
        share=1.0 if on_policy else 0.0,
        every=s.on_policy_every,
        max_new_tokens=s.max_new_tokens,
        batch_size=s.on_policy_every * s.batch_size,
    )
    with tempfile.TemporaryDirectory(prefix="draftsmith-") as folder:
        settings = distill.DistillConfig(
            target=s.target, data=s.data, draft=DraftConfig(init=s.draft), loop=loop,
            on_policy=own, features=features, target_dtype=s.dtype, out=folder,
        )  # fmt: skip
        accelerator = distill.init_accelerator(settings)
        settings, parts = distill.load_components(settings, accelerator)
        distill.fill_feature_store(accelerator, parts, Console(stderr=True))
        training = distill.build_training(settings, accelerator, parts)
        read: list[int] = []

        def choose(step: int) -> Sequence[SampleRow]:
            rows = training.select_batch(step)
            read.append(sum(len(row["input_ids"]) for row in rows))
            return rows

        clock = StepTimer(accelerator.device, s.warm, s.steps)

        class Watch(NullTracker):
            def log(self, step: int, values: Mapping[str, float]) -> None:
                clock.step()

        clock.start()
        state = TrainingState(parts.target.fingerprint)
        train(
            replace(training, select_batch=choose), loop, state, Path(folder), Watch(), dict,
            Progress(disable=True),
        )  # fmt: skip
        return clock.found(lambda step: read[step])


def run_in_subprocess(arm: str, s: CompareTrainersConfig) -> dict[str, float]:
    """One run of an arm in a process of its own."""
    flags = {name: value for name, value in vars(s).items() if name not in ("arms", "one", "out")}
    command = [sys.executable, __file__, "--one", "true", "--arms", json.dumps([arm])]
    for name, value in flags.items():
        command += [f"--{name}", str(value)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise UserError(f"{arm} failed: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main(s: CompareTrainersConfig) -> None:
    if min(s.rounds, s.steps, s.warm) < 1:
        raise UserError("need rounds, steps and warm >= 1")
    if s.one:
        torch.manual_seed(0)
        arm = s.arms[0]
        with contextlib.redirect_stdout(sys.stderr):
            if arm.startswith("ours"):
                features = s.features if arm == "ours-features" else ""
                found = run_our_trainer(s, arm == "ours-on-policy", features)
            else:
                found = reference_trainers.train_reference(s, arm)
        print(json.dumps(found))
        return
    load_target(s.target, "cpu")  # refuses early what no arm could use
    console = Console(stderr=True)
    arms: list[str] = list(s.arms)
    if importlib.util.find_spec("trl") is None and any(arm.startswith("gkd") for arm in arms):
        console.print("gkd is left out: `pip install trl` brings it")
        arms = [arm for arm in arms if not arm.startswith("gkd")]
    runs_of: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
    for turn in range(s.rounds):
        for name in arms if turn % 2 == 0 else reversed(arms):
            runs_of[name].append(run_in_subprocess(name, s))
    table = Table("trainer", "tokens/s", "least to most", "s a step", "memory added, GB", "in all")
    cells = {}
    for name, each in runs_of.items():
        columns = {key: sorted(one[key] for one in each) for key in each[0]}
        middle = {key: statistics.median(values) for key, values in columns.items()}
        speeds = columns["tokens_per_second"]
        cells[name] = {"median": middle, "runs": each}
        table.add_row(
            name, f"{middle['tokens_per_second']:,.0f}", f"{speeds[0]:,.0f} to {speeds[-1]:,.0f}",
            f"{middle['seconds_per_step']:.3f}", f"{middle['peak_bytes'] / 1e9:.2f}",
            f"{middle['peak_bytes_in_all'] / 1e9:.2f}",
        )  # fmt: skip
    console.print(table)
    settings = {key: value for key, value in vars(s).items() if key not in ("one", "out")}
    made = run_dir.provenance()
    made["versions"]["trl"] = _package_version("trl")
    line = json.dumps({"arms": cells, "settings": settings, **made})
    if s.out:
        files.write_atomically(Path(s.out), line + "\n")
    print(line)


def _package_version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    run_command(main, CompareTrainersConfig, __doc__)
