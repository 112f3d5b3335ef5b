"""Medusa heads in training: weights, loss against the target's distributions, and sizes (Cai et al. 2024)."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from decode.checkpoints import head_layouts, layouts
from decode.drafts import medusa
from decode.drafts.base import Draft
from decode.drafts.medusa import MedusaDraft, MedusaModel
from decode.model.loading import Target
from train.data.batching import Batch
from train.families.alignment import Alignment
from train.families.base import (
    FamilyContext,
    FamilyTrainer,
    TrainableDraft,
    matrix_parameters,
    model_dtype,
)
from train.families.config import DraftConfig
from train.families.head_init import (
    check_against_saved,
    check_widths,
    load_saved_config,
)
from train.families.head_loss import LossWeights, SupervisedRows, loss_and_metrics, step_weights
from train.losses import chunked_sums
from train.losses.objective import Criterion
from train.teacher.live import TeacherOutput


class Medusa(FamilyTrainer):
    """Trains Medusa heads on a frozen target."""

    settings = frozenset({"init", "heads", "head_layers"})
    description = "Medusa heads"
    hub_tag = "medusa"

    def build(self, context: FamilyContext) -> TrainableDraft:
        return TrainableMedusa(context)


class TrainableMedusa(TrainableDraft):
    """Medusa heads in training on a frozen target."""

    def __init__(self, context: FamilyContext):
        self.net = init_medusa(context.config.draft, context.target, context.device)
        self.target = context.target
        self.muon_parameters = matrix_parameters(self.net.blocks)
        self.metadata = {}
        self.init_model(context)

    def init_model(self, context: FamilyContext) -> None:
        """Sets `teacher` and `model`."""
        self.teacher = context.teacher(self.net.taps)
        self.model = MedusaTrainer(
            self.net, self.teacher.head, context.criterion(), context.config.weights
        )

    def to_draft(self) -> Draft:
        return MedusaDraft(self.net, self.target)

    def save(self, folder: Path) -> None:
        layouts.save_heads(folder, self.net.config, self.net, model_dtype(self.target), None)


class MedusaTrainer(nn.Module):
    """The loss of all heads of a MedusaModel over the target's final hidden states, as a module."""

    def __init__(
        self,
        net: MedusaModel,
        head: Callable[[Tensor], Tensor],
        criterion: Criterion,
        weights: LossWeights,
    ):
        super().__init__()
        self.net, self.head, self.criterion, self.weights = net, head, criterion, weights

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

        weight = step_weights(self.weights, rows, step_logits, slots, None, size)
        return chunked_sums.sums_in_chunks(
            sums, [rows.take(output.head_inputs), slots, rows.valid, weight], size
        )


def init_medusa(s: DraftConfig, target: Target, device: str) -> MedusaModel:
    """Saved heads, or new ones whose logits are those of the target's LM head."""
    check_widths(target)
    if s.init:
        config = load_saved_config(s, "medusa")
        check_against_saved(s, heads=config["num_heads"], head_layers=config["num_hidden_layers"])
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
