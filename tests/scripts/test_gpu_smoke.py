"""scripts/lab/gpu_smoke.py on a CPU: the same stages; recorded rounds stand for CUDA graphs, and faults are planted."""

import json
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from decode.common.errors import UserError
from decode.common.settings import parse_settings
from decode.engine.engine import SpeculativeEngine
from scripts.lab import gpu_checks, gpu_smoke
from scripts.lab.gpu_checks import STAGES, Work
from scripts.lab.settings import GpuSmokeConfig
from tests.decode.engine.test_capture_lint import as_on_a_gpu  # noqa: F401
from tests.decode.engine.test_captured_rounds import RecordedRunner, recorded  # noqa: F401

SMALL = ["--rows", "2", "--k", "3", "--max_new_tokens", "16", "--device", "cpu"]
Run = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """(exit code, the JSON) of the command with SMALL settings and these stages, which run in this process."""
    monkeypatch.setattr(gpu_checks, "run_apart", lambda s, limit: gpu_checks.run_stage(s))

    def call(*stages: str) -> tuple[int, dict[str, Any]]:
        monkeypatch.setattr(gpu_checks, "STAGES", {name: STAGES[name] for name in stages})
        out = tmp_path / "smoke.json"
        with pytest.raises(SystemExit) as end:
            gpu_smoke.main(parse_settings(GpuSmokeConfig, "", [*SMALL, "--out", str(out)]))
        found: dict[str, Any] = json.loads(out.read_text())
        return int(end.value.code or 0), found

    return call


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch, recorded: list[RecordedRunner]) -> list[RecordedRunner]:  # noqa: F811  # fmt: skip
    """Lets a CPU run mode captured, whose graphs are recorded."""

    def engine(*args: Any, mode: str, **settings: Any) -> SpeculativeEngine:
        made = SpeculativeEngine(*args, **settings)
        made.mode = mode  # past the check for a GPU
        return made

    monkeypatch.setattr(gpu_checks, "SpeculativeEngine", engine)
    monkeypatch.setattr(Work, "mode", lambda self, wanted: wanted)
    return recorded


