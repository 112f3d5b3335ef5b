"""A server that is started for one run and ended with it: its port, its start, the end of its log in errors."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from decode.common.command import end_with_parent
from decode.common.errors import UserError

STRAIGHT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Asks servers that were started here: by no proxy."""
GUARD = Path(__file__).with_name("server_guard.py")


@contextmanager
def running_server(
    command: Sequence[str], ready_url: str, seconds: float, name: str, **environment: str
) -> Iterator[None]:
    """Runs `command` during the block, which begins as soon as `ready_url` answers; variables that are set stay. It
    ends with the block and with this process, however that ends, and so do its children (server_guard.py). UserError
    with the end of its log if the server `name` does not start, or not within so many seconds; a UserError of the block
    also gets its exit code and the end of its log if the server has ended on its own."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(
            [sys.executable, str(GUARD), *command],
            stdout=log,
            stderr=log,
            cwd=tempfile.gettempdir(),
            env={**environment, **os.environ},
            preexec_fn=end_with_parent,
            process_group=0,  # or what kills the command's group kills the guard before it has ended the server
        )
        try:
            _wait_until_ready(process, ready_url, seconds, name, log)
            try:
                yield
            except UserError as error:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(5)  # after it has answered no more
                if process.returncode is None:
                    raise
                raise UserError(
                    f"{name} ended with exit code {process.returncode} ({error}); {_end_of(log)}"
                ) from error
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()


def find_executable(wanted: str, what: str, advice: str) -> str:
    """Absolute path of a file, or of a command in $PATH. UserError, which ends with `advice`, if there is none."""
    found = shutil.which(Path(wanted).expanduser())
    if found is None:
        raise UserError(f"no {what} {wanted!r}: {advice}")
    return str(Path(found).absolute())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_ready(
    process: "subprocess.Popen[bytes]", url: str, seconds: float, name: str, log: TextIO
) -> None:
    end = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < end:
        with suppress(OSError), STRAIGHT.open(url, timeout=5):
            return
        time.sleep(0.5)
    why = "did not start" if process.poll() is not None else f"was not ready within {seconds:g} s"
    raise UserError(f"{name} {why}; {_end_of(log)}")


def _end_of(log: TextIO) -> str:
    log.seek(0)
    return f"the end of its log:\n{log.read()[-1500:]}"
