"""When each step of a training run ended, and what it took in memory, whoever trains."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from train.trainer import throughput


@dataclass
class StepTimer:
    """Stamps behind the steps of one run."""

    device: torch.device
    warm: int
    steps: int
    end_times: list[float] = field(default_factory=list)
    before: int = 0
    """Bytes in use when training began."""

    def start(self) -> None:
        self.before = _memory_in_use(self.device)

    def step(self) -> None:
        """Behind each step, the device's work included."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.end_times.append(time.perf_counter())

    def found(self, tokens: Callable[[int], int]) -> dict[str, float]:
        """`tokens` says how many a step (from 0) read."""
        timed = range(self.warm, self.warm + self.steps)
        seconds = self.end_times[timed[-1]] - self.end_times[self.warm - 1]
        return {
            "tokens_per_second": sum(map(tokens, timed)) / seconds,
            "seconds_per_step": seconds / self.steps,
            "peak_bytes": throughput.peak_memory_bytes(self.device) - self.before,
            "peak_bytes_in_all": throughput.peak_memory_bytes(self.device),
        }


def _memory_in_use(device: torch.device) -> int:
    return (
        torch.cuda.memory_allocated(device)
        if device.type == "cuda"
        else throughput.peak_memory_bytes(device)
    )
