"""Which cases the fast suite leaves out, from a measured run.

A test function may take FAST_SECONDS of CPU time in the fast suite, all its cases together. Where they take more, only
the first ones run there; the others run with CI=true, as those marked slow do. `tests/durations.txt` holds the numbers:

    python -m pytest -n 2 --dist loadfile -p tests.durations    # measures all that is not marked slow, writes the list

A run that names a file runs all cases of that file which are not marked slow.
"""

import resource
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

FAST_SECONDS = 0.5
LIST = Path(__file__).with_suffix(".txt")
MEASURED = "cpu_seconds"


def read_limits() -> dict[str, int]:
    """{test function: how many of its cases the fast suite runs}; functions that run whole are not in it."""
    lines = (line.rpartition(" ") for line in LIST.read_text().splitlines())
    return {name: int(count) for name, _, count in lines}


def leave_out_cases(items: list[pytest.Item]) -> None:
    """Marks the cases behind a function's limit as slow."""
    limits, seen = read_limits(), Counter[str]()
    for item in items:
        name = item.nodeid.partition("[")[0]
        if item.get_closest_marker("slow") is None:
            seen[name] += 1
            if seen[name] > limits.get(name, len(items)):
                item.add_marker(pytest.mark.slow)


def fast_cases(seconds: list[float]) -> int:
    """How many cases, from the first, stay within FAST_SECONDS."""
    total = 0.0
    for count, own in enumerate(seconds):
        total += own
        if total > FAST_SECONDS:
            return count
    return len(seconds)


def cpu_seconds() -> float:
    """CPU time of this process and of the commands that it ran."""
    own, children = (
        resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    item.stash[STARTED] = cpu_seconds()
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    if call.when == "teardown":  # a process of xdist sends the properties with the report
        item.user_properties.append((MEASURED, cpu_seconds() - item.stash[STARTED]))


STARTED = pytest.StashKey[float]()
SECONDS: defaultdict[str, list[float]] = defaultdict(list)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "teardown":
        name = report.nodeid.partition("[")[0]
        SECONDS[name] += [float(value) for key, value in report.user_properties if key == MEASURED]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):
        return  # one of xdist's processes
    limits = {name: fast_cases(seconds) for name, seconds in SECONDS.items()}
    lines = [f"{name} {n}" for name, n in sorted(limits.items()) if n < len(SECONDS[name])]
    LIST.write_text("".join(f"{line}\n" for line in lines))
