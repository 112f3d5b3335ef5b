"""What a disk refuses is said with the name of the file or folder, and is never taken for a damaged file."""

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from decode.common.errors import UserError, disk_error, naming, world_error
from decode.common.files import write_atomically


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """In the block the system refuses to make a file larger than this, as a disk that is full does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


LARGE = "File too large: the file system takes no file of this size, name another folder"
WRITES: list[tuple[Any, str]] = [
    (lambda path: path.write_bytes(bytes(5000)), LARGE),
    (lambda path: save_file({"x": torch.zeros(5000)}, path), LARGE),
    (lambda path: torch.save({"x": torch.zeros(5000)}, path), "No space left on device: free"),
]


@pytest.mark.parametrize(("write", "said"), WRITES, ids=["python", "safetensors", "torch"])
def test_a_refused_write_names_its_file(write: Any, said: str, tmp_path: Path) -> None:
    """Real refusals: Python's names no file, that of safetensors is a message of another language, and torch does not
    say which error it was."""
    path = tmp_path / "a.bin"
    with largest_file(4000), pytest.raises(OSError, match=said[:8]) as caught, naming(path):
        write(path)
    assert str(world_error(caught.value)).startswith(f"{path}: {said}")
    assert said != LARGE or world_error(caught.value) == disk_error(caught.value)


def test_a_full_device_names_the_file_that_was_to_be_written(tmp_path: Path) -> None:
    (tmp_path / "report.json.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as caught:
        write_atomically(tmp_path / "report.json", "x")
    line = f"{tmp_path / 'report.json'}: No space left on device: free some space"
    assert world_error(caught.value) == line
    assert list(tmp_path.iterdir()) == []


def test_an_error_that_names_a_file_keeps_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError) as caught, naming(tmp_path / "other"):
        (tmp_path / "file" / "below").mkdir()
    assert str(world_error(caught.value)).startswith(f"{tmp_path / 'file' / 'below'}: Not a dir")
    denied = PermissionError(errno.EACCES, "Permission denied", "/a/b")
    with pytest.raises(PermissionError) as again, naming(tmp_path / "other"):
        raise denied
    assert again.value is denied


def full() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def caused(error: Exception) -> OSError:
    outer = OSError("the library cannot load it")
    outer.__cause__ = error
    return outer


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (full(), "W: No space left on device: free some space"),
        (caused(full()), "W: No space left on device: free some space"),
        (Exception("I/O error: Disk quota exceeded (os error 122)"), "W: Disk quota exceeded: free"),
        (OSError(errno.ENOSPC, "3 GB needed\nhere"), "W: No space left on device (3 GB needed): free"),
        (Exception("Permission denied (os error 13)"), "R: Permission denied: change its permissions"),
        (OSError(errno.EIO, os.strerror(errno.EIO)), "R: Input/output error: check the disk"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), "/x: Permission denied: change"),
        (OSError(errno.EROFS, "Read-only file system", "/x", None, "/y"), "/x -> /y: Read-only"),
    ],
)  # fmt: skip
def test_the_line_names_what_was_written_or_read(error: Exception, named: str) -> None:
    assert str(disk_error(error, read="R", written="W")).startswith(named)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("not a safetensors file"),
        FileNotFoundError(errno.ENOENT, "No such file or directory", "/x"),
        OSError("no file named model.safetensors"),
        Exception("No such file or directory (os error 2)"),
        KeyError("os error"),
        None,
    ],
)
def test_what_is_wrong_with_a_file_is_no_error_of_the_disk(error: Exception | None) -> None:
    assert disk_error(error, "R", "W") is None


def test_bad_input_is_not_renamed(tmp_path: Path) -> None:
    error = UserError("row 3 is bad")
    error.__cause__ = full()
    with pytest.raises(UserError) as caught, naming(tmp_path):
        raise error
    assert caught.value is error
