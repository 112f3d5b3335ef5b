"""Damaged files: found by checksums, moved aside and never deleted, with what is intact in them kept and used.

What can be made again is made again, with a warning: answers in a damaged shard (by train/sample.py), features, lost
lines of a journal. A training goes back to its newest intact checkpoint. A sampled set that lacks a shard is refused. A
draft whose weights were altered decodes with a warning, and is never published.
"""

import hashlib
import itertools
import json
import shutil
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from decode.common.files import write_atomically


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_once(path: Path) -> str:
    """`sha256`, computed once in a process for each state of the file: a large one takes seconds."""
    return _sha256_of_state(path, *file_state(path))


def file_state(path: Path) -> tuple[int, int, int, int]:
    """What changes when a file is replaced, whatever its name and times are set to; its size first."""
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino


@cache
def _sha256_of_state(path: Path, *state: int) -> str:
    return sha256(path)


def warn(message: str) -> None:
    sys.stderr.write(f"warning: {message}\n")


@cache
def warn_once(message: str) -> None:
    """`warn`, but once for each message: commands load a model several times."""
    warn(message)


def free_name(path: Path) -> Path:
    """The name beside `path` for what is damaged: PATH.damaged, or PATH.damaged-2 and so on if it is taken."""
    endings = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
    names = (path.with_name(f"{path.name}.damaged{ending}") for ending in endings)
    return next(name for name in names if not (name.exists() or name.is_symlink()))


def move_aside(path: Path) -> Path:
    """Renames a damaged file or folder to `free_name` and returns that name."""
    return path.rename(free_name(path))


def read_log(
    path: Path, fields: Mapping[str, type], consequence: str, needs_first: bool = False
) -> list[dict[str, Any]]:
    """The lines of a file to which JSON objects were appended; [] if there is none. Each has `fields` of these types.

    A last line without its line feed is dropped, because its writer was killed. Other lines that are not such objects
    are damage: a warning names the first of them and says the `consequence`, a copy of the file is kept beside it, and
    the file is rewritten without them. With `needs_first` a damaged first line makes all others worthless as well.
    """
    if not path.is_file():
        return []
    data = path.read_bytes()
    lines = data.split(b"\n")[:-1]
    parsed = [_parse_line(line, fields) for line in lines]
    first = parsed.index(None) if None in parsed else -1
    if first == 0 and needs_first:
        parsed = [None] * len(parsed)
    kept = [(line, row) for line, row in zip(lines, parsed, strict=True) if row is not None]
    if first >= 0:
        copy = free_name(path)
        shutil.copyfile(path, copy)
        warn(
            f"{path}: line {first + 1} is damaged, and {parsed.count(None)} of {len(lines)} lines are lost: "
            f"{consequence}; the file as it was is kept as {copy.name}"
        )
    whole = b"".join(line + b"\n" for line, _ in kept)
    if whole != data:
        write_atomically(path, whole)
    return [row for _, row in kept]


def _parse_line(line: bytes, fields: Mapping[str, type]) -> dict[str, Any] | None:
    try:
        row = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    right = isinstance(row, dict) and all(
        isinstance(row.get(name), kind) and name in row for name, kind in fields.items()
    )
    return row if right else None
