"""Which feature, token, teacher row, label and position belong together, for every draft family.

x_t is the token at t, f_t the target's hidden state there, y_t its logits there, which give the distribution of
x_{t+1}. A head starts from a slot t, where f_t and the last committed token x_{t+1} are known. Step (or head)
j = 0, 1, … predicts token t+2+j:

    family           reads                                   at position   teacher   label       valid if target wrote
    draft LM         x_t                                     t             y_t       x_{t+1}     x_{t+1}
    Medusa head j    f_t                                     none          y_{t+1+j} x_{t+2+j}   x_{t+1} .. x_{t+2+j}
    EAGLE-1          f_t, x_{t+1}                            t             y_{t+1}   x_{t+2}     x_{t+1}, x_{t+2}
                     its output is trained towards f_{t+1}
    EAGLE-3 step j   slot t's output of step j-1 (j=0: f_t)  t + j         y_{t+1+j} x_{t+2+j}   x_{t+1} .. x_{t+2+j}
                     and x_{t+1+j}

Features stay at their slot; only tokens and teacher rows are shifted. f is the state after the final norm for Medusa
and EAGLE-1, three tapped states for EAGLE-3. The prompt's last position is a slot (the target writes the answer's first
token before any drafting), the one before it is not. Valid at step j implies valid at every step before.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from train.data.batching import document_positions, next_in_same_document


@dataclass(frozen=True)
class AlignedIndices:
    """What belongs to slot t at one step; each [B, T]. Where `valid` is False the rest is arbitrary but in range."""

    token: Tensor  # int64, the token that is read
    teacher: Tensor  # int64, the row of the target's logits to learn
    label: Tensor  # int64, the token whose distribution this row is
    position: Tensor  # int64, for RoPE, from 0 in each document
    valid: Tensor  # bool


class Alignment:
    """The aligned indices of one batch at steps 0 .. steps-1. Ids are padded once; each step is a view of them."""

    def __init__(
        self, input_ids: Tensor, loss_mask: Tensor, steps: int, documents: Tensor | None = None
    ):
        """`input_ids`, `loss_mask` as in a Batch; `documents` as in `target_run_length`. All [B, T]."""
        self.shape, self.steps = input_ids.shape, steps
        length = self.shape[1]
        self.padded_ids = pad(input_ids, (0, steps + 1))  # [B, T + steps + 1]
        index = torch.arange(length + steps, device=input_ids.device)
        self.teacher_rows = index.clamp_max(length - 1).expand(self.shape[0], -1)  # [B, T + steps]
        self.position = document_positions(input_ids, documents)
        self.run_length = target_run_length(loss_mask, documents)

    def causal(self) -> AlignedIndices:
        """Indices for a draft LM, whose slot t reads x_t and predicts the token after it."""
        token, label = self._window(self.padded_ids, 0), self._window(self.padded_ids, 1)
        return AlignedIndices(
            token, self._window(self.teacher_rows, 0), label, self.position, self.run_length >= 1
        )

    def step(self, j: int) -> AlignedIndices:
        """Indices for EAGLE step j; those of Medusa head j are the same, but it reads neither token nor position."""
        if not 0 <= j < self.steps:
            raise ValueError(f"step {j} of an alignment with {self.steps} steps")
        return AlignedIndices(
            token=self._window(self.padded_ids, 1 + j),
            teacher=self._window(self.teacher_rows, 1 + j),
            label=self._window(self.padded_ids, 2 + j),
            position=self.position + j,
            valid=self.run_length >= 2 + j,
        )

    def _window(self, padded: Tensor, start: int) -> Tensor:
        return padded[:, start : start + self.shape[1]]


def target_run_length(loss_mask: Tensor, documents: Tensor | None = None) -> Tensor:
    """[B, T] int64: the number of consecutive supervised tokens from t + 1 on, within the document of token t.

    `documents` [B, T] numbers the documents of a packed row: neighbours with equal numbers belong to one document.
    None: a row is one document.
    """
    written = loss_mask & next_in_same_document(loss_mask, documents)
    length = written.shape[1]
    index = torch.arange(length, device=written.device)
    stops = torch.where(written, length, index)
    return stops.flip(1).cummin(1).values.flip(1) - index  # distance to the next stop
