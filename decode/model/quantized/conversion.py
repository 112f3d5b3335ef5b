"""Replaces the linear layers of a loaded model, or of a draft's network, by layers in few bits (settings `dtype`).

Each float weight is freed as its layer is replaced. Norms, embeddings, experts that a model holds as stacked tensors,
vision parts and what stands beside the decoder layers keep their dtype.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from decode.common import damage
from decode.common.errors import UserError
from decode.model.formats import tied_heads
from decode.model.formats.quantized import quantize_linear_layers
from decode.model.layer_stack import decoder_config, layer_stack
from decode.model.linear import layers_of_one_input
from decode.model.quantized.int4 import GROUP, Int4Linear, W4A8Linear
from decode.model.quantized.layers import FusedPart, QuantizedLinear, fused_parts
from decode.model.quantized.vnni import what_is_missing
from decode.model.quantized.w8a8 import W8A8Linear
from decode.model.recurrent import has_recurrent_layers

INT4_TARGET = (
    "dtype int4 is for drafts, whose tokens are verified: it would make the target another model; choose w8a8 or "
    "another dtype"
)
KINDS: dict[str, type[QuantizedLinear]] = {
    "w8a8": W8A8Linear,
    "w4a8": W4A8Linear,
    "int4": Int4Linear,
}
"""By the dtype of settings."""


ON_CUDA = (
    "has no product on CUDA that is right and that a graph can hold: torchao's layer writes its activations as text in "
    "each call, and multiplies 16 rows and fewer in float32, where sums beyond 2^24 are wrong"
)


def quantize_model(
    model: Any,
    dtype: str,
    what: str,
    stored: Mapping[str, Tensor] | None = None,
    scattered: bool = False,
) -> None:
    """Gives a model the linear layers of `dtype`, int8 or one of KINDS, in place; others change nothing.

    `what` is its role and name. Of a checkpoint in W8A8 `stored` has the scales [N] of each of its layers, which alone
    are then W8A8. `scattered`: inputs that share a scale do not follow each other in the checkpoint that the weights
    come from. UserError for a model or a device that this dtype is not for.
    """
    if dtype.startswith("int8"):
        quantize_linear_layers(model, dtype)
    if dtype not in KINDS:
        return
    reason = refusal(model, dtype)
    if dtype == "w8a8" and model.device.type == "cuda" and not stored:
        reason = ON_CUDA
    if reason:
        raise UserError(f"{what}: dtype {dtype} {reason}: choose another dtype")
    say_what_stays(model, dtype, what)
    say_what_is_slow(dtype)
    if stored and dtype == "w8a8":
        restore_layers(model, stored, what)
        return
    for layer in layer_stack(model):
        for part in list(layer.modules()):
            fuse_layers(part, KINDS[dtype])
        quantize_network(layer, dtype)
    replace_head(model, KINDS[dtype])
    if dtype == "w4a8":
        say_what_has_more_bits(model, what, scattered)


def refusal(model: Any, dtype: str) -> str:
    """Why this dtype is not for the model; "" where it is."""
    if model.config.is_encoder_decoder:
        return "is for decoders, and this is an encoder-decoder"
    if has_recurrent_layers(decoder_config(model)):
        return "is for layers with attention, and this model has recurrent ones"
    devices = ("cpu", "cuda") if dtype == "w8a8" else ("cpu",)
    if model.device.type not in devices:
        return f"is not for device {model.device.type}"
    if dtype == "w4a8" and what_is_missing():
        return f"needs a CPU with AVX512-VNNI, and a C++ compiler: {what_is_missing()}"
    return ""


def quantize_network(network: nn.Module, dtype: str) -> None:
    """Replaces all linear layers inside `network` in place, if `dtype` is one of KINDS. UserError unless it is on a
    CPU."""
    if dtype not in KINDS:
        return
    device = next(network.parameters()).device
    if device.type != "cpu":
        raise UserError(f"dtype {dtype} of this draft is for a CPU: choose another one on {device}")
    say_what_is_slow(dtype)
    for name in [
        name for name, part in network.named_modules() if type(part) in (nn.Linear, Conv1D)
    ]:
        weight, bias = weight_and_bias(network.get_submodule(name))
        if fits(weight, KINDS[dtype]):
            network.set_submodule(name, KINDS[dtype].from_weight(weight, bias))


def fuse_layers(module: nn.Module, kind: type[QuantizedLinear]) -> None:
    """Replaces children of `module` that read the same tensor by parts of one product."""
    for layers in layers_of_one_input(module, nn.Linear):
        given = list(layers.values())
        if len({layer.in_features for layer in given}) == 1 and fits(given[0].weight, kind):
            for name, part in zip(layers, fused_parts(kind, given), strict=True):
                setattr(module, name, part)


def replace_head(model: Any, kind: type[QuantizedLinear]) -> None:
    """Replaces the LM head. An embedding that is one matrix with it stays."""
    head = model.get_output_embeddings()
    embedding = head.weight if tied_heads.are_tied(model) else None
    if type(head) is nn.Linear and fits(head.weight, kind):
        model.set_output_embeddings(kind.from_weight(head.weight, head.bias, embedding))


def restore_layers(model: Any, stored: Mapping[str, Tensor], what: str) -> None:
    """Gives these layers of a checkpoint in W8A8 its own whole numbers and scales back. UserError for one that is no
    linear layer in this model."""
    layers = {name: part for name, part in model.named_modules() if type(part) is nn.Linear}
    strange = sorted(set(stored) - set(layers))
    if strange or model.device.type != "cpu":
        problem = f"{strange[0]} is no linear layer here" if strange else "it is not on a CPU"
        raise UserError(
            f"{what} is in W8A8, and {problem}: choose float32 or bfloat16, which leave activations as they are"
        )
    for name, scale in stored.items():
        layer = layers.pop(name)
        scale = scale.expand(layer.out_features)
        values = (layer.weight.detach().float() / scale[:, None]).round().to(torch.int8)
        model.set_submodule(name, W8A8Linear(values, scale.contiguous(), layer.bias))


def weight_and_bias(layer: Any) -> tuple[Tensor, Tensor | None]:
    """weight [N, K] and bias [N] of a linear layer; GPT-2's holds its weight as [K, N]."""
    return layer.weight.T if type(layer) is Conv1D else layer.weight, layer.bias


