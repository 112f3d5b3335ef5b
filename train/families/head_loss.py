"""Heads with their losses, as modules: what runs forward, perhaps wrapped for several processes.

All work on the same picture: at target row u the target's law is compared with what the head said about it from each
slot u - 1 - j, one for every step or head j. So the target's logits are computed once a row, a few rows at a time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from train.families.alignment import Alignment
from train.losses import divergences
from train.losses.objective import Criterion

METRIC_ROWS = 256
"""Rows of a piece on which metrics are computed: as costly a row as the loss, and needed less exactly."""


@dataclass
class LossWeights:
    """How heads weigh the parts of their loss."""

    positions: Literal["decay", "dpace"] = "decay"
    """Of step j: decay^j, or as D-PACE has it what the step adds to the expected accepted length of its own slot."""
    decay: float = 0.8
    """A token counts only if those before it were accepted: weight of each step compared with the one before."""
    feature: float = 1.0
    """eagle1: weight of the smooth L1 between features."""
    divergence: float = 0.1
    """eagle1: weight of the divergence beside it."""
    heads: float = 0.01
    """medusa2: weight of the heads' loss beside the one that keeps the target as it was."""


class SupervisedRows:
    """The target rows of a batch about which some slot says something: N of them."""

    def __init__(self, places: Alignment, steps: int):
        earlier = []
        for j in range(steps):
            valid = places.step(j).valid  # [B, T] at slots
            earlier.append(
                torch.cat([torch.zeros_like(valid[:, : j + 1]), valid], 1)[:, : valid.shape[1]]
            )
        valid = torch.stack(earlier, -1)  # [B, T, J] at rows
        self.batch, self.row = valid.any(-1).nonzero(as_tuple=True)
        self.valid = valid[self.batch, self.row]  # [N, J] bool
        self.label = places.causal().label[self.batch, self.row]  # [N] the token that followed
        self.shape = valid.shape

    def take(self, values: Tensor) -> Tensor:
        """[N, ...] from [B, T, ...]: the values at the rows."""
        return values[self.batch, self.row]

    def scatter_to_slots(self, values: Tensor) -> Tensor:
        """[B, T, J] from [N, J]: at each slot what its steps have at the rows they speak of; 0 where not valid."""
        steps = values.shape[1]
        found = values.new_zeros(*self.shape[:2], steps)
        for j in range(steps):
            valid = self.valid[:, j]
            found[self.batch[valid], self.row[valid] - 1 - j, j] = values[valid, j]
        return found

    def values_at_slots(self, values: Tensor, j: int) -> Tensor:
        """[N, ...] from [B, T, ...]: the values at the slots that speak of the rows at step j."""
        return values[self.batch, (self.row - 1 - j).clamp_min(0)]


@torch.no_grad()
def step_weights(
    weights: LossWeights,
    rows: SupervisedRows,
    say: Callable[[Tensor], list[Tensor]],
    slots: Tensor,
    ids: Tensor | None,
    size: int,
) -> Tensor:
    """[N, J]: what each step's loss at each row counts; `say` of slots [n, J, H] gives the logits [n, Vd] of each step.

    D-PACE weighs the steps of one slot, which speak of one row each, by how sure they are of the tokens that
    followed there; so for these weights logits are computed once more.
    """
    if weights.positions == "decay":
        steps = torch.arange(rows.valid.shape[1], device=slots.device)
        return (weights.decay**steps).expand_as(rows.valid)
    sure = torch.cat(
        [
            torch.stack([label_probability(q, label, ids) for q in say(piece)], 1)
            for piece, label in zip(slots.split(size), rows.label.split(size), strict=True)
        ]
    )
    found = divergences.dpace(rows.scatter_to_slots(sure), rows.scatter_to_slots(rows.valid))
    return torch.stack(
        [rows.values_at_slots(found[..., j], j) for j in range(rows.valid.shape[1])], 1
    )


def label_probability(q_logits: Tensor, label: Tensor, ids: Tensor | None) -> Tensor:
    """q [N] of the tokens label [N]; 0 for those that the draft's `ids` lack."""
    q = q_logits.float()
    if ids is None:
        known, column = torch.ones_like(label, dtype=torch.bool), label
    else:  # they rise
        column = torch.searchsorted(ids, label).clamp_max(len(ids) - 1)
        known = ids[column] == label
    q = q.gather(-1, column[:, None])[:, 0] - q.logsumexp(-1)
    return q.exp().where(known, 0.0)


def loss_and_metrics(
    criterion: Criterion,
    p_logits: Tensor,
    said: list[Tensor],
    valid: Tensor,
    weight: Tensor,
    ids: Tensor | None,
) -> dict[str, Tensor]:
    """Sums over valid [N, J] of the loss and metrics of the target's p [N, V] and what each step said [N, Vd].

    "loss" is multiplied by weight [N, J]; "alpha_j" is the overlap and "top1_j" the agreement at step j, "count_j" how
    many they are of.
    """
    total = said[0].new_zeros((), dtype=torch.float32)
    found: dict[str, Tensor] = {}
    whole = criterion.target_distribution(p_logits, ids)
    for j, q_logits in enumerate(said):
        values = weight[:, j] * criterion.position_losses(whole, q_logits)
        total = total + values.where(valid[:, j], 0.0).sum()
    some = slice(None, None, max(1, len(p_logits) // METRIC_ROWS))
    with torch.no_grad():
        law = divergences.target_log_probs(p_logits[some], ids)
        for j, q_logits in enumerate(said):
            counted, q_logits = valid[some, j], q_logits[some]
            overlap = divergences.acceptance.of(divergences.pair_log_probs(law, q_logits))
            agree = divergences.top1(p_logits[some], q_logits, ids)
            found[f"alpha_{j + 1}"] = overlap.where(counted, 0.0).sum()
            found[f"top1_{j + 1}"] = (agree & counted).sum().float()
            found[f"count_{j + 1}"] = counted.sum().float()
    return {"loss": total, **found}
