"""What is minimised at each position: a divergence, how it compares the two laws, and what is added to it."""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from decode.common.errors import UserError
from train.data.batching import Batch
from train.losses.divergences import (
    HASS_TOP_K,
    LOSSES,
    LogProbPair,
    bucket_tail,
    hard_ce,
    jsd,
    pair_log_probs,
    target_log_probs,
    top_k,
)


@dataclass
class DivergenceConfig:
    """How the loss compares the target's law with the draft's."""

    temperature: float = 1.0
    """At which both laws are compared, as in decoding at that temperature; hard_ce knows none."""
    top: int = 0
    """Likeliest tokens of the target that are told apart, the others count as one; 0: all are. top_k: its K, 0: 10."""
    beta: float = 0.5
    """jsd: share of the target in the middle law, between 0 (forward KL) and 1 (reverse KL)."""
    mix: dict[str, float] = field(default_factory=dict)
    """Further divergences and their weights beside the loss, such as {hard_ce: 0.1}."""

    def __post_init__(self) -> None:
        if self.temperature <= 0 or not 0 < self.beta < 1 or self.top < 0:
            raise UserError("compare: need temperature > 0, 0 < beta < 1 and top >= 0")
        unknown = sorted(set(self.mix) - set(LOSSES))
        if unknown:
            raise UserError(
                f"compare.mix: no divergence {unknown[0]!r}; there are {', '.join(LOSSES)}"
            )


class TargetDistribution(NamedTuple):
    """What p is in a comparison; computed once, it serves several drafts."""

    log_probs: tuple[Tensor, Tensor | None]  # a `target_law` at temperature 1
    tempered_log_probs: tuple[Tensor, Tensor | None]  # at the comparison's
    top_columns: Tensor | None  # [N, K] columns that are told apart; None: all


class Criterion:
    """The loss of a position: a divergence, and those that are mixed in with their weights.

    A sum over positions of `values(law(p_logits, ids), q_logits)` is what drafts minimise, of whatever family.
    """

    def __init__(self, name: str, config: DivergenceConfig | None = None):
        self.config = config or DivergenceConfig()
        self.terms = [(name, 1.0), *self.config.mix.items()]

    def target_distribution(
        self, p_logits: Tensor, ids: Tensor | None = None
    ) -> TargetDistribution:
        """Of p_logits [N, V], on the draft's columns `ids` [Vd]."""
        plain = target_log_probs(p_logits, ids)
        heat, top = self.config.temperature, self.config.top
        warm = plain if heat == 1 else target_log_probs(p_logits, ids, heat)
        best = plain[0].topk(min(top, plain[0].shape[-1]), -1).indices if top else None
        return TargetDistribution(plain, warm, best)

    def position_losses(self, target: TargetDistribution, q_logits: Tensor) -> Tensor:
        """[N] of q_logits [N, Vd]."""
        whole = pair_log_probs(target.tempered_log_probs, q_logits, self.config.temperature)
        pair = whole if target.top_columns is None else bucket_tail(whole, target.top_columns)
        total = q_logits.new_zeros((), dtype=whole.q.dtype)
        for name, weight in self.terms:
            total = total + weight * self._term(name, target, q_logits, whole, pair)
        return total

    def _term(
        self,
        name: str,
        target: TargetDistribution,
        q_logits: Tensor,
        whole: LogProbPair,
        pair: LogProbPair,
    ) -> Tensor:
        if name == "hard_ce":  # of the best token itself, never of all others together
            return hard_ce.of(
                whole
                if self.config.temperature == 1
                else pair_log_probs(target.log_probs, q_logits)
            )
        if name == "top_k":
            return top_k.of(whole, self.config.top or HASS_TOP_K)
        if name == "jsd":
            return jsd.of(pair, self.config.beta)
        return LOSSES[name].of(pair)


class LossFn(Protocol):
    """The objective: sums over the supervised positions of a batch, never means."""

    def __call__(self, batch: Batch) -> dict[str, torch.Tensor]:
        """{"loss": …, any other metric: …}, scalars; "loss" carries the gradient."""
