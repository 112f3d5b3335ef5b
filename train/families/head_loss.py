"""The loss of heads at supervised target rows, and the weights of their steps.

At target row u the target's distribution is compared with the head's from each slot u - 1 - j, one for every step or
head j. So the target's logits are computed once per row, a few rows at a time.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from train.families.alignment import Alignment
from train.losses import divergences
from train.losses.objective import Criterion
from train.settings.training import LossWeights

METRIC_ROWS = 256
"""Rows of each chunk on which metrics are computed: they cost as much per row as the loss and may be less exact."""


class SupervisedRows:
    """The N target rows of a batch that some slot predicts."""

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
        self.label = places.causal().label[
            self.batch, self.row
        ]  # [N] the token at the next position
        self.shape = valid.shape

    def take(self, values: Tensor) -> Tensor:
        """[N, ...] from [B, T, ...]: the values at the rows."""
        return values[self.batch, self.row]

    def scatter_to_slots(self, values: Tensor) -> Tensor:
        """[B, T, J] from [N, J]: at each slot the values of its steps at the rows they predict; 0 if not valid."""
        steps = values.shape[1]
        found = values.new_zeros(*self.shape[:2], steps)
        for j in range(steps):
            valid = self.valid[:, j]
            found[self.batch[valid], self.row[valid] - 1 - j, j] = values[valid, j]
        return found

    def values_at_slots(self, values: Tensor, j: int) -> Tensor:
        """[N, ...] from [B, T, ...]: the values at the slots that predict the rows at step j."""
        return values[self.batch, (self.row - 1 - j).clamp_min(0)]


@torch.no_grad()
def step_weights(
    weights: LossWeights,
    rows: SupervisedRows,
    step_logits: Callable[[Tensor], list[Tensor]],
    slots: Tensor,
    ids: Tensor | None,
    size: int,
    head: Callable[[Tensor], Tensor],
    teacher: Tensor,
) -> Tensor:
    """[N, J]: the weight of each step's loss at each row.

    `step_logits` maps states of slots [n, J, H] to the logits [n, Vd] of each step, `head` those of the teacher [n, P]
    to the target's. D-PACE and D-PARD weigh the steps of one slot, each of which predicts one row, by `acceptance_of`;
    so these weights need the logits once more.
    """
    if weights.positions == "decay":
        steps = torch.arange(rows.valid.shape[1], device=slots.device)
        return (weights.decay**steps).expand_as(rows.valid)
    pieces = zip(*(x.split(size) for x in (slots, rows.label, teacher)), strict=True)
    chance = []
    for piece, label, states in pieces:
        p_logits = head(states) if weights.positions == "dpard" else None
        accepted = [acceptance_of(q, label, p_logits, ids) for q in step_logits(piece)]
        chance.append(torch.stack(accepted, 1))
    found = divergences.dpace(
        rows.scatter_to_slots(torch.cat(chance)), rows.scatter_to_slots(rows.valid)
    )
    return torch.stack(
        [rows.values_at_slots(found[..., j], j) for j in range(rows.valid.shape[1])], 1
    )


def acceptance_of(
    q_logits: Tensor, label: Tensor, p_logits: Tensor | None, ids: Tensor | None
) -> Tensor:
    """[N]: the chance that a drafted token is accepted: for D-PACE, which has no p_logits, the draft's probability of
    the tokens label [N]; for D-PARD the overlap with the target's distribution."""
    if p_logits is None:
        return label_probability(q_logits, label, ids)
    return divergences.acceptance(p_logits, q_logits, ids).clamp(0, 1)


def label_probability(q_logits: Tensor, label: Tensor, ids: Tensor | None) -> Tensor:
    """[N]: the draft's probability of tokens label [N]; 0 for tokens that are not among its `ids`."""
    q = q_logits.float()
    if ids is None:
        known, column = torch.ones_like(label, dtype=torch.bool), label
    else:  # they are in rising order
        column = torch.searchsorted(ids, label).clamp_max(len(ids) - 1)
        known = ids[column] == label
    q = q.gather(-1, column[:, None])[:, 0] - q.logsumexp(-1)
    return q.exp().where(known, 0.0)


def loss_and_metrics(
    criterion: Criterion,
    p_logits: Tensor,
    step_logits: list[Tensor],
    valid: Tensor,
    weight: Tensor,
    ids: Tensor | None,
) -> dict[str, Tensor]:
    """Sums of loss and metrics over valid [N, J], from the target's logits [N, V] and each step's logits [N, Vd].

    "loss" is weighted by `weight` [N, J]; "alpha_j" is the overlap and "top1_j" the agreement at step j, each a sum
    over "count_j" rows.
    """
    total = step_logits[0].new_zeros((), dtype=torch.float32)
    found: dict[str, Tensor] = {}
    target = criterion.target_distribution(p_logits, ids)
    for j, q_logits in enumerate(step_logits):
        values = weight[:, j] * criterion.position_losses(target, q_logits)
        total = total + values.where(valid[:, j], 0.0).sum()
    some = slice(None, None, max(1, len(p_logits) // METRIC_ROWS))
    with torch.no_grad():
        log_p, likeliest = target.log_probs.rows(some), p_logits[some].argmax(-1)
        for j, q_logits in enumerate(step_logits):
            counted, q_logits = valid[some, j], q_logits[some]
            overlap = divergences.acceptance.of(divergences.pair_log_probs(log_p, q_logits))
            agree = divergences.drafted(q_logits, ids) == likeliest
            found[f"alpha_{j + 1}"] = overlap.where(counted, 0.0).sum()
            found[f"top1_{j + 1}"] = (agree & counted).sum().float()
            found[f"count_{j + 1}"] = counted.sum().float()
    return {"loss": total, **found}
