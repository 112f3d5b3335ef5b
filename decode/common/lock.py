"""A lock file: one process at a time writes into a folder.

The lock is an exclusive flock, which the operating system releases when the process ends, even by SIGKILL: a file that
was left behind locks nothing. The file names its holder for the message that others get. On a file system without
flock the holder that it names counts, unless it was a process of this host that has ended.
"""

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from decode.common.errors import UserError

LOCK_FILE = ".lock"
"""Name of the lock file of a folder."""


@contextmanager
def hold(file: Path, what: str | Path, wait: bool = False) -> Iterator[IO[str]]:
    """Holds the lock `file` during the block and deletes it afterwards; its folder must exist.

    Gives the open file: a process that inherits it holds the lock on if this one is killed.
    While another process holds it: UserError, where `what` is the folder or file that the message is about; with `wait`
    it waits.
    """
    opened = _acquire(file, what, wait)
    try:
        yield opened
    finally:
        file.unlink(missing_ok=True)
        opened.close()


def _acquire(file: Path, what: str | Path, wait: bool) -> IO[str]:
    while True:
        opened = file.open("a+", encoding="utf-8")
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise _in_use(file, what, _holder(opened)) from None
        except OSError:  # no flock here
            if _may_live(_holder(opened)):
                raise _in_use(file, what, _holder(opened)) from None
        if _is_still(file, opened):
            break
        opened.close()  # its holder deleted the file after it was opened here
    opened.truncate(0)
    since = datetime.now().astimezone().isoformat(timespec="seconds")
    json.dump({"pid": os.getpid(), "host": socket.gethostname(), "since": since}, opened)
    opened.flush()
    return opened


def _is_still(file: Path, opened: IO[str]) -> bool:
    """Whether `file` is the one that was opened; others may delete it at any time."""
    try:
        return os.path.samestat(os.fstat(opened.fileno()), file.stat())
    except FileNotFoundError:
        return False


def _holder(opened: IO[str]) -> dict[str, Any]:
    """What the file says about its holder; {} if it says nothing (yet)."""
    opened.seek(0)
    try:
        found = json.loads(opened.read())
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _may_live(holder: dict[str, Any]) -> bool:
    if not holder or holder.get("host") != socket.gethostname():
        return bool(holder)
    try:
        os.kill(int(holder["pid"]), 0)
    except (ProcessLookupError, KeyError, ValueError, TypeError):
        return False
    except PermissionError:  # a process of another user
        return True
    return True


def _in_use(file: Path, what: str | Path, holder: dict[str, Any]) -> UserError:
    names = ("pid", "host", "since")
    told = ", ".join(f"{name} {holder[name]}" for name in names if name in holder)
    elsewhere = holder.get("host", socket.gethostname()) != socket.gethostname()
    dead = f" (if it has ended, delete {file})" if elsewhere else ""
    return UserError(
        f"another run is using {what}{f' ({told})' if told else ''}: wait for its end or stop it{dead}, or name "
        "another folder"
    )
