"""A draft whose chains end by its own confidence, by the acceptance of the row so far, or by both.

    draft = AdaptiveDraft(load_draft(path, target), AdaptiveConfig("acceptance"))
    speculate(target, draft, prompts, k=6)  # up to six tokens a round

Both leave the distribution of the output as it is. A chain may end behind any drafted token, and that token stays
drafted; K of a round is known before any of its tokens is drawn.

With acceptance α a round that drafts K tokens emits 1 + α + … + α^K tokens (Leviathan et al. 2023). The best K has the
most tokens per millisecond; it is 0 where drafting costs more than it gives. A batch's round takes as long as its
longest chain; K of a row is chosen as if the others drafted as many.
"""

import statistics
import time
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from decode.common.errors import UserError
from decode.common.ranges import Share, check_ranges
from decode.drafts.base import ChainStop, Draft, DraftContext, Proposal, empty_chain
from decode.drafts.drafting import discard_draws
from decode.drafts.settings import CONFIDENCE, Milliseconds
from decode.drafts.wrappers import DraftWrapper
from decode.verification.rules import NO_DRAFT

# ---- the fastest length ----

PRIOR_ALPHA, PRIOR_POSITIONS = 0.5, 4.0
"""What is taken to be known of a new row's acceptance: as if so many positions had been reached."""
MEMORY = 0.9
"""Weight that a row's earlier rounds keep in each round that drafts."""
PROBE_EVERY = 8
"""A row that drafts nothing drafts one token every so many rounds, or it would not see that its text has changed."""
TRIALS = 3
"""Rounds of each length that are run to measure their cost, once for each number of rows."""
TIMES_KEPT = 16
"""Rounds of each length of which the median counts."""


def expected_tokens(alpha: float, k: int) -> float:
    """Tokens of a round with K = k, the bonus token included."""
    return sum(alpha**i for i in range(k + 1))


def fastest_length(alpha: float, round_ms: Sequence[float]) -> int:
    """The least K with the most expected tokens per millisecond; round_ms[K] is the cost of its rounds."""
    return max(range(len(round_ms)), key=lambda k: expected_tokens(alpha, k) / round_ms[k])


def extend_costs(round_ms: Sequence[float], longest: int) -> list[float]:
    """Milliseconds of rounds with K = 0 … `longest`: the given ones, then as a straight line through the last two.

    UserError for fewer than two.
    """
    if len(round_ms) < 2:
        raise UserError(
            f"round_ms is {list(round_ms)}: give the milliseconds of a round without drafts, with one, and so on"
        )
    step = max(0.0, round_ms[-1] - round_ms[-2])
    more = [round_ms[-1] + step * (i + 1) for i in range(longest + 1 - len(round_ms))]
    return [*round_ms, *more][: longest + 1]


@dataclass
class RunningAcceptance:
    """Acceptance of one row's drafts, of which later rounds count more. It depends on nothing but the row."""

    accepted: float = PRIOR_ALPHA * PRIOR_POSITIONS
    reached: float = PRIOR_POSITIONS
    """Drafted positions all of whose predecessors were accepted."""
    idle: int = PROBE_EVERY
    """Rounds since it drafted; a new row begins with a round that drafts."""

    @property
    def alpha(self) -> float:
        return self.accepted / self.reached

    def record(self, drafted: int, accepted: int) -> None:
        if drafted == 0:
            self.idle += 1
            return
        self.idle = 0
        self.accepted = MEMORY * self.accepted + accepted
        self.reached = MEMORY * self.reached + min(accepted + 1, drafted)

    def next_length(self, round_ms: Sequence[float]) -> int:
        """K of the row's next round: the fastest one, and at least 1 if it has been idle for PROBE_EVERY rounds."""
        least = 1 if self.idle >= PROBE_EVERY else 0
        return max(least, fastest_length(self.alpha, round_ms))


