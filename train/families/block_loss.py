"""The loss of a block draft's slots: each is compared with the target's distribution of the token it predicts."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from train.families.base import FamilyContext
from train.families.head_loss import METRIC_ROWS, acceptance_of
from train.losses import chunked_sums, divergences


class BlockLoss:
    """Sums of loss and metrics over N slots, a few at a time, so that no [N, V] of all of them exists."""

    def __init__(
        self,
        context: FamilyContext,
        head: Callable[[Tensor], Tensor],
        project: Callable[..., Tensor],
        ids: Tensor | None,
        depths: int,
        vocab: int,
        confidence: Callable[[Tensor, Tensor], Tensor] | None = None,
        shared: Sequence[Tensor] = (),
    ):
        """`head` maps the teacher's rows to the target's logits; `project` maps states and the tokens before those that
        they predict to logits of the tokens `ids`, and `confidence` to that of being accepted. `shared` are
        further arguments of `project`, computed from parameters."""
        self.criterion, self.weights = context.criterion(), context.config.weights
        self.head, self.project = head, project
        self.ids, self.depths = ids, depths
        self.confidence, self.shared = confidence, shared
        self.size = chunked_sums.max_chunk_rows(vocab)

    def __call__(
        self,
        teacher: Tensor,
        states: Tensor,
        label: Tensor,
        block: Tensor,
        depth: Tensor,
        previous: Tensor,
    ) -> dict[str, Tensor]:
        """The weighted "loss", and "alpha_j" and "top1_j", sums over the "count_j" slots of depth j - 1.

        teacher [N, P] and states [N, H] of slots that predict the tokens label [N] after previous [N], at depth [N] of
        block [N] (its number). A block's slots reach from depth 0 to its last.
        """
        weights = self.slot_weights(teacher, states, label, block, depth, previous)
        inputs = [teacher, states, *weights, depth, previous]
        return chunked_sums.sums_in_chunks(self._chunk_sums, inputs, self.size, self.shared)

    @torch.no_grad()
    def slot_weights(
        self,
        teacher: Tensor,
        states: Tensor,
        label: Tensor,
        block: Tensor,
        depth: Tensor,
        previous: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """[N] weights of a slot's loss and of its confidence's: decay^depth, or what the slot adds to the expected
        accepted length of its block (D-PACE, D-PARD); the confidence's in D-PARD is the chance that it is reached."""
        how = self.weights.positions
        if how == "decay":
            decayed = self.weights.decay ** depth.float()
            return decayed, decayed
        pieces = zip(*(x.split(self.size) for x in (states, previous, label, teacher)), strict=True)
        chance = []
        for some, before, wanted, rows in pieces:
            p_logits = self.head(rows) if how == "dpard" else None
            q_logits = self.project(some, before, *self.shared)
            chance.append(acceptance_of(q_logits, wanted, p_logits, self.ids))
        probability = torch.cat(chance)
        shape = int(block.max()) + 1 if len(block) else 0, self.depths
        confidence = probability.new_zeros(shape)
        confidence[block, depth] = probability
        there = torch.zeros(shape, dtype=torch.bool, device=block.device)
        there[block, depth] = True
        weight = divergences.dpace(confidence, there)[block, depth]
        if how == "dpace":
            return weight, weight
        return weight, divergences.reach(confidence, there)[block, depth]

    def _chunk_sums(
        self,
        teacher: Tensor,
        states: Tensor,
        weight: Tensor,
        confidence_weight: Tensor,
        depth: Tensor,
        previous: Tensor,
        *shared: Tensor,
    ) -> dict[str, Tensor]:
        p_logits, q_logits = self.head(teacher), self.project(states, previous, *shared)
        target = self.criterion.target_distribution(p_logits, self.ids)
        found = {"loss": (weight * self.criterion.position_losses(target, q_logits)).sum()}
        if self.confidence is not None:
            with torch.no_grad():
                pair = divergences.pair_log_probs(target.log_probs, q_logits)
                accepted = divergences.acceptance.of(pair).clamp(0, 1)
            guess = self.confidence(states, previous).float()
            miss = F.binary_cross_entropy_with_logits(guess, accepted, reduction="none")
            found["loss"] = found["loss"] + (confidence_weight * miss).sum()
            found["confidence"] = miss.detach().sum()
        some = slice(None, None, max(1, len(p_logits) // METRIC_ROWS))
        with torch.no_grad():
            p_logits, q_logits, depth = p_logits[some], q_logits[some], depth[some]
            log_p = target.log_probs.rows(some)
            overlap = divergences.acceptance.of(divergences.pair_log_probs(log_p, q_logits))
            agree = divergences.top1(p_logits, q_logits, self.ids).float()
            for name, values in (
                ("alpha", overlap),
                ("top1", agree),
                ("count", torch.ones_like(agree)),
            ):
                sums = values.new_zeros(self.depths).index_add(0, depth, values)
                found |= {f"{name}_{j + 1}": value for j, value in enumerate(sums)}
        return found
