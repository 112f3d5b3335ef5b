"""The training loss of a position: a divergence between target and draft distribution, plus weighted further ones."""

from typing import NamedTuple

from torch import Tensor

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
from train.settings.training import DivergenceConfig


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
