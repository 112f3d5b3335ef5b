"""What a case writes, copies or damages in its own folder before the command starts."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file

from tests.hostile.case import Prepare
from tests.hostile.lab import Lab


def step(name: str, action: Callable[[Lab, Path], None]) -> Prepare:
    """The action under a name, which ends up in the ids of the tests."""

    def run(lab: Lab, tmp: Path) -> None:
        action(lab, tmp)

    run.__name__ = name
    return run


def write(path: str, content: str | bytes, name: str = "") -> Prepare:
    """Writes tmp/path; text as UTF-8."""

    def action(lab: Lab, tmp: Path) -> None:
        file = tmp / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)

    return step(name or f"write {path}", action)


def copy(source: str, path: str = "") -> Prepare:
    """Copies lab/source, a file or a folder, to tmp/path (by default under its own name)."""

    def action(lab: Lab, tmp: Path) -> None:
        origin, goal = lab.folder / source, tmp / (path or source)
        goal.parent.mkdir(parents=True, exist_ok=True)
        copier = shutil.copytree if origin.is_dir() else shutil.copyfile
        copier(origin, goal)

    return step(f"copy {source}", action)


def edit_json(path: str, name: str = "", **changes: Any) -> Prepare:
    """Changes fields of the JSON object in tmp/path; None as a value is written as null."""
    return change_json(path, lambda values: values | changes, name or str(changes))


def drop_key(path: str, key: str) -> Prepare:
    """Removes a field of the JSON object in tmp/path."""
    without = lambda values: {k: v for k, v in values.items() if k != key}  # noqa: E731
    return change_json(path, without, f"without {key}")


def change_json(path: str, change: Callable[[Any], Any], name: str) -> Prepare:
    """Replaces the content of tmp/path by `change` of it."""

    def action(lab: Lab, tmp: Path) -> None:
        file = tmp / path
        file.write_text(json.dumps(change(json.loads(file.read_text()))))

    return step(f"{path} {name}", action)


def remove(path: str) -> Prepare:
    """Removes every file or folder that the pattern tmp/path names first in the order of names."""

    def action(lab: Lab, tmp: Path) -> None:
        found = sorted(tmp.glob(path))[0]
        shutil.rmtree(found) if found.is_dir() else found.unlink()

    return step(f"remove {path}", action)


def change_bytes(path: str, change: Callable[[bytes], bytes], name: str) -> Prepare:
    """Replaces the bytes of the first file that the pattern tmp/path names."""

    def action(lab: Lab, tmp: Path) -> None:
        file = sorted(tmp.glob(path))[0]
        file.write_bytes(change(file.read_bytes()))

    return step(f"{path} {name}", action)


def truncate(path: str) -> Prepare:
    """Cuts the file in half."""
    return change_bytes(path, lambda data: data[: len(data) // 2], "cut")


def flip(path: str) -> Prepare:
    """Changes one byte near the end of the file."""
    return change_bytes(
        path, lambda data: data[:-9] + bytes([data[-9] ^ 0xFF]) + data[-8:], "flipped"
    )


def empty(path: str) -> Prepare:
    """Leaves the file with no bytes."""
    return change_bytes(path, lambda data: b"", "emptied")


def change_tensors(
    path: str, change: Callable[[dict[str, Any]], dict[str, Any]], name: str
) -> Prepare:
    """Rewrites the safetensors file tmp/path with `change` of its tensors."""

    def action(lab: Lab, tmp: Path) -> None:
        with safe_open(tmp / path, "pt") as file:
            tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
        save_file(change(tensors), tmp / path, {"format": "pt"})

    return step(f"{path} {name}", action)


def link(path: str, goal: str) -> Prepare:
    """A symbolic link tmp/path to `goal`, which need not exist."""

    def action(lab: Lab, tmp: Path) -> None:
        (tmp / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp / path).symlink_to(goal)

    return step(f"link {path}", action)


def folder(path: str) -> Prepare:
    """A folder tmp/path."""
    return step(f"folder {path}", lambda lab, tmp: (tmp / path).mkdir(parents=True, exist_ok=True))


def mode(path: str, bits: int) -> Prepare:
    """Sets the permissions of tmp/path."""
    return step(f"mode {bits:o} {path}", lambda lab, tmp: (tmp / path).chmod(bits))
