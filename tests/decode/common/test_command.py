"""How a command ends: exit codes and one line for bad input, a full disk, Ctrl-C and SIGTERM."""

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from decode.common.command import Terminated, run_command
from decode.common.errors import UserError


@dataclass(frozen=True)
class Settings:
    target: str = "assets/target"
    """The model."""
    steps: int = 10
    """How long it trains."""


def end_of(
    capsys: pytest.CaptureFixture[str], main: Callable[[Settings], None], *argv: str
) -> tuple[object, str]:
    """(exit code, stderr) of a command with this `main`."""
    with pytest.raises(SystemExit) as stop:
        run_command(main, Settings, None, argv=argv)
    out, err = capsys.readouterr()
    assert out == ""
    return stop.value.code, err


def raises(error: BaseException) -> Callable[[Settings], None]:
    """A main that raises `error`."""

    def main(_: Settings) -> None:
        raise error

    return main


def test_main_gets_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a command that parses and does nothing, and a success that is not exit code 0."""
    seen: list[Settings] = []
    monkeypatch.setattr(sys, "argv", ["command", "--steps", "3"])
    run_command(seen.append, Settings, "A command.")
    run_command(seen.append, Settings, "A command.", first="target", argv=["x"])
    assert seen == [Settings(steps=3), Settings(target="x")]


@pytest.mark.parametrize(("own", "wanted"), [(None, "1"), ("0", "0")])
def test_large_tensors_are_in_huge_pages(
    own: str | None, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a variable that is set after torch was loaded for `main`, and one that overrides the user's."""
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", own or "")
    if own is None:
        monkeypatch.delenv("THP_MEM_ALLOC_ENABLE")
    seen: list[str] = []
    run_command(lambda _: seen.append(os.environ["THP_MEM_ALLOC_ENABLE"]), Settings, None, argv=[])
    assert seen == [wanted]


@pytest.mark.parametrize(
    "number",
    [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG],
)
def test_an_error_of_the_world_is_one_line(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    error = OSError(number, os.strerror(number), "some/file")
    code, err = end_of(capsys, raises(error))
    assert code == 2
    assert err.startswith(f"error: some/file: {os.strerror(number)}: ")
    assert err.count("\n") == 1


def test_a_full_disk_is_seen_behind_a_library(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a traceback where a library wraps the error, or says it only in its message."""
    wrapped = RuntimeError("file write failed")
    wrapped.__cause__ = OSError(errno.ENOSPC, "No space left on device", "a.bin")
    during = RuntimeError("unexpected pos 576 vs 534")
    during.__context__ = RuntimeError("basic_ios::clear: iostream error")
    in_text = Exception("Error while serializing: I/O error: No space left on device (os error 28)")
    for error in (wrapped, during, in_text):
        code, err = end_of(capsys, raises(error))
        assert code == 2
        assert err.endswith("No space left on device: free some space\n")


def test_a_programming_error_keeps_its_traceback() -> None:
    handled = KeyError("x")  # raised while an error of the world was handled
    handled.__context__ = OSError(errno.ENOENT, "no such file", "a")
    for error in (handled, OSError("no errno"), OSError(errno.EINVAL, "invalid")):
        with pytest.raises(type(error)):
            run_command(raises(error), Settings, None, argv=[])


@pytest.mark.parametrize(
    ("stop", "code", "line"),
    [(KeyboardInterrupt(), 130, "stopped by Ctrl-C"), (Terminated(), 143, "stopped by SIGTERM")],
)
def test_a_stop_is_one_line_with_its_notes(
    stop: BaseException, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stop.add_note("3 rows are saved")
    assert end_of(capsys, raises(stop)) == (code, f"{line}: 3 rows are saved\n")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_runs_finally_blocks_and_handlers_return(
    number: int, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a signal that ends the process without saving, and handlers that outlive the command."""
    before = signal.getsignal(number)
    saved = []

    def main(_: Settings) -> None:
        try:
            os.kill(os.getpid(), number)
            time.sleep(5)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)  # a launcher's, after the first signal
            saved.append(1)

    assert end_of(capsys, main)[0] == code
    assert saved == [1]
    assert signal.getsignal(number) is before


PROGRAM = """
import os, signal, time
from dataclasses import dataclass
from decode.common.command import run_command

@dataclass
class Settings:
    steps: int = 1

def main(s):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
    finally:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
        print("saved")

run_command(main, Settings, None, argv=[])
"""


def test_a_second_ctrl_c_ends_at_once() -> None:
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=root, check=False
    )
    assert (done.returncode, done.stdout) == (130, "")


