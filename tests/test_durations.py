"""tests/durations.py: what the fast suite leaves out is there, and a function is cut where its time is used up."""

import pytest

from tests import durations
from tests.worlds import ROOT


@pytest.mark.parametrize(
    ("seconds", "cases"), [([0.1, 0.1], 2), ([0.3, 0.3, 0.1], 1), ([0.6], 0), ([0.5, 0.01], 1)]
)
def test_a_function_is_cut_where_its_time_is_used_up(seconds: list[float], cases: int) -> None:
    assert durations.fast_cases(seconds) == cases


def test_every_function_of_the_list_is_there() -> None:
    """Bug: a test was renamed, and all its cases run in the fast suite."""
    limits = durations.read_limits()
    assert len(limits) > 100
    for name in limits:
        file, _, function = name.partition("::")
        text = (ROOT / file).read_text()
        assert f"def {function.rpartition('::')[2]}(" in text, name
