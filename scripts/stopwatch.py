"""When each step of a training run ended, and what it took in memory, whoever trains."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from train import meter


@dataclass
class Clock:
    """Stamps behind the steps of one run."""

    device: torch.device
    warm: int
    steps: int
    stamps: list[float] = field(default_factory=list)
    before: int = 0
    """Bytes in use when training began."""

    def start(self) -> None:
        self.before = _in_use(self.device)

    def step(self) -> None:
        """Behind each step, the device's work included."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.stamps.append(time.perf_counter())

    def found(self, tokens: Callable[[int], int]) -> dict[str, float]:
        """`tokens` says how many a step (from 0) read."""
        timed = range(self.warm, self.warm + self.steps)
        seconds = self.stamps[timed[-1]] - self.stamps[self.warm - 1]
        return {
            "tokens_per_second": sum(map(tokens, timed)) / seconds,
            "seconds_per_step": seconds / self.steps,
            "peak_bytes": meter.peak_memory(self.device) - self.before,
            "peak_bytes_in_all": meter.peak_memory(self.device),
        }


def _in_use(device: torch.device) -> int:
    return (
        torch.cuda.memory_allocated(device) if device.type == "cuda" else meter.peak_memory(device)
    )
