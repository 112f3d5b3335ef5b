"""Weights of four bits, for drafts on a CPU: a scale and a zero point for each 32 inputs of an output.

A draft's step of one or two rows reads half the bytes of W8A8; what it drafts is verified, so that the output does not
depend on it. A target would be another model: four bits by plain rounding cost too much of it. Where the CPU has
AVX512-VNNI inputs are rounded to eight bits, 32 together, and the product is vnni.cpp's; elsewhere it is torch's, in
bf16.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from decode.model.quantized import vnni
from decode.model.quantized.layers import QuantizedLinear

GROUP = 32
"""Inputs that share a scale."""
LEVELS = 15
MIDDLE = 8
"""The number that the kernel takes for 0: it multiplies by (number - MIDDLE) * scale + zero."""
TINY = 1e-30
ROWS = 64
"""Rows of the identity that are multiplied at once, to read a weight."""


def quantize_groups(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(numbers 0 … 15 in int32 [N, K], scales and zero points in bf16 [N, K / GROUP]) of a weight [N, K] in fp32."""
    groups = weight.unflatten(1, (-1, GROUP))
    low, high = groups.aminmax(dim=-1)
    scale = ((high - low) / LEVELS).clamp_min(TINY).bfloat16()
    zero = (low + MIDDLE * scale.float()).bfloat16()
    numbers = (groups - zero.float()[..., None]) / scale.float()[..., None]
    numbers = (numbers.round() + MIDDLE).clamp(0, LEVELS)
    return numbers.flatten(1).int(), scale, zero


def int4_product(x: Tensor, packed: Tensor, group: int, scales: Tensor) -> Tensor:
    return torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, group, scales)


int4_linear = torch.library.custom_op("draftsmith::int4_linear", int4_product, mutates_args=())
"""torch's product of x [M, K] in bf16 and a packed weight, as an operation that inductor does not look into."""


@int4_linear.register_fake
def _(x: Tensor, packed: Tensor, group: int, scales: Tensor) -> Tensor:
    return x.new_empty(len(x), scales.shape[1])


class Int4Linear(QuantizedLinear):
    """A linear layer with weights of four bits, whose number of inputs is a multiple of GROUP."""

    dtype_name = "int4"

    def __init__(
        self,
        numbers: Tensor,
        scale: Tensor,
        zero: Tensor,
        bias: Tensor,
        embedding: torch.nn.Parameter | None = None,
    ):
        """`numbers`, `scale` and `zero` as from `quantize_groups`."""
        super().__init__(numbers.shape, bias, embedding)
        self.scales: Tensor | None = None
        padding = (0, 0, 0, -len(numbers) % vnni.LANES)
        numbers, scale, zero = (F.pad(part, padding) for part in (numbers, scale, zero))
        if vnni.is_available():
            added = (zero.float() - MIDDLE * scale.float()).bfloat16()
            self.packed = vnni.pack_int4(numbers, scale, added)
            return
        self.packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers, 1)
        self.scales = torch.stack([scale, zero], -1).transpose(0, 1).contiguous()  # [K / 32, N, 2]

    @classmethod
    def from_weight(
        cls, weight: Tensor, bias: Tensor | None, embedding: torch.nn.Parameter | None = None
    ) -> "Int4Linear":
        """It always has a bias, so that every network of such layers has a parameter of its dtype."""
        if bias is None:
            bias = torch.zeros(len(weight))
        return cls(*quantize_groups(weight.detach().float()), bias, embedding)

    def product(self, x: Tensor) -> Tensor:
        if self.scales is None:
            out = torch.ops.draftsmith.int4_product(x.float(), self.packed, self.out_features)
            return out.to(x.dtype)
        operation = torch.ops.draftsmith.int4_linear
        multiply = operation if torch.compiler.is_compiling() else int4_product
        out = multiply(x.bfloat16(), self.packed, GROUP, self.scales)
        return out[:, : self.out_features].to(x.dtype)

    @torch.no_grad()
    def dequantized(self) -> Tensor:
        rows = torch.eye(self.in_features).split(ROWS)
        return torch.cat([self.product(some) for some in rows]).T.contiguous()
