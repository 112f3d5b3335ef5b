"""Weights of four bits: a scale and an added number for each 32 inputs of an output.

A step of few rows reads little more than half the bytes of W8A8. Where the CPU has AVX512-VNNI inputs are rounded to
eight bits, 32 together, and the product is vnni.cpp's; elsewhere it is torch's, in bf16.

int4 is for drafts on a CPU: their weights are rounded to four bits, and what they draft is verified. w4a8 is for
targets whose weights have no more than four bits already, such as those of a GGUF file: nothing of a weight is lost but
that scales have eleven bits, and a row does not depend on the others.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from decode.model.quantized import vnni
from decode.model.quantized.layers import QuantizedLinear
from decode.model.quantized.w8a8 import BLOCK, TINY, W8A8Linear

GROUP = 32
"""Inputs that share a scale."""
LEVELS = 15
MIDDLE = 8
"""The number that torch's kernel takes for 0: it multiplies by (number - MIDDLE) * scale + zero."""
OFF_STEP = 0.1
"""How far, in steps, numbers of four bits may lie from their places: they may have been rounded to bf16 since."""
ROWS = 64
"""Rows of the identity that are multiplied at once, to read a weight."""


def quantize_groups(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(numbers 0 … 15 [N, K], scales and added numbers in fp32 [N, K / GROUP]) of a weight [N, K] in fp32, which is
    rounded to number * scale + added."""
    groups = weight.unflatten(1, (-1, GROUP))
    low, high = groups.aminmax(dim=-1)
    scale = ((high - low) / LEVELS).clamp_min(TINY).bfloat16().float()
    zero = (low + MIDDLE * scale).bfloat16().float()
    numbers = (groups - zero[..., None]) / scale[..., None]
    numbers = (numbers.round() + MIDDLE).clamp(0, LEVELS)
    return numbers.flatten(1).to(torch.uint8), scale, zero - MIDDLE * scale


def stored_groups(weight: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """The same of a weight in which each group has at most 16 different numbers, at equal distances, as blocks of Q4_0,
    Q4_1 and Q4_K and groups of AWQ and GPTQ do. None for another weight."""
    if weight.shape[1] % GROUP:
        return None
    found = []
    for rows in weight.split(max(1, BLOCK // weight.shape[1])):
        groups = rows.float().reshape(-1, GROUP)
        low, high = groups.aminmax(dim=-1, keepdim=True)
        place = (groups - low) / (high - low).clamp_min(TINY)
        numbers = torch.empty(groups.shape, dtype=torch.uint8)
        steps = torch.empty(len(groups), 1)
        left = torch.arange(len(groups))
        for count in range(LEVELS, 0, -1):  # a group need not use both ends of the 16
            scaled = place[left] * count
            fits = ((scaled - scaled.round()).abs() < OFF_STEP).all(-1)
            there = left[fits]
            numbers[there], steps[there] = scaled[fits].round().to(torch.uint8), float(count)
            left = left[~fits]
            if len(left) == 0:
                break
        else:
            return None
        found.append((numbers.view(rows.shape), (high - low) / steps, low))
    numbers, scale, low = (torch.cat(parts) for parts in zip(*found, strict=True))
    return numbers, scale.view(len(weight), -1), low.view(len(weight), -1)


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
        added: Tensor,
        bias: Tensor | None,
        embedding: torch.nn.Parameter | None = None,
    ):
        """`numbers`, `scale` and `added` as from `quantize_groups`."""
        super().__init__(numbers.shape, bias, embedding)
        self.scales: Tensor | None = None
        padding = (0, 0, 0, -len(numbers) % vnni.LANES)
        numbers, scale, added = (F.pad(part, padding) for part in (numbers, scale, added))
        if vnni.is_available():
            self.packed = vnni.pack_int4(numbers, scale, added)
            return
        self.packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers.int(), 1)
        scales = torch.stack([scale, added + MIDDLE * scale], -1)
        self.scales = scales.bfloat16().transpose(0, 1).contiguous()  # [K / 32, N, 2]

    @classmethod
    def from_weight(
        cls, weight: Tensor, bias: Tensor | None, embedding: torch.nn.Parameter | None = None
    ) -> QuantizedLinear:
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


class W4A8Linear(Int4Linear):
    """A linear layer with the four bits that its weight has already; needs AVX512-VNNI."""

    dtype_name = "w4a8"

    @classmethod
    def from_weight(
        cls, weight: Tensor, bias: Tensor | None, embedding: torch.nn.Parameter | None = None
    ) -> QuantizedLinear:
        """A layer in W8A8 for a weight of more than four bits."""
        groups = stored_groups(weight.detach())
        if groups is None:
            return W8A8Linear.from_weight(weight, bias, embedding)
        return cls(*groups, bias, embedding)
