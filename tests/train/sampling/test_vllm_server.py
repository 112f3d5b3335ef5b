"""train/sample.py --engine vllm: its server is started and ended. A stand-in answers, a script is vLLM's Python."""

import os
from pathlib import Path

import pytest

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
from train.sampling import vllm_server


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
        vllm_server, "free_port", lambda: int(server.url.split(":")[2].split("/")[0])
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
