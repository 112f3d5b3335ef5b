"""Where the decoder layers of a causal LM and the norm after them are; models with only some of these layers, with
another norm, or with some rows of the LM head."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from decode.common.errors import UserError
from decode.model.quantized.layers import QuantizedLinear


def decoder_config(model: Any) -> Any:
    """The config of the part that writes text: of a causal LM, or of the decoder of an encoder-decoder."""
    if model.config.is_encoder_decoder:
        return model.get_decoder().config
    return model.config.get_text_config(decoder=True)


def layer_stack(model: Any) -> torch.nn.ModuleList:
    """The decoder layers of a model: its one ModuleList of that length. UserError when that is not clear."""
    stack: torch.nn.ModuleList = model.get_submodule(layer_stack_name(model))
    return stack


def layer_stack_name(model: Any) -> str:
    """The dotted name of `layer_stack` in `model`. ModuleLists inside a layer, such as its experts, do not count."""
    count = decoder_config(model).num_hidden_layers
    # A causal LM writes text itself; an encoder or a vision part has a decoder as its neighbour.
    decoder = model if model.config is decoder_config(model) else model.get_decoder()
    names: list[str] = []
    for name, module in decoder.named_modules():  # a module comes before those in it
        inside = any(name.startswith(f"{outer}.") for outer in names)
        if isinstance(module, torch.nn.ModuleList) and len(module) == count and not inside:
            names.append(name)
    if len(names) != 1:
        raise UserError(
            f"cannot tell which modules of this {model.config.model_type} model are its {count} layers"
        )
    own = next(name for name, module in model.named_modules() if module is decoder)
    return f"{own}.{names[0]}" if own else names[0]


def with_layers(model: Any, layers: Sequence[int]) -> Any:
    """A copy of `model` that has only these of its decoder layers, and shares all weights and the config with it.

    Models look up a layer's type and its K/V cache by its index: layers keep their indices here. UserError as from
    `check_all_weights`.
    """
    name = layer_stack_name(model)
    stack = model.get_submodule(name)
    check_all_weights([stack[i] for i in layers])
    return with_module(model, name, torch.nn.ModuleList([stack[i] for i in layers]))


def holds_all_weights(module: torch.nn.Module) -> bool:
    """Whether this process holds all weights of `module`: neither slices of them, nor hooks that fetch them."""
    weights = list(module.parameters())
    hooks = any("_hf_hook" in vars(part) for part in module.modules())  # those of accelerate
    return not any(isinstance(w, DTensor) or (w.is_meta and hooks) for w in weights)


def check_all_weights(layers: Sequence[torch.nn.Module]) -> None:
    """UserError for layers that are not `holds_all_weights`."""
    if not all(holds_all_weights(layer) for layer in layers):
        raise UserError(
            "this draft is made of the target's own layers, which placement spreads over processes or keeps on disk: "
            "leave placement.kind at single, or choose another draft"
        )


def renumber_layers(model: Any, layers: Sequence[int]) -> None:
    """Numbers the layers of `model`, a copy of the `layers` of another, from 0, so that its K/V cache has as few."""
    cut_config(decoder_config(model), layers)
    if model.config.is_encoder_decoder:
        model.config.num_decoder_layers = len(layers)
    for number, layer in enumerate(layer_stack(model)):
        for part in layer.modules():
            if "layer_idx" in vars(part):
                part.layer_idx = number  # type: ignore[assignment]


LEADING_COUNTS = ("max_window_layers", "first_k_dense_replace", "num_dense_layers")
"""Fields of configs that say how many of the first layers are of another kind than the rest."""
LAYER_NUMBERS = ("mlp_only_layers", "attn_layer_indices")
"""Fields of configs that list layers by their numbers."""


def cut_config(config: Any, layers: Sequence[int]) -> None:
    """Makes `config` that of a model with only these of its layers, which keep their kinds, window and RoPE."""
    depth, fields = config.num_hidden_layers, config.to_dict()
    config.num_hidden_layers = len(layers)
    for name, value in fields.items():
        if name in LEADING_COUNTS and value is not None:
            setattr(config, name, sum(i < value for i in layers))
        elif name in LAYER_NUMBERS and value:
            setattr(config, name, [new for new, old in enumerate(layers) if old in value])
        elif "layer" in name and isinstance(value, list | tuple) and len(value) == depth:
            setattr(config, name, [value[i] for i in layers])


def check_exit(count: int, layers: int) -> None:
    """UserError unless `count` first layers are a proper part of a model of `layers`."""
    if not 0 < count < layers:
        raise UserError(f"early exit needs 1 to {layers - 1} layers of this target, not {count}")


def final_norm(model: Any) -> torch.nn.Module:
    """The norm between the layers and the LM head of a causal LM. UserError when it is not clear which it is."""
    norm: torch.nn.Module = model.get_submodule(final_norm_name(model))
    return norm


def final_norm_name(model: Any) -> str:
    """The dotted name of `final_norm` in `model`: the one norm of the states' width that stands beside the layers."""
    config = decoder_config(model)
    parent = layer_stack_name(model).rpartition(".")[0]
    names = [
        name
        for name, module in model.get_submodule(parent).named_children()
        if "norm" in type(module).__name__.lower()
        and all(len(weight) == config.hidden_size for weight in module.parameters())
    ]
    if len(names) != 1:
        raise UserError(
            f"cannot tell which module of this {config.model_type} model is its final norm"
        )
    return f"{parent}.{names[0]}" if parent else names[0]


def with_final_norm(model: Any, norm: torch.nn.Module) -> Any:
    return with_module(model, final_norm_name(model), norm)


def with_head_rows(model: Any, ids: Tensor) -> Any:
    """A copy of `model` that computes only the logits [.., Vd] of the tokens `ids` [Vd], and shares the config and all
    other weights with it. Its LM head is a copy of these rows: later changes of the model's do not reach it."""
    head = model.get_output_embeddings()
    name = next(name for name, module in model.named_modules() if module is head)
    if isinstance(head, QuantizedLinear):
        return with_module(model, name, head.rows(ids))
    rows = torch.nn.Linear(
        head.weight.shape[1],
        len(ids),
        head.bias is not None,
        device="meta",
        dtype=head.weight.dtype,
    )
    rows.weight = torch.nn.Parameter(head.weight.detach()[ids], requires_grad=False)
    if head.bias is not None:
        rows.bias = torch.nn.Parameter(head.bias.detach()[ids], requires_grad=False)
    return with_module(model, name, rows)


def with_module(model: Any, name: str, replacement: torch.nn.Module) -> Any:
    """A copy of `model` with `replacement` as the submodule `name`; it shares all others."""
    *parents, last = name.split(".")
    copied = module = shallow_copy(model)
    for part in parents:
        child = shallow_copy(module._modules[part])
        module._modules[part] = child
        module = child
    module._modules[last] = replacement
    return copied


def shallow_copy(module: Any) -> Any:
    """The same parameters and submodules in a new module, whose submodules can be replaced. A layer is no region."""
    copied = copy.copy(module)
    vars(copied).pop("forward", None)  # that of `mark_regions` runs the layer that was copied
    copied._modules = dict(module._modules)
    return copied