@dataclass
class RoundTimes:
    """The cost of rounds by their draft length, as measured while decoding."""

    times: dict[int, deque[float]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=TIMES_KEPT))
    )
    asked: Counter[int] = field(default_factory=Counter)

    def record(self, k: int, ms: float) -> None:
        """Adds a round whose longest chain had k tokens."""
        self.times[k].append(ms)

    def next_trial(self, longest: int) -> int | None:
        """A length whose cost is still to be measured: the longest, 1 or 0. None: all are known."""
        for k in (longest, 1, 0):
            if self.asked[k] < TRIALS:
                self.asked[k] += 1
                return k
        return None

    def round_ms(self, longest: int) -> list[float]:
        """Milliseconds of rounds with K = 0 … `longest`: the median without drafts, then a line through those with
        drafts, since a step of the draft and a verified token more cost about the same each time."""
        known = {k: statistics.median(ms) for k, ms in sorted(self.times.items())}
        drafted = [k for k in known if k > 0]
        slope, fixed = 0.0, known[drafted[0]] if drafted else known.get(0, 1.0)
        if len(drafted) > 1:
            slope, fixed = statistics.linear_regression(drafted, [known[k] for k in drafted])
        if slope < 0:  # noise
            slope, fixed = 0.0, statistics.mean(known[k] for k in drafted)
        return [known.get(0, fixed), *(fixed + slope * k for k in range(1, longest + 1))]


# ---- the draft ----

WAYS = ("confidence", "acceptance", "both")


@dataclass(frozen=True)
class AdaptiveConfig:
    """How the length of chains is set. UserError for an unknown way and for numbers out of range."""

    by: str = "confidence"
    """`confidence`: a chain ends where the draft is unsure. `acceptance`: K of each row is the fastest for its running
    acceptance and the cost of rounds, 0 included. `both`: the first, within the second."""
    confidence: Share = CONFIDENCE
    """A chain ends behind the token with which the product of its tokens' probabilities falls below this."""
    round_ms: tuple[Milliseconds, ...] = ()
    """Milliseconds of a round with K = 0, 1, 2, …, the last step going on; empty: they are measured while decoding.
    With measured ones K depends on the clock, so that equal seeds may give different sampled texts."""

    def __post_init__(self) -> None:
        if self.by not in WAYS:
            raise UserError(f"adaptive {self.by!r} is unknown: give {', '.join(WAYS)}")
        check_ranges(self)
        if self.round_ms:
            extend_costs(self.round_ms, 0)


