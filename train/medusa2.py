"""Medusa-2: heads and target trained together, the target by LoRA and held close to what it was (Cai et al. 2024).

The target's loss is self-distillation: KL from its own law with the adapters off. Decoding is then exact for the new
target, which is another model than the old: it is saved beside the heads, and eval/quality.py says how far it moved.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from decode.drafts.medusa import MedusaNet
from decode.taps import Taps, head_of, layer_stack
from decode.target import Target
from train import losses
from train.batches import Batch
from train.criterion import Criterion
from train.heads import MedusaTrainer, Weights
from train.teacher import Look, states_of


class Adapted:
    """A target whose linear layers carry LoRA adapters. The adapters are in the target's own modules."""

    def __init__(self, target: Target, rank: int):
        self.target = target
        config = LoraConfig(
            r=rank, lora_alpha=rank, target_modules=linear_layers(target.decoder.model)
        )
        self.peft = get_peft_model(target.decoder.model, config)
        self.head = head_of(target.decoder.model)

    def parameters(self) -> list[nn.Parameter]:
        """Those of the adapters."""
        return [p for p in self.peft.parameters() if p.requires_grad]

    @contextmanager
    def off(self) -> Iterator[None]:
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
        return states_of(self.target.decoder.model, batch, Taps(final=True))

    def save(self, folder: Path) -> None:
        """The new target as a plain model, adapters merged in, with its tokenizer."""
        merged: Any = self.peft.merge_and_unload()  # type: ignore[operator]
        merged.save_pretrained(folder, safe_serialization=True)
        if self.target.tokenizer is not None:
            self.target.tokenizer.save_pretrained(folder)


def linear_layers(model: Any) -> list[str]:
    """Names of the linear modules inside the decoder's layers: not the LM head, nor anything that sees pictures."""
    stack = layer_stack(model)
    inside = {id(module) for module in stack.modules() if isinstance(module, nn.Linear | Conv1D)}
    return [name for name, module in model.named_modules() if id(module) in inside]


class Medusa2Trainer(nn.Module):
    """KL of the new target from the old at supervised rows, plus the heads' loss against the new one."""

    def __init__(self, net: MedusaNet, adapted: Adapted, criterion: Criterion, weights: Weights):
        super().__init__()
        self.heads = MedusaTrainer(net, adapted.head, criterion, weights)
        self.adapters = nn.ParameterList(adapted.parameters())
        self.adapted = adapted  # no module: its frozen weights are not this trainer's
        self.share = weights.heads

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        new = self.adapted.states(batch)
        with torch.no_grad(), self.adapted.off():
            old = self.adapted.states(batch)
        found = self.heads(batch, Look(new, new.detach()))
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
            return {"kl": losses.forward_kl(head(old), head(new)).sum()}

        size = self.heads.net.config["vocab_size"]
        return losses.sums_in_chunks(sums, [old, new], losses.rows_for(size))
