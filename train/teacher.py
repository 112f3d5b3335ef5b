"""What the frozen target tells a draft about a batch: tapped states, and what its logits are made of."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from decode import attention
from decode.settings import UserError
from decode.taps import Catch, Taps, head_of
from decode.target import Target, logits_only_at
from train.batches import Batch


def states_of(model: Any, batch: Batch, taps: Taps) -> Tensor:
    """[B, T, F] of `model` over the rows of a batch, each for itself; nothing is projected to the vocabulary.

    UserError for packed rows in a model that computes its layers again in backward, where they would not be apart.
    """
    again = any(vars(module).get("gradient_checkpointing") for module in model.modules())
    if batch.documents is not None and again:
        raise UserError("gradient checkpointing needs unpacked rows: set loop.pack to false")
    catch = Catch(model, taps)
    try:
        nothing = logits_only_at(model, lambda hidden: hidden[:, :0])
        with nothing, attention.within(batch.documents):
            model(input_ids=batch.input_ids, position_ids=batch.positions(), use_cache=False)
        return catch.states()
    finally:
        catch.remove()


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
        self.hidden: int = self.model.get_output_embeddings().weight.shape[1]

    @torch.no_grad()
    def look(self, batch: Batch) -> Look:
        """The states over the rows of a batch; those at padding mean nothing."""
        states = states_of(self.model, batch, self.taps)
        final = states[..., -self.hidden :]
        return Look(states[..., : -self.hidden] if self.taps.layers else final, final)
