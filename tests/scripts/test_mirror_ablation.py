"""The ablation of mirror on a tiny target: settings, texts, sums that pool, and the formula beside the measurement."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests import worlds
from tests.worlds import World

COMMAND = "scripts/experiments/mirror_ablation.py"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return worlds.build(tmp_path_factory.mktemp("world"), prompts=2)


def measured(world: World, out: Path, *more: object) -> dict[str, Any]:
    tasks = json.dumps([{"name": "mine", "path": str(world.prompts)}])
    done = worlds.call(
        COMMAND, "--target", world.target, "--draft", world.draft, "--tasks", tasks, "--out", out,
        "--branches", "[0, 2]", "--exit_layers", "[1]", "--max_new_tokens", 12, *more,
    )  # fmt: skip
    assert done.code == 0, done.err
    found = json.loads(out.read_text())
    assert json.loads(done.out.splitlines()[-1]) == {"rows": found["rows"]}
    return found


def test_every_setting_decodes_the_same_text(world: World, tmp_path: Path) -> None:
    """Catches settings that are not set, slots for too few branches, and sums of one prompt alone."""
    found = measured(world, tmp_path / "a.json")
    rows = {row["setting"]: row for row in found["rows"]}
    assert list(rows) == ["plain", "draft alone", "κ 0", "ℓe 1, κ 2"]
    assert {row["same"] for row in rows.values()} == {"2 of 2"}
    assert len({rows[name]["tau"] for name in ("draft alone", "κ 0", "ℓe 1, κ 2")}) == 1
    assert rows["κ 0"]["exit_hit_rate"] is None
    assert rows["κ 0"]["reuse_rate"] < rows["ℓe 1, κ 2"]["reuse_rate"]
    for row in (rows["κ 0"], rows["ℓe 1, κ 2"]):
        assert 0 < row["two_devices_ms"] < row["waiting_ms"]
    pooled = measured(world, tmp_path / "b.json", "--pool", json.dumps([str(tmp_path / "a.json")]))
    assert {row["same"] for row in pooled["rows"]} == {"4 of 4"}
    rounds = [sums["rounds"] for sums in found["sums"].values()]
    assert [sums["rounds"] for sums in pooled["sums"].values()] == [2 * n for n in rounds]
