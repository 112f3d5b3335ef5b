"""Runs code that a model wrote in a separate process with limits on time, memory and files, and without network.

It contains accidents: endless loops, large allocations, written files, forks, sockets. It does not stop an attacker:
the code runs under your user and can read your files. Use a container or a disposable machine for models that you do
not trust.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass

# Runs in the child before the code. A new network namespace has no interface; where the kernel refuses one, Python's
# sockets are replaced, which stops accidents only.
SANDBOX_PRELUDE = """
import os, sys
try:
    import resource
    seconds, memory, file = (int(x) for x in sys.argv[1:4])
    for what, limit in (("AS", memory), ("CPU", seconds), ("FSIZE", file), ("CORE", 0), ("NOFILE", 64)):
        resource.setrlimit(getattr(resource, "RLIMIT_" + what), (limit, limit))
except (ImportError, ValueError, OSError):
    pass
isolated = False
try:
    import ctypes
    isolated = ctypes.CDLL(None, use_errno=True).unshare(0x10000000 | 0x40000000) == 0
except (ImportError, OSError, AttributeError):
    pass
try:
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
except (NameError, ValueError, OSError):
    pass
if not isolated:
    import socket
    def refuse(*args, **kwargs):
        raise OSError("no network here")
    socket.socket = socket.create_connection = socket.getaddrinfo = refuse
code = sys.stdin.read()
print("namespace" if isolated else "sockets", file=sys.stderr, flush=True)
exec(compile(code, "answer.py", "exec"), {"__name__": "__main__"})
print("PASSED " + sys.argv[4], file=sys.__stderr__, flush=True)
"""


@dataclass(frozen=True)
class SandboxResult:
    """How the code ended."""

    passed: bool  # the code ran to its end without an exception
    reason: str  # why it did not pass; empty if it passed
    network: str
    """How the network was blocked: "namespace" or "sockets", "unknown" if the code ended before that was printed."""


def run(code: str, seconds: float = 10.0) -> SandboxResult:
    """Runs `code` in an empty folder, without this process's environment, for at most `seconds` of wall time, then
    kills its process group. Code that ends early (sys.exit) fails."""
    token = os.urandom(8).hex()
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-I", "-S", "-c", SANDBOX_PRELUDE,
            str(int(seconds) + 1), str(1 << 30), str(1 << 20), token,  # bytes of memory, and of a file
        ]  # fmt: skip
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={"PATH": "/usr/bin:/bin", "HOME": folder, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            _, err = process.communicate(code, timeout=seconds)
            reason = ""
        except subprocess.TimeoutExpired:
            err, reason = "", f"not finished after {seconds:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    lines = [line for line in err.splitlines() if line.strip()]
    network = lines[0] if lines and lines[0] in ("namespace", "sockets") else "unknown"
    passed = bool(lines) and lines[-1] == f"PASSED {token}" and process.returncode == 0
    if not passed and not reason:
        reason = lines[-1][:200] if len(lines) > 1 else f"ended with {process.returncode}"
    return SandboxResult(passed, "" if passed else reason, network)
