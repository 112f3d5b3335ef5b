"""The products of a model's linear layers by several kernels, timed: what every pass takes at least."""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from decode.common.errors import UserError
from decode.model.linear.packed_linear import PackedLinear
from eval.benchmark.timing import synchronize

MS = 1000.0
Product = Callable[[Tensor], Tensor]


def linear_layers(model: nn.Module) -> list[nn.Linear]:
    """The linear layers that a token passes, the LM head among them. UserError for a model without any."""
    found = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not found:
        raise UserError("the target has no linear layer of torch: its products cannot be timed")
    return found


def usual_product(layer: nn.Linear) -> Product:
    """By torch.nn.functional.linear."""
    return lambda x: nn.functional.linear(x, layer.weight, layer.bias)


def packed_product(layer: nn.Linear) -> Product:
    """As the decoder does."""
    return layer if isinstance(layer, PackedLinear) else PackedLinear(layer)


def int8_product(layer: nn.Linear) -> Product:
    """By weights rounded to 8 bits, one scale for each output."""
    weight = layer.weight.detach().float()
    scale = weight.abs().amax(1).clamp_min(1e-12) / 127
    rounded = (weight / scale[:, None]).round().to(torch.int8)
    scale = scale.to(torch.bfloat16)
    return lambda x: torch._weight_int8pack_mm(x, rounded, scale)


def kernels(device: torch.device) -> dict[str, Callable[[nn.Linear], Product]]:
    """{name: how it multiplies by a layer}."""
    if device.type != "cpu":
        return {"linear": usual_product}
    return {"linear": usual_product, "packed": packed_product, "int8": int8_product}


@torch.inference_mode()
def product_ms(
    layers: Sequence[nn.Linear],
    products: Sequence[Product],
    rows: int,
    repeats: int,
    dtype: torch.dtype,
) -> float:
    """Milliseconds of one product of `rows` rows with every layer: the fastest of `repeats` turns."""
    device = layers[0].weight.device
    widths = {layer.weight.shape[1] for layer in layers}
    inputs = {width: torch.randn(rows, width, device=device, dtype=dtype) for width in widths}
    seconds = []
    for _ in range(repeats + 1):
        synchronize(device)
        start = time.perf_counter()
        for layer, product in zip(layers, products, strict=True):
            product(inputs[layer.weight.shape[1]])
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return MS * min(seconds[1:])


def time_products(
    layers: Sequence[nn.Linear], rows: Sequence[int], repeats: int
) -> dict[str, list[float]]:
    """{kernel: milliseconds for each of these numbers of rows}."""
    found = {}
    for name, kernel in kernels(layers[0].weight.device).items():
        products = [kernel(layer) for layer in layers]
        dtype = torch.bfloat16 if name == "int8" else layers[0].weight.dtype
        found[name] = [product_ms(layers, products, count, repeats, dtype) for count in rows]
    return found


def fastest_ms(layers: Sequence[nn.Linear], rows: int, repeats: int) -> float:
    """Milliseconds of the layers' products of `rows` rows by the fastest kernel that rounds no weights."""
    layers = list(layers)
    dtype = layers[0].weight.dtype
    exact = [kernel for name, kernel in kernels(layers[0].weight.device).items() if name != "int8"]
    return min(
        product_ms(layers, [kernel(layer) for layer in layers], rows, repeats, dtype)
        for kernel in exact
    )