def test_the_stages_pass_on_a_cpu(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a command that does not run as a user starts it on a CPU, and figures that are missing."""
    code, found = run("plain", "eagle3", "split_kv", "training")
    assert (code, found["problems"]) == (0, [])
    stages = found["stages"]
    assert [stages[name]["result"] for name in stages] == ["done", "done", "skipped", "done"]
    for name in ("plain", "eagle3"):
        (row,) = stages[name]["rows"]
        assert (row["draft"], row["mode"]) == (name, "eager")
        assert (row["same"], row["ties"], row["of"]) == (4, 0, 4)
        assert row["tokens_per_second"] == pytest.approx(4 * 16 / row["second"])
    assert stages["split_kv"]["skipped"] == "split-KV attention is a kernel for GPUs"
    losses = stages["training"]["rows"][0]["losses"]
    assert losses[-1] < losses[0]
    assert {"torch", "transformers"} <= found["versions"].keys()
    assert "device" in found["hardware"]
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == found


def test_captured_rounds_are_compared_with_eager_ones(
    run: Run, captured: list[RecordedRunner]
) -> None:
    """Catches captured rounds that are never run, or not compared."""
    code, found = run("plain", "eagle3")
    assert (code, found["problems"]) == (0, [])
    rows = [row for stage in found["stages"].values() for row in stage["rows"]]
    assert [(row["draft"], row["mode"]) for row in rows] == [
        ("plain", "eager"), ("plain", "captured"), ("eagle3", "eager"), ("eagle3", "captured"),
    ]  # fmt: skip
    assert all((row["same"], row["of"]) == (4, 4) for row in rows)
    assert len(captured) >= 2


def test_a_graph_that_replays_something_else_is_a_problem(
    run: Run, captured: list[RecordedRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a comparison that cannot fail: graphs that commit nothing new repeat the first token."""
    monkeypatch.setattr(RecordedRunner, "__call__", lambda self: self.out.clone())
    code, found = run("plain", "eagle3")
    assert code == 1
    named = {problem.split(": prompt")[0] for problem in found["problems"]}
    assert named == {"plain: plain, captured", "eagle3: eagle3, captured"}


@pytest.mark.parametrize(("noise", "ties", "code"), [(0.02, 0, 1), (0.3, 1, 0)])
def test_a_near_tie_is_no_false_alarm(
    noise: float, ties: int, code: int, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a bfloat16 text that leaves another one where rounding decides and is told as a fault, and a fault that
    passes for one: the gap of 0.1 is within the passes' noise or not."""
    decode, turns = Work.decode, list[int]()

    def other(self: Work, mode: str, draft: Any) -> dict[str, Any]:
        found = decode(self, mode, draft)
        turns.append(1)
        if len(turns) == 2:  # the first are the texts that it is compared with
            found["ids"][1][5] += 1
        return found

    monkeypatch.setattr(Work, "decode", other)
    monkeypatch.setattr(gpu_checks, "measure_pair", lambda *args: (0.1, noise))
    found_code, found = run("plain")
    (row,) = found["stages"]["plain"]["rows"]
    assert (found_code, row["same"], row["ties"]) == (code, 3, ties)
    assert [" at token 5, by 0.1, and rounding explains 0.02" in x for x in found["problems"]] == (
        [True] * code
    )


def test_every_failure_is_listed_and_the_rest_goes_on(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a failed mode or step that ends the command, and an exit code 0 after one."""
    judged = Work.judged

    def failing(self: Work, name: str, mode: str, draft: Any) -> Any:
        if draft is None:
            raise RuntimeError("no kernel image\nmore")
        row, problems = judged(self, name, mode, draft)
        return row, [*problems, f"{name}, {mode}: the host waits at round.py:7"]

    def untrained(target: Any, rows: Any) -> Callable[[], torch.Tensor]:
        return lambda: torch.tensor(2.5)

    monkeypatch.setattr(Work, "judged", failing)
    monkeypatch.setattr(gpu_checks, "training_step", untrained)
    code, found = run("plain", "eagle3", "training")
    assert code == 1
    assert found["problems"] == [
        "plain: plain, eager: RuntimeError: no kernel image",
        "eagle3: eagle3, eager: the host waits at round.py:7",
        "training: the loss was 2.5 and is 2.5 after 3 steps",
    ]
    assert capsys.readouterr().err.count("PROBLEM ") == 3


def test_what_the_machine_cannot_run_is_skipped(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches eight bits that are refused on CUDA, or a machine without vLLM, told as a fault."""

    def refuse(*args: Any) -> Any:
        raise UserError("dtype w8a8 on CUDA is refused: torchao's layer")

    monkeypatch.setattr(gpu_checks, "load_target", refuse)
    monkeypatch.setenv("VLLM_PYTHON", "/nowhere/python")
    code, found = run("w8a8", "vllm")
    assert code == 0
    stages = found["stages"]
    assert stages["w8a8"]["skipped"] == "dtype w8a8 on CUDA is refused: torchao's layer"
    assert stages["vllm"]["skipped"].startswith("no interpreter '/nowhere/python'")


@pytest.mark.parametrize("fails", [False, True])
def test_vllm_is_measured_beside_us(fails: bool, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches vLLM's answers that are compared with nothing, its failure that is lost, and its rounding as a fault."""
    jobs: list[dict[str, Any]] = []

    def answer(python: str, given: list[dict[str, Any]]) -> Any:
        jobs.extend(given)
        if fails:
            return iter([{"error": "ValueError: no room"}])
        ids = [[1] * 16] * 3 + [[2] * 16]
        answers = [{"ids": [x], "seconds": 0.5} for x in ids]
        return iter([{"vllm": "0.32", "ran": {"enforce_eager": False}, "answers": answers}])

    monkeypatch.setattr(gpu_checks.vllm_client, "has_vllm", lambda python: True)
    monkeypatch.setattr(gpu_checks.vllm_client, "run_jobs", answer)
    code, found = run("vllm")
    assert len(jobs[0]["prompts"]) == 4
    if fails:
        assert (code, found["problems"]) == (1, ["vllm: vLLM: ValueError: no room"])
        return
    (row,) = found["stages"]["vllm"]["rows"]
    assert (code, row["same"], row["of"], row["tokens_per_second"]) == (0, 0, 4, 32)
    assert row["ran"] == {"enforce_eager": False}


# ---- the time ----


def test_stages_end_with_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a stage that is begun when nothing is left or given more than that, one that comes before a better one,
    and results that are lost where the machine is taken away in the middle."""
    out, now, seen = tmp_path / "smoke.json", [0.0], list[tuple[str, float, int]]()

    def take(s: GpuSmokeConfig, limit: float) -> dict[str, Any]:
        kept = len(json.loads(out.read_text())["stages"]) if out.exists() else 0
        seen.append((s.stage, limit, kept))
        now[0] += min(limit, 80.0)
        return {"rows": [], "problems": ["slow"] if limit < 80 else []}

    monkeypatch.setattr(gpu_checks, "run_apart", take)
    monkeypatch.setattr(gpu_checks, "time", SimpleNamespace(monotonic=lambda: now[0]))
    words = ["--seconds", "365", "--out", str(out)]
    with pytest.raises(SystemExit) as end:
        gpu_smoke.main(parse_settings(GpuSmokeConfig, "", words))
    assert seen == [
        ("plain", 90, 0), ("eagle3", 90, 1), ("graph", 180, 2), ("split_kv", 75, 3), ("w8a8", 50, 4),
    ]  # fmt: skip
    found = json.loads(out.read_text())
    assert [stage["result"] for stage in found["stages"].values()] == [
        "done", "done", "done", "problems", "problems", "not run", "not run",
    ]  # fmt: skip
    assert found["problems"] == ["split_kv: slow", "w8a8: slow"]
    assert end.value.code == 1
    assert sum(limit for limit, _ in STAGES.values()) > parse_settings(GpuSmokeConfig, "", []).seconds  # fmt: skip


STUCK = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({pids!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
time.sleep(600)
"""


def run_nothing(s: GpuSmokeConfig) -> dict[str, Any]:
    return {"rows": [], "problems": []}


@pytest.mark.parametrize("own_limit", [3, 90])
def test_a_stage_that_hangs_ends_with_its_children(
    own_limit: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a stuck GPU that takes all later stages along, compilers that go on beside them, and a stage that the end
    of all the time has cut as a fault of it."""
    pids = tmp_path / "pids"
    (tmp_path / "gpu_smoke.py").write_text(STUCK.format(pids=str(pids)))
    monkeypatch.setattr(gpu_checks, "__file__", str(tmp_path / "gpu_checks.py"))
    begun = time.monotonic()
    monkeypatch.setattr(gpu_checks, "STAGES", {"plain": (own_limit, run_nothing)})
    found = gpu_checks.run_apart(GpuSmokeConfig(stage="plain"), 3.0)
    late = "not done after 3 s"
    assert found == {"rows": [], "problems": [late] if own_limit == 3 else [], "cut": late}
    assert time.monotonic() - begun < 30
    for pid in map(int, pids.read_text().split()):
        end = time.monotonic() + 20
        while is_alive(pid):
            assert time.monotonic() < end
            time.sleep(0.05)


def is_alive(pid: int) -> bool:
    """Not a zombie, which the machine's first process collects."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


@pytest.mark.parametrize(
    ("script", "problem"),
    [("import sys; sys.exit('error: the GPU is full')", "the GPU is full"),
     ("import os; os.kill(os.getpid(), 11)", "exit code -11")],
)  # fmt: skip
def test_a_stage_that_ends_is_told(
    script: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a crash of CUDA that ends the command without its JSON."""
    (tmp_path / "gpu_smoke.py").write_text(script)
    monkeypatch.setattr(gpu_checks, "__file__", str(tmp_path / "gpu_checks.py"))
    found = gpu_checks.run_apart(GpuSmokeConfig(stage="plain"), 30.0)
    assert found == {"rows": [], "problems": [problem]}


@pytest.mark.slow
def test_a_stage_runs_in_a_process_of_its_own() -> None:
    """Catches settings that the process is not given, and output beside the JSON."""
    s = parse_settings(GpuSmokeConfig, "", [*SMALL, "--stage", "plain"])
    found = gpu_checks.run_apart(s, 200.0)
    assert found["problems"] == []
    assert found["rows"][0]["of"] == 4
    with pytest.raises(UserError, match="no stage 'all'; there are plain, eagle3, graph"):
        gpu_checks.check_gpu(GpuSmokeConfig(stage="all"))


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
