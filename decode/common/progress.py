"""Progress of long work on stderr: bars in a terminal, and a plain line every 30 seconds where there is none."""

import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINE_SECONDS = 30.0
"""Seconds between two lines of one task in a log."""


class ProgressLog:
    """Reports tasks as `description 120/720, 3.1/s, 3 min 12 s left`, one line every LINE_SECONDS and one at the end.

    It has the methods of rich's Progress that this project calls, so that either serves: add_task, advance, update.
    """

    def __init__(
        self, fields: Sequence[str] = (), disable: bool = False, every: float = LINE_SECONDS
    ):
        self.fields, self.disable, self.every = fields, disable, every
        self.tasks: list[LoggedTask] = []

    def __enter__(self) -> "ProgressLog":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for task in self.tasks:
            if task.completed != task.printed:
                self._print(task)

    def add_task(
        self, description: str, total: float | None = None, completed: float = 0, **fields: Any
    ) -> int:
        """The number of a new task, of which `completed` of `total` units were done before."""
        self.tasks.append(LoggedTask(description, total, completed, fields))
        return len(self.tasks) - 1

    def advance(self, task: int, steps: float = 1) -> None:
        """`steps` more units are done."""
        self.update(task, completed=self.tasks[task].completed + steps)

    def update(self, task: int, completed: float | None = None, **fields: Any) -> None:
        """Sets what is done so far, and the fields that are shown behind it."""
        found = self.tasks[task]
        found.fields |= fields
        if completed is not None:
            found.completed = completed
        if time.monotonic() - found.line_at >= self.every:
            self._print(found)

    def _print(self, task: "LoggedTask") -> None:
        task.line_at, task.printed = time.monotonic(), task.completed
        if not self.disable:
            sys.stderr.write(task.line(self.fields) + "\n")
            sys.stderr.flush()


class LoggedTask:
    """One task of a ProgressLog."""

    def __init__(
        self, description: str, total: float | None, completed: float, fields: dict[str, Any]
    ):
        self.description, self.total, self.fields = description, total, fields
        self.completed = self.first = completed
        self.printed = completed
        self.began = self.line_at = time.monotonic()

    def line(self, fields: Sequence[str]) -> str:
        """What is done of the total, units a second since it began, the named fields, and the time left."""
        seconds = time.monotonic() - self.began
        rate = (self.completed - self.first) / seconds if seconds > 0 else 0.0
        total = "" if self.total is None else f"/{self.total:g}"
        parts = [f"{self.description} {self.completed:g}{total}", f"{rate:.3g}/s"]
        parts += [str(self.fields[name]) for name in fields if self.fields.get(name)]
        if self.total is not None and rate > 0:
            parts.append(f"{duration((self.total - self.completed) / rate)} left")
        return ", ".join(parts)


def duration(seconds: float) -> str:
    """`2 h 5 min`, `3 min 12 s` or `7 s`."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 60} min {whole % 60} s" if whole >= 60 else f"{whole} s"


def progress_bars(
    console: Console | None = None, fields: Sequence[str] = (), disable: bool = False
) -> Progress | ProgressLog:
    """A context manager that shows tasks on `console` (default: stderr): bars in a terminal, else lines of a log.

    `fields` name keywords of add_task and update that are shown beside a task, such as loss and speed.
    """
    console = Console(stderr=True) if console is None else console
    if not console.is_terminal:
        return ProgressLog(fields, disable)
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()]
    extra = [TextColumn("{task.fields[" + name + "]}") for name in fields]
    return Progress(*columns, *extra, TimeRemainingColumn(), console=console, disable=disable)
