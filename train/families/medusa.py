"""TODO: train.families.registry.medusa."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from decode.checkpoints import layouts
from decode.drafts import medusa
from decode.drafts.medusa import MedusaDraft, MedusaModel
from decode.model.loading import Target
from train.data.batching import Batch
from train.families.alignment import Alignment
from train.families.base import (
    FamilyContext,
    TrainableDraft,
    make_loss_fn,
    matrix_parameters,
    model_dtype,
)
from train.families.config import DraftConfig
from train.families.head_init import check_against_saved, check_widths, load_saved_config
from train.families.head_loss import LossWeights, SupervisedRows, loss_and_metrics, step_weights
from train.losses import divergences
from train.losses.objective import Criterion, LossFn
from train.teacher.cached import CachedTeacher
from train.teacher.live import LiveTeacher, TeacherOutput


def build_medusa1(job: FamilyContext) -> TrainableDraft:
    net = init_medusa(job.s.draft, job.target, job.device)
    teacher = job.teacher(net.taps)
    model = MedusaTrainer(net, teacher.head, job.criterion(), job.s.weights)
    return _build_medusa(job, net, model, partial(make_loss_fn, teacher), teacher)


def _build_medusa(
    job: FamilyContext,
    net: MedusaModel,
    model: nn.Module,
    objective: Callable[[nn.Module], LossFn],
    teacher: LiveTeacher | CachedTeacher | None,
) -> TrainableDraft:
    return TrainableDraft(
        model=model,
        objective=objective,
        draft=lambda: MedusaDraft(net, job.target),
        muon_parameters=matrix_parameters(net.blocks),
        save=lambda out: layouts.save_heads(out, net.config, net, model_dtype(job.target), None),
        facts={},
        teacher=teacher,
    )


class MedusaTrainer(nn.Module):
    """All heads of a MedusaNet over the target's final states."""

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
        seen = output.features.to(next(self.net.parameters()).dtype)
        slots = torch.stack([rows.values_at_slots(seen, j) for j in range(steps)], 1)  # [N, K, H]
        size = divergences.max_chunk_rows(self.net.config["vocab_size"])

        def say(slots: Tensor) -> list[Tensor]:
            return [self.net.logits(slots[:, j], j) for j in range(steps)]

        def sums(
            teacher: Tensor, slots: Tensor, valid: Tensor, weight: Tensor
        ) -> dict[str, Tensor]:
            return loss_and_metrics(
                self.criterion, self.head(teacher), say(slots), valid, weight, None
            )

        weight = step_weights(self.weights, rows, say, slots, None, size)
        return divergences.sums_in_chunks(
            sums, [rows.take(output.head_inputs), slots, rows.valid, weight], size
        )


def init_medusa(s: DraftConfig, target: Target, device: str) -> MedusaModel:
    """Saved heads, or new ones that say what the target's own head says."""
    check_widths(target)
    if s.init:
        config = load_saved_config(s, "medusa")
        check_against_saved(s, heads=config["num_heads"], head_layers=config["num_hidden_layers"])
        return medusa.load(s.init, target, device, "float32").net
    config = layouts.medusa_config(
        target.decoder.config, s.heads, s.head_layers, target.decoder.vocab_size
    )
    net = MedusaModel(config)
    start = target.decoder.model.get_output_embeddings().weight.detach()
    with torch.no_grad():
        for parameter in net.lm_heads.parameters():
            parameter.copy_(start)
    return net.to(device)
