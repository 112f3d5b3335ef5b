"""One process at a time in a folder; locks that nobody holds any more are none."""

import errno
import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from decode.common import lock
from decode.common.errors import UserError

ROOT = Path(__file__).resolve().parents[3]
HOLDER = """
import sys, time
from pathlib import Path
from decode.common import lock
with lock.hold(Path(sys.argv[1]), "out"):
    print("held", flush=True)
    time.sleep(60)
"""


def holder(file: Path) -> subprocess.Popen[str]:
    """Another process that holds the lock."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(file)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_process_is_refused_and_told_who_holds_it(tmp_path: Path) -> None:
    file = tmp_path / ".lock"
    first = holder(file)
    before = file.read_bytes()
    said = rf"another run is using out \(pid {first.pid}, host {re.escape(socket.gethostname())}, "
    with pytest.raises(UserError, match=said), lock.hold(file, "out"):
        pass
    assert file.read_bytes() == before
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert file.is_file()  # left behind, and no lock
    with lock.hold(file, "out"):
        assert json.loads(file.read_text())["pid"] == os.getpid()
    assert not file.exists()


def test_the_end_of_the_block_releases_it_however_it_ends(tmp_path: Path) -> None:
    for error in (UserError("x"), KeyboardInterrupt()):
        with pytest.raises(type(error)), lock.hold(tmp_path / ".lock", "out"):
            raise error
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_its_holder_deletes_in_between_is_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches two holders: one of a deleted file, one of the file that is there."""
    file, real = tmp_path / ".lock", fcntl.flock

    def flock(opened: Any, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", real)
        file.unlink()
        real(opened, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with lock.hold(file, "out"):
        assert json.loads(file.read_text())["pid"] == os.getpid()
        with pytest.raises(UserError), lock.hold(file, "out"):
            pass


@pytest.mark.parametrize(
    ("holder", "held"),
    [
        ({"pid": os.getpid(), "host": socket.gethostname()}, True),
        ({"pid": 2**22 + 1, "host": socket.gethostname()}, False),
        ({"pid": 1, "host": "elsewhere"}, True),
        ({}, False),
        ([], False),
    ],
)
def test_without_flock_the_file_says_who_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holder: Any, held: bool
) -> None:
    def flock(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    file = tmp_path / ".lock"
    file.write_text(json.dumps(holder))
    if held:
        with pytest.raises(UserError, match="another run is using"), lock.hold(file, "out"):
            pass
        assert json.loads(file.read_text()) == holder
    else:
        with lock.hold(file, "out"):
            pass


def test_of_many_at_once_one_gets_it(tmp_path: Path) -> None:
    """Catches a gap between opening, locking and deleting the file."""
    program = f"""
import sys, time
from pathlib import Path
from decode.common import lock
from decode.common.errors import UserError
inside = Path({str(tmp_path / "inside")!r})
for _ in range(300):
    try:
        with lock.hold(Path({str(tmp_path / ".lock")!r}), "out"):
            inside.mkdir()  # fails if somebody else is inside
            inside.rmdir()
    except UserError:
        pass
"""
    processes = [subprocess.Popen([sys.executable, "-c", program], cwd=ROOT) for _ in range(4)]
    end = time.monotonic() + 60
    assert [process.wait(end - time.monotonic()) for process in processes] == [0] * 4
