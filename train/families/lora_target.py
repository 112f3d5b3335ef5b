"""A target that is trained itself, by LoRA adapters in its own modules: switched off, they give the original target."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from decode.common.errors import UserError
from decode.common.target_settings import QUANTIZED_DTYPES
from decode.model.hidden_states import HiddenStateSpec, LMHead
from decode.model.layer_stack import layer_stack
from decode.model.loading import Target
from train.data.batching import Batch
from train.families.base import FamilyContext
from train.teacher.live import compute_hidden_states


class LoraTarget:
    """A target whose linear layers carry LoRA adapters. The adapters are in the target's own modules."""

    def __init__(self, target: Target, rank: int):
        from peft import LoraConfig, get_peft_model  # takes half a second

        self.target = target
        config = LoraConfig(
            r=rank, lora_alpha=rank, target_modules=linear_layer_names(target.runner.model)
        )
        self.peft = get_peft_model(target.runner.model, config)
        self.head = LMHead(target.runner.model)

    def parameters(self) -> list[nn.Parameter]:
        """The parameters of the adapters."""
        return [p for p in self.peft.parameters() if p.requires_grad]

    @contextmanager
    def adapters_disabled(self) -> Iterator[None]:
        """Inside this block the model computes the original target's outputs."""
        from peft.tuners.lora import LoraLayer

        layers = [m for m in self.peft.modules() if isinstance(m, LoraLayer)]
        for layer in layers:
            layer.enable_adapters(False)  # type: ignore[attr-defined]
        try:
            yield
        finally:
            for layer in layers:
                layer.enable_adapters(True)  # type: ignore[attr-defined]

    def states(self, batch: Batch, layers: tuple[int, ...] = ()) -> Tensor:
        """[B, T, F] the states that enter `layers`, then the final ones, which the LM head reads."""
        taps = HiddenStateSpec(layers, final=True)
        return compute_hidden_states(self.target.runner.model, batch, taps)

    def save(self, folder: Path) -> None:
        """Writes the new target as a plain model with the adapters merged in, and its tokenizer."""
        merged: Any = self.peft.merge_and_unload()  # type: ignore[operator]
        merged.save_pretrained(folder, safe_serialization=True)
        if self.target.tokenizer is not None:
            self.target.tokenizer.save_pretrained(folder)


def adapt_target(context: FamilyContext, family: str, rank: int) -> LoraTarget:
    """The context's target with adapters of this rank. UserError for stored features, which would be those of a target
    that no longer exists."""
    if context.feature_folder is not None:
        raise UserError(f"{family} trains the target as well: leave `features` empty, it runs live")
    if context.target.dtype in QUANTIZED_DTYPES:
        raise UserError(
            f"{family} trains the target as well, which is fixed in {context.target.dtype}: set target_dtype to float32"
        )
    return LoraTarget(context.target, rank)


def linear_layer_names(model: Any) -> list[str]:
    """Names of the linear modules inside the decoder layers, without the LM head and vision towers."""
    stack = layer_stack(model)
    inside = {id(module) for module in stack.modules() if isinstance(module, nn.Linear | Conv1D)}
    return [name for name, module in model.named_modules() if id(module) in inside]
