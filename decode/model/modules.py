"""Parts of the decoder layers that we run ourselves: norm, rotary embedding and gated MLP, as Llama's are."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

CosSin = tuple[Tensor, Tensor]


class RMSNorm(nn.RMSNorm):
    """torch's for inputs of any dtype: under autocast a bf16 input is normed in fp32, as its weight is.

    With two dtypes torch warns and leaves its fused kernel.
    """

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


def apply_rotary(x: Tensor, rotary: CosSin) -> Tensor:
    """x [B, heads, T, D] after rotary position embedding, as in Llama."""
    cos, sin = rotary
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]


class Fp32RotaryEmbedding(LlamaRotaryEmbedding):
    """Llama's, with frequencies that stay in fp32 when the model is cast: rounded ones are wrong at far positions."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Fp32RotaryEmbedding":
        exact = dict(self.named_buffers())
        super()._apply(fn, recurse)
        for name, value in self.named_buffers():
            setattr(self, name, exact[name].to(value.device))
        return self


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}
"""What `hidden_act` in config.json may be."""


class GatedMLP(nn.Module):
    """Llama's gated MLP, with the activation that its config names."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        self.activation = ACTIVATIONS[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))
