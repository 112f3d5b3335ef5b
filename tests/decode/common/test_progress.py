"""Progress: bars in a terminal; in a log one line per interval and a last one."""

import io
import re
import time

import pytest
from rich.console import Console
from rich.progress import Progress

from decode.common import progress
from decode.common.progress import ProgressLog, duration, progress_bars


class Clock:
    """A monotonic clock that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def log_console() -> Console:
    return Console(file=io.StringIO(), force_terminal=False)


def test_a_log_gets_a_line_every_interval(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches silence before the first line and for hours, a line for every step, and wrong counts, speeds or
    remaining times."""
    bars = progress_bars(log_console(), fields=("loss",))
    assert isinstance(bars, ProgressLog)
    with bars:
        task = bars.add_task("train", total=720, loss="")
        for step in range(1, 66):
            clock.now += 1
            bars.update(task, completed=2 * step, loss=f"loss {step}")
    assert capsys.readouterr().err.splitlines() == [
        "train 60/720, 2/s, loss 30, 5 min 30 s left",
        "train 120/720, 2/s, loss 60, 5 min 0 s left",
        "train 130/720, 2/s, loss 65, 4 min 55 s left",
    ]


def test_the_first_line_comes_with_a_tenth(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches half a minute of silence, and a time left that the shortest answer alone foretells."""
    with progress_bars(log_console()) as bars:
        task = bars.add_task("answering", total=240)
        for done, seconds in ((1, 10), (23, 1), (24, 1), (48, 10)):
            clock.now += seconds
            bars.update(task, completed=done)
    assert capsys.readouterr().err.splitlines() == [
        "answering 24/240, 2/s, 1 min 48 s left",
        "answering 48/240, 2.18/s, 1 min 28 s left",
    ]


def test_the_interval_counts_for_each_task(
    clock: Clock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches one task whose lines keep another one silent."""
    monkeypatch.setattr(progress, "LINE_SECONDS", 5)
    with progress_bars(log_console()) as bars:
        one, other = bars.add_task("one", total=10), bars.add_task("other")
        clock.now += 4
        bars.advance(one)
        clock.now += 5
        bars.advance(one, 2)
        bars.advance(other)
    said = ["one 1/10, 0.25/s, 36 s left", "one 3/10, 0.333/s, 21 s left", "other 1, 0.111/s"]
    assert capsys.readouterr().err.splitlines() == said


def test_work_done_before_is_no_speed(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a resumed run that seems to have done everything in the seconds since its start."""
    with progress_bars(log_console()) as bars:
        task = bars.add_task("train", total=100, completed=80)
        clock.now += 30
        bars.advance(task, 3)
    assert capsys.readouterr().err == "train 83/100, 0.1/s, 2 min 50 s left\n"


def test_the_last_line_comes_once_and_after_an_error_too(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches an end that is not shown, shown twice, or a line for a task that never began."""

    def interrupted() -> None:
        with progress_bars(log_console()) as bars:
            task = bars.add_task("read", total=2)
            bars.add_task("write", total=2)
            clock.now += 30
            bars.advance(task)
            clock.now += 1
            raise RuntimeError

    with pytest.raises(RuntimeError):
        interrupted()
    assert capsys.readouterr().err == "read 1/2, 0.0333/s, 30 s left\n"


def test_work_of_which_nothing_is_finished_has_lines_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches minutes of silence before the first batch is finished; a task that has ended has no more lines."""
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.9)
    with progress_bars(log_console()) as bars:
        bars.update(bars.add_task("read", total=2), completed=2)
        bars.add_task("answering", total=24)
        time.sleep(2.5)
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == "read 2/2, " + lines[-1].split(", ", 1)[1]
    assert 1 <= lines.count("answering 0/24, 0/s") <= 2
    assert len(lines) <= 3


def test_disabled_progress_is_silent(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches lines of every process of a run, of which only one should report."""
    with progress_bars(log_console(), disable=True) as bars:
        task = bars.add_task("train", total=2)
        clock.now += 60
        bars.advance(task)
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_bars() -> None:
    """Catches lines in a terminal, and a bar without its description, counts or fields."""
    screen = io.StringIO()
    bars = progress_bars(Console(file=screen, force_terminal=True, width=120), fields=("loss",))
    assert isinstance(bars, Progress)
    with bars:
        task = bars.add_task("train", total=4, loss="")
        bars.update(task, completed=3, loss="loss 0.5")
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    assert re.search(r"train .* 3/4 +loss 0\.5", text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (59.4, "59 s"), (59.6, "1 min 0 s"), (192, "3 min 12 s"), (7500, "2 h 5 min")],
)
def test_duration(seconds: float, text: str) -> None:
    """Catches 60 s, and minutes beyond an hour."""
    assert duration(seconds) == text
