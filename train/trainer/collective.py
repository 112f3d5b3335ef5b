"""Collectives over ranks: raising one rank's UserError on all, broadcasting a value, and a SIGTERM handler."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast_object_list, gather_object

from decode.common.errors import UserError


class SingleRankError(UserError):
    """An error of one rank in the middle of a step: the other ranks cannot be notified, so the launcher ends them."""


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
        sys.exit(2)


def broadcast(value: Any) -> Any:
    """The main process's `value`, on every rank."""
    return broadcast_object_list([value])[0]


class SigtermHandler:
    """Context manager in which SIGTERM sets `received` instead of ending the process."""

    received = False

    def __enter__(self) -> "SigtermHandler":
        self.before = signal.signal(signal.SIGTERM, self._on_sigterm)
        return self

    def _on_sigterm(self, *_: Any) -> None:
        self.received = True

    def __exit__(self, *_: Any) -> None:
        signal.signal(signal.SIGTERM, self.before)
