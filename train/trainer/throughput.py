"""How fast steps run and what they take: tokens a second, share of the GPU's arithmetic, memory, waiting for data."""

import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from eval.metrics.roofline import GPU_SPECS, GpuSpec
from train.data import batching
from train.data.sample_store import SampleRow
from train.trainer.collective import SingleRankError

FlopsByDtype = dict[str, float]
"""Operations by the dtype that they are done in."""


def gpu_peaks(device: torch.device) -> GpuSpec | None:
    """What the device can do at best; None where that is not known."""
    return GPU_SPECS.get(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def peak_memory_bytes(device: torch.device) -> int:
    """Most bytes in use at once so far: of the GPU, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024  # macOS counts bytes


class ThroughputMeter:
    """Adds up steps between two lines of the log; what lies between steps (measuring, saving) does not count.

    `step_flops` gives the operations that a step over some samples takes by the models' shapes, and is asked once a step.
    `mfu` is the share of the time in which the device at its best would have done them, each in its dtype; it is left
    out where nobody knows what the device can do. Memory is this process's.
    """

    def __init__(
        self,
        device: torch.device,
        processes: int,
        step_flops: Callable[[Sequence[SampleRow]], FlopsByDtype],
    ):
        self.device, self.processes, self.step_flops = device, processes, step_flops
        self.gpu = gpu_peaks(device)
        self._reset()

    def add(self, rows: Sequence[SampleRow], seconds: float, waited: float) -> None:
        """A step over the samples `rows` took `seconds`, `waited` of them for the samples."""
        self.tokens += sum(len(row["input_ids"]) for row in rows)
        self.learned += batching.supervised_token_count(rows)
        self.seconds += seconds
        self.data_wait_seconds += waited
        if self.gpu is not None:
            parts = self.step_flops(rows).items()
            self.ideal_seconds += sum(count / self.gpu.flops(dtype) for dtype, count in parts)

    def flush(self) -> dict[str, float]:
        """What to log of the steps since the last call. Tokens are those of samples, without padding."""
        found = {
            "tokens_per_second": self.tokens / self.seconds,
            "learned_per_second": self.learned / self.seconds,
            "data_wait_share": self.data_wait_seconds / self.seconds,
            "peak_memory_gb": peak_memory_bytes(self.device) / 1e9,
        }
        if self.gpu is not None:
            found["mfu"] = self.ideal_seconds / self.seconds / self.processes
        self._reset()
        return found

    def _reset(self) -> None:
        self.tokens = self.learned = 0
        self.seconds = self.data_wait_seconds = self.ideal_seconds = 0.0


@contextmanager
def report_out_of_memory(advice: str) -> Iterator[None]:
    """Turns a device's running out of memory into one line that ends with `advice`."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise SingleRankError(f"out of memory: {advice}") from error
