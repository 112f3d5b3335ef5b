"""Products of few rows on a CPU: what every verification asks for, and what the usual call leaves to one thread."""

from typing import Any

import torch

from decode.model.attention import ForwardContext

MAX_ROWS = 32
"""Rows up to which this order of factors is the faster one for narrow models too (docs/log.md)."""


class SmallBatchLinear(torch.nn.Linear):
    """A linear layer that computes x Wᵀ as (W xᵀ)ᵀ for 2 to MOST rows while a decoder's forward runs.

    The math library divides a product among threads along the first factor's rows: here the outputs, there too few.
    Compiled code has products of its own, and training keeps the usual ones, decoded in between or not.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] -> [..., N], equal to that of torch.nn.Linear but for rounding."""
        rows = x.numel() // x.shape[-1]
        if (
            ForwardContext.slots is None
            or not 2 <= rows <= MAX_ROWS
            or torch.compiler.is_compiling()
        ):
            return super().forward(x)
        columns = x.reshape(rows, -1).t()
        if self.bias is None:
            out = torch.mm(self.weight, columns)
        else:
            out = torch.addmm(self.bias[:, None], self.weight, columns)
        return out.t().contiguous().view(*x.shape[:-1], -1)


def patch_linear_layers(model: Any) -> None:
    """Gives `model` such layers where they pay: in fp32 on a CPU."""
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            weight = module.weight
            if weight.dtype == torch.float32 and weight.device.type == "cpu":
                module.__class__ = SmallBatchLinear
