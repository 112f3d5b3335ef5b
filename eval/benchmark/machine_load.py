"""What else a machine did while a turn was measured: evidence that does not depend on how long any method took.

Before and after a turn are read: two clocks, the CPU time of other processes (with what a hypervisor took, steal) on
the CPUs that this process may use, and the seconds of a probe: one fixed read of memory, which is what decoding waits
for. Ours are this process, those of its launch and all their children, which servers that it started are. A neighbour
on a CPU that is not ours shows in the probe alone.
"""

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import psutil
import torch

from decode.common.machine import process_count

PROBE_BYTES, PROBE_READS = 2**25, 3
BUSY_SHARE = 0.1  # of the CPUs that we compute on: what others may take of them
CPU_SECONDS_OF_NOISE = 0.03  # Three ticks of the kernel's clock, by which its counters are off
SLOW_PROBE = 1.5  # times the lower quartile of all probes of a run
CLOCK_SHARE, CLOCK_SECONDS = 0.02, 0.05  # by which the two clocks may differ

BUSY = "other processes had the CPUs"
SLOW_MEMORY = "memory was slow"
CLOCK = "the clock jumped"


@dataclass(frozen=True)
class TurnEvidence:
    """Of one turn, all in seconds."""

    seconds: float  # by the clock that methods are timed with
    calendar_seconds: float  # by the clock of the calendar
    others: float  # of CPU, summed over our CPUs, steal included
    steal: float
    cpus: int
    probes: list[float]  # before and after
    threads: int | None = None  # that compute for us; None: as many as CPUs, as in earlier journals

    @property
    def ours(self) -> int:
        """CPUs that we compute on."""
        return min(self.threads or self.cpus, self.cpus)

    @property
    def taken(self) -> float:
        """Seconds of CPU that others had of those that we compute on: a machine of many CPUs gives them its idle ones,
        where only the probe notices them."""
        idle = (self.cpus - self.ours) * self.seconds
        return self.steal + max(0.0, self.others - self.steal - idle)


@dataclass(frozen=True)
class CpuTimes:
    """Seconds of CPU until now: of the CPUs that we may use, what a hypervisor took of them, and of our processes."""

    busy: float
    steal: float
    ours: float
    cpus: int


def cpu_times() -> CpuTimes:
    every = psutil.cpu_times(percpu=True)
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(every))
    cpus = [x._asdict() for at, x in enumerate(every) if at in allowed]
    # A guest's seconds are part of its user's.
    idle = ("idle", "iowait", "guest", "guest_nice")
    busy = sum(seconds for x in cpus for name, seconds in x.items() if name not in idle)
    return CpuTimes(busy, sum(x.get("steal", 0.0) for x in cpus), _own_seconds(), len(cpus))


def _own_seconds() -> float:
    me, total = psutil.Process(), 0.0
    family = (
        me.parent() if process_count() > 1 else None
    )  # the launcher, whose children share the target
    for process in [*([] if family else [me]), *(family or me).children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            x = process.cpu_times()
            total += x.user + x.system + x.children_user + x.children_system
    return total


class MachineWatch:
    """Evidence of what lies between `begin` and `end`. It is read outside the clocks of methods."""

    def __init__(self, device: torch.device | str = "cpu"):
        self.block = torch.ones(PROBE_BYTES // 4, device=device)

    def begin(self) -> None:
        self.probed = self.probe()
        self.cpu = cpu_times()
        self.calendar, self.start = time.time(), time.perf_counter()

    def end(self) -> TurnEvidence:
        seconds, calendar = time.perf_counter() - self.start, time.time() - self.calendar
        now = cpu_times()
        others = now.busy - self.cpu.busy - (now.ours - self.cpu.ours)
        return TurnEvidence(
            seconds=seconds,
            calendar_seconds=calendar,
            others=max(0.0, others),
            steal=now.steal - self.cpu.steal,
            cpus=now.cpus,
            probes=[self.probed, self.probe()],
            threads=torch.get_num_threads() * process_count(),
        )

    def probe(self) -> float:
        """Seconds of the fastest of a few reads of the same memory."""
        found = []
        for _ in range(PROBE_READS):
            start = time.perf_counter()
            self.block.sum().item()  # waits for the device
            found.append(time.perf_counter() - start)
        return min(found)


def typical_probe(found: Sequence[TurnEvidence]) -> float:
    """Of a run; infinite without evidence. The lower quartile, since half of a run may be busy."""
    probes = [seconds for x in found for seconds in x.probes]
    return float(np.quantile(probes, 0.25)) if probes else float("inf")


def busy_reason(x: TurnEvidence, probe: float) -> str:
    """Why seconds of this turn do not count; "" if they do. `probe` is that of a quiet machine."""
    if abs(x.calendar_seconds - x.seconds) > CLOCK_SECONDS + CLOCK_SHARE * abs(x.seconds):
        return CLOCK
    if x.taken > CPU_SECONDS_OF_NOISE + BUSY_SHARE * x.ours * x.seconds:
        return BUSY
    return SLOW_MEMORY if max(x.probes) > SLOW_PROBE * probe else ""


def all_busy(found: Sequence[TurnEvidence]) -> bool:
    """Whether others had too much of these turns together: of a short one the counters are too coarse to say so."""
    seconds = sum(x.ours * x.seconds for x in found)
    return sum(x.taken for x in found) > CPU_SECONDS_OF_NOISE + BUSY_SHARE * seconds
