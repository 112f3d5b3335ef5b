"""Acceptance and speed-up from decode records: τ, α by position, seconds per token, also of another engine's arms.

Everything is a sum or a count for each prompt, pooled over prompts and divided once. A mean of per-prompt means would
weigh a ten-token answer like a thousand-token one.

α is not the acceptance rate: α counts only drafted tokens that verification reached, the acceptance rate also those
after the first rejection. With 8 drafted tokens and α = 0.6, τ is 2.47 and the acceptance rate 0.18. Tokens that a
grammar forced are in τ alone: they cannot be rejected, so they say nothing about the draft.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from decode.common.typed_json import Estimate
from decode.engine.records import DecodeRecord
from eval.metrics.bootstrap import Array, Ratio, paired_ratio

DROPPED_SHARE = 0.25
"""Of a row's prompts, at most so many may be without seconds."""
Arm = Mapping[tuple[str, str], tuple[float, int]]
"""{(task, id): (seconds, tokens)} of the requests of a method or engine that count."""


@dataclass(frozen=True)
class Acceptance:
    """Counts of n prompts at positions 1..k of a round's drafted tokens; of a tree, positions are depths."""

    emitted: Array  # [n] tokens that rounds emitted: all but the first, which prefill gives
    rounds: Array  # [n]
    drafted: Array  # [n] drafted tokens
    accepted: Array  # [n] accepted drafted tokens
    reached_at: Array
    """[n, k] rounds that reached a position: they drafted it, and accepted all before it."""
    accepted_at: Array  # [n, k] rounds that accepted a position

    @classmethod
    def of(cls, records: Sequence[DecodeRecord], k: int = 0) -> "Acceptance":
        return cls(
            np.array([r.output_tokens - 1 for r in records], dtype=np.int64),
            np.array([len(r.rounds) for r in records], dtype=np.int64),
            np.array([sum(d for d, _ in r.rounds) for r in records], dtype=np.int64),
            np.array([sum(a for _, a in r.rounds) for r in records], dtype=np.int64),
            _counts_at_least([[min(d, a + 1) for d, a in r.rounds] for r in records], k),
            _counts_at_least([[a for _, a in r.rounds] for r in records], k),
        )

    @property
    def tau(self) -> Ratio:
        """τ: tokens emitted after prefill ÷ rounds. Plain decoding is 1.0."""
        return Ratio(self.emitted, self.rounds)

    @property
    def alpha(self) -> Ratio:
        """α: Σ_i accepted at i ÷ Σ_i reached at i."""
        return Ratio(self.accepted_at.sum(1), self.reached_at.sum(1))

    @property
    def alpha_by_position(self) -> list[Ratio]:
        """α_i = P(position i accepted | position i reached)."""
        return list(map(Ratio, self.accepted_at.T, self.reached_at.T))

    @property
    def unconditional_by_position(self) -> list[Ratio]:
        """Accepted at position i ÷ all rounds: what serving engines print."""
        return [Ratio(accepted, self.rounds) for accepted in self.accepted_at.T]

    @property
    def rate(self) -> Ratio:
        """Accepted ÷ drafted tokens. Not α: tokens after a rejection count as drafted here."""
        return Ratio(self.accepted, self.drafted)

    @property
    def accept_length(self) -> Ratio:
        """1 + accepted ÷ rounds: τ without trimming at the end of an answer and without forced tokens."""
        return Ratio(self.rounds + self.accepted, self.rounds)

    @property
    def histogram(self) -> list[int]:
        """How many rounds accepted 0, 1, … k drafted tokens. ValueError if a round accepted more than k."""
        if self.accepted_at.sum() != self.accepted.sum():
            raise ValueError(f"a round accepted more than k = {self.accepted_at.shape[1]} tokens")
        at_least = [self.rounds.sum(), *self.accepted_at.sum(0), 0]
        return [int(x) for x in -np.diff(at_least)]


def _counts_at_least(values: list[list[int]], k: int) -> Array:
    """[n, k]: how many numbers of each row are at least 1, 2, … k."""
    counts = np.zeros((len(values), k), dtype=np.int64)
    for row, numbers in enumerate(values):
        exactly = np.bincount(np.minimum(np.array(numbers, dtype=np.int64), k), minlength=k + 1)
        counts[row] = exactly[::-1].cumsum()[::-1][1:]
    return counts


def seconds_per_token(records: Sequence[DecodeRecord]) -> Ratio:
    """Prefill and first token included. A batch's seconds are divided among its prompts."""
    return Ratio([r.seconds for r in records], [r.output_tokens for r in records])


def speedup(records: Sequence[DecodeRecord], plain: Sequence[DecodeRecord], seed: int) -> Estimate:
    """Plain seconds per token ÷ the method's, on the method's prompts, pooled."""
    matched = match_prompts(records, plain)
    return paired_ratio(seconds_per_token(matched), seconds_per_token(records), seed)


def over_best_arm(own: Arm, arms: Mapping[str, Arm], seed: int) -> tuple[str, int, Estimate]:
    """(the engine's fastest arm, prompts, its seconds per token ÷ ours), on the prompts that all have. Which arm is
    best is seen on the same prompts: in the other engine's favour. ("", 0, no value) without such prompts."""
    shared = [key for key in own if all(key in arm for arm in arms.values())]
    if not shared or not arms:
        return "", 0, Estimate()

    def rate(arm: Arm) -> Ratio:
        return Ratio(*zip(*(arm[key] for key in shared), strict=True))

    best = min(arms, key=lambda name: rate(arms[name]).value or float("inf"))
    return best, len(shared), paired_ratio(rate(arms[best]), rate(own), seed)


def timed_places(troubles: Sequence[str]) -> tuple[list[int], str]:
    """(which of these prompts' seconds count, why a row of them is void): `troubles` are their `untimed`.

    A few are dropped. Where that would be many, chance or their lengths may have chosen them: all are kept, and the row
    is void.
    """
    found = [x for x in troubles if x]
    if len(found) <= DROPPED_SHARE * len(troubles):
        return [i for i, x in enumerate(troubles) if not x], ""
    most = max(found, key=found.count)
    return [*range(len(troubles))], f"{most} ({len(found)} of {len(troubles)} prompts)"


def match_prompts(
    records: Sequence[DecodeRecord], others: Sequence[DecodeRecord]
) -> list[DecodeRecord]:
    """The records of `others` on the prompts of `records`, in their order.

    ValueError when a prompt is missing or occurs twice, since the two records of a pair must be of the same prompt.
    """
    by_prompt = {(s.task, s.id): s for s in others}
    wanted = [(s.task, s.id) for s in records]
    if len(by_prompt) != len(others) or len(set(wanted)) != len(wanted):
        raise ValueError("a prompt occurs twice: pass one record for each prompt and method")
    missing = [key for key in wanted if key not in by_prompt]
    if len(missing) > 0:
        raise ValueError(f"{len(missing)} prompts have no counterpart, the first is {missing[0]}")
    return [by_prompt[key] for key in wanted]
