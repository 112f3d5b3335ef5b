"""Evidence that a machine was busy: what is ours, what is others', and when it is too much."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from eval.benchmark import machine_load
from eval.benchmark.machine_load import (
    BUSY,
    CLOCK,
    SLOW_MEMORY,
    MachineWatch,
    TurnEvidence,
    all_busy,
    busy_reason,
    typical_probe,
)

QUIET = TurnEvidence(2.0, 2.0, 0.05, 0.0, 2, [0.001, 0.0012])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"others": 0.42}, ""),  # 20 % of one of two cores
        ({"others": 0.44}, BUSY),
        ({"others": 2.0}, BUSY),
        ({"others": 4.0, "steal": 4.0}, BUSY),
        ({"others": 0.44, "cpus": 64}, ""),
        ({"others": 100.0, "cpus": 64, "threads": 8}, ""),  # on the 56 that we leave idle
        ({"others": 114.0, "cpus": 64, "threads": 8}, BUSY),
        ({"others": 2.0, "steal": 2.0, "cpus": 64, "threads": 8}, BUSY),
        ({"others": 100.0, "cpus": 64, "threads": 128}, BUSY),
        ({"seconds": 0.02, "calendar_seconds": 0.02, "others": 0.03}, ""),  # ticks of the counters
        ({"seconds": 0.05, "calendar_seconds": 0.05, "others": 0.1}, BUSY),
        ({"probes": [0.001, 0.0014]}, ""),
        ({"probes": [0.001, 0.0016]}, SLOW_MEMORY),
        ({"probes": [0.0016, 0.001]}, SLOW_MEMORY),
        ({"seconds": 4.0}, CLOCK),
        ({"seconds": 1.9}, CLOCK),
        ({"seconds": -1.0}, CLOCK),
        ({"calendar_seconds": 3602.0}, CLOCK),
        ({"seconds": 2.05}, ""),
    ],
)
def test_what_makes_a_turn_busy(changes: dict[str, Any], reason: str) -> None:
    """Catches evidence that is read and not judged, and a quiet machine that counts as busy."""
    assert busy_reason(replace(QUIET, **changes), 0.001) == reason


def test_short_turns_are_judged_together() -> None:
    """Catches turns that each hide a neighbour within a tick; a quiet run of any length is quiet."""
    short = TurnEvidence(0.02, 0.02, 0.02, 0.0, 1, [0.001, 0.001])
    assert busy_reason(short, 0.001) == ""
    assert all_busy([short] * 10)
    assert not all_busy([])
    assert not all_busy([replace(short, others=0.0015)] * 1000)


def test_the_typical_probe_is_that_of_the_quiet_half() -> None:
    """Catches a neighbour in half of a run that makes slow reads typical."""
    slow = replace(QUIET, probes=[0.003, 0.003])
    assert typical_probe([slow] * 10 + [QUIET] * 10) <= 0.0012
    assert typical_probe([]) == float("inf")


class FakePsutil:
    """Two CPUs of which the process may use the second; it has two children and had one more."""

    NoSuchProcess, AccessDenied = psutil.NoSuchProcess, psutil.AccessDenied

    def __init__(self) -> None:
        self.now = [[1.0, 1.0, 50.0, 0.0], [1.0, 1.0, 50.0, 0.0]]
        self.own = {"me": [1.0, 0.5, 2.0, 0.0], "server": [0.0] * 4, "gone": [0.0] * 4}

    def cpu_times(self, percpu: bool) -> list[Any]:
        assert percpu
        names = ("user", "system", "idle", "steal")
        return [
            SimpleNamespace(_asdict=lambda x=x: dict(zip(names, x, strict=True))) for x in self.now
        ]

    def Process(self, name: str = "me") -> Any:
        def children(recursive: bool) -> list[Any]:
            assert recursive
            return [self.Process("server"), self.Process("gone")]

        def read() -> Any:
            if name == "gone":
                raise psutil.NoSuchProcess(1)
            names = ("user", "system", "children_user", "children_system")
            return SimpleNamespace(**dict(zip(names, self.own[name], strict=True)))

        return SimpleNamespace(cpu_times=read, children=children)


def test_ours_are_all_our_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a server of ours that counts as a neighbour, or another CPU that does."""
    fake = FakePsutil()
    monkeypatch.setattr(machine_load, "psutil", fake)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1}, raising=False)
    watch = MachineWatch()
    watch.begin()
    fake.now = [[90.0, 9.0, 50.0, 0.0], [4.0, 1.5, 60.0, 0.25]]
    fake.own |= {"me": [2.0, 0.5, 2.5, 0.0], "server": [1.0, 0.25, 0.0, 0.0]}
    found = watch.end()
    assert found.others == pytest.approx(3.75 - 1.0 - 0.5 - 1.25)
    assert (found.steal, found.cpus, found.threads) == (0.25, 1, torch.get_num_threads())
    fake.own["server"] = [9.0, 0.0, 0.0, 0.0]  # counters that are a tick apart
    assert watch.end().others == 0.0


def test_a_clock_that_jumps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches one clock compared with itself."""
    start = time.perf_counter()
    watch = MachineWatch()
    watch.begin()
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 60)
    found = watch.end()
    assert found.calendar_seconds == pytest.approx(60 + found.seconds, abs=1)
    assert found.seconds < time.perf_counter() - start
    assert busy_reason(found, typical_probe([found])) == CLOCK


@contextmanager
def strangers(count: int, cpu: int) -> Iterator[None]:
    """Processes that are not our children and that compute all the time on one CPU."""
    spin = "import os; print(os.getpid(), flush=True)\nwhile True: pass"
    shell = f"taskset -c {cpu} {sys.executable} -c '{spin}' &"
    pids = []
    try:
        for _ in range(count):
            with subprocess.Popen(["sh", "-c", shell], stdout=subprocess.PIPE, text=True) as done:
                assert done.stdout is not None
                pids.append(int(done.stdout.readline()))
                done.stdout.close()
        yield
    finally:
        for pid in pids:
            os.kill(pid, 9)


@pytest.mark.slow
@pytest.mark.skipif(not psutil.LINUX, reason="needs taskset")
@pytest.mark.parametrize("count", [1, 2])
def test_a_real_neighbour(count: int) -> None:
    """Catches counters that say nothing of a process beside us; ours alone, a child included, are no neighbour."""
    cpu, every = max(os.sched_getaffinity(0)), os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cpu})
    try:
        watch = MachineWatch(torch.device("cpu"))

        def compute() -> TurnEvidence:
            watch.begin()
            end = time.process_time() + 0.5
            while time.process_time() < end:
                pass
            own = "import time\nwhile time.process_time() < 0.5: pass"
            subprocess.run([sys.executable, "-c", own], check=True)
            return watch.end()

        with strangers(count, cpu):
            beside = compute()
        alone = compute()
        assert beside.others > 0.8 * count / (count + 1) * beside.seconds
        assert busy_reason(beside, float("inf")) == BUSY
        # Others may compute here, too.
        assert alone.seconds - alone.others == pytest.approx(1.05, abs=0.35)
    finally:
        os.sched_setaffinity(0, every)
