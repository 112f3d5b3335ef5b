"""What the frozen target tells its heads about a batch: tapped states, and the states behind its logits."""

from dataclasses import dataclass

import torch
from torch import Tensor

from decode.taps import Catch, Taps, head_of
from decode.target import Target, logits_only_at


@dataclass(frozen=True)
class Look:
    """States of one batch; logits are `Teacher.head` of `final`, computed where they are needed."""

    features: Tensor  # [B, T, F] what the draft taps
    final: Tensor  # [B, T, H] behind the final norm


class Teacher:
    """The live target. Nothing of it is trained, and it projects no position to the vocabulary by itself."""

    def __init__(self, target: Target, taps: Taps):
        self.model = target.decoder.model
        self.taps = Taps(taps.layers, final=True)
        self.head = head_of(self.model)
        self.hidden = target.decoder.config.hidden_size

    @torch.no_grad()
    def look(self, input_ids: Tensor) -> Look:
        """The states over right-padded rows [B, T]; those at padding mean nothing."""
        position = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        catch = Catch(self.model, self.taps)
        try:
            with logits_only_at(self.model, lambda hidden: hidden[:, :0]):
                self.model(input_ids=input_ids, position_ids=position, use_cache=False)
            states = catch.states()
        finally:
            catch.remove()
        final = states[..., -self.hidden :]
        return Look(states[..., : -self.hidden] if self.taps.layers else final, final)
