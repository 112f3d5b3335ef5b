"""The end time of each training step and the memory of the run, for any trainer."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from train.trainer import throughput


@dataclass
class StepTimer:
    """Records the end of each step of one run; the first `warmup_steps` are not timed, the next `steps` are."""

    device: torch.device
    warmup_steps: int
    steps: int
    end_times: list[float] = field(default_factory=list)
    initial_bytes: int = 0
    """Bytes in use when training started."""

    def start(self) -> None:
        """Call before the first step."""
        self.initial_bytes = _memory_in_use(self.device)

    def step(self) -> None:
        """Call after each step; waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.end_times.append(time.perf_counter())

    def results(self, tokens: Sequence[int]) -> dict[str, float]:
        """Throughput and peak memory of the timed steps; `tokens` has the tokens that each step read, from step 0."""
        timed = range(self.warmup_steps, self.warmup_steps + self.steps)
        seconds = self.end_times[timed[-1]] - self.end_times[self.warmup_steps - 1]
        return {
            "tokens_per_second": sum(tokens[step] for step in timed) / seconds,
            "seconds_per_step": seconds / self.steps,
            "peak_bytes": throughput.peak_memory_bytes(self.device) - self.initial_bytes,
            "peak_bytes_in_all": throughput.peak_memory_bytes(self.device),
        }


def _memory_in_use(device: torch.device) -> int:
    return (
        torch.cuda.memory_allocated(device)
        if device.type == "cuda"
        else throughput.peak_memory_bytes(device)
    )
