"""scripts/lab/cells.py: turns alternate, finished cells are never measured again, and intervals hold what they say."""

import json
import random
import statistics
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from decode.common.command import Terminated
from decode.common.errors import UserError
from decode.common.journal import Journal
from decode.common.provenance import hardware
from scripts.lab import cells
from scripts.lab.cells import Cell, cells_beside, run_cells
from tests import worlds

STAND_IN = "tests/scripts/bench_stand_in.py"


@dataclass
class BenchConfig:
    names: list[str] = field(default_factory=lambda: ["a", "b"])
    steps: int = 3
    out: str = ""
    one: bool = False


def counted(names: str, log: list[tuple[str, int]], stop_at: int = 99) -> list[Cell]:
    """Cells that note their turns; the measurement of number `stop_at` is stopped in the middle."""

    def measure(name: str, turn: int) -> dict[str, int]:
        log.append((name, turn))
        if len(log) == stop_at:
            raise Terminated
        return {"value": len(log)}

    return [Cell(name, lambda turn, name=name: measure(name, turn)) for name in names]


@pytest.mark.parametrize("turns", [1, 3])
@pytest.mark.parametrize("stop_at", [1, 2, 3])
def test_a_stopped_experiment_goes_on(tmp_path: Path, turns: int, stop_at: int) -> None:
    """Catches a finished cell that is measured again, one that was stopped and counts, another turn's value, and a
    first cell that always runs on a cold machine."""
    journal = lambda: Journal(tmp_path / "journal.jsonl", {})  # noqa: E731
    first: list[tuple[str, int]] = []
    with pytest.raises(Terminated):
        run_cells(counted("abc", first, stop_at), journal(), turns)
    assert journal().measured == stop_at - 1
    again: list[tuple[str, int]] = []
    found = run_cells(counted("abc", again), journal(), turns)
    assert first[:-1] + again == [
        (name, turn) for turn in range(turns) for name in ("abc" if turn % 2 == 0 else "cba")
    ]
    # results are in the order of the turns, and those of the first start are kept
    for name, values in found.items():
        assert len(values) == turns
        assert [x["value"] for x in values] == [
            at + 1 if at + 1 < stop_at else at + 2 - stop_at
            for at, cell in enumerate(first[:-1] + again)
            if cell[0] == name
        ]
    assert run_cells(counted("abc", again, stop_at=0), journal(), turns) == found
    assert len(again) == 3 * turns - (stop_at - 1)  # nothing was measured the third time


def test_one_name_stands_for_one_cell() -> None:
    """Catches two cells that share a file."""
    with pytest.raises(UserError, match="a is to be measured twice"):
        run_cells(counted("aba", []), None)


def measure_beside(out: Path, s: BenchConfig, log: list[tuple[str, int]], stop_at: int = 99) -> Any:
    with cells_beside(str(out), s) as kept:
        return run_cells(counted("abc", log, stop_at), kept, 2)


def test_cells_beside_a_result_are_kept_until_it_is_written(tmp_path: Path) -> None:
    """Catches cells that outlive a finished bench, whose next start would then measure nothing."""
    out, log = tmp_path / "deep" / "out.json", list[tuple[str, int]]()
    with pytest.raises(Terminated) as stopped:
        measure_beside(out, BenchConfig(out=str(out)), log, 4)
    assert "goes on" in stopped.value.__notes__[0]
    assert len((out.parent / "out.json.cells" / "journal.jsonl").read_text().splitlines()) == 1 + 3
    found = measure_beside(out, BenchConfig(out=str(out)), log)
    assert len(log) == 4 + 3
    assert found["a"][0] == {"value": 1}
    assert list(out.parent.iterdir()) == []
    measure_beside(out, BenchConfig(out=str(out)), log)
    assert len(log) == 7 + 6


