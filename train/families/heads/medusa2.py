"""Medusa-2: heads and target trained together, the target by LoRA and kept close to the original (Cai et al. 2024).

The target's loss is self-distillation: KL from its distribution with the adapters off. Decoding is exact for the new
target, which differs from the original: it is saved beside the heads, and eval/checks/target_drift.py measures how far
it moved.
"""

from pathlib import Path

import torch
from torch import Tensor, nn

from decode.common.typed_json import to_json
from decode.drafts.medusa import MedusaModel
from train.data.batching import Batch
from train.families.base import FamilyContext, TrainableDraft
from train.families.head_loss import LossWeights
from train.families.heads.lora_target import LoraTarget, adapt_target
from train.families.heads.medusa import Medusa, MedusaTrainer, TrainableMedusa
from train.losses import chunked_sums, divergences
from train.losses.objective import Criterion
from train.teacher.live import TeacherOutput


class Medusa2(Medusa):
    """Trains Medusa heads together with LoRA adapters of the target; saved as family `medusa`."""

    settings = Medusa.settings | {"target_lora_rank"}
    trains_target = True

    def build(self, context: FamilyContext) -> TrainableDraft:
        return TrainableMedusa2(context)


class TrainableMedusa2(TrainableMedusa):
    """Medusa heads and the target's LoRA adapters in training."""

    model: "Medusa2Trainer"

    def init_model(self, context: FamilyContext) -> None:
        config, target = context.config, context.target
        self.lora_target = adapt_target(context)
        self.model = Medusa2Trainer(self.net, self.lora_target, context.criterion(), config.weights)
        self.teacher = None
        self.low_lr_parameters = list(self.model.adapters)
        self.metadata = {
            "target": {"name": str(Path(config.out) / "target"), "revision": None},
            "original_target": to_json(target.describe()),
        }

    def loss(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        sums: dict[str, Tensor] = model(batch)
        return sums

    def save(self, folder: Path) -> None:
        """Also writes the new target to `folder`/target; the adapters are merged into it for good."""
        super().save(folder)
        self.lora_target.save(folder / "target")


class Medusa2Trainer(nn.Module):
    """KL of the new target from the original at supervised rows, plus the heads' loss against the new target."""

    def __init__(
        self, net: MedusaModel, lora_target: LoraTarget, criterion: Criterion, weights: LossWeights
    ):
        super().__init__()
        self.heads = MedusaTrainer(net, lora_target.head, criterion, weights)
        self.adapters = nn.ParameterList(lora_target.parameters())
        self.lora_target = lora_target  # no module: its frozen weights do not belong to this one
        self.heads_weight = weights.heads

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
