"""Hidden states of the target that a draft reads, caught by hooks on its modules; and the target's own head."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from decode.common.errors import UserError


@dataclass(frozen=True)
class HiddenStateSpec:
    """Which states; they stand side by side in the order of the fields."""

    layers: tuple[int, ...] = ()
    """States that enter these layers, before any norm of theirs: HF's hidden_states[i] (capture convention)."""
    final: bool = False
    """The state that the LM head reads, after the final norm."""


class HiddenStateHooks:
    """Hooks on `model` that keep the tapped states of each forward until `states` takes them."""

    def __init__(self, model: Any, taps: HiddenStateSpec):
        self.captured: dict[int, torch.Tensor] = {}
        stack = layer_stack(model)
        for i in taps.layers:
            if not 0 <= i < len(stack):
                raise UserError(
                    f"no layer {i} to tap: this target has layers 0 to {len(stack) - 1}"
                )
        places = [stack[i] for i in taps.layers]
        places += [model.get_output_embeddings()] if taps.final else []
        self.count = len(places)
        self.handles = [
            place.register_forward_pre_hook(partial(self._keep, at), with_kwargs=True)
            for at, place in enumerate(places)
        ]

    def _keep(self, at: int, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.captured[at] = args[0] if args else kwargs["hidden_states"]

    def states(self) -> torch.Tensor:
        """[B, T, F] of the last forward, all tapped states along the last dimension; forgotten here."""
        found = torch.cat([self.captured[at] for at in range(self.count)], -1)
        self.captured.clear()
        return found

    def remove(self) -> None:
        """The model is as before."""
        for handle in self.handles:
            handle.remove()


def layer_stack(model: Any) -> torch.nn.ModuleList:
    """The decoder layers of a causal LM: its one ModuleList of that length. UserError when that is not clear."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    stacks = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == count]
    if len(stacks) != 1:
        raise UserError(
            f"cannot tell which modules of this {model.config.model_type} model are its {count} layers"
        )
    return stacks[0]


def lm_head_function(
    model: Any, device: str | torch.device | None = None, dtype: torch.dtype | None = None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function from final states [..., H] to the logits [..., V] that `model` gives for them.

    Heads are linear; what some models do to their output is in their config. On another device or in another dtype
    it has a copy of the weights.
    """
    projection, finish = model.get_output_embeddings(), logit_transform(model)
    weight = projection.weight.detach().to(device, dtype)
    bias = None if projection.bias is None else projection.bias.detach().to(device, dtype)

    def head(states: torch.Tensor) -> torch.Tensor:
        # Not through the module: hooks on it would take this for a forward of the model.
        return finish(F.linear(states.to(weight.dtype), weight, bias))

    return head


def logit_transform(model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """What `model` does to the output of its LM head to get logits [..., V]: nothing, or a scale and a cap."""
    config = vars(model.config.get_text_config(decoder=True))
    scale = float(config.get("logit_scale") or 1.0) / float(config.get("logits_scaling") or 1.0)
    cap = config.get("final_logit_softcapping")

    def finish(logits: torch.Tensor) -> torch.Tensor:
        if scale != 1.0:
            logits = logits * scale
        return logits if cap is None else cap * torch.tanh(logits / cap)

    return finish


class HiddenStateBuffer:
    """Tapped states of the last `count` tokens of each row that have one, which all have but the newest.

    [B, count, F], the latest last. Rows with fewer tokens hold their first state several times over.
    """

    def __init__(self, rows: int, count: int, width: int, device: torch.device, dtype: torch.dtype):
        self.states = torch.zeros(rows, count, width, device=device, dtype=dtype)
        self.place = torch.arange(count, device=device)

    def reset_rows(self, row: torch.Tensor, features: torch.Tensor, length: torch.Tensor) -> None:
        """Rows `row` [b] begin with prompts of `length` [b] whose states are features [b, W, F]."""
        at = (length[:, None] - len(self.place) + self.place).clamp_min(0)
        self.states[row] = _gather_positions(features, at).to(self.states.dtype)

    def update_hidden_states(self, features: torch.Tensor, count: torch.Tensor) -> None:
        """The first `count` [B] of features [B, P, F] are those of the next tokens of each row."""
        both = torch.cat([self.states, features.to(self.states.dtype)], 1)
        self.states.copy_(_gather_positions(both, count[:, None] + self.place))


def _gather_positions(states: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return states.gather(1, index[..., None].expand(-1, -1, states.shape[-1]))
