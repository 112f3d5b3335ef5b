"""scripts/lab/data_curve.py: parts are nested, points are kept, and the command runs on a tiny target."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decode.common.errors import UserError
from scripts.lab import curve_runs
from scripts.lab.settings import DataCurveConfig
from tests import worlds
from tests.test_stopped_commands import on_call
from train import distill
from train.data import batching, mixture
from train.settings.training import LoopConfig
from train.trainer.settings import DistillConfig

COMMAND = "scripts/lab/data_curve.py"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> worlds.World:
    return worlds.build(tmp_path_factory.mktemp("world"), 24)


@pytest.fixture(scope="module")
def data(world: worlds.World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return worlds.sampled(world, tmp_path_factory.mktemp("data"), "--max_new_tokens", 12)


def tokens_of(data: Path) -> list[int]:
    """Supervised tokens of each row that has any."""
    rows, _ = mixture.load(str(data), 512)
    return [batching.supervised_token_count([row]) for row in rows]


# ---- parts of the data ----


@pytest.mark.parametrize("seed", range(3))
def test_parts_are_nested_and_reach_their_sizes(seed: int) -> None:
    """Catches parts drawn one by one, and parts that stop a row early or late."""
    tokens = np.random.default_rng(9).integers(1, 40, 200).tolist()
    sizes = [30, 300, 1000, sum(tokens)]
    parts = curve_runs.nested_rows(tokens, sizes, seed)
    for size, part in zip(sizes, parts, strict=True):
        total = sum(tokens[i] for i in part)
        assert size <= total < size + max(tokens)
        assert sorted(set(part.tolist())) == part.tolist()
    for small, large in zip(parts, parts[1:], strict=False):
        assert set(small.tolist()) < set(large.tolist())
    assert parts[-1].tolist() == list(range(200))


def test_each_seed_takes_other_rows() -> None:
    tokens = [10] * 100
    first, again, other = (curve_runs.nested_rows(tokens, [200], s)[0] for s in (0, 0, 1))
    assert first.tolist() == again.tolist() != other.tolist()


@pytest.mark.parametrize(
    ("sizes", "said"), [([10, 1001], "1,000 supervised tokens"), ([1, 9], "the same 1 rows")]
)
def test_impossible_sizes_are_refused(sizes: list[int], said: str) -> None:
    with pytest.raises(UserError, match=said):
        curve_runs.nested_rows([10] * 100, sizes, 0)


def test_default_sizes_span_two_decades() -> None:
    assert curve_runs.geometric_sizes(60_000, 5, 100) == [600, 1897, 6000, 18974, 60_000]


def test_a_run_trains_on_the_rows_of_its_part(data: Path) -> None:
    """Catches a limit that takes other rows than the ones whose tokens the curve counts."""
    tokens = tokens_of(data)
    s = DataCurveConfig(distill=DistillConfig(data=str(data)))
    sizes = [sum(tokens) // 8, sum(tokens) // 2, sum(tokens)]
    for seed in (0, 3):
        for part in curve_runs.nested_rows(tokens, sizes, seed):
            settings = curve_runs.run_settings(s, 1, seed, len(part), "")
            rows, _ = mixture.load(settings.data, 512, seed=settings.seed)
            assert [row["id"] for row in rows] == [rows.whole[int(i)]["id"] for i in part]


def test_steps_follow_from_passes_with_a_floor() -> None:
    loop = LoopConfig(batch_size=4)
    s = DataCurveConfig(distill=DistillConfig(loop=loop), passes=2.5, least_steps=10)
    assert [curve_runs.count_steps(s, rows) for rows in (1, 16, 17, 100)] == [10, 10, 11, 63]
    s.steps = 7
    assert [curve_runs.count_steps(s, rows) for rows in (1, 100)] == [7, 7]


def test_prompts_of_the_data_are_not_held_out(world: worlds.World, data: Path) -> None:
    """Catches a curve on prompts that were trained on; a prompt that only begins like one of them is no other's."""
    from decode.model.loading import load_target
    from eval.tasks.loading import Task, load_fitting_prompts

    target = load_target(str(world.target), "cpu")
    rows, _ = mixture.load(str(data), 512)
    own = load_fitting_prompts([Task("own", str(world.prompts), limit=3)], target)
    with pytest.raises(UserError, match="task 'own' is in somewhere too"):
        curve_runs.check_held_out(own, rows, "somewhere")
    curve_runs.check_held_out(load_fitting_prompts([Task("code", limit=3)], target), rows, "x")


# ---- the command ----


