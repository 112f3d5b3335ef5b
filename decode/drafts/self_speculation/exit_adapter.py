"""A trained exit of the target after its first layers: a small block for each token, in front of the LM head.

LayerSkip (Elhoushi et al. 2024) trains the target itself for early exit. Here the target stays as it is: only the
adapter is trained, and the target's own pass never runs it.
"""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from decode.model.hidden_states import HiddenStateSpec
from decode.model.layer_stack import final_norm


class ExitAdapter(nn.Module):
    """norm(x + D (SiLU(G n(x)) * U n(x))) for each state x [..., H] that enters the target's layer E.

    It takes the place of the target's final norm, and `norm` is a module of that kind. D starts at zero and `norm` as
    the target's, so that an untrained adapter is the plain early exit. `ids` [Vd] are the target's ids of the tokens
    that are drafted, rising; None: all.
    """

    ids: torch.Tensor | None

    def __init__(self, config: dict[str, Any], norm: nn.Module, ids: torch.Tensor | None):
        super().__init__()
        width, inner = config["hidden_size"], config["exit_width"]
        self.config = config
        self.layers: int = config["exit_layer"]
        self.taps = HiddenStateSpec((self.layers,))
        self.input_norm = nn.RMSNorm(width, eps=1e-5)
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        self.norm = norm
        self.register_buffer("ids", ids, persistent=False)
        for matrix in (self.gate_proj, self.up_proj):
            nn.init.normal_(matrix.weight, std=width**-0.5)
        nn.init.zeros_(self.down_proj.weight)

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        """States [..., H] entering layer E -> inputs [..., H] of the LM head, in the dtype of the states."""
        x = state.to(self.input_norm.weight.dtype)
        normed = self.input_norm(x)
        inner = F.silu(self.gate_proj(normed)) * self.up_proj(normed)
        out: torch.Tensor = self.norm(x + self.down_proj(inner))
        return out.to(state.dtype)


def copy_final_norm(model: Any) -> nn.Module:
    """The final norm of the causal LM `model` as a module of its own, in fp32 and trainable."""
    return copy.deepcopy(final_norm(model)).float().requires_grad_(True)
