"""Training throughput: tokens per second, model FLOPs utilisation (MFU), peak memory and time waiting for data."""

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
"""{dtype: FLOPs computed in it}."""


def gpu_peaks(device: torch.device) -> GpuSpec | None:
    """Peak FLOP/s and bandwidth of the device; None for a CPU or an unknown GPU."""
    return GPU_SPECS.get(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory so far in bytes: allocated on the GPU, or resident in this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes


class ThroughputMeter:
    """Averages over the steps between two lines of the log, without the time for measuring and saving between steps.

    `step_flops` gives the FLOPs of a step over some samples, by a step without data; it is called once per step. `mfu`
    is the time that the device would need for them at its peak FLOP/s of each dtype, divided by the measured time; it
    is left out where the device's peak is not known. Memory is that of this process.
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
        """Adds a step over the samples `rows` that took `seconds`, of which `waited` were spent on loading them."""
        self.tokens += sum(len(row["input_ids"]) for row in rows)
        self.learned += batching.supervised_token_count(rows)
        self.seconds += seconds
        self.data_wait_seconds += waited
        if self.gpu is not None:
            parts = self.step_flops(rows).items()
            self.ideal_seconds += sum(count / self.gpu.flops(dtype) for dtype, count in parts)

    def flush(self) -> dict[str, float]:
        """The averages to log of the steps since the last call, and resets them. Padding does not count as tokens."""
        metrics = {
            "tokens_per_second": self.tokens / self.seconds,
            "learned_per_second": self.learned / self.seconds,
            "data_wait_share": self.data_wait_seconds / self.seconds,
            "peak_memory_gb": peak_memory_bytes(self.device) / 1e9,
        }
        if self.gpu is not None:
            metrics["mfu"] = self.ideal_seconds / self.seconds / self.processes
        self._reset()
        return metrics

    def _reset(self) -> None:
        self.tokens = self.learned = 0
        self.seconds = self.data_wait_seconds = self.ideal_seconds = 0.0


@contextmanager
def report_out_of_memory(advice: str) -> Iterator[None]:
    """Context manager that turns torch's out-of-memory error into a one-line UserError that ends with `advice`."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise SingleRankError(f"out of memory: {advice}") from error
