"""What the frozen target tells a draft about a batch: tapped states, and what its logits are made of."""

from dataclasses import dataclass

import torch
from torch import Tensor

from decode.taps import Catch, Taps, head_of
from decode.target import Target, logits_only_at
from train.batches import Batch


@dataclass(frozen=True)
class Look:
    """What a teacher says of one batch; logits are its `head` of rows of `teacher`, made where they are needed."""

    features: Tensor  # [B, T, F] what the draft taps
    teacher: Tensor  # [B, T, P] means something at supervised positions


class Teacher:
    """The live target. Nothing of it is trained, and it projects no position to the vocabulary by itself.

    `head` takes rows [N, P] of `Look.teacher`, here the states behind the final norm, to logits [N, V].
    """

    def __init__(self, target: Target, taps: Taps):
        self.model = target.decoder.model
        self.taps = Taps(taps.layers, final=True)
        self.head = head_of(self.model)
        self.hidden = target.decoder.config.hidden_size

    @torch.no_grad()
    def look(self, batch: Batch) -> Look:
        """The states over the rows of a batch; those at padding mean nothing."""
        ids = batch.input_ids
        position = torch.arange(ids.shape[1], device=ids.device)[None]
        catch = Catch(self.model, self.taps)
        try:
            with logits_only_at(self.model, lambda hidden: hidden[:, :0]):
                self.model(input_ids=ids, position_ids=position, use_cache=False)
            states = catch.states()
        finally:
            catch.remove()
        final = states[..., -self.hidden :]
        return Look(states[..., : -self.hidden] if self.taps.layers else final, final)
