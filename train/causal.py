"""A small LM with its loss, as a module: what runs forward, perhaps wrapped for several processes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from decode.taps import Taps, behind_head
from train import losses
from train.batches import Batch
from train.criterion import Criterion
from train.teacher import Look, states_of


class CausalTrainer(nn.Module):
    """The loss of a draft LM against the target's law, at every supervised position.

    Both are projected to the vocabulary a few positions at a time, so no [N, V] of them all exists.
    """

    def __init__(self, lm: Any, head: Callable[[Tensor], Tensor], criterion: Criterion):
        super().__init__()
        self.lm, self.head, self.criterion = lm, head, criterion
        self.finish = behind_head(lm)

    def forward(self, batch: Batch, look: Look) -> dict[str, Tensor]:
        states = states_of(self.lm, batch, Taps(final=True))[batch.loss_mask]  # [N, H]
        projection = self.lm.get_output_embeddings()

        def sums(teacher: Tensor, states: Tensor) -> dict[str, Tensor]:
            law = self.criterion.law(self.head(teacher))
            q_logits = self.finish(projection(states))
            loss = self.criterion.values(law, q_logits).sum()
            with torch.no_grad():
                overlap = losses.acceptance.of(losses.paired(law.plain, q_logits))
                agree = law.plain[0].argmax(-1) == q_logits.argmax(-1)
            return {"loss": loss, "overlap": overlap.sum(), "top1": agree.sum().float()}

        inputs = [look.teacher[batch.loss_mask], states]
        return losses.sums_in_chunks(sums, inputs, losses.rows_for(projection.weight.shape[0]))
