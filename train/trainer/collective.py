"""Several processes that end together: a refusal by one is a refusal by all, and SIGTERM stops all after one step."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast_object_list, gather_object

from decode.common.errors import UserError


class SingleRankError(UserError):
    """Happened to one process in the midst of a step: the others cannot be told, their launcher ends them."""


@contextmanager
def raise_on_all_ranks(accelerator: Accelerator | PartialState) -> Iterator[None]:
    """All processes leave this block, or none: a UserError in any of them is raised in the main one, the others exit.

    They wait for each other at its end; within it only where none of them can refuse alone.
    """
    said = ""
    try:
        yield
    except SingleRankError:
        raise
    except UserError as error:
        said = str(error)
    found = [line for line in gather_object([said]) if line]
    if found and accelerator.is_main_process:
        raise UserError(found[0])
    if found:
        sys.exit(2)


def broadcast(value: Any) -> Any:
    """The main process's `value`, in every process."""
    return broadcast_object_list([value])[0]


class SigtermHandler:
    """Within it SIGTERM ends nothing by itself: it sets `asked`."""

    received = False

    def __enter__(self) -> "SigtermHandler":
        self.before = signal.signal(signal.SIGTERM, self._on_sigterm)
        return self

    def _on_sigterm(self, *_: Any) -> None:
        self.received = True

    def __exit__(self, *_: Any) -> None:
        signal.signal(signal.SIGTERM, self.before)
