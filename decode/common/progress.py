"""Progress of long work on stderr: bars in a terminal, and a plain line every 30 seconds where there is none; durations
and sizes in words."""

import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

LINE_SECONDS = 30.0
"""Seconds between two lines of one task in a log."""
FIRST_SECONDS = 3.0
FIRST_SHARE = 0.1
"""The first line comes with this share of the units, but not for tasks that are shorter. (Of a batch the shortest
answers are finished first: one says nothing of the time that all take.)"""


def progress_bars(
    console: Console | None = None, fields: Sequence[str] = (), disable: bool = False
) -> "ProgressBars":
    """A context manager that shows tasks on `console` (default: stderr): bars in a terminal, otherwise lines of a log.

    `fields` name keywords of add_task and update that are shown beside a task, such as loss and speed. With `disable`
    nothing is shown.
    """
    console = Console(stderr=True) if console is None else console
    if not console.is_terminal:
        return ProgressLog(fields, disable)
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()]
    extra = [TextColumn("{task.fields[" + name + "]}") for name in fields]
    return Progress(*columns, *extra, TimeRemainingColumn(), console=console, disable=disable)


@dataclass
class LoggedTask:
    """The state of one task of a ProgressLog."""

    description: str
    total: float | None
    completed: float
    fields: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.initial = self.printed = self.completed
        self.started_at = self.printed_at = time.monotonic()

    def line(self, field_names: Sequence[str]) -> str:
        """Units done and in total, units per second since the task was added, the named fields, and the time left."""
        seconds = time.monotonic() - self.started_at
        speed = (self.completed - self.initial) / seconds if seconds > 0 else 0.0
        total = "" if self.total is None else f"/{self.total:g}"
        parts = [f"{self.description} {self.completed:g}{total}", f"{speed:.3g}/s"]
        parts += [str(self.fields[name]) for name in field_names if self.fields.get(name)]
        if self.total is not None and speed > 0:
            parts.append(f"{duration((self.total - self.completed) / speed)} left")
        return ", ".join(parts)


class ProgressLog:
    """Writes `description 120/720, 3.1/s, 3 min 12 s left`: for each task a line once FIRST_SHARE is finished, one
    every LINE_SECONDS, and a last one. The newest task has them also while nothing of it is finished.

    It has those methods of rich's Progress that this project calls, so that one can stand for the other.
    """

    def __init__(self, fields: Sequence[str] = (), disable: bool = False):
        self.fields, self.disable = fields, disable
        self.tasks: list[LoggedTask] = []
        self._ended, self._printing = threading.Event(), threading.Lock()
        self._clock = threading.Thread(target=self._print_in_time, daemon=True)

    def __enter__(self) -> "ProgressLog":
        self._clock.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._clock.join()
        for task in self.tasks:
            if task.completed != task.printed:
                self._print(task)

    def add_task(
        self, description: str, total: float | None = None, completed: float = 0, **fields: Any
    ) -> TaskID:
        """The number of a new task, of which `completed` of `total` units (None: unknown) are done already."""
        self.tasks.append(LoggedTask(description, total, completed, fields))
        return TaskID(len(self.tasks) - 1)

    def advance(self, task: TaskID, steps: float = 1) -> None:
        self.update(task, completed=self.tasks[task].completed + steps)

    def update(self, task: TaskID, completed: float | None = None, **fields: Any) -> None:
        logged = self.tasks[task]
        logged.fields |= fields
        if completed is not None:
            logged.completed = completed
        self._print_if_due(logged)

    def _print_in_time(self) -> None:
        while not self._ended.wait(1.0):
            for task in self.tasks[-1:]:
                if task.completed != task.total:
                    self._print_if_due(task)

    def _print_if_due(self, task: LoggedTask) -> None:
        with self._printing:
            done, total = task.completed - task.initial, task.total or 0
            first = task.printed == task.initial and 0 < FIRST_SHARE * total <= done
            if time.monotonic() - task.printed_at >= (FIRST_SECONDS if first else LINE_SECONDS):
                self._print(task)

    def _print(self, task: LoggedTask) -> None:
        task.printed_at, task.printed = time.monotonic(), task.completed
        if not self.disable:
            sys.stderr.write(task.line(self.fields) + "\n")
            sys.stderr.flush()


ProgressBars = Progress | ProgressLog


def duration(seconds: float) -> str:
    """`2 h 5 min`, `3 min 12 s` or `7 s`."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 60} min {whole % 60} s" if whole >= 60 else f"{whole} s"


def format_bytes(count: float) -> str:
    """A number of bytes in B, kB, MB or GB of powers of ten."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count:.0f} B"
