"""W8A8: weights of eight bits with a scale for each output, activations of eight bits with a scale for each token.

Both are rounded symmetrically to -127 … 127, so that a layer is a product of whole numbers, times the two scales, plus
the bias. The sums are exact on every CPU, so that what a layer gives for a row does not depend on the other rows.
Before they are rounded, inputs and weights are rotated, 64 together, by a Hadamard matrix, which leaves their product
as it is and spreads the few inputs that are much larger than the rest over 64 (QuaRot, Ashkboos et al. 2024,
arXiv 2404.00456, rotates whole states instead, which drafts read). No text is needed for it, and no layer's name.
On x86 with AVX512-VNNI or AMX the product is oneDNN's, which reads a quarter of the bytes of fp32 weights; elsewhere it
is computed in fp32 pieces that are short enough to be exact, and saves memory alone.
"""

import math
import os
from functools import cache

import torch
from torch import Tensor

from decode.common.errors import UserError
from decode.model.quantized.layers import QuantizedLinear

LARGEST = 127
TINY = 1e-30
"""Smallest largest number of a row that is rounded: below it a scale would lose its bits."""
ZERO_POINT = 128
"""oneDNN multiplies unsigned activations: 0 is 128 there."""
ROTATED = 64
"""Inputs that are rotated together, or the largest power of 2 that divides their number."""
CACHED = 1 << 17
"""Numbers that are rotated at once."""
EXACT_INPUTS = 1024
"""So many products of two numbers of eight bits have a sum below 2^24, which fp32 holds exactly in any order."""
BLOCK = 1 << 20
"""Numbers of a weight that are in fp32 at once."""
UNSAFE_CACHE = "ONEDNN_CACHE_CONTEXT_UNSAFE"


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """(whole numbers [M, K] of -127 … 127, steps [M, 1]), both in the dtype of x [M, K], whose rows are their products
    but for rounding. A row with NaN or infinity has such a step."""
    steps = x.abs().amax(-1, keepdim=True).clamp_min(TINY) / LARGEST
    return (x / steps).round_(), steps


# ---- rotation ----


