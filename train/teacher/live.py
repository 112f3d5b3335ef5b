"""What the frozen target tells a draft about a batch: tapped states, and what its logits are made of."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from decode.common.errors import UserError
from decode.model import attention
from decode.model.hidden_states import HiddenStateHooks, HiddenStateSpec, LMHead
from decode.model.loading import Target
from decode.model.runner import logits_only_at
from train.data.batching import Batch


def compute_hidden_states(model: Any, batch: Batch, taps: HiddenStateSpec) -> Tensor:
    """[B, T, F] of `model` over the rows of a batch, each for itself; nothing is projected to the vocabulary.

    UserError for packed rows in a model that computes its layers again in backward, where they would not be apart.
    """
    again = any(vars(module).get("gradient_checkpointing") for module in model.modules())
    if batch.documents is not None and again:
        raise UserError("gradient checkpointing needs unpacked rows: set loop.pack to false")
    catch = HiddenStateHooks(model, taps)
    try:
        nothing = logits_only_at(model, lambda hidden: hidden[:, :0])
        with nothing, attention.packed_documents(batch.documents):
            model(input_ids=batch.input_ids, position_ids=batch.positions(), use_cache=False)
        return catch.states()
    finally:
        catch.remove()


@dataclass(frozen=True)
class TeacherOutput:
    """What a teacher says of one batch; logits are its `head` of rows of `teacher`, made where they are needed."""

    features: Tensor  # [B, T, F] what the draft taps
    head_inputs: Tensor  # [B, T, P] means something at supervised positions


class LiveTeacher:
    """The live target. Nothing of it is trained, and it projects no position to the vocabulary by itself.

    `head` takes rows [N, P] of `Look.teacher`, here the states behind the final norm, to logits [N, V].
    """

    def __init__(self, target: Target, taps: HiddenStateSpec):
        self.model = target.decoder.model
        self.taps = HiddenStateSpec(taps.layers, final=True)
        self.head = LMHead(self.model)
        self.hidden: int = self.model.get_output_embeddings().weight.shape[1]

    @torch.no_grad()
    def get_output(self, batch: Batch) -> TeacherOutput:
        """The states over the rows of a batch; those at padding mean nothing."""
        states = compute_hidden_states(self.model, batch, self.taps)
        final = states[..., -self.hidden :]
        return TeacherOutput(states[..., : -self.hidden] if self.taps.layers else final, final)
