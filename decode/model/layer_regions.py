"""Decoder layers as regions of compiled code: what is generated for one layer runs for all layers that are like it."""

from functools import partial
from typing import Any

import torch

from decode.model.layer_stack import decoder_config, layer_stack


@torch.compiler.nested_compile_region
def run_layer(layer: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of `layer`, which compiled code calls as a function with the layer's weights as arguments."""
    return type(layer).forward(layer, *args, **kwargs)


def mark_regions(model: Any) -> None:
    """Makes each decoder layer of `model` a region. Eager decoding and training do not see it.

    Layers that read the K/V of other layers (gemma4) stay as they are: regions hand on nothing but their result.
    """
    if decoder_config(model).to_dict().get("num_kv_shared_layers"):
        return
    for layer in layer_stack(model):
        if "forward" not in vars(layer):  # where hooks of a placement exchange the weights
            layer.forward = partial(run_layer, layer)