class AdaptiveDraft(DraftWrapper):
    """`inner`, whose chains have at most K tokens and often fewer.

    A round in which no row drafts runs no pass of `inner`, whose `skip` keeps its state. A row's random numbers are the
    same however many tokens it drafts, and its K depends on no other row unless costs are measured. The host takes part
    in each round, so the draft's part is never compiled. By acceptance it does so before the round, of which there is a
    CUDA graph for each number of drafted tokens; by confidence it reads each proposal, and CUDA graphs are refused. A
    lookup belongs inside, not in front.
    """

    def __init__(self, inner: Draft, config: AdaptiveConfig = AdaptiveConfig()):
        super().__init__(inner)
        self.config = config
        self.on_host = self.may_be_empty = True
        self.context = None  # its chains end at that of `inner`, where K counts as what was drafted
        self.plans_rounds = config.by == "acceptance" and not inner.on_host
        self.fixed: int | None = (
            None  # tokens of every row's chain while a warm-up runs each length
        )
        self.limit: Tensor | None = None
        """[B] tokens of each row's chain in the running round at most, on the device; it stays where it is."""
        self.times: dict[int, RoundTimes] = {}
        """By number of rows; kept from batch to batch."""

    def begin_batch(self, request: DraftContext) -> None:
        """UserError for trees and under grammars, whose forced tokens would count as its own."""
        if self.shape is not None or self.inner.shape is not None:
            raise UserError(f"draft {self.name!r} adapts the length of chains: give it no tree")
        if request.constraint is not None:
            raise UserError(
                f"draft {self.name!r} adapts its length, which no grammar goes with yet: drop `adaptive`"
            )
        self.request, rows = request, request.rows
        self.stop: ChainStop | None = None
        if self.config.by != "acceptance":
            self.stop = ChainStop([request.k] * rows, path=self.config.confidence)
        self.rows = [RunningAcceptance() for _ in range(rows)]
        self.length = [0] * rows  # tokens of each row, the prompt included
        self.running: set[int] = set()  # rows that have committed since the last proposal
        self.drafted = [0] * rows  # in the round that has not been committed yet
        self.started: float | None = None  # when that round began
        self.planned = False  # this batch's rounds are planned before they run
        self.own_times = self.times.setdefault(rows, RoundTimes())
        self.inner.begin_batch(replace(request, stop=self.stop))

    def prefill(
        self, row: Tensor, prompts: Tensor, length: Tensor, features: Tensor | None
    ) -> None:
        for at in row.tolist():
            self.rows[at], self.drafted[at], self.length[at] = RunningAcceptance(), 0, 0
        self.inner.prefill(row, prompts, length, features)

    def on_commit(self, row: int, tokens: list[int]) -> None:
        if self.started is not None:  # the first row of the round
            self.own_times.record(max(self.drafted), 1000 * (time.perf_counter() - self.started))
            self.started = None
        self.rows[row].record(self.drafted[row], len(tokens) - 1)
        self.running.add(row)
        self.length[row] += len(tokens)
        self.inner.on_commit(row, tokens)

    def state_tensors(self) -> list[Tensor]:
        own = [] if self.limit is None else [self.limit]
        return [*self.inner.state_tensors(), *own]

    def plan_round(self, history: Tensor, length: Tensor, k: int) -> int:
        self.planned = True
        self._choose(k, length.device)
        if self.longest > 0:
            self.inner.plan_round(history, length, self.longest)
        else:
            self.inner.skip(history, length, 0)
        return self.longest

    def propose(self, history: Tensor, length: Tensor, k: int) -> Proposal:
        """As many columns as the longest chain has tokens."""
        if self.planned:
            # Python runs while a round is captured, which takes longer than its replays.
            self.started = None
        else:
            self._choose(k, length.device)
            if self.longest == 0:
                self.inner.skip(history, length, 0)
        if self.longest == 0:
            discard_draws(self.request, length, k)
            every = torch.ones_like(length, dtype=torch.bool)
            return empty_chain(history, every)
        proposal = self.inner.propose(history, length, self.longest)
        discard_draws(self.request, length, k - self.longest)
        if proposal.tree is not None:
            raise UserError(f"draft {self.name!r} drafts trees, whose length cannot be adapted")
        assert self.limit is not None
        position = torch.arange(proposal.tokens.shape[1], device=length.device)
        tokens = torch.where(position < self.limit[:, None], proposal.tokens, NO_DRAFT)
        if not self.planned:
            self.drafted = (tokens != NO_DRAFT).sum(1).tolist()
        return replace(proposal, tokens=tokens)

    def _choose(self, k: int, device: torch.device) -> None:
        """Sets how many tokens each row drafts at most in the round that begins, on the host and on the device."""
        self.started = time.perf_counter()
        limits = self._limits(k)
        self.drafted, self.running, self.longest = limits, set(), max(limits)
        if self.stop is not None:
            self.stop.limit[:] = limits
        if self.limit is None or len(self.limit) != len(limits):
            self.limit = torch.zeros(len(limits), dtype=torch.long, device=device)
        self.limit.copy_(torch.tensor(limits))

    def _limits(self, k: int) -> list[int]:
        """Tokens of each row's chain at most; 0 for rows that have ended, which the engine still asks for."""
        wanted = self._wanted(k)
        if self.inner.context is not None:
            room = [max(0, self.inner.context - length) for length in self.length]
            wanted = [min(pair) for pair in zip(wanted, room, strict=True)]
        return [n if row in self.running else 0 for row, n in enumerate(wanted)]

    def _wanted(self, k: int) -> list[int]:
        """Tokens that each row would draft at most, wherever its text is."""
        if self.fixed is not None or self.config.by == "confidence":
            return [k if self.fixed is None else self.fixed] * len(self.rows)
        if self.config.round_ms:
            trial, costs = None, extend_costs(self.config.round_ms, k)
        else:
            trial, costs = self.own_times.next_trial(k), self.own_times.round_ms(k)
        return [row.next_length(costs) if trial is None else trial for row in self.rows]
