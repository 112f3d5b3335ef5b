"""Heads with their losses, as modules: what runs forward, perhaps wrapped for several processes.

All work on the same picture: at target row u the target's law is compared with what the head said about it from each
slot u - 1 - j, one for every step or head j. So the target's logits are computed once a row, a few rows at a time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from decode.drafts.eagle_net import Eagle1, EagleNet
from decode.drafts.medusa import MedusaNet
from train import losses
from train.align import Alignment
from train.batches import Batch
from train.criterion import Criterion
from train.teacher import Look
from train.ttt import TestTimeAttention

METRIC_ROWS = 256
"""Rows of a piece on which metrics are computed: as costly a row as the loss, and needed less exactly."""


@dataclass
class Weights:
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


class MedusaTrainer(nn.Module):
    """All heads of a MedusaNet over the target's final states."""

    def __init__(
        self,
        net: MedusaNet,
        head: Callable[[Tensor], Tensor],
        criterion: Criterion,
        weights: Weights,
    ):
        super().__init__()
        self.net, self.head, self.criterion, self.weights = net, head, criterion, weights

    def forward(self, batch: Batch, look: Look) -> dict[str, Tensor]:
        steps = len(self.net.blocks)
        places = Alignment(batch.input_ids, batch.loss_mask, steps, batch.documents)
        rows = Rows(places, steps)
        seen = look.features.to(next(self.net.parameters()).dtype)
        slots = torch.stack([rows.slot_of(seen, j) for j in range(steps)], 1)  # [N, K, H]
        size = losses.rows_for(self.net.config["vocab_size"])

        def say(slots: Tensor) -> list[Tensor]:
            return [self.net.logits(slots[:, j], j) for j in range(steps)]

        def sums(
            teacher: Tensor, slots: Tensor, valid: Tensor, weight: Tensor
        ) -> dict[str, Tensor]:
            return compared(self.criterion, self.head(teacher), say(slots), valid, weight, None)

        weight = weights_of(self.weights, rows, say, slots, None, size)
        return losses.sums_in_chunks(
            sums, [rows.take(look.teacher), slots, rows.valid, weight], size
        )


class EagleTrainer(nn.Module):
    """An EAGLE net run `steps` times over each slot, from the second time on its own states (training-time test).

    EAGLE-1 is trained on one step, and on the target's feature besides its law.
    """

    alignment: type[Alignment] = Alignment

    def __init__(
        self,
        net: EagleNet,
        head: Callable[[Tensor], Tensor],
        embedding: Tensor,
        criterion: Criterion,
        weights: Weights,
        steps: int,
    ):
        super().__init__()
        self.net, self.head, self.steps = net, head, steps
        self.criterion, self.weights = criterion, weights
        self.embedding = embedding  # no buffer: it is the target's, and not to be sent around

    def forward(self, batch: Batch, look: Look) -> dict[str, Tensor]:
        places = self.alignment(batch.input_ids, batch.loss_mask, self.steps, batch.documents)
        rows = Rows(places, self.steps)
        first = places.step(0)
        dtype = self.net.fc.weight.dtype
        start = self.net.start(look.features.to(dtype))
        embeds = self.net.embed(first.token, self.embedding).to(dtype)
        # Only slots that are trained go through the layer; of the others its keys are all that is ever seen.
        keys, values = self.net.keys(start, embeds, first.position)
        slots = asking(first.valid)
        row = torch.arange(len(slots), device=slots.device)[:, None]
        numbers = batch.documents
        same = None if numbers is None else numbers[row, slots][..., None] == numbers[:, None]
        attend = TestTimeAttention(keys, values, slots, same)
        index = torch.zeros_like(first.position)  # of each slot among those that ask
        index[row, slots] = torch.arange(slots.shape[1], device=slots.device)
        state = start[row, slots]
        states = []
        for j in range(self.steps):
            at = places.step(j)
            embeds = self.net.embed(at.token[row, slots], self.embedding).to(dtype)
            state = self.net.step(state, embeds, at.position[row, slots], attend)
            states.append(state[rows.batch, rows.slot_of(index, j)])
        ids, size = self.net.ids, losses.rows_for(len(self.embedding))

        def say(states: Tensor) -> list[Tensor]:
            return [self.net.logits(states[:, j]) for j in range(self.steps)]

        def sums(
            teacher: Tensor, states: Tensor, valid: Tensor, weight: Tensor, feature: Tensor
        ) -> dict[str, Tensor]:
            p_logits = self.head(teacher)
            valid = self.trained(p_logits, valid)
            found = compared(self.criterion, p_logits, say(states), valid, weight, ids)
            if isinstance(self.net, Eagle1):
                near = losses.smooth_l1(states[:, 0], feature)[valid[:, 0]].sum()
                said_loss = self.weights.divergence * found["loss"]
                found["loss"] = self.weights.feature * near + said_loss
                found["feature"] = near.detach()
            return found

        label = look.features if isinstance(self.net, Eagle1) else look.features[..., :0]
        own = torch.stack(states, 1)  # [N, J, h]
        weight = weights_of(self.weights, rows, say, own, ids, size)
        inputs = [rows.take(look.teacher), own, rows.valid, weight, rows.take(label)]
        return losses.sums_in_chunks(sums, inputs, size)

    def trained(self, p_logits: Tensor, valid: Tensor) -> Tensor:
        """[N, J] bool: which of the `valid` places the loss counts; all of them."""
        return valid


