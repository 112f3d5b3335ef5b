"""scripts/lab/gpu_smoke.py on a CPU: the same path; recorded rounds stand for CUDA graphs, and faults are planted."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from decode.common.settings import parse_settings
from decode.engine.engine import SpeculativeEngine
from scripts.lab import gpu_checks, gpu_smoke
from scripts.lab.settings import GpuSmokeConfig
from tests.decode.engine.test_capture_lint import as_on_a_gpu  # noqa: F401
from tests.decode.engine.test_captured_rounds import RecordedRunner, recorded  # noqa: F401

SMALL = ["--rows", "2", "--k", "3", "--max_new_tokens", "16", "--compiled", "false", "--device", "cpu"]  # fmt: skip


def run(tmp_path: Path, *more: str) -> tuple[int, dict[str, Any]]:
    """(exit code, the JSON) of the command with SMALL settings."""
    out = tmp_path / "smoke.json"
    words = [*SMALL, *more, "--out", str(out)]
    with pytest.raises(SystemExit) as end:
        gpu_smoke.main(parse_settings(GpuSmokeConfig, "", words))
    found: dict[str, Any] = json.loads(out.read_text())
    return int(end.value.code or 0), found


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch, recorded: list[RecordedRunner]) -> list[RecordedRunner]:  # noqa: F811  # fmt: skip
    """Lets a CPU run mode captured, whose graphs are recorded."""

    def engine(*args: Any, mode: str, **settings: Any) -> SpeculativeEngine:
        made = SpeculativeEngine(*args, **settings)
        made.mode = mode  # past the check for a GPU
        return made

    monkeypatch.setattr(gpu_checks, "SpeculativeEngine", engine)
    monkeypatch.setattr(gpu_checks, "modes", lambda device, compiled: ["eager", "captured"])
    return recorded


def test_the_self_test_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a command that does not run as a user starts it on a CPU, and figures that are missing."""
    code, found = run(tmp_path)
    assert (code, found["problems"]) == (0, [])
    assert [row["draft"] for row in found["decoding"]] == ["plain", "causal"]
    assert {row["mode"] for row in found["decoding"]} == {"eager"}
    assert all(row["tokens_per_second"] > 0 and row["same"] == 4 for row in found["decoding"])
    assert found["training"][1] < found["training"][0]
    assert {"torch", "transformers"} <= found["versions"].keys()
    assert "device" in found["hardware"]
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == found


def test_captured_rounds_are_compared_with_eager_ones(
    tmp_path: Path, captured: list[RecordedRunner]
) -> None:
    """Catches captured rounds that are never run, or not compared."""
    code, found = run(tmp_path)
    assert (code, found["problems"]) == (0, [])
    rows = [row for row in found["decoding"] if row["mode"] == "captured"]
    assert [row["draft"] for row in rows] == ["plain", "causal"]
    assert all((row["same_as"], row["same"], row["of"]) == ("eager", 4, 4) for row in rows)
    assert len(captured) >= 2


def test_a_graph_that_replays_something_else_is_a_problem(
    tmp_path: Path, captured: list[RecordedRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a comparison that cannot fail: graphs that commit nothing new repeat the first token."""
    monkeypatch.setattr(RecordedRunner, "__call__", lambda self: self.out.clone())
    code, found = run(tmp_path)
    assert code == 1
    named = {problem.split(":")[0] for problem in found["problems"]}
    assert named == {"plain, captured", "causal, captured"}


def test_every_failure_is_listed_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a failed mode or step that ends the command, and an exit code 0 after one."""
    decode_in = gpu_checks.decode_in

    def failing(mode: str, target: Any, draft: Any, *rest: Any) -> dict[str, Any]:
        if draft is None:
            raise RuntimeError("no kernel image")
        return decode_in(mode, target, draft, *rest) | {"waits": ["round.py:7"]}

    def untrained(target: Any, rows: Any) -> Callable[[], torch.Tensor]:
        return lambda: torch.tensor(2.5)

    monkeypatch.setattr(gpu_checks, "decode_in", failing)
    monkeypatch.setattr(gpu_checks, "training_step", untrained)
    code, found = run(tmp_path)
    assert code == 1
    assert found["problems"] == [
        "plain, eager: RuntimeError: no kernel image",
        "causal, eager: the host waits at round.py:7",
        "training: the loss was 2.5 and is 2.5 after a step",
    ]
    assert capsys.readouterr().err.count("PROBLEM ") == 3


def test_waits_are_those_that_torch_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches other warnings counted as waits, and a mode of torch that stays switched on."""
    switched: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", switched.append)

    def work() -> None:
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)

    (place,) = gpu_checks.find_waits(torch.device("cuda"), work)
    assert place.startswith(__file__)
    assert switched == ["warn", "default"]
    with pytest.raises(RuntimeError, match="broken"):
        gpu_checks.find_waits(torch.device("cuda"), lambda: (_ for _ in ()).throw(RuntimeError("broken")))  # fmt: skip
    assert switched[-1] == "default"
    assert gpu_checks.find_waits(torch.device("cpu"), lambda: None) == []
    assert len(switched) == 4