@pytest.mark.parametrize(
    ("end", "code"), [("pass", 0), ("raise UserError('no')", 2), ("sys.exit(2)", 2)]
)
@pytest.mark.parametrize("processes", [1, 2])
def test_one_of_several_processes_skips_the_interpreter_s_shutdown(
    end: str, code: int, processes: int
) -> None:
    """In it threads of torch.distributed may abort a process whose work is done, and the launcher then fails."""
    text = f"""
import atexit, sys
from dataclasses import dataclass
from decode.common.command import run_command
from decode.common.errors import UserError

@dataclass
class Settings: pass

def main(_):
    print("done")
    {end}

atexit.register(print, "shutdown")
run_command(main, Settings, None, argv=[])
"""
    env = os.environ | {"WORLD_SIZE": str(processes)}
    done = subprocess.run([sys.executable, "-c", text], env=env, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert done.stdout.split() == (["done", "shutdown"] if processes == 1 else ["done"])


class Launch:
    """The processes of one launch, as torchrun tells each of them its number and where to leave its error."""

    def __init__(
        self, folder: Path, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.folder, self.patch, self.capsys = folder, patch, capsys

    def end(self, rank: int, error: BaseException) -> str:
        """stderr of process `rank`, which raises `error`."""
        file = self.error_file(rank)
        file.parent.mkdir(parents=True, exist_ok=True)
        self.patch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        self.patch.setenv("RANK", str(rank))
        return end_of(self.capsys, raises(error))[1]

    def error_file(self, rank: int) -> Path:
        return self.folder / "attempt_0" / str(rank) / "error.json"

    def seen_by_launcher(self, rank: int) -> str:
        """What torchrun's own report says of process `rank`, and blames if its time is the first."""
        failure = ProcessFailure(rank, 1, 2, str(self.error_file(rank)))
        assert abs(failure.timestamp - time.time()) < 60
        assert isinstance(failure.message, dict)
        return failure.message["extraInfo"]["py_callstack"]


@pytest.fixture
def launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Launch:
    return Launch(tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize("first", [0, 1])
def test_of_several_processes_the_first_says_the_error(launch: Launch, first: int) -> None:
    """Bug: each of eight processes printed the line, and the launcher's report did not have it. The first one to fail
    may be any: the launcher ends the others, which may not have come so far."""
    error = "error: no such file: check the path"
    assert launch.end(first, UserError("no such file: check the path")) == error + "\n"
    assert launch.end(1 - first, UserError("no such file: check the path")) == ""
    assert launch.end(2, UserError("no such file: check the path")) == ""
    assert [launch.seen_by_launcher(rank) for rank in range(3)] == [error] * 3


def test_other_errors_of_other_processes_are_said(launch: Launch) -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "/x/a")
    assert launch.end(0, full) == "error: /x/a: No space left on device: free some space\n"
    assert launch.end(1, UserError("row 3 is bad: mend it")) == "error: row 3 is bad: mend it\n"
    assert launch.end(2, full) == ""


def test_the_launcher_s_signal_after_an_error_says_nothing(launch: Launch) -> None:
    """Bug: the main process, which the launcher then ended, added that it was stopped."""
    assert launch.end(0, Terminated()) == "stopped by SIGTERM\n"
    assert launch.end(1, UserError("no: change it")) == "error: no: change it\n"
    assert launch.end(0, Terminated()) == ""


def test_an_error_is_said_where_the_launcher_s_folder_is_gone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "none" / "0" / "error.json"))
    for _ in range(2):
        assert end_of(capsys, raises(UserError("no: change it"))) == (2, "error: no: change it\n")


def test_no_secret_reaches_the_launcher_s_report(launch: Launch) -> None:
    secret = "hf_" + "aB3" * 12
    assert secret not in launch.end(0, UserError(f"the login {secret} is refused"))
    assert secret not in launch.error_file(0).read_text()
