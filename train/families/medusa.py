"""Medusa heads in training, on a frozen target or together with it (Cai et al. 2024).

Medusa-2 trains the target by LoRA and keeps it close to the original by self-distillation: KL from its distribution
with the adapters off. Decoding is exact for the new target, which differs from the original: it is saved beside the
heads, and eval/checks/target_drift.py measures how far it moved.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from decode.checkpoints import head_layouts, layouts
from decode.common.target_record import TargetRecord
from decode.drafts import medusa
from decode.drafts.base import Draft
from decode.drafts.medusa import MedusaDraft, MedusaModel
from decode.model.loading import Target
from train.data.batching import Batch
from train.families.alignment import Alignment
from train.families.base import (
    FamilyContext,
    TrainableDraft,
    check_widths,
    load_saved_config,
    matrix_parameters,
    model_dtype,
)
from train.families.head_loss import SupervisedRows, loss_and_metrics, step_weights
from train.families.lora_target import LoraTarget, adapt_target
from train.families.settings.heads import Medusa2Settings, MedusaSettings
from train.losses import chunked_sums, divergences
from train.teacher.live import TeacherOutput


class TrainableMedusa(TrainableDraft):
    """Medusa heads in training on a frozen target."""

    def __init__(self, context: FamilyContext, s: MedusaSettings):
        self.net = init_medusa(s, context.target, context.device)
        self.target = context.target
        self.muon_parameters = matrix_parameters(self.net.blocks)
        self.metadata = {}
        self.init_model(context, s)

    def init_model(self, context: FamilyContext, s: MedusaSettings) -> None:
        """Sets `teacher` and `model`."""
        self.teacher = context.teacher(self.net.aux_layers)
        self.model = MedusaTrainer(self.net, self.teacher.head, context)

    def to_draft(self) -> Draft:
        return MedusaDraft(self.net, self.target)

    def save(self, folder: Path) -> None:
        layouts.save_heads(folder, self.net.config, self.net, model_dtype(self.target), None)


class MedusaTrainer(nn.Module):
    """The loss of all heads of a MedusaModel over the target's final hidden states, as a module."""

    def __init__(self, net: MedusaModel, head: Callable[[Tensor], Tensor], context: FamilyContext):
        super().__init__()
        self.net, self.head = net, head
        self.criterion, self.weights = context.criterion(), context.config.weights

    def forward(self, batch: Batch, output: TeacherOutput) -> dict[str, Tensor]:
        steps = len(self.net.blocks)
        places = Alignment(batch.input_ids, batch.loss_mask, steps, batch.documents)
        rows = SupervisedRows(places, steps)
        features = output.features.to(next(self.net.parameters()).dtype)
        slots = torch.stack(
            [rows.values_at_slots(features, j) for j in range(steps)], 1
        )  # [N, K, H]
        size = chunked_sums.max_chunk_rows(self.net.config["vocab_size"])

        def step_logits(slots: Tensor) -> list[Tensor]:
            return [self.net.logits(slots[:, j], j) for j in range(steps)]

        def sums(
            teacher: Tensor, slots: Tensor, valid: Tensor, weight: Tensor
        ) -> dict[str, Tensor]:
            return loss_and_metrics(
                self.criterion, self.head(teacher), step_logits(slots), valid, weight, None
            )

        teacher = rows.take(output.head_inputs)
        weight = step_weights(
            self.weights, rows, step_logits, slots, None, size, self.head, teacher
        )
        return chunked_sums.sums_in_chunks(sums, [teacher, slots, rows.valid, weight], size)


def init_medusa(s: MedusaSettings, target: Target, device: str) -> MedusaModel:
    """Saved heads, or new ones whose logits are those of the target's LM head."""
    check_widths(target)
    if s.init:
        s.continued(load_saved_config(s.init, "medusa"), target.runner.config.num_hidden_layers)
        return medusa.load(s.init, target, device, "float32").net
    config = head_layouts.medusa_config(
        target.runner.config, s.heads, s.head_layers, target.runner.vocab_size
    )
    net = MedusaModel(config)
    start = target.runner.model.get_output_embeddings().weight.detach()
    with torch.no_grad():
        for parameter in net.lm_heads.parameters():
            parameter.copy_(start)
    return net.to(device)


class TrainableMedusa2(TrainableMedusa):
    """Medusa heads and the target's LoRA adapters in training."""

    model: "Medusa2Trainer"

    def init_model(self, context: FamilyContext, s: MedusaSettings) -> None:
        assert isinstance(s, Medusa2Settings)
        target = context.target
        self.lora_target = adapt_target(context, s.family, s.target_lora_rank)
        self.model = Medusa2Trainer(self.net, self.lora_target, context)
        self.teacher = None
        self.low_lr_parameters = list(self.model.adapters)
        self.metadata = {
            "target": TargetRecord(str(Path(context.config.out) / "target")),
            "original_target": target.describe(),
        }

    def save(self, folder: Path) -> None:
        """Also writes the new target to `folder`/target; the adapters are merged into it for good."""
        super().save(folder)
        self.lora_target.save(folder / "target")


class Medusa2Trainer(nn.Module):
    """KL of the new target from the original at supervised rows, plus the heads' loss against the new target."""

    def __init__(self, net: MedusaModel, lora_target: LoraTarget, context: FamilyContext):
        super().__init__()
        self.heads = MedusaTrainer(net, lora_target.head, context)
        self.adapters = nn.ParameterList(lora_target.parameters())
        self.lora_target = lora_target  # no module: its frozen weights do not belong to this one
        self.heads_weight = context.config.weights.heads

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        new = self.lora_target.states(batch)
        with torch.no_grad(), self.lora_target.adapters_disabled():
            original = self.lora_target.states(batch)
        sums = self.heads(batch, TeacherOutput(new, new.detach()))
        kl = self.kl_from_original(original[batch.loss_mask], new[batch.loss_mask])
        return {**sums, "loss": kl + self.heads_weight * sums["loss"], "kl": kl.detach()}

    def kl_from_original(self, original: Tensor, new: Tensor) -> Tensor:
        """The sum over rows of final hidden states [N, H] of both targets."""
        head = self.lora_target.head

        def chunk_loss(original: Tensor, new: Tensor) -> dict[str, Tensor]:
            return {"loss": divergences.forward_kl(head(original), head(new)).sum()}

        size = chunked_sums.max_chunk_rows(self.heads.net.config["vocab_size"])
        return chunked_sums.sums_in_chunks(chunk_loss, [original, new], size)["loss"]