def words(world: worlds.World, data: Path, out: Path) -> list[object]:
    tokens = tokens_of(data)
    sizes = [sum(tokens) // 12, sum(tokens) // 4, sum(tokens)]
    return [
        COMMAND, "--distill.target", world.target, "--distill.data", data, "--distill.draft.init", world.draft,
        "--distill.loop.batch_size", 4, "--distill.loop.micro_batch", 4, "--distill.loop.warmup", 0,
        "--distill.features", out.parent / f"{out.name}-features",
        "--sizes", json.dumps(sizes), "--seeds", "[0, 1]", "--passes", 1, "--least_steps", 2, "--k", 2,
        "--tasks", "[{name: code, limit: 2}, {name: prose, limit: 1}]", "--max_new_tokens", 6, "--out", out,
    ]  # fmt: skip


def state(out: Path) -> list[str]:
    """The finished points, a line each."""
    file = out / "journal.jsonl"
    return file.read_text().split("\n")[1:-1] if file.is_file() else []


def test_a_stopped_curve_goes_on(world: worlds.World, data: Path, tmp_path: Path) -> None:
    """Catches points that are measured again, and data and checkpoints that stay on the disk."""
    out = tmp_path / "out"
    command = words(world, data, out)
    with pytest.MonkeyPatch.context() as patch:
        stop = lambda: os.kill(os.getpid(), signal.SIGTERM)  # noqa: E731
        on_call(patch, distill, "main", 4, stop)  # the fourth training
        done = worlds.call(*map(str, command))
    assert done.code == 143
    assert done.err.splitlines()[-1].startswith("stopped by SIGTERM: ")
    kept = state(out)
    assert len(kept) == 4  # before training, and three points
    assert not (out / "data_curve.json").exists()
    done = worlds.call(*map(str, command)).ok()
    assert state(out)[: len(kept)] == kept
    curve = json.loads((out / "data_curve.json").read_text())
    check_curve(curve, data, out)
    line = json.loads(done.out.splitlines()[-1])
    assert (line["verdict"], line["curve"]) == (curve["verdict"], str(out / "data_curve.json"))
    for text in ("T = 0: doubling", "T = 1: doubling", "| before training |", ", predicted |"):
        assert text in done.out
        assert text in (out / "data_curve.md").read_text()
    assert list(out.glob("drafts/*/checkpoints")) == []
    finished = state(out)
    assert worlds.call(*map(str, command)).code == 0  # only written again
    assert state(out) == finished
    assert "different: k" in worlds.call(*map(str, command), "--k", 3).error()


@pytest.mark.slow
def test_a_killed_curve_is_that_of_an_undisturbed_run(
    world: worlds.World, data: Path, tmp_path: Path
) -> None:
    """Catches half-written parts, and points that depend on what was trained before them."""
    out, whole = tmp_path / "out", tmp_path / "whole"
    for points in (1, 3):  # in the middle of a training or of writing a part
        ready = lambda: len(state(out)) >= points  # noqa: B023, E731
        assert worlds.kill_when(ready, *map(str, words(world, data, out))) == -9
        assert points <= len(state(out)) < 7
    for folder in (out, whole):
        assert worlds.call(*map(str, words(world, data, folder))).code == 0
    curves = [json.loads((folder / "data_curve.json").read_text()) for folder in (out, whole)]
    for name in ("points", "before", "forecasts", "verdict"):
        assert curves[0][name] == curves[1][name]


def check_curve(curve: dict[str, Any], data: Path, out: Path) -> None:
    """Six trainings: three sizes, two seeds; both temperatures."""
    tokens = tokens_of(data)
    sizes = sorted({p["size"] for p in curve["points"]})
    assert len(sizes) == 3
    assert [(p["temperature"], p["size"]) for p in curve["points"]] == [
        (t, size) for t in (0.0, 1.0) for size in sizes
    ]
    assert curve["points"][2]["tokens"] == sum(tokens)
    assert curve["points"][2]["rows"] == len(tokens)
    assert curve["points"][2]["steps"] == max(2, -(-len(tokens) // 4))
    for point in [*curve["points"], *curve["before"]]:
        assert 1 <= point["tau"] <= 3
        assert 0 <= point["alpha"] <= 1
        assert len(point["tau_seeds"]) == (2 if point["size"] else 1)
    assert {(f["temperature"], f["metric"]) for f in curve["forecasts"]} == {
        (t, m) for t in (0.0, 1.0) for m in ("tau", "alpha")
    }
    points = [json.loads(line) for line in state(out)]
    for size in sizes:
        for seed in (0, 1):
            facts = json.loads((out / "drafts" / f"{size}-{seed}" / "draftsmith.json").read_text())
            (point,) = (x["value"] for x in points if x["key"] == [f"{size}-{seed}", 0])
            assert facts["samples"] == point["rows"]
            assert facts["trained_steps"] == point["steps"]
            assert facts["training"]["seed"] == seed
    for name in ("tau.svg", "alpha.svg"):
        assert (out / name).read_text().startswith("<svg")


def test_heads_run_too(world: worlds.World, data: Path, tmp_path: Path) -> None:
    """Medusa heads: no draft to start from, and no more tokens than heads."""
    command = [
        COMMAND, "--distill.target", world.target, "--distill.data", data, "--distill.draft.family", "medusa",
        "--distill.draft.heads", 2, "--distill.loop.batch_size", 2, "--distill.loop.micro_batch", 2,
        "--sizes", f"[20, {sum(tokens_of(data))}]", "--seeds", "[0]", "--steps", 2, "--temperatures", "[0.0]",
        "--tasks", "[{name: code, limit: 2}]", "--max_new_tokens", 4, "--out", tmp_path / "out",
    ]  # fmt: skip
    whole = [*command, "--distill.supervise", "all", "--k", 2]
    own = json.dumps([{"name": "own", "path": str(world.prompts)}])
    assert "give tasks that are held out" in worlds.call(*map(str, whole), "--tasks", own).error()
    assert "heads" in worlds.call(*map(str, command)).error()
    assert not (tmp_path / "out").exists()
    worlds.call(*map(str, command), "--k", 2).ok()
    curve = json.loads((tmp_path / "out" / "data_curve.json").read_text())
    assert (curve["before"], curve["family"], curve["verdict"]) == ([], "medusa", "not clear")
    assert [p["steps"] for p in curve["points"]] == [2, 2]
    assert worlds.call(*map(str, whole), "--overwrite", "true").code == 0
    more = json.loads((tmp_path / "out" / "data_curve.json").read_text())
    assert [p["rows"] for p in more["points"]] < [p["rows"] for p in curve["points"]]