@pytest.mark.parametrize("changed", ["steps", "machine", "commit"])
def test_cells_of_something_else_are_measured_again(
    tmp_path: Path, changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches one table from two settings, two machines or two versions of the code."""
    out, log = tmp_path / "out.json", list[tuple[str, int]]()
    with pytest.raises(Terminated):
        measure_beside(out, BenchConfig(), log, 4)
    if changed == "machine":
        monkeypatch.setattr(cells.provenance, "hardware", lambda: replace(hardware(), threads=77))
    if changed == "commit":
        monkeypatch.setattr(cells.provenance, "git_sha", lambda: "another")
    measure_beside(out, BenchConfig(steps=4 if changed == "steps" else 3), log)
    assert len(log) == 4 + 6


def test_files_of_others_are_not_deleted(tmp_path: Path) -> None:
    """Catches a bench that empties a folder of somebody's results because of its name."""
    folder = tmp_path / "out.json.cells"
    folder.mkdir()
    (folder / "thesis.json").write_text("years")
    measure_beside(tmp_path / "out.json", BenchConfig(), [])
    assert [file.read_text() for file in folder.iterdir()] == ["years"]


def test_a_bench_that_measured_nothing_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(Terminated) as stopped:
        measure_beside(tmp_path / "out.json", BenchConfig(), [], 1)
    assert not getattr(stopped.value, "__notes__", [])
    assert list(tmp_path.iterdir()) == []


def test_a_killed_bench_goes_on(tmp_path: Path) -> None:
    """Catches half-written cells and a lock that outlives its process; every cell is a process of its own."""
    out = tmp_path / "out.json"
    command = [STAND_IN, "--names", "[a, b, c]", "--log", tmp_path / "log", "--out", out]
    file = tmp_path / "out.json.cells" / "journal.jsonl"
    kept = lambda: file.read_text().split("\n")[1:-1] if file.is_file() else []  # noqa: E731
    words = [*map(str, command), "--seconds", "0.2"]
    assert worlds.kill_when(lambda: len(kept()) >= 2, *words) == -9
    finished = [json.loads(line) for line in kept()]
    assert 2 <= len(finished) < 6
    done = worlds.fork(*words).ok()
    result = json.loads(out.read_text())
    assert result == json.loads(done.out.splitlines()[-1])
    for line in finished:
        name, turn = line["key"]
        assert result["runs"][name][turn] == line["value"]
    lines = (tmp_path / "log").read_text().split()
    assert sorted(set(lines)) == ["a", "b", "c"]
    assert 6 <= len(lines) <= 7  # the one that was killed in the middle, at most, ran twice
    assert not (tmp_path / "out.json.cells").exists()


def test_a_failed_process_is_named_with_its_reason(tmp_path: Path) -> None:
    command = [STAND_IN, "--names", "[a, bad]", "--log", tmp_path / "log", "--out", tmp_path / "o"]
    assert worlds.fork(*command).error() == 'error: names ["bad"]: bad has no cell: name another'


def test_intervals_of_pairs_cover_what_they_promise() -> None:
    """Catches an interval of unpaired values, and one too narrow for few seeds."""
    rng, covered = random.Random(0), 0
    for _ in range(2000):
        seeds = [rng.gauss(0, 5) for _ in range(3)]  # of both alike: it must cancel out
        own = [x + rng.gauss(0.5, 0.1) for x in seeds]
        base = [x + rng.gauss(0, 0.1) for x in seeds]
        found = cells.paired_difference(own, base)
        assert found is not None
        mean, (low, high) = found
        assert mean == pytest.approx(statistics.mean(own) - statistics.mean(base))
        assert low < mean < high
        covered += low <= 0.5 <= high
    assert 0.935 < covered / 2000 < 0.965
    assert cells.paired_difference([1.0], [2.0]) is None
    many = cells.paired_difference([float(i % 2) for i in range(41)], [0.0] * 41)
    assert many is not None
    half = (many[1][1] - many[1][0]) / 2
    spread = statistics.stdev([float(i % 2) for i in range(41)])
    assert half == pytest.approx(2.021 * spread / 41**0.5, rel=0.004)


def test_averages() -> None:
    assert cells.mean_and_spread([1.0, 3.0]) == (2.0, pytest.approx(2**0.5))
    assert cells.mean_and_spread([1.0]) == (1.0, None)
    assert cells.mean_and_spread([]) == (None, None)
