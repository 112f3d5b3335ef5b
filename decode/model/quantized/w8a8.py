"""W8A8: weights of eight bits with a scale for each output, activations of eight bits with a scale for each token.

Both are rounded symmetrically to -127 … 127, so that a layer is a product of whole numbers, times the two scales, plus
the bias. The sums are exact on every CPU, so that what a layer gives for a row does not depend on the other rows.
Before they are rounded, inputs and weights are rotated, 64 together, by a Hadamard matrix, which leaves their product
as it is and spreads the few inputs that are much larger than the rest over 64 (QuaRot, Ashkboos et al. 2024,
arXiv 2404.00456, rotates whole states instead, which drafts read). No text is needed for it, and no layer's name.
On x86 with AVX512-VNNI the product is vnni.cpp's, which reads a quarter of the bytes of fp32 weights; elsewhere it is
computed in fp32 pieces that are short enough to be exact, and saves memory alone.
"""

import math

import torch
from torch import Tensor

from decode.model.quantized import vnni
from decode.model.quantized.layers import QuantizedLinear

LARGEST = 127
TINY = 1e-30
"""Smallest largest number of a row that is rounded: below it a scale would lose its bits."""
ROTATED = 64
"""Inputs that are rotated together, or the largest power of 2 that divides their number."""
CACHED = 1 << 17
"""Numbers that are rotated at once."""
EXACT_INPUTS = 1024
"""So many products of two numbers of eight bits have a sum below 2^24, which fp32 holds exactly in any order."""
BLOCK = 1 << 20
"""Numbers of a weight that are in fp32 at once."""


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


exact_int8 = torch.library.custom_op("draftsmith::exact_int8", exact_product, mutates_args=())
"""`exact_product` as an operation that inductor does not look into: its pieces would be compiled one by one."""


@exact_int8.register_fake
def _(numbers: Tensor, values: Tensor, scale: Tensor) -> Tensor:
    return numbers.new_empty(len(numbers), len(scale))


def int8_product(numbers: Tensor, weight: Tensor, scale: Tensor, offset: Tensor | None) -> Tensor:
    """The same of whole numbers [M, K] in floating point, in fp32 where there is an `offset`: of a packed weight."""
    if offset is None:
        multiply = exact_int8 if torch.compiler.is_compiling() else exact_product
        return multiply(numbers.float(), weight, scale)
    unsigned = numbers.add(vnni.ZERO_POINT).to(torch.uint8)
    return torch.ops.draftsmith.int8_product(unsigned, weight, scale, offset)


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
        after rotation."""
        super().__init__(values.shape, bias, embedding)
        self.block = block
        self.scale = torch.nn.Parameter(scale.detach().float(), requires_grad=False)
        self.values = values
        self.offset: Tensor | None = None
        """int8 [N, K], or with an offset the form of it that `vnni.pack_int8` makes."""
        if vnni.fits(values.shape):
            self.values, self.offset = vnni.pack_int8(values)

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
        sums = int8_product(numbers, self.values, self.scale.float(), self.offset)
        return sums.to(x.dtype).mul_(steps)

    @torch.no_grad()
    def dequantized(self) -> Tensor:
        packed = self.offset is not None
        values = vnni.unpack_int8(self.values, self.out_features) if packed else self.values
        weight = values.float() * self.scale.float()[:, None]
        return rotate(weight, self.block)
