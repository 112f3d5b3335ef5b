"""The common EAGLE-3 training recipe beside this project's: same samples, rows of each step, schedule and steps.

    python scripts/experiments/reference_eagle3.py --config configs/smollm2/reference_eagle3.yaml

"usual", as public trainers have it: AdamW alone; labels in replies only; the mask marks the tokens of a reply and not
the positions that predict them, so that the first draft of every reply is never trained; the loss is the soft
cross-entropy against the target's distribution renormalised on the draft's vocabulary; positions whose most likely
token is not in that vocabulary are left out. Positions that the mask would train beyond a reply's end are left out as
well, in its favour.
"ours": the settings `distill`.

Several seeds each; τ is measured by decoding prompts that nobody trained on. Stopped at any point, the same command
goes on. --out receives reference_eagle3.json and the drafts; the last line is JSON.
"""

import contextlib
import json
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import numpy as np
import torch
from accelerate import Accelerator
from rich.console import Console
from rich.table import Table
from torch import Tensor

from decode.common import files, provenance, run_dir
from decode.common.command import run_command
from decode.common.errors import UserError
from decode.common.ranges import Count, DraftLength, LearningRate, Seed, Temperature
from decode.drafts.base import METADATA_FILE
from decode.model.loading import load_target
from eval.metrics.bootstrap import paired_ratio_interval
from eval.reporting.formatting import format_with_interval
from eval.tasks.loading import Task
from scripts.experiments import held_out
from train import distill
from train.distill import DistillConfig, RunComponents
from train.families.alignment import AlignedIndices, Alignment
from train.families.config import DraftConfig
from train.families.heads.eagle import EagleTrainer, TrainableEagle
from train.hub.upload import TrainingPublishConfig
from train.losses import divergences
from train.losses.objective import DivergenceConfig
from train.trainer import collective
from train.trainer.acceptance_eval import AcceptanceEval

COMMAND = "scripts/experiments/reference_eagle3.py"
OWNED_FILES = ("reference_eagle3.json", "points/*.json", "drafts/**")
Recipe = Literal["usual", "ours"]
RECIPES: tuple[Recipe, ...] = ("usual", "ours")


@dataclass
class ReferenceEagle3Config:
    distill: DistillConfig = field(
        default_factory=lambda: DistillConfig(draft=DraftConfig(family="eagle3", vocab=2048, steps=4))
    )  # fmt: skip
    """Our recipe: settings of train/distill.py. Its seed, loop.eval_every, loop.keep_best, tracker, wandb, publish,
    out, resume, overwrite and dry_run have no effect."""
    usual_lr: LearningRate = 1e-3
    """Peak learning rate of the usual recipe, whose batches, steps and draft are those of `distill`."""
    seeds: list[Seed] = field(default_factory=lambda: [0, 1, 2])
    tasks: list[Task] = field(
        default_factory=lambda: [Task("code", limit=8), Task("prose", limit=8), Task("arithmetic", limit=8)]
    )  # fmt: skip
    """The held-out prompts; of chats the first turn."""
    k: DraftLength = 4
    """Tokens drafted per round."""
    temperatures: list[Temperature] = field(default_factory=lambda: [0.0, 1.0])
    max_new_tokens: Count = 48
    """Longest answer in evaluation, in tokens."""
    out: str = "outputs/reference_eagle3"
    overwrite: bool = False
    """Delete what an earlier run left in `out`."""


class UnshiftedAlignment(Alignment):
    """Slot t is trained if token t is part of a reply and what the slot predicts is part of the same reply."""

    def step(self, j: int) -> AlignedIndices:
        places = super().step(j)
        in_reply = (
            torch.cat([torch.zeros_like(self.run_length[:, :1]), self.run_length[:, :-1]], 1) > 0
        )
        return AlignedIndices(
            places.token, places.teacher, places.label, places.position, places.valid & in_reply
        )


class ReferenceEagleTrainer(EagleTrainer):
    """EagleTrainer with that mask, without positions whose most likely token is not in the draft's vocabulary."""

    alignment = UnshiftedAlignment

    def loss_positions(self, p_logits: Tensor, valid: Tensor) -> Tensor:
        return valid & divergences.argmax_in_vocabulary(p_logits, self.net.ids)[:, None]


def run_settings(s: ReferenceEagle3Config, recipe: Recipe, seed: int, out: str) -> DistillConfig:
    """The settings of train/distill.py for one run."""
    settings = replace(
        s.distill, seed=seed, out=out, loop=replace(s.distill.loop, eval_every=0, keep_best=False),
        tracker="none", publish=TrainingPublishConfig(), resume=False, overwrite=False, dry_run=False,
    )  # fmt: skip
    if recipe == "ours":
        return settings
    return replace(
        settings, loss="soft_ce", divergence=DivergenceConfig(), supervise="answers",
        loop=replace(settings.loop, lr=s.usual_lr, muon_lr=0.0),
    )  # fmt: skip