def rotate(x: Tensor, block: int) -> Tensor:
    """x [M, K], of which each `block` of inputs K / block apart, a power of 2, is multiplied by the Hadamard matrix of
    that size -> [M, K]. Twice gives `block` times x.

    Sums of two numbers in a fixed order: a row does not depend on the others, and eager and compiled code give the same
    bits. Eager code takes as many rows at once as a core's cache holds.
    """
    x = x.clone()
    inputs = x.shape[1]
    rows = len(x) if torch.compiler.is_compiling() else max(1, CACHED // inputs)
    for part in x.split(rows):
        size = block
        while size > 1:
            a, b = part.view(len(part), size // 2, 2, inputs // size).unbind(2)
            difference = a - b
            a += b
            b.copy_(difference)
            size //= 2
    return x


# ---- products of whole numbers ----


def exact_product(numbers: Tensor, values: Tensor, scale: Tensor) -> Tensor:
    """The sums numbers [M, K] · values [N, K], whole numbers of eight bits in fp32 and int8, rounded to fp32 and times
    scale [N] -> [M, N]."""
    outputs, inputs = values.shape
    sums = numbers.new_empty(len(numbers), outputs)
    pieces = numbers.split(EXACT_INPUTS, 1)
    rows = max(1, BLOCK // inputs)
    for start in range(0, outputs, rows):
        block = values[start : start + rows].split(EXACT_INPUTS, 1)
        parts = [a @ b.to(a.dtype).T for a, b in zip(pieces, block, strict=True)]
        total = parts[0] if len(parts) == 1 else torch.stack(parts).double().sum(0)
        sums[:, start : start + rows] = total
    return sums * scale


def packed_product(numbers: Tensor, packed: Tensor, scale: Tensor, zeros: Tensor) -> Tensor:
    """The same by oneDNN: `numbers` [M, K] are uint8 from ZERO_POINT on, `packed` is its form of the weight."""
    return torch.ops.onednn.qlinear_pointwise(
        numbers, 1.0, ZERO_POINT, packed, scale, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )


@cache
def has_int8_products() -> bool:
    """Whether this CPU multiplies whole numbers of eight bits exactly and fast: it has the instructions by name, and
    the product of the largest numbers is right. Older ones add pairs of products in 16 bits, which saturate."""
    named = torch.cpu._is_vnni_supported() or torch.cpu._is_amx_tile_supported()
    if not (named and torch.backends.mkldnn.is_available()):
        return False
    largest = torch.full((16, 64), LARGEST)
    packed = torch.ops.onednn.qlinear_prepack(largest.to(torch.int8), None)
    numbers = (largest + ZERO_POINT).to(torch.uint8)
    scale, zeros = torch.ones(16), torch.zeros(16, dtype=torch.int32)
    return bool((packed_product(numbers, packed, scale, zeros) == 64 * LARGEST**2).all())


def int8_product(numbers: Tensor, weight: Tensor, scale: Tensor, zeros: Tensor) -> Tensor:
    """`packed_product` of a packed weight, else `exact_product`."""
    if weight.is_mkldnn:
        return packed_product(numbers, weight, scale, zeros)
    return exact_product(numbers, weight, scale)


int8_linear = torch.library.custom_op("draftsmith::int8_linear", int8_product, mutates_args=())
"""`int8_product` as an operation that inductor does not look into: of its own lowering of oneDNN's product it demands
that weights are constants of the code. What it writes is in decode/model/inductor_linear.py."""


@int8_linear.register_fake
def _(numbers: Tensor, weight: Tensor, scale: Tensor, zeros: Tensor) -> Tensor:
    return numbers.new_empty(len(numbers), len(scale), dtype=torch.float32)


# ---- the layer ----


class W8A8Linear(QuantizedLinear):
    """A linear layer in W8A8. What it computes with is fp32, but for the sums."""

    dtype_name = "w8a8"

    def __init__(
        self,
        values: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        embedding: torch.nn.Parameter | None = None,
        block: int = 1,
    ):
        """The weight is the int8 `values` [N, K] times `scale` [N]; with a `block`, a power of 2, that is the weight
        after rotation. UserError where oneDNN may confuse weights."""
        super().__init__(values.shape, bias, embedding)
        check_cache()
        self.block = block
        self.scale = torch.nn.Parameter(scale.detach().float(), requires_grad=False)
        self.zeros = torch.zeros(len(values), dtype=torch.int32)
        self.is_packed = has_int8_products()
        self.values = values
        """int8 [N, K], or oneDNN's form of it."""
        if self.is_packed:
            self.values = torch.ops.onednn.qlinear_prepack(values, None)

    @classmethod
    def from_weight(
        cls, weight: Tensor, bias: Tensor | None, embedding: torch.nn.Parameter | None = None
    ) -> "W8A8Linear":
        values = torch.empty(weight.shape, dtype=torch.int8)
        scale = torch.empty(len(weight))
        block = math.gcd(weight.shape[1], ROTATED)
        rows = max(1, BLOCK // weight.shape[1])
        for start in range(0, len(weight), rows):  # a whole LM head in fp32 is large
            part = rotate(weight.detach()[start : start + rows].float(), block)
            numbers, steps = quantize_rows(part / block)
            values[start : start + rows], scale[start : start + rows] = numbers, steps[:, 0]
        return cls(values, scale, bias, embedding, block)

    def product(self, x: Tensor) -> Tensor:
        numbers, steps = quantize_rows(rotate(x, self.block))
        operation = torch.ops.draftsmith.int8_linear
        multiply = operation if torch.compiler.is_compiling() else int8_product
        given = numbers.add_(ZERO_POINT).to(torch.uint8) if self.is_packed else numbers.float()
        sums = multiply(given, self.values, self.scale.float(), self.zeros)
        return sums.to(x.dtype).mul_(steps)

    @torch.no_grad()
    def dequantized(self) -> Tensor:
        values = self.values.to_dense().T if self.is_packed else self.values
        weight = values.float() * self.scale.float()[:, None]
        return rotate(weight, self.block)


def check_cache() -> None:
    """UserError for the setting of torch with which oneDNN knows weights by their addresses alone: a weight that was
    freed would be multiplied in place of the one that lies there now."""
    if os.environ.get(UNSAFE_CACHE, "0") not in ("", "0"):
        raise UserError(
            f"{UNSAFE_CACHE} is set, with which products of eight bits may be of other weights: unset it"
        )
