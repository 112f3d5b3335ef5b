"""Errors of the world, as a full disk or a file that may not be read: which one an exception means, in one line.

Readers ask here before they call a file damaged: what the disk or permissions refuse may be whole, and is never made
again or moved aside.
"""

import errno
import os
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from decode.common.errors import UserError, first_line

ADVICE = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some of your quota",
    errno.EROFS: "name a folder that can be written",
    errno.EACCES: "change its permissions, or name another path",
    errno.EPERM: "change its permissions, or name another path",
    errno.ENOTDIR: "a part of the path is a file, name another path",
    errno.EISDIR: "name a file",
    errno.ENOENT: "check the path",
    errno.EEXIST: "remove it, or name another path",
    errno.ENAMETOOLONG: "give a shorter name",
    errno.ELOOP: "a link of the path leads back to itself, name another path",
    errno.EFBIG: "the file system takes no file of this size, name another folder",
    errno.EIO: "check the disk",
    errno.EBUSY: "it is in use or a mount point, name another path",
    errno.EXDEV: "it lies on another disk, name another path",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}
"""{error number: what to do}: the errors of the world, which say nothing about the program."""
DISK_ERRORS = frozenset(
    (
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EROFS,
        errno.EFBIG,
        errno.EACCES,
        errno.EPERM,
        errno.EIO,
        errno.EMFILE,
    )
)
"""Those that say nothing about the content of a file: getting it again would not help."""
WRITE_ERRORS = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG))
"""Those of them that reading does not end with."""


def world_error(error: BaseException | None) -> str | None:
    """One line for an error of the world (see ADVICE) in `error` or in what caused it; None for any other error."""
    found = _find(error, ADVICE)
    return None if found is None else found.line("")


def disk_error(
    error: BaseException | None, read: str | Path = "", written: str | Path = ""
) -> str | None:
    """One line that says what a disk or permissions refused, and what to do; None for an error that is not among
    DISK_ERRORS, nor caused by one.

    It names the file of the error; where that names none, what was `written` if only writing can end so, else `read`.
    """
    found = _find(error, DISK_ERRORS)
    if found is None:
        return None
    return found.line(str(written or read if found.number in WRITE_ERRORS else read))


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """In the block `path` is written: an error of its disk that names no file, as that of a full one, gets its name."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        found = _find(error, DISK_ERRORS)
        if found is None or found.files:
            raise
        raise OSError(found.number, os.strerror(found.number), str(path)) from error


@dataclass(frozen=True)
class _Found:
    """An error of the world."""

    number: int
    files: str
    """The files that it names; empty for none."""
    more: str
    """What it says beyond the number."""

    def line(self, where: str) -> str:
        place = self.files or where
        return f"{place + ': ' if place else ''}{os.strerror(self.number)}{self.more}: {ADVICE[self.number]}"


def _find(error: BaseException | None, numbers: Collection[int]) -> _Found | None:
    """That of `numbers` which `error` has, or what caused it."""
    if error is None:
        return None
    number = _number_of(error)
    if number not in numbers:
        during = error.__context__ if isinstance(error, OSError | RuntimeError) else None
        return _find(error.__cause__ or during, numbers)
    if not isinstance(error, OSError):
        return _Found(number, "", "")
    files = " -> ".join(str(file) for file in (error.filename, error.filename2) if file is not None)
    own = error.strerror or os.strerror(number)
    return _Found(
        number, files, "" if own == os.strerror(number) else f" ({first_line(Exception(own))})"
    )


def _number_of(error: BaseException) -> int:
    """The error's number; 0 if it has none. Libraries that write without Python's files put it into their message."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    message = str(error)
    found = re.search(r"os error (\d+)", message)
    if found:
        return int(found[1])
    full = "No space left on device" in message or "iostream error" in message
    return errno.ENOSPC if full else 0
