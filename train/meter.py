"""How fast steps run and what they take: tokens a second, share of the GPU's arithmetic, memory, waiting for data."""

import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from train import batches
from train.shards import Row
from train.together import Alone

PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A10G": 70e12,
    "A10": 125e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}
"""Dense bf16 operations a second by the makers' data sheets; the first name that occurs in the device's counts."""


def peak_of(device: torch.device) -> float | None:
    """Operations a second that the device can do at best in bf16; None where that is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def peak_memory(device: torch.device) -> int:
    """Most bytes in use at once so far: of the GPU, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024  # macOS counts bytes


class Meter:
    """Adds up steps between two lines of the log; what lies between steps (measuring, saving) does not count.

    `flops` gives the operations that a step over some samples takes by the model's shapes. Memory is this process's.
    """

    def __init__(
        self, device: torch.device, processes: int, flops: Callable[[Sequence[Row]], float]
    ):
        self.device, self.flops = device, flops
        peak = peak_of(device)
        self.peak = None if peak is None else peak * processes
        self._forget()

    def add(self, rows: Sequence[Row], seconds: float, waited: float) -> None:
        """A step over the samples `rows` took `seconds`, `waited` of them for the samples."""
        self.tokens += sum(len(row["input_ids"]) for row in rows)
        self.learned += batches.token_count(rows)
        self.seconds += seconds
        self.waited += waited
        self.work += 0.0 if self.peak is None else self.flops(rows)

    def take(self) -> dict[str, float]:
        """What to log of the steps since the last call. Tokens are those of samples, without padding."""
        found = {
            "tokens_per_second": self.tokens / self.seconds,
            "learned_per_second": self.learned / self.seconds,
            "data_wait_share": self.waited / self.seconds,
            "peak_memory_gb": peak_memory(self.device) / 1e9,
        }
        if self.peak is not None:
            found["mfu"] = self.work / self.seconds / self.peak
        self._forget()
        return found

    def _forget(self) -> None:
        self.tokens = self.learned = 0
        self.seconds = self.waited = self.work = 0.0


@contextmanager
def enough_memory(advice: str) -> Iterator[None]:
    """Turns a device's running out of memory into one line that ends with `advice`."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise Alone(f"out of memory: {advice}") from error
