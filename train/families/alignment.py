"""Which feature, token, teacher row, label and position belong together, for every family of drafts.

x_t is the token at t, f_t the target's state there, y_t its logits there: the law of x_{t+1}. A head starts from
a slot t, where f_t and the last committed token x_{t+1} are known. Step (or head) j = 0, 1, … predicts token t+2+j:

    family           reads                                   at position   teacher   label       valid if target wrote
    draft LM         x_t                                     t             y_t       x_{t+1}     x_{t+1}
    Medusa head j    f_t                                     none          y_{t+1+j} x_{t+2+j}   x_{t+1} .. x_{t+2+j}
    EAGLE-1          f_t, x_{t+1}                            t             y_{t+1}   x_{t+2}     x_{t+1}, x_{t+2}
                     and its output is to be f_{t+1}: `later(f, 1)`
    EAGLE-3 step j   slot t's output of step j-1 (j=0: f_t)  t + j         y_{t+1+j} x_{t+2+j}   x_{t+1} .. x_{t+2+j}
                     and x_{t+1+j}

What is read stays at its slot; only tokens and teachers move. f is the state behind the final norm for Medusa and
EAGLE-1, three tapped states for EAGLE-3. The prompt's last position is a slot (the target writes the answer's first
token before any drafting), the one before it is not. Valid at step j implies valid at every step before.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from train.data.batching import document_positions, next_in_same_document


@dataclass(frozen=True)
class AlignedIndices:
    """What goes with slot t at one step; each [B, T]. Where not valid, the rest means nothing but is in range."""

    token: Tensor  # int64, the token read
    teacher: Tensor  # int64, the row of the target's logits to learn
    label: Tensor  # int64, the token that this row is the law of
    position: Tensor  # int64, for RoPE, from 0 in each document
    valid: Tensor  # bool


class Alignment:
    """The places of one batch at steps 0 .. steps-1: padded once, so that tokens of a step are a view of it."""

    def __init__(
        self, input_ids: Tensor, loss_mask: Tensor, steps: int, documents: Tensor | None = None
    ):
        """`input_ids`, `loss_mask` as in a Batch; `documents` as in `reach`. All [B, T]."""
        self.shape, self.steps = input_ids.shape, steps
        length = self.shape[1]
        self.ids = pad(input_ids, (0, steps + 1))  # [B, T + steps + 1]
        index = torch.arange(length + steps, device=input_ids.device)
        self.rows = index.clamp_max(length - 1).expand(self.shape[0], -1)  # [B, T + steps]
        self.position = document_positions(input_ids, documents)
        self.reach = target_run_length(loss_mask, documents)

    def causal(self) -> AlignedIndices:
        """Places for a draft LM, whose slot t reads x_t and predicts the token after it."""
        token, label = self._window(self.ids, 0), self._window(self.ids, 1)
        return AlignedIndices(
            token, self._window(self.rows, 0), label, self.position, self.reach >= 1
        )

    def step(self, j: int) -> AlignedIndices:
        """Places for EAGLE step j. Medusa head j has the same but reads no token and no position."""
        if not 0 <= j < self.steps:
            raise ValueError(f"step {j} of an alignment made for {self.steps} steps")
        return AlignedIndices(
            token=self._window(self.ids, 1 + j),
            teacher=self._window(self.rows, 1 + j),
            label=self._window(self.ids, 2 + j),
            position=self.position + j,
            valid=self.reach >= 2 + j,
        )

    def _window(self, padded: Tensor, start: int) -> Tensor:
        return padded[:, start : start + self.shape[1]]


def later(x: Tensor, n: int) -> Tensor:
    """x [B, T, ...] with what stands n >= 0 places later at every place, zeros where the row has ended."""
    return torch.cat([x[:, n:], torch.zeros_like(x[:, :n])], dim=1)


def supervised(loss_mask: Tensor, j: int, documents: Tensor | None = None) -> Tensor:
    """[B, T] bool: slot t at step j is a draft that decoding makes: tokens t+1 .. t+2+j are the target's."""
    return target_run_length(loss_mask, documents) >= 2 + j


def target_run_length(loss_mask: Tensor, documents: Tensor | None = None) -> Tensor:
    """[B, T] int64: how many tokens in a row, from t + 1 on, the target wrote in the document of token t.

    `documents` [B, T] tells the documents of a packed row apart: neighbours with equal numbers are of one. None:
    a row is one document.
    """
    written = loss_mask & next_in_same_document(loss_mask, documents)
    length = written.shape[1]
    index = torch.arange(length, device=written.device)
    stops = torch.where(written, length, index)
    return stops.flip(1).cummin(1).values.flip(1) - index  # the next stop, from where we are
