"""A case of bad input, and what every case must do: exit code 2, one line of advice, every file as it was."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from decode.common.files import RUN_FILE
from tests.hostile.lab import BASE, EARLIER_RUNS, Lab, call

LONGEST_MESSAGE = 400
"""Characters of the one line, in which paths of a test's folder take up to a hundred each."""
Prepare = Callable[[Lab, Path], None]
"""Writes files into the case's folder before the command starts."""


@dataclass(frozen=True)
class Case:
    """BASE[command] followed by `arguments`, which is refused with a line that contains `says`."""

    command: str
    arguments: str
    says: str | tuple[str, ...]
    prepare: tuple[Prepare, ...] = ()
    keep_base: bool = True
    """False: `arguments` are the whole command line."""
    slow: bool = False
    """Much like a case before it: run with CI=true only."""
    warns: bool = False
    """Lines that begin with `warning: ` may come before the error."""
    without: tuple[str, ...] = ()
    """Settings, or groups of them, whose flags are left out of BASE."""

    @property
    def name(self) -> str:
        steps = " ".join(step.__name__ for step in self.prepare)
        return f"{self.command} {self.arguments} {steps}".strip()


def params(*cases: Case) -> list[Any]:
    """The cases as parameters of a test, each with its command line as its id."""
    marks = {True: [pytest.mark.slow], False: []}
    return [pytest.param(case, id=case.name[:160], marks=marks[case.slow]) for case in cases]


def check(case: Case, lab: Lab, tmp: Path) -> None:
    """Runs the case, over an earlier run where the command can overwrite one, and asserts what every case must do."""
    base = lab.words(BASE[case.command], tmp) if case.keep_base else []
    overwrites = case.keep_base and case.command in EARLIER_RUNS
    if overwrites:
        shutil.copytree(lab.folder / EARLIER_RUNS[case.command], tmp / "out")
    for step in case.prepare:
        step(lab, tmp)
    overwrite = ["--overwrite", "true"] if overwrites else []
    before = snapshot(tmp)
    words = [*drop_flags(base, case.without), *overwrite, *lab.words(case.arguments, tmp)]
    done = call(case.command, words, tmp)
    changed = difference(before, snapshot(tmp))
    assert (done.code, changed) == (2, []), f"{done.err}\n{done.out}"
    lines = [line for line in done.err.splitlines() if line.strip()]
    if case.warns:
        lines = [line for line in lines if not line.startswith("warning: ")]
    assert len(lines) == 1, done.err
    assert lines[0].startswith("error: ")
    assert done.out.strip() == ""
    assert len(lines[0]) <= LONGEST_MESSAGE, lines[0]
    for word in (case.says,) if isinstance(case.says, str) else case.says:
        assert word in lines[0], f"no {word!r} in: {lines[0]}"


def drop_flags(words: list[str], names: tuple[str, ...]) -> list[str]:
    """The command line without the flags, and their values, of these settings or groups of settings."""
    kept: list[str] = []
    keeps = True
    for word in words:
        if word.startswith("--"):
            keeps = word.removeprefix("--").split(".")[0] not in names
        if keeps:
            kept.append(word)
    return kept


def snapshot(folder: Path) -> dict[str, tuple[Any, ...]]:
    """{path: what is there} of everything below `folder`: links and their goals, files with size and time."""
    found: dict[str, tuple[Any, ...]] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = ("link", str(path.readlink()))
        elif path.is_file():
            facts = path.stat()
            if path.name == RUN_FILE:  # it may be written back
                found[name] = ("file", path.read_bytes())
            else:
                found[name] = ("file", facts.st_size, facts.st_mtime_ns)
        else:
            found[name] = ("folder",)
    return found


def difference(before: dict[str, tuple[Any, ...]], after: dict[str, tuple[Any, ...]]) -> list[str]:
    """Names that are new, gone or changed."""
    names = sorted(before.keys() | after.keys())
    return [name for name in names if before.get(name) != after.get(name)]
