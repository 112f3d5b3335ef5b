"""Linear layers that read the same tensor, such as the query, key and value projections, multiplied as one.

Products of few rows with one large weight take 0.8 to 0.95 of the time of those with its parts (docs/log.md).
"""

from collections.abc import Sequence
from typing import Generic, TypeVar

import torch

SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers in one module that read the same tensor in most models, in the order of their calls."""


L = TypeVar("L", bound=torch.nn.Linear)


class FusedProduct(Generic[L]):
    """The product of one input [..., K] with the weights of several layers, which take their outputs in turn.

    The first layer that is called computes it. Only layers that are given the very same tensor take part of it: where
    one is given another tensor, or is called before the first, `is_whole` is False from then on.
    """

    def __init__(self, layers: Sequence[L]):
        self.layers = layers
        self.is_whole = True
        self.packed: torch.Tensor | None = None
        self.bias: torch.Tensor | None = None
        self.sizes: list[int] = []
        self.held: tuple[torch.Tensor, Sequence[torch.Tensor]] | None = None

    def pack(self) -> torch.Tensor:
        """All weights packed for oneDNN as one."""
        weights = [layer.weight.detach() for layer in self.layers]
        self.sizes = [len(weight) for weight in weights]
        if any(layer.bias is not None for layer in self.layers):
            biases = [
                weight.new_zeros(len(weight)) if layer.bias is None else layer.bias.detach()
                for layer, weight in zip(self.layers, weights, strict=True)
            ]
            self.bias = torch.cat(biases)
        self.packed = torch.ops.mkldnn._reorder_linear_weight(torch.cat(weights), None)
        return self.packed

    def drop(self) -> None:
        """Forgets the packed weights, which have changed."""
        self.packed = self.bias = None

    def output(self, place: int, x: torch.Tensor) -> torch.Tensor | None:
        """[..., N] the output of layer number `place` for x, or None if that layer has to multiply by itself."""
        if place == 0:
            packed = self.pack() if self.packed is None else self.packed
            out = torch.ops.mkldnn._linear_pointwise(x, packed, self.bias, "none", [], "")
            self.held = x, out.split(self.sizes, -1)
        if self.held is None or self.held[0] is not x:
            self.is_whole, self.held = False, None
            self.drop()
            return None
        part = self.held[1][place]
        if place == len(self.layers) - 1:
            self.held = None
        return part
