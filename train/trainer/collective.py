"""Ranks and their collectives: joining them, raising one rank's UserError on all, a value for all, an output folder."""

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import (
    InitProcessGroupKwargs,
    broadcast_object_list,
    gather_object,
    parse_flag_from_env,
)

from decode.common import machine, run_dir
from decode.common.command import note_error
from decode.common.errors import UserError, one_line
from decode.common.run_dir import FolderSettings
from decode.devices.choice import find_gpu
from decode.distributed.tensor_parallel import LONGEST_SILENCE

RANKS = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
"""Variables by which torchrun and MPI number their processes."""


class SingleRankError(UserError):
    """An error of one rank in the middle of a step: the other ranks cannot be notified, so the launcher ends them."""


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Raises what Accelerate has against the launcher's variables and files as UserErrors."""
    try:
        yield
    except (ImportError, NotImplementedError, ValueError) as error:
        raise UserError(
            f"Accelerate cannot set up what the launcher asks for: {one_line(error, 300)}"
        ) from error


def join_processes() -> PartialState:
    """This process among those that were started together, which form a group on CPUs too.

    They wait for each other for days: each answers its own prompts, and one may end hours before another, where torch's
    default is 10 minutes on GPUs. UserError if they form no group, since each would believe that it is alone, and for
    an NVIDIA GPU that torch cannot use, unless the launcher was told to use the CPU.
    """
    size = machine.process_count()
    if size > 1 and not any(os.environ.get(name) for name in RANKS):
        raise UserError(
            f"WORLD_SIZE is {size}, and no variable says which of the processes this one is: start it with accelerate "
            "launch or torchrun, or unset WORLD_SIZE"
        )
    on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU")
    if not on_cpu:
        find_gpu()
        # Accelerate forms no group on CPUs unless it is told to.
        on_cpu = size > 1 and not torch.accelerator.is_available()
    patience = InitProcessGroupKwargs(timeout=LONGEST_SILENCE).to_kwargs()
    with one_line_errors():
        state = PartialState(cpu=on_cpu, **patience)
    if state.num_processes != size:
        raise UserError(
            f"{size} processes were started, and they form a group of {state.num_processes}: start them with "
            "accelerate launch or torchrun, and with ACCELERATE_USE_CPU=1 where there is no GPU for each"
        )
    return state


@contextmanager
def raise_on_all_ranks(accelerator: Accelerator | PartialState) -> Iterator[None]:
    """Barrier that re-raises any rank's UserError on all ranks: the main one raises it, the others exit with code 2.

    All ranks wait for each other at the end of the block. A collective call inside the block is safe only where no rank
    can raise a UserError before it on its own.
    """
    message = ""
    try:
        yield
    except SingleRankError:
        raise
    except UserError as error:
        message = str(error)
    messages = [text for text in gather_object([message]) if text]
    if messages and accelerator.is_main_process:
        raise UserError(messages[0])
    if messages:
        note_error(f"error: {messages[0]}")  # torchrun may see this process's end first
        sys.exit(2)


def broadcast(value: Any) -> Any:
    """The main process's `value`, on every rank."""
    return broadcast_object_list([value])[0]


@contextmanager
def open_run(
    accelerator: Accelerator | PartialState,
    settings: FolderSettings,
    command: str,
    writes: Sequence[str],
    reads: Sequence[str | Path],
) -> Iterator[bool]:
    """`run_dir.open_run` in the main process; gives every rank whether an earlier run is continued."""
    with contextlib.ExitStack() as stack:
        resumes = False
        with raise_on_all_ranks(accelerator):
            if accelerator.is_main_process:
                run = run_dir.open_run(settings, command, writes, reads)
                resumes = stack.enter_context(run).resumes
        yield broadcast(resumes)
