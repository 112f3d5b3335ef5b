"""python server_guard.py COMMAND …: runs a server, and ends it with all its children, however the parent here ends.

A server's children may outlive it (engine cores do), and a client that is killed can end nobody. So the server has
a process group of its own. This process gets SIGTERM when its parent ends it or dies, and then ends the whole group; so
it does when the server ends alone. The exit code is the server's, 128 + N for signal N.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time

SERVER_SECONDS, CHILDREN_SECONDS = 14.0, 3.0
"""Time between SIGTERM and SIGKILL: for the server, and for those that outlive it."""


def main() -> int:
    server = subprocess.Popen(sys.argv[1:], process_group=0)

    def signal_group(number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, number)

    asked = []  # when this process was asked to end
    signal.signal(signal.SIGTERM, lambda *_: asked.append(time.monotonic()))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # for the parent, which ends this process
    if os.getppid() == 1:  # it died before Linux was told to say so
        asked.append(time.monotonic())
    told = False
    while server.poll() is None:
        if asked and not told:
            signal_group(signal.SIGTERM)
            told = True
        if asked and time.monotonic() > asked[0] + SERVER_SECONDS:
            signal_group(signal.SIGKILL)
        time.sleep(0.1)
    signal_group(signal.SIGTERM)
    end = time.monotonic() + CHILDREN_SECONDS
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < end:
            os.killpg(server.pid, 0)  # ProcessLookupError: nobody is left
            time.sleep(0.1)
        os.killpg(server.pid, signal.SIGKILL)
    return server.returncode if server.returncode >= 0 else 128 - server.returncode


if __name__ == "__main__":
    sys.exit(main())
