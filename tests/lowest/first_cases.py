"""A plugin for run.sh: of each test function the first cases alone, which show what a version breaks."""

from collections import Counter

import pytest

CASES = 3


@pytest.hookimpl(trylast=True)  # behind -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seen, first, others = Counter[str](), [], []
    for item in items:
        name = item.nodeid.partition("[")[0]
        seen[name] += 1
        (first if seen[name] <= CASES else others).append(item)
    items[:] = first
    config.hook.pytest_deselected(items=others)
