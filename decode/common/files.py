"""Atomic writing (after a crash the old or the new file is there), and JSON with an error that names its file."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from decode.common.errors import UserError


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replaces `path` by a file with `content`; text is written as UTF-8. Missing parent folders are made.

    After a crash or a power cut the old file or the new one is there, never a part of it: the data is synced before
    the rename, and the folder after it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read_json(path: Path) -> Any:
    """The parsed content of `path`. UserError that names the file when it is absent or not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist") from error
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: delete it and make it again") from error


def parse_jsonl(text: str, path: Path) -> Iterator[tuple[str, Any]]:
    """("path:line", value) for each line of `text` that is not blank. UserError names path and line if it is not JSON.

    Lines end at line feeds only: JSON strings may contain other separators, such as U+2028.
    """
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip() == "":
            continue
        where = f"{path}:{number}"
        try:
            value = json.loads(line)
        except ValueError as error:
            raise UserError(f"{where} is not valid JSON: write one JSON value per line") from error
        yield where, value
