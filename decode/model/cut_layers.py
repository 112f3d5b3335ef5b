"""A language model with fewer layers, and its config with it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from decode.common.errors import UserError, one_line
from decode.model.layer_stack import (
    decoder_config,
    layer_stack,
    layer_stack_name,
    renumber_layers,
)
from decode.model.loading import auto_class

PLAIN = (bool, int, float, str)
"""Types of attributes by which a layer's module says what it is."""
NOT_COMPARED = ("training", "gradient_checkpointing")


def cut_layers(model: Any, layers: Sequence[int]) -> None:
    """Leaves `model` only these of its decoder layers, in place, numbered from 0, and makes its config say so.

    UserError for a model that its config cannot describe once it is cut.
    """
    stack = layer_stack(model)
    name = layer_stack_name(model)
    model.set_submodule(name, nn.ModuleList([stack[i] for i in layers]))
    renumber_layers(model, layers)
    check_config(model)


def check_config(model: Any) -> None:
    """UserError unless a new model of this config has the modules of `model`, which was cut: then the saved folder
    loads as the same model. Some configs have rules for what each layer is, such as every second one."""
    refusal = f"a {decoder_config(model).model_type} model cannot be cut to these layers"
    try:
        config = type(model.config).from_dict(model.config.to_dict())  # as it is saved and loaded
        with torch.device("meta"):
            made = auto_class(config).from_config(config)
    except Exception as error:  # transformers checks configs in a dozen ways
        raise UserError(f"{refusal} ({one_line(error)}): name others in draft.layers") from error
    shapes, wanted = (
        {name: value.shape for name, value in each.named_parameters(remove_duplicate=False)}
        for each in (model, made)
    )
    odd = sorted(n for n in shapes.keys() | wanted.keys() if shapes.get(n) != wanted.get(n))
    if odd:
        raise UserError(f"{refusal}: its config would describe another {odd[0]}")
    others = dict(layer_stack(made).named_modules())
    for name, part in layer_stack(model).named_modules():
        for key, value in vars(part).items():
            if type(value) in PLAIN and not key.startswith("_") and key not in NOT_COMPARED:
                other = vars(others[name]).get(key, value)
                if other != value:
                    raise UserError(
                        f"{refusal}: {key} of layers.{name} is {value}, and its config would say {other}"
                    )


@torch.inference_mode()
def output_counts(model: Any, modules: Sequence[nn.Module]) -> list[int]:
    """How many outputs each of `modules` returns in a pass of `model` over one token; 0 for one that is no tuple."""
    found: dict[int, int] = {}

    def keep(module: nn.Module, args: Any, out: Any) -> None:
        found[id(module)] = len(out) if isinstance(out, tuple) else 0

    handles = [module.register_forward_hook(keep) for module in modules]
    try:
        model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return [found[id(module)] for module in modules]
