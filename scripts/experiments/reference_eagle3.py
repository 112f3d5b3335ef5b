"""The field's usual EAGLE-3 recipe beside ours: the same samples, steps, start and schedule, several seeds.

    python scripts/experiments/reference_eagle3.py --data outputs/reproduce/samples --features outputs/reproduce/features

"usual": the loss mask of the tokens themselves and not of what a slot predicts, so that the first draft of every reply
is never trained; soft cross-entropy against the law renormalised on the draft's vocabulary; places whose best token
the draft cannot say left out. What that mask trains behind a reply's end is left out as well, in its favour.
"ours": every place where decoding drafts, with --loss. τ is measured by the decoder on the bundled evaluation prompts.
"""

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from decode.common import files, run_dir
from decode.common.cli import run_command
from decode.drafts.eagle import EagleDraft
from decode.engine.engine import decode
from decode.model.loading import Target, load_target
from decode.verification.sampling import SamplingParams
from eval.metrics import acceptance
from decode.engine.records import DecodeRecord
from eval.tasks.loading import Task, TaskPrompt, load_task_prompts
from train.data import batching, sample_store
from train.data.sample_store import SampleRow
from train.families import config
from train.families.alignment import AlignedIndices, Alignment
from train.families.base import FamilyContext
from train.families.eagle import EagleTrainer, build_eagle3
from train.families.head_loss import LossWeights
from train.losses import divergences
from train.losses.objective import DivergenceConfig
from train.teacher.cached import CachedTeacher, FeatureFolder
from train.trainer.loop import LoopConfig, build_optimizers, lr_multiplier


@dataclass
class ReferenceEagle3Config:
    target: str = "assets/target"
    data: str = "outputs/reproduce/samples"
    features: str = "outputs/reproduce/features"
    """Cached states, made if they are not there."""
    loss: str = "lk_lambda"
    """What ours minimises."""
    draft: config.DraftConfig = field(
        default_factory=lambda: config.DraftConfig(family="eagle3", vocab=2048, steps=4)
    )
    steps: int = 100
    batch_size: int = 16
    micro_batch: int = 4
    lr: float = 2e-3
    warmup: int = 10
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    tasks: list[Task] = field(
        default_factory=lambda: [Task("code", limit=8), Task("prose", limit=8), Task("arithmetic", limit=8)]
    )  # fmt: skip
    k: int = 4
    max_new_tokens: int = 48
    out: str = ""
    """File for the JSON of the last line; empty writes none."""


class UnshiftedAlignment(Alignment):
    """Slot t counts if token t is the reply's, whatever it predicts, as long as that lies in the same reply."""

    def step(self, j: int) -> AlignedIndices:
        places = super().step(j)
        own = torch.cat([torch.zeros_like(self.reach[:, :1]), self.reach[:, :-1]], 1) > 0
        return AlignedIndices(
            places.token, places.teacher, places.label, places.position, places.valid & own
        )


class ReferenceEagleTrainer(EagleTrainer):
    """The trainer with that mask, which leaves out what the draft's vocabulary lacks."""

    alignment = UnshiftedAlignment

    def trained(self, p_logits: Tensor, valid: Tensor) -> Tensor:
        return valid & divergences.argmax_in_vocabulary(p_logits, self.net.ids)[:, None]


