"""scripts/sweep.py over a stand-in command: what is tried, by whom, how often, and what the table says."""

import json
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from scripts.lab.sweep_plan import DrawnRange, SweepConfig, draw, plan_trials
from scripts.lab.sweep_pool import last_error, launch_environment, split_launch
from scripts.lab.sweep_results import is_number, look_up
from tests import worlds

STAND_IN = "tests/scripts/stand_in.py"


def words(out: Path, **more: object) -> list[str]:
    """A command line of scripts/sweep.py over the stand-in."""
    settings = {"command": STAND_IN, "metric": "score", "out": out} | more
    return [f"--{name}={value}" for name, value in settings.items()]


def sweep(out: Path, **more: object) -> worlds.Done:
    return worlds.call("scripts/sweep.py", *words(out, **more))


def table(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "sweep.json").read_text())
    return found


def lines_of(out: Path, name: str) -> dict[str, list[str]]:
    """{trial: lines of a file that the stand-in wrote}."""
    files = sorted(out.glob(f"trials/*/out/{name}"))
    return {file.parts[-3]: file.read_text().splitlines() for file in files}


def test_a_grid_is_ranked_and_averaged_over_seeds(tmp_path: Path) -> None:
    """Catches a table in the order of the trials, a lost seed, and finished trials that run again."""
    out = tmp_path / "out"
    grid = "{lr: [0.1, 1e-1, 0.3, 0.9], seed: [0, 2]}"
    assert sweep(out, grid=grid).code == 0
    rows = table(out)["rows"]
    assert [float(row["settings"]["lr"]) for row in rows] == [0.3, 0.1, 0.9]
    assert rows[0]["metric"] == pytest.approx(1.01)
    assert rows[0]["spread"] == pytest.approx(0.02 / 2**0.5)
    assert len(lines_of(out, "starts.txt")) == 6  # 1e-1 is 0.1
    text = (out / "sweep.md").read_text()
    assert "| lr | score | seeds | time |" in text
    assert "| 0.3 | 1.01 ± 0.014 | 2 of 2 |" in text
    assert (out / "sweep.svg").is_file()
    # The seed adds the same to every trial: paired, it leaves no spread at all.
    assert rows[0]["to_best"] is None
    near = pytest.approx(-0.04)
    assert rows[1]["to_best"] == {"mean": near, "ci": [near] * 2, "seeds": 2}
    assert "| 0.9 | -0.3600 [-0.3600, -0.3600] | 2 |" in text
    done = sweep(out, grid="{lr: [0.3, 0.1, 0.9, 0.5], seed: [0, 2]}", goal="min").ok()
    assert all(len(starts) == 1 for starts in lines_of(out, "starts.txt").values())
    assert [row["settings"]["lr"] for row in table(out)["rows"]] == [0.9, 0.1, 0.5, 0.3]
    assert json.loads(done.out.splitlines()[-1])["best"]["settings"] == {"lr": 0.9}


def test_differences_are_of_common_seeds(tmp_path: Path) -> None:
    """Catches pairs of different seeds where a trial failed, and an interval from one pair."""
    out, more = tmp_path / "out", {"retries": 0}
    grid = "{lr: [0.3, 0.4], fails: [0], seed: [0, 1, 2]}"
    assert sweep(out, grid=grid, **more).code == 0
    (metrics,) = out.glob("trials/lr=0.4,*seed=1-*/out/metrics.jsonl")
    metrics.write_text('{"other": 1}\n')
    done = sweep(out, grid=grid, **more)
    assert "no score in" in done.err
    (row,) = (row for row in table(out)["rows"] if row["to_best"])
    assert (row["settings"]["lr"], row["to_best"]["seeds"]) == (0.4, 2)
    assert row["to_best"]["mean"] == pytest.approx(-0.01)
    assert sweep(out, grid="{lr: [0.3, 0.4], fails: [0], seed: [0]}", **more).code == 0
    assert [row["to_best"] for row in table(out)["rows"]] == [None, None]
    assert "paired by seed" not in (out / "sweep.md").read_text()


def test_metrics_are_found_where_they_are(tmp_path: Path) -> None:
    """Catches a metric that is only looked for at the top of metrics.jsonl."""
    out, more = tmp_path / "out", {"grid": "{lr: [0.3]}"}
    for result, metric, value in (
        ("metrics.jsonl", "score", 1.0),
        ("stdout", "best.0.7.score", 1.0),
        ("stdout", "list.0.tau", 1.5),
    ):
        assert sweep(out, result=result, metric=metric, **more).code == 0
        assert table(out)["rows"][0]["metric"] == value
    assert sweep(out, point="best", **more).code == 0
    assert table(out)["rows"][0]["metric"] == 2.0
    done = sweep(out, metric="scores", **more)
    assert done.code == 2
    assert "no scores in" in done.err
    assert "other, score, step" in done.err
    assert all(len(starts) == 1 for starts in lines_of(out, "starts.txt").values())
    assert look_up({"a": [1]}, "a.1") is None


