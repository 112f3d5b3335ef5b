"""The comparison of a forecast with vLLM; our own engine, with rounds of known cost, stands for vLLM."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from decode.common.errors import UserError
from decode.drafts.registry import load_draft
from decode.engine.engine import decode
from decode.model.loading import Target, load_target
from decode.verification.sampling import SamplingParams
from decode.verification.tree import tree_from_paths
from eval.benchmark import vllm_client
from tests import worlds
from tests.worlds import World

COMMAND = "scripts/experiments/forecast_check.py"
PREFILL, PLAIN, DRAFTING, TOKEN = 0.003, 0.010, 0.012, 0.002
"""Seconds of a prefill, a plain step, and a round with K tokens: DRAFTING + K TOKEN."""


def answers(target: Target, job: dict[str, Any], lost: int) -> Iterator[dict[str, Any]]:
    """What vLLM would print for each prompt of the job if it drafted greedily; every round accepts `lost` less."""
    config = job["speculative"] or {"num_speculative_tokens": 0}
    k = config["num_speculative_tokens"]
    for prompt, temperature, seeds in zip(
        job["prompts"], job["temperatures"], job["seeds"], strict=True
    ):
        draft = None
        if k:
            drawn = temperature > 0 and config.get("draft_sample_method") == "probabilistic"
            chain = None if drawn else tree_from_paths([[0] * n for n in range(1, k + 1)])
            draft = load_draft(config["model"], target, shape=chain)
        (record,) = decode(
            target, draft, [prompt], k=k or 1, max_new_tokens=job["max_new_tokens"],
            sampling=SamplingParams(temperature), seeds=seeds,
        )  # fmt: skip
        accepted = [max(0, a - lost) for _, a in record.rounds]
        step = DRAFTING + k * TOKEN if k else PLAIN
        yield {
            "ids": [record.output_ids],
            "seconds": PREFILL + len(record.rounds) * step,
            "first_token_seconds": PREFILL,
            "rounds": len(record.rounds),
            "drafted": k * len(record.rounds),
            "accepted": sum(accepted),
            "by_position": [sum(a > i for a in accepted) for i in range(k)],
        }


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """{lost, jobs, stop}: what the stand-in for vLLM takes away, what it was asked, and the job that it fails on."""
    state: dict[str, Any] = {"lost": 0, "jobs": [], "stop": 99}
    targets: dict[str, Target] = {}

    def run_jobs(python: str, jobs: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for job in jobs:
            target = targets.setdefault(job["target"], load_target(job["target"], "cpu"))
            endless = Target(**{**vars(target), "eos": frozenset()})
            state["jobs"].append(job)
            if len(state["jobs"]) == state["stop"]:
                raise UserError("stopped")
            found = list(answers(endless, job, state["lost"]))
            yield {"vllm": "9.9", "repaired": [], "answers": found}

    monkeypatch.setattr(vllm_client, "run_jobs", run_jobs)
    return state


def check(world: World, out: Path, *more: object) -> dict[str, Any]:
    tasks = json.dumps([{"name": "own", "path": str(world.prompts)}])
    words = ["--target", world.target, "--drafts", f"[{world.draft}]", "--tasks", tasks]
    words += ["--k", "[2, 3]", "--calibration_k", "[1, 4]", "--calibration", 2]
    words += ["--max_new_tokens", 12, "--vllm_python", sys.executable, "--out", out]
    done = worlds.call(COMMAND, *words, *more)
    assert done.code == 0, done.err
    file = out / "forecast_check.json"
    return json.loads(file.read_text()) if file.exists() else {}


def test_greedy_forecasts_are_exact(tmp_path: Path, served: dict[str, Any]) -> None:
    """Catches prompts for costs that are compared, prefill or rounds without a draft counted twice, and a check that
    passes whatever was served."""
    world = worlds.build(tmp_path, prompts=8)
    found = check(world, tmp_path / "out")
    cells = {(c["temperature"], c["rule"], c["k"]): c for c in found["cells"]}
    assert set(cells) == {
        (0, "greedy", 2),
        (0, "greedy", 3),
        (1, "greedy", 2),
        (1, "greedy", 3),
    } | {(1, "probabilistic", 3)}
    assert (found["prompts"], found["calibration_prompts"]) == (6, 2)
    for k in (2, 3):
        cell = cells[0, "greedy", k]
        assert cell["forecast"]["counts"]["accepted"] == cell["served"]["accepted"]
        assert cell["speedup_error"] == pytest.approx(0, abs=1e-9)
        assert cells[1, "greedy", k]["cost"]["line"] == pytest.approx(
            {"fixed_ms": 12, "per_token_ms": 2}
        )
    assert (found["summary"]["greedy_equal"], found["summary"]["greedy_cells"]) == (2, 2)
    assert cells[0, "greedy", 3]["inside"]
    drawn = [job for job in served["jobs"] if (job["speculative"] or {}).get("draft_sample_method")]
    assert [set(job["temperatures"]) for job in drawn] == [{1.0}]

    served["lost"] = 1
    found = check(world, tmp_path / "lossy", "--temperatures", "[0.0]")
    assert found["summary"]["greedy_equal"] == 0
    assert not any(c["inside"] for c in found["cells"])


def test_a_run_goes_on(tmp_path: Path, served: dict[str, Any]) -> None:
    """Catches an engine that is asked twice after a run was stopped."""
    world = worlds.build(tmp_path, prompts=4)
    served["stop"] = 3
    with pytest.raises(AssertionError, match="stopped"):
        check(world, tmp_path / "out", "--temperatures", "[0.0]")
    assert check(world, tmp_path / "out", "--temperatures", "[0.0]")["summary"]["cells"] == 2
    asked = [(job["speculative"] or {}).get("num_speculative_tokens") for job in served["jobs"]]
    assert asked == [None, 1, 2, 2, 3, 4]
