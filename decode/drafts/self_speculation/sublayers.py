"""A causal LM without some of its attention and MLP sub-layers, for any architecture that keeps them in modules."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from decode.common.errors import UserError
from decode.model.cut_layers import output_counts
from decode.model.layer_stack import (
    check_whole,
    layer_stack,
    layer_stack_name,
    shallow_copy,
    with_module,
)

ATTENTION_NAMES = ("self_attn", "attn", "attention")
MLP_NAMES = ("mlp", "feed_forward", "block_sparse_moe")


@dataclass(frozen=True)
class SkipSet:
    """The layers without their attention and those without their MLP. The first and the last layer keep both."""

    attention: tuple[int, ...]
    mlp: tuple[int, ...]


def from_bits(bits: str) -> SkipSet:
    """The set of a text of 2 (L - 2) digits: attention of layers 1 to L - 2, then their MLPs; 1 means skipped."""
    half = len(bits) // 2
    found = [
        tuple(i + 1 for i in range(half) if part[i] == "1") for part in (bits[:half], bits[half:])
    ]
    return SkipSet(*found)


class Nothing(nn.Module):
    """Takes the place of a sub-layer and adds zero to the residual stream, in the form in which that returns it."""

    def __init__(self, returns_tuple: bool):
        super().__init__()
        self.returns_tuple = returns_tuple

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        zeros = torch.zeros_like(hidden_states)
        return (zeros, None) if self.returns_tuple else zeros


class SublayerSkipper:
    """Makes copies of `model` that lack some sub-layers and share everything else with it.

    Norms beside a skipped sub-layer still run. UserError for a model whose sub-layers are not modules of their own, and
    for one in which layers use the keys of others.
    """

    def __init__(self, model: Any):
        config = model.config.get_text_config(decoder=True)
        self.model, self.layers = model, list(layer_stack(model))
        check_whole(self.layers)
        shares_keys = bool(config.to_dict().get("num_kv_shared_layers"))
        names = [
            (_child(layer, ATTENTION_NAMES), _child(layer, MLP_NAMES)) for layer in self.layers
        ]
        if shares_keys or not all(attention and mlp for attention, mlp in names):
            raise UserError(
                f"SWIFT skips sub-layers, which cannot be told apart or left out in {config.model_type}: use early exit"
            )
        if len(self.layers) < 3:
            raise UserError("SWIFT keeps the first and the last layer: it needs at least 3 layers")
        self.names = names
        self.mlp_outputs = output_counts(
            model,
            [layer.get_submodule(mlp) for layer, (_, mlp) in zip(self.layers, names, strict=True)],
        )

    def without(self, skipped: SkipSet) -> Any:
        """The model without these sub-layers."""
        layers = []
        for number, layer in enumerate(self.layers):
            attention, mlp = self.names[number]
            if number in skipped.attention or number in skipped.mlp:
                layer = shallow_copy(layer)
            if number in skipped.attention:
                layer._modules[attention] = Nothing(True)
            if number in skipped.mlp:
                layer._modules[mlp] = Nothing(self.mlp_outputs[number] > 0)
            layers.append(layer)
        return with_module(self.model, layer_stack_name(self.model), nn.ModuleList(layers))


def _child(layer: nn.Module, names: tuple[str, ...]) -> str:
    """The one of `names` that `layer` has as a child; empty if there is none."""
    return next((name for name, _ in layer.named_children() if name in names), "")
