"""The common EAGLE-3 training recipe beside this project's: same samples, steps, initial weights and schedule.

    python scripts/experiments/reference_eagle3.py --data outputs/reproduce/samples --out usual_eagle3.json

"usual": the loss mask marks the tokens of a reply and not the positions that predict them, so that the first draft of
every reply is never trained; the loss is the soft cross-entropy against the target's distribution renormalised on the
draft's vocabulary; positions whose most likely token is not in that vocabulary are left out. Positions that the mask
would train beyond a reply's end are left out as well, in its favour.
"ours": every position at which decoding drafts, with --loss.
Several seeds each; τ is measured by decoding the bundled evaluation prompts.
"""

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
from rich.console import Console
from rich.status import Status
from rich.table import Table
from torch import Tensor

from decode.common import files, provenance
from decode.common.command import run_command
from decode.common.errors import UserError
from decode.common.ranges import Count, CountOrZero, DraftLength, LearningRate, Seed
from decode.common.run_dir import check_file
from decode.drafts.eagle import EagleDraft
from decode.engine.engine import decode
from decode.engine.records import DecodeRecord
from decode.model.loading import Target, load_target
from decode.verification.sampling import SamplingParams
from eval.metrics import acceptance
from eval.tasks.loading import Task, TaskPrompt, load_task_prompts
from train.data import batching
from train.data.manifest import load_set
from train.data.sample_store import SampleRow
from train.distill import DistillConfig
from train.families import config
from train.families.alignment import AlignedIndices, Alignment
from train.families.base import FamilyContext
from train.families.eagle import EagleTrainer, TrainableEagle
from train.families.registry import family_trainer
from train.losses import divergences
from train.teacher.cached import CachedTeacher, FeatureFolder
from train.trainer.loop import LoopConfig, build_optimizers, lr_multiplier


@dataclass
class ReferenceEagle3Config:
    target: str = "assets/target"
    data: str = "outputs/reproduce/samples"
    features: str = "outputs/reproduce/features"
    """Folder of the target's hidden states, filled if they are missing."""
    loss: str = "lk_lambda"
    """Divergence of "ours"."""
    draft: config.DraftConfig = field(
        default_factory=lambda: config.DraftConfig(family="eagle3", vocab=2048, steps=4)
    )
    steps: Count = 100
    batch_size: Count = 16
    micro_batch: Count = 4
    lr: LearningRate = 2e-3
    warmup: CountOrZero = 10
    seeds: list[Seed] = field(default_factory=lambda: [0, 1, 2])
    tasks: list[Task] = field(
        default_factory=lambda: [Task("code", limit=8), Task("prose", limit=8), Task("arithmetic", limit=8)]
    )  # fmt: skip
    k: DraftLength = 4
    max_new_tokens: Count = 48
    out: str = ""
    """File for the JSON of the last line; empty: none."""


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


def train_draft(
    s: ReferenceEagle3Config,
    target: Target,
    rows: Sequence[SampleRow],
    recipe: str,
    seed: int,
    status: Status,
) -> EagleDraft:
    """An EAGLE-3 draft after `steps` steps of recipe "usual" or "ours"; shows the loss in `status`."""
    torch.manual_seed(seed)
    loss: Any = "soft_ce" if recipe == "usual" else s.loss
    settings = DistillConfig(draft=s.draft, loss=loss)
    folder = FeatureFolder(Path(s.features), 64, target.decoder.context)
    context = FamilyContext(settings, target, rows, "cpu", folder)
    trainee = family_trainer("eagle3").build(context)
    assert isinstance(trainee, TrainableEagle)
    assert isinstance(trainee.teacher, CachedTeacher)
    trainee.teacher.fill_store(Console(stderr=True), 0, 1, lambda: None)
    if recipe == "usual":
        trainee.model = ReferenceEagleTrainer(
            trainee.net,
            trainee.teacher.head,
            target.decoder.model.get_input_embeddings().weight.detach(),
            context.criterion(),
            settings.weights,
            s.draft.steps,
        )
    model = trainee.model
    loop = LoopConfig(steps=s.steps, warmup=s.warmup, lr=s.lr)
    (optimizer,) = build_optimizers(model, [], [], loop)
    for step in range(s.steps):
        for group in optimizer.param_groups:
            group["lr"] = s.lr * lr_multiplier(step, loop)
        chosen = [rows[i] for i in batching.step_indices(len(rows), s.batch_size, seed, step)]
        chosen.sort(key=lambda row: len(row["input_ids"]))
        tokens = batching.supervised_token_count(chosen)
        total = 0.0
        for at in range(0, len(chosen), s.micro_batch):
            micro_batch = batching.collate(chosen[at : at + s.micro_batch], pad_id=0)
            sums = trainee.loss(model, micro_batch)
            (sums["loss"] / tokens).backward()
            total += float(sums["loss"].detach()) / tokens
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        status.update(f"{recipe} seed {seed} step {step + 1}/{s.steps} loss {total:.3f}")
    draft = trainee.to_draft()
    assert isinstance(draft, EagleDraft)
    return draft


def decode_samples(
    s: ReferenceEagle3Config,
    target: Target,
    draft: EagleDraft,
    items: list[TaskPrompt],
    temperature: float,
) -> list[DecodeRecord]:
    """A record of each prompt, decoded with chains of `s.k` drafts."""
    prompts = [item.prompt_ids for item in items]
    return decode(
        target, draft, prompts, k=s.k, rows=8, max_new_tokens=s.max_new_tokens,
        sampling=SamplingParams(temperature), seed=0,
    )  # fmt: skip


def main(s: ReferenceEagle3Config) -> None:
    check_file(s.out)
    if s.loss not in divergences.LOSSES:
        known = ", ".join(divergences.LOSSES)
        raise UserError(f"loss: no divergence {s.loss!r}; there are {known}")
    if s.draft.family != "eagle3" or not s.seeds:
        raise UserError("set draft.family to eagle3, and give at least one of seeds")
    console = Console(stderr=True)
    target = load_target(s.target, "cpu")
    rows, _ = batching.truncate_rows(load_set(Path(s.data))[1], target.decoder.context)
    items = [item for task in s.tasks for item in load_task_prompts(task, target)]
    cells: list[dict[str, Any]] = []
    for seed in s.seeds:
        for recipe in ("usual", "ours"):
            with console.status("") as status:
                draft = train_draft(s, target, rows, recipe, seed, status)
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
    line = json.dumps(result | provenance.collect())
    if s.out:
        files.write_atomically(Path(s.out), line + "\n")
    print(line)


if __name__ == "__main__":
    run_command(main, ReferenceEagle3Config, __doc__)
