"""train/sample.py --engine auto: vLLM where a GPU and vLLM are, ours elsewhere. Both are put in place."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from decode.common.errors import UserError
from decode.common.settings import parse_settings
from decode.common.target_record import ModelFingerprint
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
from tests.train.sampling.test_vllm_server import interpreter
from tests.train.test_sample_command import rows_of, sources
from tests.worlds import World
from train.data import sample_store
from train.data.manifest import read_manifest
from train.sampling import engine_choice
from train.sampling.config import SampleConfig
from train.sampling.engine_choice import check_engine, copies_of_target, settle_engine

Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """Makes the machine: its GPUs, and the environment in which vLLM is: .venv-vllm, this one or none."""
    python = interpreter(tmp_path, "exit 0")

    def make(gpus: int, vllm: str = "") -> None:
        monkeypatch.chdir(tmp_path)
        for name in ("RANK", "VLLM_PYTHON", "ACCELERATE_USE_CPU"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        if vllm == "venv":
            monkeypatch.setenv("VLLM_PYTHON", str(python))
        found = object() if vllm == "here" else None
        monkeypatch.setattr(engine_choice.importlib.util, "find_spec", lambda name: found)

    return make


def settings(world: World, *more: str) -> SampleConfig:  # noqa: F811
    words = ["--target", str(world.target), "--out", "out", *more]
    return parse_settings(SampleConfig, "", words)


@pytest.mark.parametrize("place", ["venv", "here"])
def test_vllm_is_taken_on_a_gpu(
    place: str, machine: Machine, world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]  # noqa: F811
) -> None:  # fmt: skip
    """Catches our engine at a fifth of the speed beside an installed vLLM, and a choice without a word."""
    machine(1, place)
    found = settle_engine(settings(world))
    python = sys.executable if place == "here" else str(tmp_path / "python")
    assert (found.engine, found.vllm_python) == ("vllm", python)
    assert found.concurrency == 256
    assert capsys.readouterr().err == (
        f"engine auto: vLLM, by {python}; --engine draftsmith answers here\n"
    )
    check_engine(found)


OURS: dict[str, tuple[list[str], str]] = {
    "a draft": (["--draft", "ngram"], "a draft is given"),
    "a mode": (["--mode", "eager"], "mode eager is its own"),
    "eight bits": (["--dtype", "w8a8"], "dtype w8a8 is its own"),
    "layers over devices": (["--placement.kind", "device_map"], "placement.kind is device_map"),
    "no vllm": ([], "no vLLM is installed (VLLM_PYTHON, .venv-vllm)"),
}


@pytest.mark.parametrize("case", OURS)
def test_our_engine_stays_for_the_rest(
    case: str, machine: Machine, world: World, capsys: pytest.CaptureFixture[str]  # noqa: F811
) -> None:  # fmt: skip
    """Catches settings that vLLM's server does not follow and that are dropped, and a GPU without vLLM as an error."""
    machine(1, "" if case == "no vllm" else "venv")
    words, why = OURS[case]
    found = settle_engine(settings(world, *words, "--vllm_args", "[--enforce-eager]"))
    assert found.engine == "local"
    assert capsys.readouterr().err == f"engine auto: ours, since {why}\n"
    check_engine(found)


@pytest.mark.parametrize(
    ("gpus", "words", "cpu"),
    [(0, [], ""), (1, ["--device", "cpu"], ""), (1, [], "1"),
     (1, ["--origin", "text"], ""), (1, ["--engine", "draftsmith"], ""), (1, ["--engine", "local"], "")],
)  # fmt: skip
def test_nothing_is_said_where_there_is_no_choice(
    gpus: int, words: list[str], cpu: str, machine: Machine, world: World,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Catches vLLM on a CPU or against --device, --origin or --engine, and a line for everybody without a GPU."""
    machine(gpus, "venv")
    if cpu:
        monkeypatch.setenv("ACCELERATE_USE_CPU", cpu)
    assert settle_engine(settings(world, *words)).engine == "local"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("begun_by", "engine"), [("float32", "local"), ("vllm-float32", "vllm")])
def test_what_is_begun_goes_on_with_its_engine(
    begun_by: str, engine: str, machine: Machine, world: World,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Catches a run that is refused as another target's after vLLM was installed between two starts."""
    machine(1, "venv")
    held = [ModelFingerprint(dtype=begun_by)]
    monkeypatch.setattr(sample_store, "targets_in", lambda folder: held)
    assert settle_engine(settings(world)).engine == engine


def test_an_interpreter_that_was_asked_for_is_there_or_refused(
    machine: Machine, world: World  # noqa: F811
) -> None:  # fmt: skip
    """Catches a misspelt environment after which our engine samples for a week."""
    machine(1, "venv")
    with pytest.raises(UserError, match="no interpreter 'none/python'"):
        settle_engine(settings(world, "--vllm_python", "none/python"))


def test_each_process_has_its_gpu_s_copy(machine: Machine, world: World) -> None:  # noqa: F811
    """Catches one GPU at work and seven idle, and copies beside arguments that say how the target is spread."""
    machine(8, "venv")
    assert [copies_of_target(settings(world), n) for n in (1, 2, 8, 16)] == [1, 2, 8, 8]
    own = settings(world, "--vllm_args", "[--tensor-parallel-size, '4']")
    assert copies_of_target(own, 8) == 1
    machine(0)
    assert copies_of_target(settings(world), 4) == 1


def test_rows_are_those_of_the_engine_vllm(
    machine: Machine, world: World, server: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    """Catches auto's rows in another form (ids, loss spans, finish reasons), without a record of who answered, and a
    resume that is refused."""
    machine(1)
    monkeypatch.setattr(engine_choice, "parse_flag_from_env", lambda name: False)  # as tests run
    port = int(server.url.split(":")[2].split("/")[0])
    monkeypatch.setattr(vllm_client, "free_port", lambda: port)
    server.model = {"id": "target"}
    (tmp_path / "vllm").mkdir()
    python = interpreter(tmp_path / "vllm", '[ "$1" = -c ] && exit 0\nexec sleep 600')
    words: list[Any] = [
        "--vllm_python", python, "--target", world.target, "--sources", sources(world.prompts),
        "--out", tmp_path / "out", "--max_new_tokens", 24, "--shard_rows", 4, "--start_timeout", 2,
    ]  # fmt: skip
    done = worlds.call(COMMAND, *words)
    assert summary(done)["asked"] == COUNT
    assert "engine auto: vLLM, by" in done.err
    assert rows_of(tmp_path / "out") == expected(world, server)
    assert read_manifest(tmp_path / "out").engine == "vllm"
    assert "engine: vllm" in (tmp_path / "out" / "run.yaml").read_text()
    assert {body["seed"] for body in server.bodies} != {server.bodies[0]["seed"]}
    asked = len(server.bodies)
    again = worlds.call(COMMAND, *words)
    assert (again.code, len(server.bodies)) == (0, asked)