def test_a_failing_trial_is_retried_and_named(tmp_path: Path) -> None:
    """Catches a sweep that stops at the first failure, hides it, or never tries it again."""
    out, more = tmp_path / "out", {"grid": "{lr: [0.3, 0.4], fails: [0, 1, 3]}", "retries": 1}
    done = sweep(out, **more)
    assert done.code == 2
    last = done.err.splitlines()[-1]
    assert last.startswith("error: 2 of 6 trials have no result, such as lr=0.3,fails=3-")
    assert "no luck with lr: try another (exit code 2), attempts: 2" in last
    starts = lines_of(out, "starts.txt")
    assert sorted(len(lines) for lines in starts.values()) == [1, 1, 2, 2, 2, 2]
    facts = table(out)
    assert len(facts["failed"]) == 2
    assert [row["metric"] for row in facts["rows"]].count(None) == 2
    assert facts["rows"][-1]["metric"] is None
    assert "## Failed" in (out / "sweep.md").read_text()
    assert sweep(out, **more).code == 0  # the fourth start succeeds
    starts = lines_of(out, "starts.txt")
    assert sorted(len(lines) for lines in starts.values()) == [1, 1, 2, 2, 4, 4]


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_sweep_goes_on(tmp_path: Path, sent: signal.Signals) -> None:
    """Catches finished trials that run again, and two processes of one trial after its sweep was killed."""
    out = tmp_path / "out"
    more = words(out, grid="{lr: [0.1, 0.2, 0.3, 0.4], steps: [10], seconds: [0.15]}", workers=2)
    with worlds.started("scripts/sweep.py", *more) as process:
        done = lambda: len(list(out.glob("trials/*/record.json")))  # noqa: E731
        while done() < 2 or len(lines_of(out, "steps.txt")) < 4:
            assert process.poll() is None, process.stderr.read() if process.stderr else ""
            time.sleep(0.02)
        process.send_signal(sent)
        code = process.wait()
        err = process.stderr.read() if process.stderr else ""
        assert code == (-9 if sent == signal.SIGKILL else 128 + sent), err
        if sent != signal.SIGKILL:
            assert f"finished trials are kept in {out}" in err.splitlines()[-1]
            assert list(out.rglob(".lock")) == []
        before = lines_of(out, "starts.txt")
        assert done() < 4
        again = worlds.call("scripts/sweep.py", *more)
    assert again.code == 0, again.err
    assert "tried again" not in again.err
    assert all(len(steps) == 10 for steps in lines_of(out, "steps.txt").values())
    starts = lines_of(out, "starts.txt")
    finished = [name for name in starts if len(starts[name]) == 1]
    assert len(finished) >= 2
    assert all(len(lines) <= 2 for lines in starts.values())
    assert before.keys() <= starts.keys()
    assert len(table(out)["rows"]) == 4


def test_a_trial_that_outlives_its_sweep_is_waited_for(tmp_path: Path) -> None:
    """Catches a second process of a trial whose first one has not yet locked its own folder."""
    out = tmp_path / "out"
    more = words(out, grid="{lr: [0.1], steps: [3], seconds: [0.5]}", retries=0)
    with worlds.started("scripts/sweep.py", *more) as process:
        while len(list(out.glob("trials/*/stderr.txt"))) == 0:
            time.sleep(0.01)
        time.sleep(0.1)
        process.kill()
        process.wait()
        assert lines_of(out, "starts.txt") == {}
        done = worlds.call("scripts/sweep.py", *more)
    assert done.code == 0, done.err
    [starts], [steps] = lines_of(out, "starts.txt").values(), lines_of(out, "steps.txt").values()
    assert (len(starts), len(steps)) == (2, 3)


