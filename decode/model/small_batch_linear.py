"""A linear layer for inputs of few rows on a CPU, as in every step of decoding, that uses all threads."""

import math
from typing import Any

import torch

from decode.model.attention import CONTEXT

MAX_ROWS = 32
"""Up to this many rows the layer below is faster for narrow models too (docs/log.md)."""


class SmallBatchLinear(torch.nn.Linear):
    """A linear layer that divides its outputs among threads for 1 to MAX_ROWS rows, while a step of decoding runs.

    The math library splits a product among threads along the rows of its first factor, so x Wᵀ of several rows is
    computed as (W xᵀ)ᵀ. It multiplies one row with a single thread, so W is cut into one matrix for each thread.
    Compiled code uses its own products. Training uses the usual ones, whether or not the model has decoded in between.
    """

    def __init__(self, linear: torch.nn.Linear):
        """Takes the place of `linear`: shares its parameters, buffers and hooks."""
        torch.nn.Module.__init__(self)
        vars(self).update(vars(linear))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] -> [..., N], equal to that of torch.nn.Linear but for rounding."""
        rows = x.numel() // x.shape[-1]
        if CONTEXT.slots is None or not 1 <= rows <= MAX_ROWS or torch.compiler.is_compiling():
            return super().forward(x)
        if rows == 1:
            return self._multiply_one_row(x)
        columns = x.reshape(rows, -1).t()
        if self.bias is None:
            out = torch.mm(self.weight, columns)
        else:
            out = torch.addmm(self.bias[:, None], self.weight, columns)
        return out.t().contiguous().view(*x.shape[:-1], -1)

    def _multiply_one_row(self, x: torch.Tensor) -> torch.Tensor:
        width, outputs = self.weight.shape[1], self.weight.shape[0]
        parts = math.gcd(outputs, torch.get_num_threads())
        if parts == 1:
            return super().forward(x)
        pieces = self.weight.view(parts, -1, width).transpose(1, 2)
        out = torch.bmm(x.reshape(1, 1, width).expand(parts, 1, width), pieces)
        out = out.view(*x.shape[:-1], outputs)
        return out if self.bias is None else out + self.bias


def patch_linear_layers(model: Any) -> None:
    """Replaces the linear layers of `model` by `SmallBatchLinear` where that is faster: in fp32 on a CPU."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is not torch.nn.Linear:
                continue
            if child.weight.dtype == torch.float32 and child.weight.device.type == "cpu":
                setattr(module, name, SmallBatchLinear(child))
