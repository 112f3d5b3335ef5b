"""Damaged files: found by checksums, moved aside and never deleted, with what is intact in them kept and used.

What can be made again is made again, with a warning: answers in a damaged shard (by train/sample.py), features, lost
lines of a journal. A training goes back to its newest intact checkpoint. A sampled set that lacks a shard is refused. A
draft whose weights were altered decodes with a warning, and is never published.
"""

import hashlib
import json
import shutil
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from decode.common.files import write_atomically

SUFFIX = ".damaged"


def sha256(path: Path) -> str:
    """The SHA-256 of a file's content, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_once(path: Path) -> str:
    """`sha256`, computed once in a process for each state of the file: a large one takes seconds."""
    stat = path.stat()
    return _sha256_of_state(path, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


@cache
def _sha256_of_state(path: Path, *state: int) -> str:
    return sha256(path)


def warn(message: str) -> None:
    """Prints one line on stderr about something that does not stop the command."""
    sys.stderr.write(f"warning: {message}\n")


@cache
def warn_once(message: str) -> None:
    """`warn`, but once for each message: commands load a model several times."""
    warn(message)


def free_name(path: Path) -> Path:
    """The name beside `path` for what is damaged: PATH.damaged, or PATH.damaged-2 and so on if it is taken."""
    name, number = path.with_name(path.name + SUFFIX), 1
    while name.exists() or name.is_symlink():
        number += 1
        name = path.with_name(f"{path.name}{SUFFIX}-{number}")
    return name


def move_aside(path: Path) -> Path:
    """Renames a damaged file or folder to `free_name` and returns that name."""
    name = free_name(path)
    path.rename(name)
    return name


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
    damaged = [number for number, row in enumerate(parsed, 1) if row is None]
    if needs_first and damaged[:1] == [1]:
        parsed = [None] * len(parsed)
    kept = b"".join(
        line + b"\n" for line, row in zip(lines, parsed, strict=True) if row is not None
    )
    if damaged:
        copy = free_name(path)
        shutil.copyfile(path, copy)
        warn(
            f"{path}: line {damaged[0]} is damaged, and {parsed.count(None)} of {len(lines)} lines are lost: "
            f"{consequence}; the file as it was is kept as {copy.name}"
        )
    if kept != data:
        write_atomically(path, kept)
    return [row for row in parsed if row is not None]


def _parse_line(line: bytes, fields: Mapping[str, type]) -> dict[str, Any] | None:
    try:
        row = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    whole = isinstance(row, dict) and all(
        name in row and isinstance(row[name], kind) for name, kind in fields.items()
    )
    return row if whole else None
