"""The fastest draft length, from a row's running acceptance and the milliseconds of rounds.

With acceptance α a round that drafts K tokens emits 1 + α + … + α^K tokens (Leviathan et al. 2023). The best K has the
most tokens per millisecond; it is 0 where drafting costs more than it gives. A batch's round takes
as long as its longest chain; K of a row is chosen as if the others drafted as many.
"""

import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from decode.common.errors import UserError

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
        """Adds a round."""
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
