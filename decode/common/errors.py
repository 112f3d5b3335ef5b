"""UserError, which ends a command with one line, and what other exceptions mean in one line.

Errors of the world, such as a full disk or a missing permission, say nothing about the program. Readers ask here before
they call a file damaged: what the disk or permissions refuse may be whole, and is never made again or moved aside.
"""

import errno
import os
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

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
"""{error number: what to do}: the errors of the world."""
WRITE_ERRORS = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG))
"""Those that reading does not end with."""
DISK_ERRORS = WRITE_ERRORS | {errno.EACCES, errno.EPERM, errno.EIO, errno.EMFILE}
"""Those that say nothing about the content of a file: getting it again would not help."""


class UserError(Exception):
    """Bad input: one line that names what is wrong and what to change. Commands exit with code 2."""


class NotFiniteError(UserError):
    """Logits that are NaN or infinite. `prompt` is the number of the prompt; None if they are the draft's."""

    def __init__(self, prompt: int | None, message: str):
        super().__init__(message)
        self.prompt = prompt


def first_line(error: Exception) -> str:
    """The first line of the message of `error`, or the name of its class when it has no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def one_line(error: Exception, longest: int = 200) -> str:
    """The message of `error` in one line of up to `longest` characters, after the name of its class where the message
    is a single word, as that of a KeyError is."""
    text = " ".join(str(error).split())
    text = text if " " in text else f"{type(error).__name__} {text}".strip()
    return text if len(text) <= longest else text[: longest - 1] + "…"


def world_error(error: BaseException | None) -> str | None:
    """One line for an error of the world in `error` or in what caused it; None for any other error."""
    return _line(error, ADVICE) or memory_error(error)


def memory_error(error: BaseException | None) -> str | None:
    """One line for a GPU's memory that was too small, in `error` or in what caused it; None for any other error."""
    if error is None:
        return None
    if type(error).__name__ != "OutOfMemoryError":  # torch's; commands say --help without it
        return memory_error(error.__cause__)
    asked = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
    more = f" ({asked[1]} more were asked for)" if asked else ""
    return (
        f"the GPU's memory is full{more}: lower what is computed at once (batch_size, loop.micro_batch) or its length "
        "(max_new_tokens), or load the target in fewer bits (dtype bfloat16, int8) or over several devices "
        "(placement.kind device_map)"
    )


def disk_error(
    error: BaseException | None, read: str | Path = "", written: str | Path = ""
) -> str | None:
    """`world_error` of DISK_ERRORS alone. Where the error names no file, the line names what was `written` if only
    writing can end so, else what was `read`."""
    return _line(error, DISK_ERRORS, read, written)


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """In the block `path` is written: an error of its disk that names no file, as that of a full one, gets its name."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        number, files, _ = _find(error, DISK_ERRORS)
        if not number or files:
            raise
        raise OSError(number, os.strerror(number), str(path)) from error


def _line(
    error: BaseException | None,
    numbers: Collection[int],
    read: str | Path = "",
    written: str | Path = "",
) -> str | None:
    number, files, more = _find(error, numbers)
    if not number:
        return None
    place = files or str(written or read if number in WRITE_ERRORS else read)
    return f"{place + ': ' if place else ''}{os.strerror(number)}{more}: {ADVICE[number]}"


def _find(error: BaseException | None, numbers: Collection[int]) -> tuple[int, str, str]:
    """(that of `numbers` which `error` has, or what caused it: 0 for none; the files that it names; what it says beyond
    the number)."""
    if error is None:
        return 0, "", ""
    number = _number_of(error)
    if number not in numbers:
        during = error.__context__ if isinstance(error, OSError | RuntimeError) else None
        return _find(error.__cause__ or during, numbers)
    if not isinstance(error, OSError):
        return number, "", ""
    files = " -> ".join(str(file) for file in (error.filename, error.filename2) if file is not None)
    usual, own = os.strerror(number), error.strerror or ""
    return number, files, "" if own in ("", usual) else f" ({first_line(Exception(own))})"


def _number_of(error: BaseException) -> int:
    """The error's number; 0 if it has none. Libraries that write without Python's files put it into their message."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    message = str(error)
    found = re.search(r"os error (\d+)", message)
    full = "No space left on device" in message or "iostream error" in message
    return int(found[1]) if found else errno.ENOSPC if full else 0
