"""A vLLM server of the target, started for one sampling and ended with it. vLLM lives in an environment of its own."""

import os
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from decode.common.command import end_with_parent
from decode.common.errors import UserError
from eval.benchmark.vllm_client import find_interpreter, model_path
from train.sampling.config import SampleConfig

LOG_TAIL = 1500
"""Characters of the server's log in an error."""


@contextmanager
def target_server(s: SampleConfig, processes: int) -> Iterator[str]:
    """The address of the API of a server of `s.target` for so many client processes; it ends with the block.

    UserError with the end of its log if it does not start, or not within `s.start_timeout` seconds.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}/v1"
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            server_command(s, port, processes),
            stdout=log,
            stderr=log,
            cwd=tempfile.gettempdir(),
            env={"VLLM_NO_USAGE_STATS": "1", **os.environ},
            preexec_fn=end_with_parent,
        )
        try:
            wait_until_ready(process, url, s.start_timeout, log)
            yield url
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()


def server_command(s: SampleConfig, port: int, processes: int) -> list[str]:
    """The command line: one model under its own name, and no sampling settings but those of the requests."""
    model = model_path(s.target, s.revision)
    revision = ["--revision", s.revision] if s.revision and not Path(model).exists() else []
    return [
        *(find_interpreter(s.vllm_python), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", model, "--served-model-name", "target", "--dtype", s.dtype, *revision),
        *("--host", "127.0.0.1", "--port", str(port), "--generation-config", "vllm"),
        *("--max-num-seqs", str(s.concurrency * processes), *s.vllm_args),
    ]


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_ready(
    process: "subprocess.Popen[bytes]",
    url: str,
    seconds: float,
    log: TextIO,
) -> None:
    """Returns as soon as the server lists its models. UserError if it ends before, or takes longer than `seconds`."""
    end = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < end:
        with suppress(OSError), urllib.request.urlopen(f"{url}/models", timeout=5):
            return
        time.sleep(0.5)
    why = "did not start" if process.poll() is not None else f"was not ready within {seconds:g} s"
    log.seek(0)
    raise UserError(f"vLLM {why}; the end of its log:\n{log.read()[-LOG_TAIL:]}")
