"""A GPU whose memory is full, in one line."""

import errno
from dataclasses import dataclass

import pytest
import torch

from decode.common.command import run_command
from decode.common.errors import memory_error, world_error

CUDA = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 14.56 GiB of which 1.20 GiB is "
    "free. See documentation for Memory Management"
)
ADVICE = (
    ": lower what is computed at once (batch_size, loop.micro_batch) or its length (max_new_tokens), or load the "
    "target in fewer bits (dtype bfloat16, int8) or over several devices (placement.kind device_map)"
)


@dataclass
class NoConfig:
    """No settings."""


@pytest.mark.parametrize(
    ("message", "more"),
    [(CUDA, " (2.50 GiB more were asked for)"), ("Allocation on device", ""),
     (CUDA.replace("2.50 GiB", "512.00 MiB"), " (512.00 MiB more were asked for)")],
)  # fmt: skip
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_full_gpu_ends_in_one_line(
    message: str, more: str, wrapped: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches torch's traceback and its paragraph on the allocator, also where another error came of it."""

    def main(settings: NoConfig) -> None:
        try:
            raise torch.OutOfMemoryError(message)
        except torch.OutOfMemoryError as error:
            if wrapped:
                raise RuntimeError("a layer failed") from error
            raise

    with pytest.raises(SystemExit) as end:
        run_command(main, NoConfig, "", argv=[])
    assert end.value.code == 2
    assert capsys.readouterr().err == f"error: the GPU's memory is full{more}{ADVICE}\n"


def test_other_errors_are_no_full_gpu() -> None:
    """Catches a full disk, or a fault of the code, that is told as a full GPU."""
    assert memory_error(ValueError(CUDA)) is None
    assert world_error(ValueError("x")) is None
    assert "No space left" in (world_error(OSError(errno.ENOSPC, "No space left on device")) or "")
