"""One at a time: one process writes into a folder, and one request decodes with a model or a draft.

The lock of a folder is an exclusive flock, which the operating system releases when the process ends, even by SIGKILL:
a file that was left behind locks nothing. The file names its holder for the message that others get.

A model or a draft serves one request, since its KV cache is that request's. A request begins with the first `next()` of
its generator and ends when that has ended, failed, been closed or been garbage-collected. Rounds of all requests of the
process run one after the other, whichever threads read them: torch compiles, captures CUDA graphs and packs weights for
a whole process.
"""

import contextlib
import fcntl
import gc
import json
import os
import socket
import threading
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from decode.common.errors import UserError

LOCK_FILE = ".lock"
"""Name of the lock file of a folder."""


@contextlib.contextmanager
def hold(file: Path, what: str | Path, wait: bool = False) -> Iterator[IO[str]]:
    """Holds the lock `file` during the block and deletes it afterwards; its folder must exist.

    Gives the open file: a process that inherits it holds the lock on if this one is killed. While another process holds
    it: UserError about the folder or file `what`; with `wait` it waits.
    """
    while True:
        opened = file.open("a+", encoding="utf-8")
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            holder = _holder(opened)
            # On a file system without flock the holder that the file names counts.
            if isinstance(error, BlockingIOError) or _may_live(holder):
                raise _in_use(file, what, holder) from None
        with contextlib.suppress(FileNotFoundError):  # deleted after it was opened here
            if os.path.samestat(os.fstat(opened.fileno()), file.stat()):
                break
        opened.close()
    opened.truncate(0)
    since = datetime.now().astimezone().isoformat(timespec="seconds")
    json.dump({"pid": os.getpid(), "host": socket.gethostname(), "since": since}, opened)
    opened.flush()
    try:
        yield opened
    finally:
        file.unlink(missing_ok=True)
        opened.close()


def _holder(opened: IO[str]) -> dict[str, Any]:
    opened.seek(0)
    with contextlib.suppress(ValueError):
        found = json.loads(opened.read())
        return found if isinstance(found, dict) else {}
    return {}


def _may_live(holder: dict[str, Any]) -> bool:
    """False if the holder was a process of this host that has ended."""
    if not holder or holder.get("host") != socket.gethostname():
        return bool(holder)
    try:
        os.kill(int(holder["pid"]), 0)
    except PermissionError:  # a process of another user
        return True
    except (ProcessLookupError, KeyError, ValueError, TypeError):
        return False
    return True


def _in_use(file: Path, what: str | Path, holder: dict[str, Any]) -> UserError:
    names = [name for name in ("pid", "host", "since") if name in holder]
    told = ", ".join(f"{name} {holder[name]}" for name in names)
    elsewhere = holder.get("host", socket.gethostname()) != socket.gethostname()
    dead = f" (if it has ended, delete {file})" if elsewhere else ""
    return UserError(
        f"another run is using {what}{f' ({told})' if told else ''}: wait for its end or stop it{dead}, or name "
        "another folder"
    )


# ---- requests ----


USERS: dict[int, "Request"] = {}
"""The request that uses an object, by the object's id."""
ROUND = threading.RLock()
"""Held while a round runs."""


class Running(threading.local):
    """The request whose round runs in this thread."""

    request: "Request | None" = None


RUNNING = Running()


class Request:
    """One request with everything that it alone uses, until `release`."""

    def __init__(self) -> None:
        self.claimed: list[Any] = []

    def claim(self, thing: Any, name: str) -> None:
        """Makes `thing` this request's. UserError, which calls it `name`, if another request uses it."""
        # `setdefault` is atomic: of two threads one gets it.
        if USERS.setdefault(id(thing), self) is not self:
            gc.collect()  # an abandoned generator in a cycle of references still holds what it used
            if USERS.setdefault(id(thing), self) is not self:
                raise refusal(name)
        self.claimed.append(thing)

    def release(self) -> None:
        for thing in self.claimed:
            USERS.pop(id(thing), None)
        self.claimed.clear()

    @contextlib.contextmanager
    def round(self) -> Iterator[None]:
        """The block runs while no round of another thread does."""
        with ROUND:
            before, RUNNING.request = RUNNING.request, self
            try:
                yield
            finally:
                RUNNING.request = before


def claim(thing: Any, name: str) -> None:
    """Makes `thing` that of the request whose round runs here, if one does. UserError if another request uses it."""
    if RUNNING.request is not None:
        RUNNING.request.claim(thing, name)
    elif id(thing) in USERS:
        raise refusal(name)


def refusal(name: str) -> UserError:
    return UserError(
        f"{name} is decoding for another generator, which has neither ended nor been closed: read that one to its end "
        "or close() it first, or load this model a second time"
    )