def load_components(
    s: DistillConfig, recipe: Recipe, ours: DistillConfig, accelerator: Accelerator
) -> tuple[DistillConfig, RunComponents]:
    """Those of `distill.load_components`, with the trainer of the recipe; both recipes read the features of `ours`."""
    target = load_target(s.target, str(accelerator.device), s.target_dtype, s.revision)
    rows, dropped = distill.load_rows(s, target)
    rows.whole = distill.load_rows(replace(s, supervise=ours.supervise), target)[0].whole
    s = replace(s, loop=s.loop.resolve_epochs(len(rows)))
    trainable = distill.build_draft(s, target, rows)
    assert isinstance(trainable, TrainableEagle)
    if recipe == "usual":
        trained = trainable.model
        assert isinstance(trained, EagleTrainer)
        trainable.model = ReferenceEagleTrainer(
            trained.net, trained.head, trained.embedding, trained.criterion, trained.weights, trained.steps
        )  # fmt: skip
    evaluation = AcceptanceEval(s.check, target, s.seed)
    inputs = distill.training_inputs(s, target, rows)
    return s, RunComponents(target, rows, dropped, trainable, evaluation, inputs)


def train_draft(s: ReferenceEagle3Config, recipe: Recipe, seed: int, console: Console) -> str:
    """The folder of the run's draft, which is trained there unless it is finished."""
    out = str(Path(s.out) / "drafts" / f"{recipe}-{seed}")
    if not (Path(out) / METADATA_FILE).is_file():
        settings = run_settings(s, recipe, seed, out)
        settings, accelerator = distill.init_accelerator(settings)
        settings, parts = load_components(settings, recipe, s.distill, accelerator)
        inputs = distill.input_paths(settings)
        run = collective.open_run(
            accelerator, out, settings, distill.COMMAND, distill.OWNED_FILES, inputs
        )
        with run as resumed, contextlib.redirect_stdout(sys.stderr):
            distill.distill(settings, accelerator, parts, console, resumed)
    return out


def measure(
    s: ReferenceEagle3Config, recipe: Recipe, seed: int, console: Console
) -> dict[str, list[list[int]]]:
    """What `held_out.count_acceptance` returns of the run's draft, from points/NAME.json if it is there."""
    file = Path(s.out) / "points" / f"{recipe}-{seed}.json"
    if not file.is_file():
        folder = train_draft(s, recipe, seed, console)
        counts = held_out.measure_draft(s, folder)
        files.write_atomically(file, json.dumps(counts) + "\n")
    return files.read_json_object(file, "a measurement of this command: delete it")


def check(s: ReferenceEagle3Config) -> None:
    """UserError for what would fail only after the first training."""
    if s.distill.draft.family != "eagle3":
        raise UserError(f"distill.draft.family is {s.distill.draft.family}: set it to eagle3")
    held_out.check_comparison(s, run_settings(s, "ours", 0, ""))


def compare(
    counts: dict[Recipe, list[dict[str, list[list[int]]]]], temperature: str
) -> dict[str, Any]:
    """τ of each recipe and seed, their ratios, and the ratio of all seeds together with an interval over prompts."""
    by_seed = {
        recipe: np.array([found[temperature] for found in counts[recipe]])[..., :2]
        for recipe in RECIPES
    }  # [seeds, prompts, (emitted, rounds)]
    tau = {name: (x.sum(1)[:, 0] / x.sum(1)[:, 1]).tolist() for name, x in by_seed.items()}
    ours, usual = (by_seed[name].sum(0).T for name in ("ours", "usual"))
    ratio = float(ours[0].sum() / ours[1].sum() / (usual[0].sum() / usual[1].sum()))
    return {
        "temperature": float(temperature),
        "tau": tau,
        "ratios": [a / b for a, b in zip(tau["ours"], tau["usual"], strict=True)],
        "ratio": ratio,
        "ratio_ci": paired_ratio_interval(ours[0], ours[1], usual[0], usual[1], 0),
    }


def main(s: ReferenceEagle3Config) -> None:
    run_dir.check_folder(Path(s.out))
    check(s)
    console = Console(stderr=True)
    with run_dir.open_run(s.out, s, COMMAND, OWNED_FILES, held_out.input_paths(s)):
        counts: dict[Recipe, list[dict[str, list[list[int]]]]] = {"usual": [], "ours": []}
        for seed in s.seeds:
            for recipe in counts:
                console.print(f"{recipe}, seed {seed}", highlight=False)
                counts[recipe].append(measure(s, recipe, seed, console))
        results = [compare(counts, str(temperature)) for temperature in s.temperatures]
        path = Path(s.out) / "reference_eagle3.json"
        facts = {"results": results, "seeds": s.seeds, "k": s.k, **provenance.collect()}
        files.write_atomically(path, json.dumps(facts, indent=1) + "\n")
    table = Table("T", "usual τ", "ours τ", "ours ÷ usual [95 %]", "by seed")
    for x in results:
        table.add_row(
            f"{x['temperature']:g}",
            *(f"{np.mean(x['tau'][recipe]):.3f}" for recipe in RECIPES),
            format_with_interval(x["ratio"], x["ratio_ci"], 3),
            ", ".join(f"{ratio:.3f}" for ratio in x["ratios"]),
        )
    console.print(table)
    print(
        json.dumps({"result": str(path), "ratios": {x["temperature"]: x["ratio"] for x in results}})
    )


if __name__ == "__main__":
    run_command(main, ReferenceEagle3Config, __doc__)
