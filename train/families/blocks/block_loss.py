"""The loss of a block draft's slots: each is compared with the target's distribution of the token it predicts."""

from collections.abc import Callable

import torch
from torch import Tensor

from train.families.head_loss import METRIC_ROWS, LossWeights, label_probability
from train.losses import divergences
from train.losses.objective import Criterion


class BlockLoss:
    """Sums of loss and metrics over N slots, a few at a time, so that no [N, V] of all of them exists."""

    def __init__(
        self,
        criterion: Criterion,
        weights: LossWeights,
        head: Callable[[Tensor], Tensor],
        project: Callable[[Tensor], Tensor],
        ids: Tensor | None,
        depths: int,
        vocab: int,
    ):
        """`head` maps the teacher's rows to the target's logits, `project` states to logits of the tokens `ids`."""
        self.criterion, self.weights, self.head, self.project = criterion, weights, head, project
        self.ids, self.depths = ids, depths
        self.size = divergences.max_chunk_rows(vocab)

    def __call__(
        self, teacher: Tensor, states: Tensor, label: Tensor, block: Tensor, depth: Tensor
    ) -> dict[str, Tensor]:
        """ "loss", weighted, and "alpha_j", "top1_j" as sums over "count_j" slots of depth j - 1.

        teacher [N, P] and states [N, H] of slots that predict the tokens label [N], at depth [N] of block [N] (its
        number). A block's slots reach from depth 0 to its last.
        """
        weight = self.slot_weights(states, label, block, depth)
        return divergences.sums_in_chunks(
            self._chunk_sums, [teacher, states, weight, depth], self.size
        )

    @torch.no_grad()
    def slot_weights(self, states: Tensor, label: Tensor, block: Tensor, depth: Tensor) -> Tensor:
        """[N]: decay^depth, or what the slot adds to the expected accepted length of its block (D-PACE)."""
        if self.weights.positions == "decay":
            return self.weights.decay ** depth.float()
        probability = torch.cat(
            [
                label_probability(self.project(some), wanted, self.ids)
                for some, wanted in zip(
                    states.split(self.size), label.split(self.size), strict=True
                )
            ]
        )
        shape = int(block.max()) + 1 if len(block) else 0, self.depths
        confidence = probability.new_zeros(shape)
        confidence[block, depth] = probability
        there = torch.zeros(shape, dtype=torch.bool, device=block.device)
        there[block, depth] = True
        return divergences.dpace(confidence, there)[block, depth]

    def _chunk_sums(
        self, teacher: Tensor, states: Tensor, weight: Tensor, depth: Tensor
    ) -> dict[str, Tensor]:
        p_logits, q_logits = self.head(teacher), self.project(states)
        target = self.criterion.target_distribution(p_logits, self.ids)
        found = {"loss": (weight * self.criterion.position_losses(target, q_logits)).sum()}
        some = slice(None, None, max(1, len(p_logits) // METRIC_ROWS))
        with torch.no_grad():
            p_logits, q_logits, depth = p_logits[some], q_logits[some], depth[some]
            log_p = divergences.target_log_probs(p_logits, self.ids)
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
