"""train/sample.py --engine vllm: its server is started and ended. A stand-in answers, a script is vLLM's Python."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from decode.serving.running import vllm_client
from tests import worlds
from tests.train.sampling.stand_in import StandIn
from tests.train.sampling.test_server_sampling import (  # noqa: F401 (fixtures)
    COMMAND,
    COUNT,
    expected,
    server,
    summary,
    world,
)
from tests.train.test_sample_command import rows_of, sources
from tests.worlds import World
from train.data.manifest import read_manifest


def interpreter(folder: Path, script: str) -> Path:
    """An executable in place of the Python of vLLM's environment; it notes its arguments and its process first."""
    file = folder / "python"
    file.write_text(f'#!/bin/sh\necho "$$ $*" > {folder}/started\n{script}\n')
    file.chmod(0o755)
    return file


def arguments(world: World, python: Path, out: Path) -> list[object]:  # noqa: F811
    return [
        "--engine", "vllm", "--vllm_python", python, "--target", world.target, "--sources", sources(world.prompts),
        "--out", out, "--max_new_tokens", 24, "--shard_rows", 4, "--concurrency", 3, "--start_timeout", 2,
    ]  # fmt: skip


def ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_the_server_answers_and_ends_with_the_run(
    world: World, server: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    """Bug: another model is served, requests go elsewhere, its rows differ from a server's, or it goes on for ever."""
    monkeypatch.setattr(
        vllm_client, "free_port", lambda: int(server.url.split(":")[2].split("/")[0])
    )
    server.model = {"id": "target"}
    python = interpreter(tmp_path, "exec sleep 600")
    more = ["--vllm_args", "[--tensor-parallel-size, '2']"]
    done = worlds.call(COMMAND, *arguments(world, python, tmp_path / "out"), *more)
    assert summary(done)["asked"] == COUNT
    assert rows_of(tmp_path / "out") == expected(world, server)
    assert read_manifest(tmp_path / "out").engine == "vllm"
    pid, *command = (tmp_path / "started").read_text().split()
    assert ended(int(pid))
    assert command[command.index("--model") + 1] == str(world.target)
    assert command[command.index("--max-num-seqs") + 1] == "3"
    assert command[-2:] == ["--tensor-parallel-size", "2"]
    assert ("--no-enable-chunked-prefill" in command) != torch.cuda.is_available()


@pytest.mark.parametrize(
    ("script", "said"),
    [("echo no such GPU; exit 1", "no such GPU"), ("exec sleep 600", "not ready within 2 s")],
)
def test_a_server_that_does_not_start_is_one_error(
    script: str, said: str, world: World, tmp_path: Path  # noqa: F811
) -> None:  # fmt: skip
    """Bug: waiting for ever, a lost log, or a process that is left behind."""
    python = interpreter(tmp_path, script)
    done = worlds.call(COMMAND, *arguments(world, python, tmp_path / "out"))
    assert done.code == 2
    assert said in done.err
    assert ended(int((tmp_path / "started").read_text().split()[0]))
    assert not (tmp_path / "out").exists()


DYING = """#!{python}
import os, subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({pids!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        data = b'{{"data": [{{"id": "target"}}]}}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_POST(self):
        if {dies}:
            print("out of engine cores", flush=True)
            os._exit(7)
        open({asked!r}, "w").close()
        import time
        time.sleep(600)

    def log_message(self, *args):
        pass


HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def dying_server(folder: Path, dies: bool) -> Path:
    """A server with a child of its own, as vLLM has; at the first prompt it dies, or says nothing for ever."""
    file, pids, asked = folder / "python", str(folder / "pids"), str(folder / "asked")
    file.write_text(DYING.format(python=sys.executable, pids=pids, asked=asked, dies=dies))
    file.chmod(0o755)
    return file


def await_true(reached: Callable[[], bool]) -> None:
    end = time.monotonic() + worlds.PATIENCE
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.05)


def gone(folder: Path) -> bool:
    """Whether the server and its child have ended."""
    return all(ended_or_zombie(int(pid)) for pid in (folder / "pids").read_text().split())


def ended_or_zombie(pid: int) -> bool:
    """A child whose parent died before it is a zombie until the machine's first process collects it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and prctl is Linux's")


@linux_only
def test_a_server_that_dies_is_named_with_its_exit_code_and_log(
    world: World, tmp_path: Path  # noqa: F811
) -> None:  # fmt: skip
    """Bug: "connection failed" after minutes of attempts, while the reason stands in a log that nobody sees."""
    python = dying_server(tmp_path, dies=True)
    words = [*arguments(world, python, tmp_path / "out"), "--start_timeout", 60]
    done = worlds.call(COMMAND, *words)
    assert done.code == 2
    assert "vLLM ended with exit code 7" in done.err
    assert "out of engine cores" in done.err
    await_true(lambda: gone(tmp_path))


@linux_only
def test_a_killed_client_leaves_no_server_behind(world: World, tmp_path: Path) -> None:  # noqa: F811
    """Bug: after kill -9 of the command, a server or a child of it holds the GPU for ever."""
    python = dying_server(tmp_path, dies=False)
    words = [*arguments(world, python, tmp_path / "out"), "--start_timeout", 60]
    assert worlds.kill_when((tmp_path / "asked").exists, COMMAND, *words) == -9
    await_true(lambda: gone(tmp_path))
