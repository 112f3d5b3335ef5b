"""What linear layers in few bits have in common: they decode, and are neither trained nor written."""

import copy
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from decode.common.errors import UserError


class QuantizedLinear(torch.nn.Module):
    """A linear layer whose weight [N, K] has few bits; subclasses keep the numbers and multiply by them.

    It has no state dict. Where a gradient is asked for, as through the LM head in the training of some drafts, the
    product is that of `weight` in floating point.
    """

    dtype_name: ClassVar[str]
    """Its kind, as settings call it."""

    def __init__(
        self, shape: torch.Size, bias: Tensor | None, embedding: torch.nn.Parameter | None
    ):
        super().__init__()
        self.out_features, self.in_features = shape
        self.bias = None
        if bias is not None:
            self.bias = torch.nn.Parameter(bias.detach().float(), requires_grad=False)
        self.embedding = embedding
        """The embedding, of an LM head that is one matrix with it: it stays for look-up."""

    @classmethod
    def from_weight(
        cls, weight: Tensor, bias: Tensor | None, embedding: torch.nn.Parameter | None = None
    ) -> "QuantizedLinear":
        """The layer with this weight [N, K], rounded, and bias [N]."""
        raise NotImplementedError

    def product(self, x: Tensor) -> Tensor:
        """x [M, K] in fp32 or wider times the weight -> [M, N] in the dtype of x. No row depends on another."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N] in the dtype of x."""
        if torch.is_grad_enabled() and x.requires_grad:
            bias = None if self.bias is None else self.bias.to(x.dtype)
            return F.linear(x, self.weight.detach().to(x.dtype), bias)
        rows = x.reshape(-1, self.in_features)
        out = self.product(rows.float() if rows.element_size() < 4 else rows)
        if self.bias is not None:
            out = out + self.bias
        return out.to(x.dtype).view(*x.shape[:-1], self.out_features)

    @property
    def weight(self) -> Tensor:
        """[N, K] in floating point: the embedding of an LM head that is tied to it, else what the numbers stand for,
        made at each call."""
        return self.dequantized() if self.embedding is None else self.embedding

    @torch.no_grad()
    def dequantized(self) -> Tensor:
        """[N, K] in fp32: what the numbers stand for."""
        return self.product(torch.eye(self.in_features, dtype=torch.float32)).T.contiguous()

    def rows(self, ids: Tensor) -> "QuantizedLinear":
        """The layer with the outputs `ids` [Vd] alone."""
        bias = None if self.bias is None else self.bias[ids]
        return self.from_weight(self.weight.detach()[ids], bias)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Linear:
        """A linear layer of `weight`: copies of a target's layers are made to be trained. A tied one stays tied."""
        return linear_layer(copy.deepcopy(self.weight, memo), self.bias)

    def _save_to_state_dict(self, *args: Any) -> None:
        raise UserError(
            f"a model in {self.dtype_name} can be neither saved nor trained: load it in float32"
        )


def linear_layer(weight: Tensor, bias: Tensor | None) -> torch.nn.Linear:
    """A linear layer that has this `weight` [N, K] itself, and a copy of `bias`."""
    outputs, inputs = weight.shape
    layer = torch.nn.Linear(inputs, outputs, bias is not None, device="meta")
    tied = isinstance(weight, torch.nn.Parameter)
    layer.weight = weight if tied else torch.nn.Parameter(weight)
    if bias is not None:
        layer.bias = torch.nn.Parameter(bias.detach().clone())
    return layer
