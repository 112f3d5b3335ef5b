"""Hidden states that a draft reads, captured by hooks on the target's modules; the target's LM head as a function."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from decode.common.errors import UserError
from decode.model.layer_stack import layer_stack
from decode.model.linear import patch_linear_layers
from decode.model.quantized.layers import QuantizedLinear


@dataclass(frozen=True)
class HiddenStateSpec:
    """Which hidden states are captured. They are concatenated in the order of the fields."""

    layers: tuple[int, ...] = ()
    """The inputs of these layers, before any norm in the layer: `hidden_states[i]` of transformers (capture ids)."""
    final: bool = False
    """The input of the LM head, after the final norm."""


def check_aux_layers(aux_layers: HiddenStateSpec, depth: int) -> None:
    """UserError for a layer that a target of `depth` layers does not have."""
    for i in aux_layers.layers:
        if not 0 <= i < depth:
            raise UserError(f"no layer {i} to tap: this target has layers 0 to {depth - 1}")


class HiddenStateHooks:
    """Hooks on `model` that keep the hidden states `aux_layers` of each forward until `states` returns them.

    UserError for a layer that the model does not have.
    """

    def __init__(self, model: Any, aux_layers: HiddenStateSpec):
        self.captured: dict[int, Tensor] = {}
        stack = layer_stack(model)
        check_aux_layers(aux_layers, len(stack))
        modules = [stack[i] for i in aux_layers.layers]
        modules += [model.get_output_embeddings()] if aux_layers.final else []
        self.count, self.device = len(modules), model.device
        self.handles = [
            module.register_forward_pre_hook(partial(self._keep, number), with_kwargs=True)
            for number, module in enumerate(modules)
        ]

    def _keep(
        self, number: int, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.captured[number] = args[0] if args else kwargs["hidden_states"]

    def states(self) -> Tensor:
        """[B, T, F] all captured states of the last forward along the last dimension. They are released here."""
        captured = [self.captured[number].to(self.device) for number in range(self.count)]
        states = torch.cat(captured, -1)
        self.captured.clear()
        return states

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


class LogitTransform:
    """What `model` does to the output [..., V] of its LM head to get logits: nothing, or a scale and a soft cap."""

    def __init__(self, model: Any):
        config = vars(model.config.get_text_config(decoder=True))
        multiplier, divisor = config.get("logit_scale"), config.get("logits_scaling")
        self.scale = float(multiplier or 1.0) / float(divisor or 1.0)
        self.cap: float | None = config.get("final_logit_softcapping")

    def __call__(self, logits: Tensor) -> Tensor:
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


class LMHead:
    """The function from final hidden states [..., H] to the logits [..., V] that `model` computes from them.

    LM heads are linear; what some models do to their output is a `LogitTransform`. On another device or in another
    dtype than the model it has a copy of the weights. One in few bits is used as it is, in every dtype. It is never
    trained: the weights are detached.
    """

    def __init__(
        self, model: Any, device: str | torch.device | None = None, dtype: torch.dtype | None = None
    ):
        # A layer of its own: hooks on the model's would take this for a forward of the model.
        own = model.get_output_embeddings()
        self.transform = LogitTransform(model)
        if isinstance(own, QuantizedLinear) and torch.device(device or "cpu").type == "cpu":
            self.linear: Any = own
            self.dtype: torch.dtype = torch.float32
            return
        rows, width = own.weight.shape
        linear = torch.nn.Linear(width, rows, own.bias is not None, device="meta")
        for name in ("weight", "bias") if own.bias is not None else ("weight",):
            value = getattr(own, name).detach().to(device, dtype)
            setattr(linear, name, torch.nn.Parameter(value, requires_grad=False))
        holder = torch.nn.ModuleDict({"head": linear})
        patch_linear_layers(holder)
        self.linear = holder["head"]
        self.dtype = linear.weight.dtype

    def __call__(self, states: Tensor) -> Tensor:
        # Not by a call of the layer, which may be the model's own and have its hooks
        return self.transform(self.linear.forward(states.to(self.dtype)))


class HiddenStateBuffer:
    """Hidden states [B, count, F] of the last `count` tokens of each row before its newest one, the latest last.

    The newest token has not been run through the target yet and has no state. Rows with fewer tokens repeat their
    first state.
    """

    def __init__(self, rows: int, count: int, width: int, device: torch.device, dtype: torch.dtype):
        self.states = torch.zeros(rows, count, width, device=device, dtype=dtype)
        self.offsets = torch.arange(count, device=device)

    def reset_rows(self, row: Tensor, features: Tensor, length: Tensor) -> None:
        """Sets rows `row` [b] to the end of prompts of `length` [b] whose states are features [b, W, F]."""
        at = (length[:, None] - len(self.offsets) + self.offsets).clamp_min(0)
        self.states[row] = _gather_positions(features, at).to(self.states.dtype)

    def update_hidden_states(self, features: Tensor, count: Tensor) -> None:
        """Appends the first `count` [B] states of features [B, P, F], those of the next tokens of each row."""
        both = torch.cat([self.states, features.to(self.states.dtype)], 1)
        self.states.copy_(_gather_positions(both, count[:, None] + self.offsets))


def _gather_positions(states: Tensor, index: Tensor) -> Tensor:
    return states.gather(1, index[..., None].expand(-1, -1, states.shape[-1]))
