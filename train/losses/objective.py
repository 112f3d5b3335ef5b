"""The training loss of a position: a divergence between target and draft distribution, plus weighted further ones."""

from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

from torch import Tensor

from decode.common.errors import UserError
from decode.common.published import Name
from decode.common.ranges import CountOrZero, at_least, inside
from train.losses.divergences import (
    HASS_TOP_K,
    LOSSES,
    LogProbPair,
    TargetLogProbs,
    bucket_tail,
    hard_ce,
    jsd,
    pair_log_probs,
    target_log_probs,
    top_k,
)


@dataclass
class DivergenceConfig:
    """How the loss compares the target's distribution p with the draft's distribution q."""

    temperature: Annotated[float, at_least(0.001, 100)] = 1.0
    """Temperature applied to both distributions before they are compared; hard_ce ignores it."""
    top: CountOrZero = 0
    """Compare only this many of the target's likeliest tokens one by one, and all others as one sum; 0: compare every
    token. For top_k it is K; 0: 10."""
    beta: Annotated[float, inside(0, 1)] = 0.5
    """jsd: weight of p in the mixture of p and q, between 0 (forward KL) and 1 (reverse KL)."""
    mix: dict[Name, Annotated[float, at_least(0)]] = field(default_factory=dict)
    """Further divergences added to the loss with their weights, such as {hard_ce: 0.1}."""

    def __post_init__(self) -> None:
        unknown = sorted(set(self.mix) - set(LOSSES))
        if unknown:
            raise UserError(
                f"divergence.mix: no divergence {unknown[0]!r}; there are {', '.join(LOSSES)}"
            )


class TargetDistribution(NamedTuple):
    """The target's side of a loss, computed once for several heads or steps of a draft."""

    log_probs: TargetLogProbs  # at temperature 1
    tempered_log_probs: TargetLogProbs  # at DivergenceConfig.temperature
    top_columns: Tensor | None  # [N, K] columns compared one by one; None: all


class Criterion:
    """The loss of a position: the divergence `name`, plus those of `config.mix` with their weights.

    Drafts of every family minimise the sum of `position_losses(target_distribution(p_logits, ids), q_logits)`.
    """

    def __init__(self, name: str, config: DivergenceConfig | None = None):
        self.config = config or DivergenceConfig()
        self.terms = [(name, 1.0), *self.config.mix.items()]

    def target_distribution(
        self, p_logits: Tensor, ids: Tensor | None = None
    ) -> TargetDistribution:
        """The target distribution of p_logits [N, V], on the draft's columns `ids` [Vd] (None: all of V)."""
        plain = target_log_probs(p_logits, ids)
        temperature, top = self.config.temperature, self.config.top
        tempered = plain if temperature == 1 else target_log_probs(p_logits, ids, temperature)
        top_columns = plain.p.topk(min(top, plain.p.shape[-1]), -1).indices if top else None
        return TargetDistribution(plain, tempered, top_columns)

    def position_losses(self, target: TargetDistribution, q_logits: Tensor) -> Tensor:
        """The loss [N] of q_logits [N, Vd]."""
        full = pair_log_probs(target.tempered_log_probs, q_logits, self.config.temperature)
        pair = full if target.top_columns is None else bucket_tail(full, target.top_columns)
        total = q_logits.new_zeros((), dtype=full.q.dtype)
        for name, weight in self.terms:
            total = total + weight * self._term(name, target, q_logits, full, pair)
        return total

    def _term(
        self,
        name: str,
        target: TargetDistribution,
        q_logits: Tensor,
        full: LogProbPair,
        pair: LogProbPair,
    ) -> Tensor:
        """The divergence `name` [N]; `full` compares all columns, `pair` merges the tail into one."""
        if name == "hard_ce":  # always of all columns at temperature 1
            return hard_ce.of(
                full if self.config.temperature == 1 else pair_log_probs(target.log_probs, q_logits)
            )
        if name == "top_k":
            return top_k.of(full, self.config.top or HASS_TOP_K)
        if name == "jsd":
            return jsd.of(pair, self.config.beta)
        return LOSSES[name].of(pair)
