"""Parameters of tests: which of many like cases run every time, and which only with CI=true."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_except(names: Iterable[str], fast: Collection[str]) -> list[Any]:
    """The `names` as test parameters, all but the `fast` ones marked slow. KeyError if a fast one is not among them."""
    names = list(names)
    missing = set(fast) - set(names)
    if missing:
        raise KeyError(f"no case {missing}")
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]
