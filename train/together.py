"""Several processes that end together: a refusal by one is a refusal by all, and SIGTERM stops all after one step."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast_object_list, gather_object

from decode.settings import UserError


class Alone(UserError):
    """Happened to one process in the midst of a step: the others cannot be told, their launcher ends them."""


@contextmanager
def agreed(accelerator: Accelerator | PartialState) -> Iterator[None]:
    """All processes leave this block, or none: a UserError in any of them is raised in the main one, the others exit.

    They wait for each other at its end; within it only where none of them can refuse alone.
    """
    said = ""
    try:
        yield
    except Alone:
        raise
    except UserError as error:
        said = str(error)
    found = [line for line in gather_object([said]) if line]
    if found and accelerator.is_main_process:
        raise UserError(found[0])
    if found:
        sys.exit(2)


def told(value: Any) -> Any:
    """The main process's `value`, in every process."""
    return broadcast_object_list([value])[0]


class Stop:
    """Within it SIGTERM ends nothing by itself: it sets `asked`."""

    asked = False

    def __enter__(self) -> "Stop":
        self.before = signal.signal(signal.SIGTERM, self._ask)
        return self

    def _ask(self, *_: Any) -> None:
        self.asked = True

    def __exit__(self, *_: Any) -> None:
        signal.signal(signal.SIGTERM, self.before)
