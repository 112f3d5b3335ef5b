"""Parameters of tests: which of many like cases run every time, and which stand for a whole product."""

from collections.abc import Hashable, Iterable
from itertools import combinations, product
from typing import Any

import pytest

Row = tuple[Any, ...]


def slow_except(rows: Iterable[Any], fast: Iterable[Hashable]) -> list[Any]:
    """The `rows` (names, or tuples of them) as test parameters, all but the `fast` ones marked slow.

    A tuple is fast as well if its first name is one of `fast`. KeyError if a fast one is not among them."""
    rows, fast = list(rows), set(fast)
    known = {*rows, *(row[0] for row in rows if isinstance(row, tuple))}
    missing = fast - known
    if missing:
        raise KeyError(f"no case {missing}")
    found = []
    for row in rows:
        values = row if isinstance(row, tuple) else (row,)
        is_fast = row in fast or (isinstance(row, tuple) and row[0] in fast)
        found.append(pytest.param(*values, marks=[] if is_fast else pytest.mark.slow))
    return found


def rotated(first: Iterable[Any], *others: Iterable[Any]) -> list[Row]:
    """Rows in place of the product of all: each of `first` with one combination of the `others` in turn, and the
    foremost of `first` with all of them."""
    leading, combined = list(first), list(product(*others))
    rows = [(leading[0], *one) for one in combined]
    return rows + [(x, *combined[i % len(combined)]) for i, x in enumerate(leading[1:], 1)]


def pairwise(*tables: Iterable[Any]) -> list[Row]:
    """Rows in place of the product of all: any two values of two tables stand together in one of them."""
    every = list(product(*tables))

    def pairs(row: Row) -> set[tuple[Any, Any]]:
        return set(combinations(enumerate(row), 2))

    rows, missing = [], set().union(*map(pairs, every))
    while missing:
        rows.append(max(every, key=lambda row: len(pairs(row) & missing)))
        missing -= pairs(rows[-1])
    return rows
