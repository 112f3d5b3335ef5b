"""Where the decoder layers of a causal LM are, and models that have only some of them."""

import copy
from collections.abc import Sequence
from typing import Any

import torch

from decode.common.errors import UserError


def layer_stack(model: Any) -> torch.nn.ModuleList:
    """The decoder layers of a causal LM: its one ModuleList of that length. UserError when that is not clear."""
    stack: torch.nn.ModuleList = model.get_submodule(layer_stack_name(model))
    return stack


def layer_stack_name(model: Any) -> str:
    """The dotted name of `layer_stack` in `model`. ModuleLists inside a layer, such as its experts, do not count."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    names: list[str] = []
    for name, module in model.named_modules():  # a module comes before those in it
        inside = any(name.startswith(f"{outer}.") for outer in names)
        if isinstance(module, torch.nn.ModuleList) and len(module) == count and not inside:
            names.append(name)
    if len(names) != 1:
        raise UserError(
            f"cannot tell which modules of this {model.config.model_type} model are its {count} layers"
        )
    return names[0]


def with_layers(model: Any, layers: Sequence[int]) -> Any:
    """A copy of `model` that has only these of its decoder layers, and shares all weights and the config with it.

    Models look up a layer's type and its K/V cache by its index: layers keep their indices here.
    """
    *parents, last = layer_stack_name(model).split(".")
    shorter = module = _shallow_copy(model)
    for name in parents:
        child = _shallow_copy(module._modules[name])
        module._modules[name] = child
        module = child
    stack = module._modules[last]
    module._modules[last] = torch.nn.ModuleList([stack[i] for i in layers])
    return shorter


def _shallow_copy(module: Any) -> Any:
    """The same parameters and submodules in a new module, whose submodules can be replaced."""
    copied = copy.copy(module)
    copied._modules = dict(module._modules)
    return copied
