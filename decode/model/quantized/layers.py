"""What linear layers in few bits have in common: they decode, and are neither trained nor written."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from decode.common.errors import UserError
from decode.model.linear import FusedProduct, share_product
from decode.model.quantized import vnni


class QuantizedLinear(torch.nn.Module):
    """A linear layer whose weight [N, K] has few bits; subclasses keep the numbers and multiply by them.

    It has no state dict. Where a gradient is asked for, as through the LM head in the training of some drafts, the
    product is that of `weight` in floating point.
    """

    dtype_name: str
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
        """x [M, K] in fp32 or wider times the weight -> [M, N] in the dtype of x. A target's rows are the same however
        many there are."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N] in the dtype of x."""
        if torch.is_grad_enabled() and x.requires_grad:
            bias = None if self.bias is None else self.bias.to(x.dtype)
            return F.linear(x, self.weight.detach().to(x.dtype), bias)
        out = self.outputs(x)
        if self.bias is not None:
            out = out + self.bias
        return out.to(x.dtype)

    def outputs(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N] without the bias, in fp32 or wider."""
        rows = x.reshape(-1, self.in_features)
        out = self.product(rows.float() if rows.element_size() < 4 else rows)
        return out.view(*x.shape[:-1], self.out_features)

    @property
    def weight(self) -> Tensor:
        """[N, K] in floating point: the embedding of an LM head that is tied to it, else what the numbers stand for,
        made at each call."""
        return self.dequantized() if self.embedding is None else self.embedding

    def dequantized(self) -> Tensor:
        """[N, K] in fp32: what the numbers stand for."""
        raise NotImplementedError

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


class FusedPart(QuantizedLinear):
    """A layer whose outputs are some of those of `whole`, which multiplies at once for all layers that read the same
    tensor: one product of few rows with one large weight, whose input is rounded once."""

    def __init__(self, whole: QuantizedLinear, start: int, outputs: int, bias: Tensor | None):
        super().__init__(torch.Size((outputs, whole.in_features)), bias, None)
        self.whole = whole
        self.dtype_name = whole.dtype_name
        self.start = start
        self.fused: FusedProduct[FusedPart]
        self.place: int

    def outputs(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            part = self.fused.output(self.place, x)
            if part is not None:
                return part
        return self.product(x)[..., self.start : self.start + self.out_features]

    def product(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N], the outputs of all layers one after the other."""
        return self.whole.outputs(x)

    def dequantized(self) -> Tensor:
        return self.whole.dequantized()[self.start : self.start + self.out_features]


def has_vnni_layers(model: torch.nn.Module) -> bool:
    """Whether some of its layers are in few bits on a CPU with AVX512-VNNI, so that its attention can be ours too."""
    return (
        any(isinstance(part, QuantizedLinear) for part in model.modules()) and vnni.is_available()
    )


def fused_parts(kind: type[QuantizedLinear], layers: Sequence[Any]) -> list[FusedPart]:
    """Layers of this kind in place of several linear ones that read the same tensor."""
    whole = kind.from_weight(torch.cat([layer.weight.detach() for layer in layers]), None)
    parts: list[FusedPart] = []
    for layer in layers:
        start = sum(part.out_features for part in parts)
        parts.append(FusedPart(whole, start, layer.out_features, layer.bias))
    share_product(parts)
    return parts


def linear_layer(weight: Tensor, bias: Tensor | None) -> torch.nn.Linear:
    """A linear layer that has this `weight` [N, K] itself, and a copy of `bias`."""
    outputs, inputs = weight.shape
    layer = torch.nn.Linear(inputs, outputs, bias is not None, device="meta")
    tied = isinstance(weight, torch.nn.Parameter)
    layer.weight = weight if tied else torch.nn.Parameter(weight)
    if bias is not None:
        layer.bias = torch.nn.Parameter(bias.detach().clone())
    return layer