def test_two_machines_never_run_one_trial_twice(tmp_path: Path) -> None:
    """Catches a trial that two sweeps on one folder start; both write the whole table."""
    out = tmp_path / "out"
    more = words(out, grid="{lr: [0.1, 0.2, 0.3, 0.4, 0.5, 0.6], steps: [1], seconds: [0.3]}")
    launch = ["--launch=[GPU=0, GPU=1]"]
    with (
        worlds.started("scripts/sweep.py", *more, *launch) as one,
        worlds.started("scripts/sweep.py", *more, "--launch=[GPU=2]") as two,
    ):
        for process in (one, two):
            outs, err = process.communicate(timeout=120)
            assert process.returncode == 0, err
            assert json.loads(outs.splitlines()[-1])["best"]["settings"]["lr"] == 0.3
    starts = lines_of(out, "starts.txt")
    assert [len(lines) for lines in starts.values()] == [1] * 6
    assert {lines[0].split()[1] for lines in starts.values()} == {"0", "1", "2"}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, "nothing is swept"),
        ({"grid": "{lrr: [0.1]}"}, "there is no setting lrr (did you mean 'lr'?)"),
        ({"grid": "{lr: [0.1, 3]}"}, "lr is 3.0: it must be from 0 to 1"),
        ({"grid": "{lr: [much]}"}, "lr"),
        ({"grid": "{lr: []}"}, "lr has no values"),
        ({"grid": "{lr: 0.1}"}, "grid.lr is 0.1"),
        ({"grid": "{out: [a]}"}, "out cannot be swept: the sweep sets it"),
        ({"grid": "{lr: [0.1]}", "random": "{lr: [0.1]}"}, "lr cannot be swept: it is in grid and"),
        ({"random": "{lr: {low: 0, high: 1, scale: log}}"}, "low above 0 on a log scale"),
        ({"random": "{lr: {low: 0}}"}, "high"),
        ({"grid": "{lr: [0.1], seed: [1, 2]}", "random": "{steps: [1]}", "draws": 6000}, "12,000"),
        ({"grid": "{lr: [0.1]}", "words": "[--kinds, x]"}, "kinds"),
        ({"grid": "{lr: [0.1]}", "command": "train/gone.py"}, "train/gone.py is no command"),
        ({"grid": "{lr: [0.1]}", "command": "scripts/test.sh"}, "is no command"),
        ({"grid": "{lr: [0.1]}", "command": "../x.py"}, "is no command"),
        ({"grid": "{k: [1]}", "command": "decode/generate.py"}, "decode/generate.py has no setting out"),
        ({"grid": "{seed: [1]}", "command": "eval/run.py", "words": "[--overwrite, true]"}, "overwrite"),
        ({"grid": "{lr: [0.1]}", "launch": "[\"A='1\"]"}, "close the quote"),
    ],
)  # fmt: skip
def test_bad_sweeps_are_refused_before_anything_runs(
    tmp_path: Path, more: dict[str, object], said: str
) -> None:
    done = sweep(tmp_path / "out", **more)
    assert said in done.error()
    assert not (tmp_path / "out").exists()


def test_another_commands_folder_is_refused(tmp_path: Path) -> None:
    """Catches a sweep that spreads over someone's folder."""
    (tmp_path / "thesis.tex").write_text("x")
    assert "holds files that no run wrote" in sweep(tmp_path, grid="{lr: [0.1]}").error()
    (tmp_path / "run.yaml").write_text("# command: train/distill.py\nseed: 1\n")
    assert "was written by train/distill.py" in sweep(tmp_path, grid="{lr: [0.1]}").error()


def test_draws_are_the_same_each_time_and_grow(tmp_path: Path) -> None:
    """Catches random trials that a second start does not find again."""
    ranges: dict[str, Any] = {"lr": DrawnRange(0.001, 1, "log"), "kind": ["a", "b"]}
    s = SweepConfig(STAND_IN, random=ranges, grid={"seed": [0, 1]}, draws=4, out=str(tmp_path))
    few = [trial.name for trial in plan_trials(s)]
    s.draws = 20
    many = plan_trials(s)
    assert [trial.name for trial in many][:8] == few
    assert len({trial.name for trial in many}) == 40
    values = sorted(trial.settings["lr"] for trial in many)
    assert 0.001 <= values[0] < 0.03 < values[-1] <= 1
    assert {trial.settings["kind"] for trial in many} == {"a", "b"}
    assert draw(DrawnRange(1, 4, whole=True), random.Random(0)) in (1, 2, 3, 4)


def test_a_command_with_one_output_file_gets_one(tmp_path: Path) -> None:
    s = SweepConfig(
        "eval/transfer.py", grid={"k": [2, 3]}, words=["--draft", "x"], out=str(tmp_path)
    )
    assert [trial.out.name for trial in plan_trials(s)] == ["out.json", "out.json"]


def test_the_telling_line_of_an_error() -> None:
    launched = "x\nerror: no data: sample first\nTraceback …\nsubprocess.CalledProcessError: C …"
    assert last_error(launched, 1) == "no data: sample first (exit code 1)"
    assert last_error("Traceback\n  x = 1\nValueError: odd\n", 1) == "ValueError: odd (exit code 1)"
    assert last_error("", -9) == "no message (exit code -9)"
    words = ["accelerate", "launch"]
    assert split_launch("A=1 B='2 3' accelerate launch") == ({"A": "1", "B": "2 3"}, words)
    assert (is_number("1e-3"), is_number(True), is_number("x")) == (True, False, False)


def test_trials_are_runs_of_their_own_in_wandb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the id of the job that sweeps makes all trials one run; a group that the user chose is lost."""
    monkeypatch.delenv("WANDB_RUN_GROUP", raising=False)
    monkeypatch.setenv("WANDB_RUN_ID", "job-17")
    s = SweepConfig("train/distill.py", grid={"seed": [1]}, out=str(tmp_path / "rates"))
    env = launch_environment(s)
    assert (env.get("WANDB_RUN_ID"), env["WANDB_RUN_GROUP"]) == (None, "rates")
    monkeypatch.setenv("WANDB_RUN_GROUP", "mine")
    assert launch_environment(s)["WANDB_RUN_GROUP"] == "mine"
