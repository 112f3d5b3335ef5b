"""Medusa-2: heads and target trained together, the target by LoRA and held close to what it was (Cai et al. 2024).

The target's loss is self-distillation: KL from its own law with the adapters off. Decoding is then exact for the new
target, which is another model than the old: it is saved beside the heads, and eval/checks/target_drift.py says how far it moved.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from decode.common.errors import UserError
from decode.drafts.medusa import MedusaModel
from decode.model.hidden_states import HiddenStateSpec, layer_stack, lm_head_function
from decode.model.loading import Target
from train.data.batching import Batch
from train.families import medusa as families_medusa
from train.families.base import FamilyContext, TrainableDraft
from train.families.head_loss import LossWeights
from train.families.medusa import MedusaTrainer, _build_medusa
from train.losses import divergences
from train.losses.objective import Criterion
from train.teacher.live import TeacherOutput, compute_hidden_states


class LoraTarget:
    """A target whose linear layers carry LoRA adapters. The adapters are in the target's own modules."""

    def __init__(self, target: Target, rank: int):
        self.target = target
        config = LoraConfig(
            r=rank, lora_alpha=rank, target_modules=linear_layer_names(target.decoder.model)
        )
        self.peft = get_peft_model(target.decoder.model, config)
        self.head = lm_head_function(target.decoder.model)

    def parameters(self) -> list[nn.Parameter]:
        """Those of the adapters."""
        return [p for p in self.peft.parameters() if p.requires_grad]

    @contextmanager
    def adapters_disabled(self) -> Iterator[None]:
        """Within it the target is what it was."""
        layers = [m for m in self.peft.modules() if isinstance(m, LoraLayer)]
        for layer in layers:
            layer.enable_adapters(False)  # type: ignore[attr-defined]
        try:
            yield
        finally:
            for layer in layers:
                layer.enable_adapters(True)  # type: ignore[attr-defined]

    def states(self, batch: Batch) -> Tensor:
        """[B, T, H] what the LM head reads."""
        return compute_hidden_states(self.target.decoder.model, batch, HiddenStateSpec(final=True))

    def save(self, folder: Path) -> None:
        """The new target as a plain model, adapters merged in, with its tokenizer."""
        merged: Any = self.peft.merge_and_unload()  # type: ignore[operator]
        merged.save_pretrained(folder, safe_serialization=True)
        if self.target.tokenizer is not None:
            self.target.tokenizer.save_pretrained(folder)


def linear_layer_names(model: Any) -> list[str]:
    """Names of the linear modules inside the decoder's layers: not the LM head, nor anything that sees pictures."""
    stack = layer_stack(model)
    inside = {id(module) for module in stack.modules() if isinstance(module, nn.Linear | Conv1D)}
    return [name for name, module in model.named_modules() if id(module) in inside]


class Medusa2Trainer(nn.Module):
    """KL of the new target from the old at supervised rows, plus the heads' loss against the new one."""

    def __init__(
        self, net: MedusaModel, adapted: LoraTarget, criterion: Criterion, weights: LossWeights
    ):
        super().__init__()
        self.heads = MedusaTrainer(net, adapted.head, criterion, weights)
        self.adapters = nn.ParameterList(adapted.parameters())
        self.adapted = adapted  # no module: its frozen weights are not this trainer's
        self.share = weights.heads

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        new = self.adapted.states(batch)
        with torch.no_grad(), self.adapted.adapters_disabled():
            old = self.adapted.states(batch)
        found = self.heads(batch, TeacherOutput(new, new.detach()))
        drift = self.drift(old[batch.loss_mask], new[batch.loss_mask])
        return {
            **found,
            "loss": drift["kl"] + self.share * found["loss"],
            "kl": drift["kl"].detach(),
        }

    def drift(self, old: Tensor, new: Tensor) -> dict[str, Tensor]:
        """{"kl": sum} over rows of states [N, H]."""
        head = self.adapted.head

        def sums(old: Tensor, new: Tensor) -> dict[str, Tensor]:
            return {"kl": divergences.forward_kl(head(old), head(new)).sum()}

        size = self.heads.net.config["vocab_size"]
        return divergences.sums_in_chunks(sums, [old, new], divergences.max_chunk_rows(size))


def build_medusa2(job: FamilyContext) -> TrainableDraft:
    if job.where is not None:
        raise UserError("medusa2 trains the target as well: leave `features` empty, it runs live")
    net = families_medusa.init_medusa(job.s.draft, job.target, job.device)
    adapted = LoraTarget(job.target, job.s.draft.rank)
    model = Medusa2Trainer(net, adapted, job.criterion(), job.s.weights)
    trainee = _build_medusa(job, net, model, lambda wrapped: lambda batch: wrapped(batch), None)

    def save(out: Path) -> None:
        trainee.save(out)
        adapted.save(out / "target")

    facts = {
        "family": "medusa",
        "target": {"name": str(Path(job.s.out) / "target"), "revision": None},
        "original_target": {"name": job.target.name, "revision": job.target.revision},
    }
    return replace(trainee, save=save, facts=facts, slow=list(model.adapters))