def train_draft(
    s: ReferenceEagle3Config,
    target: Target,
    rows: Sequence[SampleRow],
    recipe: str,
    seed: int,
    tick: Callable[[str], None],
) -> EagleDraft:
    """A draft after `steps` steps."""
    torch.manual_seed(seed)
    loss = s.loss if recipe == "ours" else "soft_ce"
    recipe_of = SimpleNamespace(
        draft=s.draft, loss=loss, compare=DivergenceConfig(), weights=LossWeights()
    )
    where = FeatureFolder(Path(s.features), 64, target.decoder.context)
    trainee = build_eagle3(FamilyContext(cast(Any, recipe_of), target, rows, "cpu", where))
    assert isinstance(trainee.teacher, CachedTeacher)
    trainee.teacher.fill_store(Console(stderr=True), 0, 1, lambda: None)
    model = cast(EagleTrainer, trainee.model)
    if recipe == "usual":
        model.__class__ = ReferenceEagleTrainer
    loop = LoopConfig(steps=s.steps, warmup=s.warmup, lr=s.lr)
    (optimizer,) = build_optimizers(model, [], [], loop)
    objective = trainee.objective(model)
    for step in range(s.steps):
        for group in optimizer.param_groups:
            group["lr"] = s.lr * lr_multiplier(step, loop)
        chosen = [rows[i] for i in batching.step_indices(len(rows), s.batch_size, seed, step)]
        chosen.sort(key=lambda row: len(row["input_ids"]))
        tokens = batching.supervised_token_count(chosen)
        total = 0.0
        for at in range(0, len(chosen), s.micro_batch):
            sums = objective(batching.collate(chosen[at : at + s.micro_batch], pad_id=0))
            (sums["loss"] / tokens).backward()
            total += float(sums["loss"].detach()) / tokens
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        tick(f"{recipe} seed {seed} step {step + 1}/{s.steps} loss {total:.3f}")
    draft = trainee.draft()
    assert isinstance(draft, EagleDraft)
    return draft


def decode_samples(
    s: ReferenceEagle3Config,
    target: Target,
    draft: EagleDraft,
    items: list[TaskPrompt],
    temperature: float,
) -> list[DecodeRecord]:
    prompts = [item.prompt_ids for item in items]
    return decode(
        target, draft, prompts, k=s.k, rows=8, max_new_tokens=s.max_new_tokens,
        sampling=SamplingParams(temperature), seed=0,
    )  # fmt: skip


def main(s: ReferenceEagle3Config) -> None:
    console = Console(stderr=True)
    target = load_target(s.target, "cpu")
    rows, _ = batching.truncate_rows(sample_store.read_shards(Path(s.data)), target.decoder.context)
    items = [item for task in s.tasks for item in load_task_prompts(task, target)]
    cells: list[dict[str, Any]] = []
    for seed in s.seeds:
        for recipe in ("usual", "ours"):
            with console.status("") as status:
                draft = train_draft(s, target, rows, recipe, seed, status.update)
            for temperature in (0.0, 1.0):
                found = decode_samples(s, target, draft, items, temperature)
                cells.append(
                    {
                        "recipe": recipe, "seed": seed, "temperature": temperature,
                        "tau": acceptance.tau(found), "alpha": acceptance.alpha(found, s.k),
                        "alpha_by_position": acceptance.alpha_by_position(found, s.k),
                    }
                )  # fmt: skip
                console.print(cells[-1])
    table = Table("T", "usual τ", "ours τ", "ours ÷ usual, by seed")
    ratios = {}
    for temperature in (0.0, 1.0):
        tau = {
            recipe: [
                c["tau"] for c in cells if c["recipe"] == recipe and c["temperature"] == temperature
            ]
            for recipe in ("usual", "ours")
        }
        ratios[f"{temperature:g}"] = [a / b for a, b in zip(tau["ours"], tau["usual"], strict=True)]
        table.add_row(
            f"{temperature:g}",
            *(f"{statistics.fmean(tau[recipe]):.3f}" for recipe in ("usual", "ours")),
            ", ".join(f"{r:.3f}" for r in ratios[f"{temperature:g}"]),
        )
    console.print(table)
    result = {"cells": cells, "ratios": ratios, "samples": len(rows), "steps": s.steps}
    line = json.dumps(result | run_dir.provenance())
    if s.out:
        files.write_atomically(Path(s.out), line + "\n")
    print(line)


if __name__ == "__main__":
    run_command(main, ReferenceEagle3Config, __doc__)
