"""The counts behind a line that a server printed with two or three digits.

A line has whole numbers of drafted and accepted tokens, and beside them 1 + accepted ÷ rounds and, for each position,
accepted there ÷ rounds, both rounded. Which numbers of rounds print as these figures is computed, not assumed.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from decode.common.errors import UserError
from eval.engine_logs.counts import RequestCounts

LENGTH_ERROR = 0.005 + 1e-9
"""Half of the last digit of a mean length."""
RATE_ERROR = 0.0005 + 1e-9
"""Half of the last digit of a rate by position."""
COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


@dataclass(frozen=True)
class PrintedLine:
    drafted: int
    accepted: int
    length: float | None = None
    """1 + accepted ÷ rounds with a draft, to two digits; None: not printed."""
    rates: tuple[float, ...] = ()
    """Accepted at position 1, 2, … ÷ rounds with a draft, to three digits; empty: not printed."""


@dataclass(frozen=True)
class Recovered:
    counts: RequestCounts
    """With the rounds that drafted something; None if the line does not tell them."""
    fewest: int
    most: int
    """Between these lies the number of rounds."""


def recover(line: PrintedLine, where: str) -> Recovered:
    """The counts of a line. UserError if no number of rounds prints as its figures.

    If several do, the rounds are those in which each drafts all positions, or else those in the middle. α is given
    only where rounds and positions are certain and every round drafted all positions.
    """
    if line.accepted > line.drafted:
        raise _contradiction(line, where)
    if line.length is None:
        return Recovered(RequestCounts(None, line.drafted, line.accepted), 0, 0)
    rounds = _possible_rounds(line)
    if len(rounds) == 0:
        raise _contradiction(line, where)
    fewest, most, depth = int(rounds[0]), int(rounds[-1]), len(line.rates)
    full = line.drafted // depth if depth and line.drafted % depth == 0 else -1
    chosen = full if full in rounds else int(rounds[len(rounds) // 2])
    accepted_at: list[int] = []
    certain = fewest == most and depth > 0
    for low, high, rate in zip(*_position_bounds(line, chosen), line.rates, strict=True):
        certain = certain and low == high
        accepted_at.append(min(max(round(rate * chosen), int(low)), int(high)))
    if depth:
        _spread(accepted_at, line, chosen)
    reached = (chosen, *accepted_at[:-1]) if certain and chosen * depth == line.drafted else ()
    counts = RequestCounts(chosen, line.drafted, line.accepted, tuple(accepted_at), reached)
    return Recovered(counts, fewest, most)


def _possible_rounds(line: PrintedLine) -> np.ndarray:
    """Every number of rounds that prints as the line's figures, ascending."""
    extra = (line.length or 1.0) - 1
    fewest, most = 1, line.drafted  # each of these rounds drafted at least one token
    if line.accepted:
        fewest = (
            math.ceil(line.accepted / (extra + LENGTH_ERROR)) if extra > -LENGTH_ERROR else most + 1
        )
        if extra > LENGTH_ERROR:
            most = min(most, math.floor(line.accepted / (extra - LENGTH_ERROR)))
    elif extra > LENGTH_ERROR:
        return np.arange(0)
    if line.rates:
        fewest = max(fewest, -(-line.drafted // len(line.rates)))
    rounds = np.arange(fewest, most + 1)
    if line.rates and len(rounds):
        low, high = _rate_bounds(line.rates, rounds)
        fits = (low <= high).all(0) & (low.sum(0) <= line.accepted) & (line.accepted <= high.sum(0))
        rounds = rounds[fits]
    return rounds


def _rate_bounds(rates: Sequence[float], rounds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Least and greatest accepted tokens [K, n] that print as each rate over each number of rounds."""
    column = np.array(rates)[:, None]
    low = np.ceil(np.maximum(column - RATE_ERROR, 0) * rounds)
    return low.astype(np.int64), np.floor((column + RATE_ERROR) * rounds).astype(np.int64)


def _position_bounds(line: PrintedLine, rounds: int) -> tuple[np.ndarray, np.ndarray]:
    """Least and greatest accepted tokens [K] of each position; they also have to add up to all accepted ones."""
    low, high = (bound[:, 0] for bound in _rate_bounds(line.rates, np.array([rounds])))
    return (
        np.maximum(low, line.accepted - high.sum() + high),
        np.minimum(high, line.accepted - low.sum() + low),
    )


def _spread(accepted_at: list[int], line: PrintedLine, rounds: int) -> None:
    """Moves the positions within what their rates allow until they add up to all accepted tokens."""
    low, high = _position_bounds(line, rounds)
    for i in range(len(accepted_at)):
        missing = line.accepted - sum(accepted_at)
        accepted_at[i] = min(max(accepted_at[i] + missing, int(low[i])), int(high[i]))


def _contradiction(line: PrintedLine, where: str) -> UserError:
    length = "" if line.length is None else f" at a mean length of {line.length:g}"
    rates = f" and rates {', '.join(f'{x:g}' for x in line.rates)}" if line.rates else ""
    return UserError(
        f"{where}: {line.accepted} accepted of {line.drafted} drafted tokens{length}{rates} do not fit together: "
        "the line is damaged or of another version"
    )


def number(pattern: str, line: str, where: str, kind: Callable[[str], float] = int) -> float | None:
    """What `pattern` finds in the line, as a number; None if it finds nothing."""
    found = re.search(pattern, line)
    if found is None:
        return None
    try:
        return kind(found[1])
    except ValueError:
        raise UserError(f"{where}: {found[1][:40]!r} is no number: the line is damaged") from None


def numbers(pattern: str, line: str) -> tuple[float, ...]:
    """The numbers of a list that `pattern` finds in the line; empty if it finds nothing."""
    found = re.search(pattern, line)
    return tuple(float(x) for x in re.findall(r"\d+\.\d+|\d+", found[1])) if found else ()


def log_lines(text: str, path: str) -> list[tuple[str, str]]:
    """("path:line", line) of a server's log."""
    return [(f"{path}:{n}", line.rstrip("\r")) for n, line in enumerate(text.split("\n"), 1)]