def asking(valid: Tensor) -> Tensor:
    """[B, M] int64: the places where valid [B, T] holds, rising; M is their largest number (at least 1).

    Rows with fewer go on with places where it does not hold.
    """
    count = max(1, int(valid.sum(1).max()))
    return (~valid).long().argsort(dim=1, stable=True)[:, :count]


class Rows:
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

    def to_slots(self, values: Tensor) -> Tensor:
        """[B, T, J] from [N, J]: at each slot what its steps have at the rows they speak of; 0 where not valid."""
        steps = values.shape[1]
        found = values.new_zeros(*self.shape[:2], steps)
        for j in range(steps):
            valid = self.valid[:, j]
            found[self.batch[valid], self.row[valid] - 1 - j, j] = values[valid, j]
        return found

    def slot_of(self, values: Tensor, j: int) -> Tensor:
        """[N, ...] from [B, T, ...]: the values at the slots that speak of the rows at step j."""
        return values[self.batch, (self.row - 1 - j).clamp_min(0)]


@torch.no_grad()
def weights_of(
    weights: Weights,
    rows: Rows,
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
            torch.stack([confidence(q, label, ids) for q in say(piece)], 1)
            for piece, label in zip(slots.split(size), rows.label.split(size), strict=True)
        ]
    )
    found = losses.dpace(rows.to_slots(sure), rows.to_slots(rows.valid))
    return torch.stack([rows.slot_of(found[..., j], j) for j in range(rows.valid.shape[1])], 1)


def confidence(q_logits: Tensor, label: Tensor, ids: Tensor | None) -> Tensor:
    """q [N] of the tokens label [N]; 0 for those that the draft's `ids` lack."""
    q = q_logits.float()
    if ids is None:
        known, column = torch.ones_like(label, dtype=torch.bool), label
    else:  # they rise
        column = torch.searchsorted(ids, label).clamp_max(len(ids) - 1)
        known = ids[column] == label
    q = q.gather(-1, column[:, None])[:, 0] - q.logsumexp(-1)
    return q.exp().where(known, 0.0)


def compared(
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
    whole = criterion.law(p_logits, ids)
    for j, q_logits in enumerate(said):
        values = weight[:, j] * criterion.values(whole, q_logits)
        total = total + values.where(valid[:, j], 0.0).sum()
    some = slice(None, None, max(1, len(p_logits) // METRIC_ROWS))
    with torch.no_grad():
        law = losses.target_law(p_logits[some], ids)
        for j, q_logits in enumerate(said):
            counted, q_logits = valid[some, j], q_logits[some]
            overlap = losses.acceptance.of(losses.paired(law, q_logits))
            agree = losses.top1(p_logits[some], q_logits, ids)
            found[f"alpha_{j + 1}"] = overlap.where(counted, 0.0).sum()
            found[f"top1_{j + 1}"] = (agree & counted).sum().float()
            found[f"count_{j + 1}"] = counted.sum().float()
    return {"loss": total, **found}