def fits(weight: Tensor, kind: type[QuantizedLinear]) -> bool:
    """Whether a weight [N, K] can be of this kind: four bits need whole groups."""
    return kind is not Int4Linear or weight.shape[1] % GROUP == 0


def say_what_has_more_bits(model: Any, what: str, scattered: bool) -> None:
    """A line for the products of a model in w4a8 that are W8A8. UserError if all are."""
    parts = [part for part in model.modules() if isinstance(part, QuantizedLinear)]
    layers = [part for part in parts if not isinstance(part, FusedPart)]
    other = sum(type(part) is not W4A8Linear for part in layers)
    reason = "have more than four bits"
    if scattered:
        reason = (
            f"are in act-order: their groups are scattered, and {GROUP} neighbours need one scale"
        )
    if other == len(layers):
        why = reason if scattered else "have none of four bits, as those of a GGUF of Q4_K_M do"
        raise UserError(f"{what}: its weights {why}: choose dtype w8a8")
    if other:
        damage.warn_once(
            f"{what}: {other} of {len(layers)} products are w8a8, because their weights {reason}"
        )


def say_what_stays(model: Any, dtype: str, what: str) -> None:
    """A line where experts keep their dtype."""
    experts = sum(p.numel() for p in layer_stack(model).parameters() if p.ndim == 3)
    if experts > 0:
        share = experts / sum(p.numel() for p in model.parameters())
        damage.warn_once(
            f"{what}: its experts are stacked tensors and no linear layers, and keep their dtype: {share:.0%} of its "
            f"weights are not {dtype}"
        )


WITHOUT_PRODUCTS = {
    "w8a8": "is exact and takes less memory, but it is slower than float32",
    "int4": "takes less memory, but its products are torch's own in bfloat16, which take longer",
}


def say_what_is_slow(dtype: str) -> None:
    """A line where the CPU has no products of whole numbers for this dtype."""
    if dtype in WITHOUT_PRODUCTS and what_is_missing():
        damage.warn_once(
            f"there are no products of whole numbers in eight bits here ({what_is_missing()}): "
            f"dtype {dtype} {WITHOUT_PRODUCTS[dtype]}"
        )
