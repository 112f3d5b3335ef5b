import ast
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate.state import AcceleratorState

from decode.common.errors import UserError
from tests import worlds
from tests.worlds import World
from train import training
from train.trainer import tracking
from train.trainer.settings import DistillConfig
from train.trainer.tracking import NullTracker, Tracker, explain_mode

ROOT = Path(__file__).resolve().parents[3]


def lines(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def start(out: Path, resumed_step: int | None = None) -> Tracker:
    return Tracker(out, "test", {}, mode="disabled", resumed_step=resumed_step)


def run_script(
    code: str, out: Path, home: Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs `code` in a process with a home and temporary folder of its own and no W&B account."""
    home.mkdir()
    env = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "XDG", "NETRC"))}
    paths = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
    env |= {"HOME": str(home), "PYTHONPATH": paths, "OUT": str(out)} | variables
    # not below tmp_path: the service's socket has a short limit on its path
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        done = subprocess.run(
            [sys.executable, "-c", code, "--api_key", "hunter2"],
            env={**env, "TMPDIR": folder},
            cwd=home,
            capture_output=True,
            text=True,
            timeout=120,
        )
    return done


OFFLINE = """
import os
from pathlib import Path
from train.trainer.tracking import Tracker

out = Path(os.environ["OUT"])
for resumed in (None, 1):
    tracker = Tracker(out, "test", {"lr": 1.0, "server": {"api_key": "hunter2"}}, "auto", resumed)
    tracker.log(1, {"loss": 2.0})
    tracker.log(2, {"loss": 1.0})
    tracker.artifact("draft", "model", [out / "metrics.jsonl"])
    tracker.finish()
"""


@pytest.mark.slow
def test_offline_is_quiet_stays_inside_out_and_resumes_the_run(tmp_path: Path) -> None:
    """Bug: W&B asks for an account, writes to the home folder, or a resumed run is a new run. Nor may a key get into
    its files, from the settings or from the command line."""
    out, home = tmp_path / "out", tmp_path / "home"
    done = run_script(OFFLINE, out, home)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(home.rglob("*")) == []
    assert [path.name for path in tmp_path.iterdir() if path not in (out, home)] == []
    run_id = (out / "wandb_run_id.txt").read_text().strip()
    runs = list((out / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(runs) > 0
    assert {path.name for path in runs} == {f"run-{run_id}.wandb"}
    assert all(b"hunter2" not in path.read_bytes() for path in out.rglob("*") if path.is_file())
    assert lines(out) == [
        {"step": 1, "loss": 2.0},
        {"step": 1, "loss": 2.0},
        {"step": 2, "loss": 1.0},
    ]


KILLED = """
import os, signal, time
from pathlib import Path
from train.trainer.tracking import Tracker

out = Path(os.environ["OUT"])
tracker = Tracker(out, "test", {}, "offline")
tracker.log(1, {"loss": 2.0})
children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
assert len(children) > 0
for child in children:
    os.kill(int(child), signal.SIGKILL)
time.sleep(0.5)
for step in range(2, 6):
    tracker.log(step, {"loss": 1.0})
    time.sleep(0.1)
tracker.artifact("draft", "model", [out / "metrics.jsonl"])
tracker.finish()
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds its children in /proc")
def test_training_survives_a_killed_wandb_service(tmp_path: Path) -> None:
    """Bug: the out-of-memory killer takes W&B's service and the training dies or hangs with it."""
    out = tmp_path / "out"
    done = run_script(KILLED, out, tmp_path / "home")
    assert done.returncode == 0, done.stderr
    assert [line["step"] for line in lines(out)] == [1, 2, 3, 4, 5]


def test_online_turns_offline_without_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a compute node with a key but no network loses its W&B run, or stops."""
    started = []

    def start_wandb(out: Path, project: str, config: dict, run_id: str, mode: str) -> str:
        started.append((mode, run_id))
        if mode == "online":
            raise TimeoutError("no route")
        return "run"

    monkeypatch.setattr(tracking, "explain_mode", lambda mode: ("online", []))
    monkeypatch.setattr(tracking, "_start_wandb", start_wandb)
    tracker = Tracker(tmp_path, "test", {}, mode="online")
    assert tracker._run == "run"
    run_id = (tmp_path / "wandb_run_id.txt").read_text().strip()
    assert started == [("online", run_id), ("offline", run_id)]


def test_a_failing_wandb_is_reported_once(tmp_path: Path, caplog: Any) -> None:
    """Bug: W&B's exceptions stop the training, or its warnings flood the log."""

    class Broken:
        def log(self, values: dict) -> None:
            raise RuntimeError("service is gone")

    tracker = start(tmp_path)
    tracker._run = Broken()
    tracker.log(1, {"loss": 1.0})
    tracker.log(2, {"loss": 1.0})
    tracker.finish()
    assert len(caplog.records) == 1
    assert "service is gone" in caplog.text
    assert len(lines(tmp_path)) == 2


class Recorded:
    """Stands for one of Accelerate's trackers."""

    def __init__(self, *args: Any, **named: Any):
        self.calls: list[Any] = [(args, named)]

    def start(self) -> None:
        sys.stdout.write("hello\n")

    def store_init_configuration(self, values: dict) -> None:
        self.calls.append(values)

    def log(self, values: dict, step: int) -> None:
        self.calls.append((step, values))

    def finish(self) -> None:
        self.calls.append("end")


@pytest.mark.parametrize("name", ["tensorboard", "trackio"])
def test_accelerates_trackers_log_beside_the_file(
    name: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: a tracker prints behind the command's JSON, forgets that the run was resumed, or learns a key."""
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, name, Recorded)
    ends = SimpleNamespace(finish=lambda: seen[-1].append("end"))
    monkeypatch.setitem(sys.modules, "trackio", ends)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "other"))
    config = {"lr": 0.5, "data": [1, 2], "loop": {"steps": 3}, "hub": {"token": "hunter2"}}
    seen: list[Any] = []
    for resumed in (None, 1):
        tracker = Tracker(tmp_path, "test", config, "online", resumed, name)
        seen.append(tracker._run.calls)
        tracker.log(2, {"loss": 1.0})
        tracker.artifact("draft", "model", [tmp_path])
        tracker.finish()
    flat = {"lr": 0.5, "data": "[1, 2]", "loop.steps": 3, "hub.token": "***"}
    assert seen[0][1:] == [flat, (2, {"loss": 1.0}), "end"]
    assert seen[1][1:] == [(2, {"loss": 1.0}), "end"]
    first, second = seen[0][0], seen[1][0]
    if name == "tensorboard":
        assert (first[1], second[1]) == ({"purge_step": None}, {"purge_step": 2})
    else:
        assert first == second
    assert lines(tmp_path) == [{"step": 2, "loss": 1.0}]
    assert capsys.readouterr().out == ""


def test_no_tracker_needs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: without a tracker W&B is still asked for."""
    monkeypatch.setenv("WANDB_MODE", "nonsense")
    tracker = Tracker(tmp_path, "test", {}, name="none")
    tracker.log(1, {"loss": 1.0})
    tracker.finish()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl"]


def test_a_tracker_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a training runs for days and nobody sees it."""
    monkeypatch.setattr(tracking, "get_available_trackers", lambda: ["wandb"])
    for name in ("wandb", "none"):
        tracking.check_tracker(name)  # type: ignore[arg-type]
    with pytest.raises(
        UserError, match="tracker trackio is not installed: run `pip install trackio`"
    ):
        tracking.check_tracker("trackio")


REAL = """
import os, sys
from pathlib import Path

from train.trainer.tracking import Tracker, check_tracker

check_tracker(sys.argv[1])
for resumed in (None, 2):
    tracker = Tracker(Path(os.environ["OUT"]), "test", {"lr": 1.0, "on": None}, "auto", resumed, sys.argv[1])
    assert tracker._run is not None
    for step in (1, 2, 3):
        tracker.log(step + (resumed or 0), {"loss": 1.0 / step})
    tracker.finish()
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tensorboard", "trackio"])
def test_the_real_packages_write_into_out(name: str, tmp_path: Path) -> None:
    """Bug: what the stand-in above takes, the package refuses, or it writes into the home folder."""
    pytest.importorskip(name)
    out, home = tmp_path / "out", tmp_path / "home"
    done = run_script(REAL.replace("sys.argv[1]", repr(name)), out, home)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert (out / name).is_dir()
    assert list(home.rglob("*")) == []


def test_lines_are_on_disk_at_once(tmp_path: Path) -> None:
    """Bug: a killed run loses its last metrics in a buffer."""
    tracker = start(tmp_path)
    tracker.log(1, {"loss": float("nan"), "lr": 0.5})
    assert lines(tmp_path) == [{"step": 1, "loss": None, "lr": 0.5}]
    tracker.finish()


def test_resuming_cuts_the_steps_that_are_trained_again(tmp_path: Path) -> None:
    """Bug: steps after the checkpoint stand twice in the file, or a torn last line breaks it."""
    tracker = start(tmp_path)
    for step in range(1, 6):
        tracker.log(step, {"loss": 1.0})
    tracker.finish()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    resumed = start(tmp_path, resumed_step=3)
    resumed.log(4, {"loss": 0.5})
    resumed.finish()
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4]
    assert lines(tmp_path)[-1]["loss"] == 0.5


@pytest.mark.parametrize(
    "bad", [b'{"step": 2, "loss": "\xff\xfe"}', b'{"step": 2, "lo', b"\0" * 4096, b"[2]", b'{"step": "2"}']
)  # fmt: skip
def test_damage_in_the_middle_is_said_and_the_log_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bad: bytes
) -> None:
    """Bug: bytes that are no UTF-8 block every further start of the run; or lost lines are not mentioned."""
    tracker = start(tmp_path)
    for step in (1, 2, 3):
        tracker.log(step, {"loss": 1.0})
    tracker.finish()
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([whole[0], bad, *whole[2:]]))
    before = path.read_bytes()
    start(tmp_path, resumed_step=3).finish()
    assert [line["step"] for line in lines(tmp_path)] == [1, 3]
    [said] = capsys.readouterr().err.splitlines()
    assert "metrics.jsonl: line 2 is damaged, and 1 of 3 lines are lost" in said
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == before
    start(tmp_path, resumed_step=3).finish()
    assert capsys.readouterr().err == ""  # mended


def test_a_damaged_wandb_id_begins_a_new_wandb_run(tmp_path: Path) -> None:
    """Bug: a file of zeros instead of the id blocks every further start of the run."""
    (tmp_path / "wandb_run_id.txt").write_bytes(b"\0\xff\0")
    fresh = tracking._run_id(tmp_path, resumed=True)
    assert re.fullmatch("[0-9a-f]{8}", fresh)
    assert tracking._run_id(tmp_path, resumed=True) == fresh


def test_a_new_run_starts_a_new_file(tmp_path: Path) -> None:
    """Bug: the metrics of two runs into one folder are mixed."""
    first = start(tmp_path)
    first.log(1, {"loss": 1.0})
    first.finish()
    start(tmp_path).finish()
    assert lines(tmp_path) == []


KEY = "0123456789abcdef" * 2 + "01234567"
"""What W&B takes for a key; it belongs to nobody."""
HOST = "https://wandb.example.com"


@pytest.fixture
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home folder without a login, no variable of W&B, and a wandb that reads both anew."""
    home = tmp_path / "home"
    home.mkdir()
    for name in [x for x in os.environ if x.startswith(("WANDB", "NETRC", "XDG"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    import wandb

    wandb.teardown()
    yield home
    wandb.teardown()


def log_in(host: str = "") -> None:
    """What `wandb login` leaves, written by the installed wandb itself."""
    from wandb.sdk.lib import urls, wbauth

    wbauth.write_netrc_auth(host=host or urls.DEFAULT_BASE_URL, api_key=KEY)


LOGINS: dict[str, tuple[str | None, str, dict[str, str]]] = {
    "wandb login": ("", "", {}),
    "wandb login --host": (HOST, f"base_url = {HOST}", {}),
    "WANDB_BASE_URL": (HOST, "", {"WANDB_BASE_URL": HOST}),
    "a port": ("http://localhost:8080", "", {"WANDB_BASE_URL": "http://localhost:8080/"}),
    "NETRC": ("", "", {"NETRC": "keys"}),
    "WANDB_API_KEY": (None, "", {"WANDB_API_KEY": KEY}),
    "a key of an own server": (None, "", {"WANDB_API_KEY": f"local-{KEY}"}),
    "identity token": (None, "", {"WANDB_IDENTITY_TOKEN_FILE": __file__}),
    "settings file": (None, f"api_key = {KEY}", {}),
}
"""{kind: (server whose key lies in the netrc file, line of W&B's settings file, variables)}."""


@pytest.mark.parametrize("kind", LOGINS)
def test_logins_of_every_kind_are_found(
    kind: str, clean: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a logged-in user's runs silently stay offline, or are told to log in."""
    assert explain_mode("auto")[0] == "offline"
    import wandb

    wandb.teardown()
    host, line, variables = LOGINS[kind]
    for name, value in variables.items():
        monkeypatch.setenv(name, str(clean / value) if name == "NETRC" else value)
    if host is not None:
        log_in(host)
    if line:
        (clean / ".config/wandb").mkdir(parents=True)
        (clean / ".config/wandb/settings").write_text(f"[default]\n{line}\n")
    assert explain_mode("auto") == ("online", [])
    assert explain_mode("online") == ("online", [])
    assert explain_mode("offline") == ("offline", [])


@pytest.mark.parametrize(
    ("entries", "mode"),
    [
        ("machine github.com login x password y\nmachine {host}\n  login user\n  password {key}\n", "online"),
        ("machine {host} login user password {key}", "online"),
        ("default login user password {key}\n", "online"),
        ("machine github.com login x password {key}\n", "offline"),
        ("machine {host} login\n???", "offline"),
        ("", "offline"),
    ],
)  # fmt: skip
def test_a_netrc_file_of_others_is_read_as_wandb_does(entries: str, mode: str, clean: Path) -> None:
    """Bug: a key that stands beside those of other machines, or on several lines, is not found."""
    from wandb.sdk.lib import urls

    host = urls.DEFAULT_BASE_URL.partition("//")[2]
    (clean / ".netrc").write_text(entries.format(host=host, key=KEY))
    found, notes = explain_mode("auto")
    assert (found, len(notes)) == (mode, mode == "offline")


def test_a_login_for_another_server_is_none(clean: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the key of one server is taken for another's, and W&B asks on the terminal."""
    log_in()
    monkeypatch.setenv("WANDB_BASE_URL", HOST)
    mode, [said] = explain_mode("auto")
    assert mode == "offline"
    assert said.startswith(f"W&B: no login for {HOST} is found, so the run is kept offline")
    with pytest.raises(
        UserError, match=f"to be online but there is no login for {HOST}: run `wandb login`"
    ):
        explain_mode("online")


@pytest.mark.parametrize(
    ("mode", "variables", "login", "expected"),
    [
        ("auto", {}, False, "offline"),
        ("auto", {"WANDB_MODE": "offline"}, True, "offline"),
        ("auto", {"WANDB_MODE": "dryrun"}, True, "offline"),
        ("auto", {"WANDB_MODE": "run"}, True, "online"),
        ("auto", {"WANDB_MODE": "shared"}, True, "shared"),
        ("auto", {"WANDB_MODE": "disabled"}, True, "disabled"),
        ("auto", {"WANDB_MODE": ""}, True, "online"),
        ("auto", {"WANDB_DISABLED": "true"}, True, "disabled"),
        ("auto", {"WANDB_DISABLED": "1", "WANDB_MODE": "online"}, True, "disabled"),
        ("auto", {"WANDB_DISABLED": "false"}, True, "online"),
        ("auto", {"WANDB_DISABLED": "0"}, True, "online"),
        ("auto", {"WANDB_DISABLED": "True"}, False, "disabled"),
        ("auto", {"WANDB_DISABLED": "yes", "WANDB_API_KEY": "short"}, False, "disabled"),
        ("auto", {"WANDB_RESUME": "never", "WANDB_PROJECT": ""}, True, "online"),
        ("offline", {"WANDB_API_KEY": "short"}, False, "offline"),
        ("disabled", {"WANDB_MODE": "online"}, False, "disabled"),
        ("offline", {"WANDB_MODE": "dryrun"}, False, "offline"),
    ],
)
def test_variables_stand_above_a_default_that_nobody_gave(
    mode: Any, variables: dict, login: bool, expected: str, clean: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Bug: WANDB_DISABLED and WANDB_MODE=dryrun are ignored or refused; a job without an account waits for a key."""
    if login:
        log_in()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found, notes = explain_mode(mode)
    assert found == expected
    assert len(notes) == (not login and mode == "auto" and expected != "disabled")


def test_a_given_setting_stands_above_the_variables_in_one_line(
    clean: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_in()
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_PROJECT", "theirs")
    said = tracking.check_tracker("wandb", "online", "ours")
    assert said == [
        "wandb online stands above what W&B was told by its variables or settings, offline",
        "project ours stands above WANDB_PROJECT=theirs",
    ]
    assert tracking.check_tracker("wandb", "offline", "") == []
    assert tracking.check_tracker("none", "online", "ours") == []


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"WANDB_MODE": "nonsense"}, "W&B does not take WANDB_MODE (Input should be 'online'"),
        ({"WANDB_RESUME": "maybe"}, "W&B does not take WANDB_RESUME (Input should be 'allow'"),
        ({"WANDB_MODE": "OFFLINE"}, "W&B does not take WANDB_MODE (Input should be 'online'"),
        ({"WANDB_RESUME": "true"}, "W&B does not take WANDB_RESUME (Input should be 'allow'"),
        ({"WANDB_BASE_URL": "wandb.example.com"}, "W&B does not take WANDB_BASE_URL (Input should be a valid URL"),
        ({"WANDB_PROJECT": "a/b"}, "W&B does not take its settings (Invalid project name 'a/b'"),
        ({"WANDB_API_KEY": KEY + "\n"}, "(API key cannot start or end with whitespace): mend its WANDB_ variables"),
        ({"WANDB_API_KEY": f'"{KEY}"'}, "W&B's login is not usable (WANDB_API_KEY invalid: API key may only contain"),
        ({"WANDB_RUN_ID": " a"}, "W&B does not take its settings (Run ID cannot start or end with whitespace)"),
        ({"WANDB_API_KEY": "short"}, "W&B's login is not usable (WANDB_API_KEY invalid: API key must have 40+"),
        ({"WANDB_API_KEY": KEY, "WANDB_IDENTITY_TOKEN_FILE": "t"}, "Both WANDB_API_KEY and WANDB_IDENTITY_TOKEN_FILE"),
        ({"WANDB_IDENTITY_TOKEN_FILE": "/nonexistent"}, "/nonexistent does not exist"),
    ],
)  # fmt: skip
def test_what_wandb_does_not_take_is_one_line(
    variables: dict, says: str, clean: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: hours later, W&B fails on a variable with a mistake in it. No line repeats a key."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as error:
        tracking.check_tracker("wandb")
    assert says in str(error.value)
    assert "\n" not in str(error.value)
    assert KEY not in str(error.value)


def test_a_missing_login_is_said_before_anything_is_loaded(
    clean: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Bug: the features of a whole set are computed before W&B is asked for. Here neither target nor samples exist."""
    settings = DistillConfig(
        target=str(tmp_path / "none"), data=str(tmp_path / "none"), wandb="online", out=str(tmp_path / "out")
    )  # fmt: skip
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    AcceleratorState._reset_state(
        reset_partial_state=True
    )  # an earlier test's precision would be another
    with pytest.raises(UserError, match="W&B is to be online but there is no login"):
        training.train_draft(settings)
    assert not (tmp_path / "out").exists()


USED = """
import os
from pathlib import Path
from train.trainer.tracking import Tracker

out = Path(os.environ["OUT"])
tracker = Tracker(out, os.environ.get("GIVEN", ""), {}, "auto")
run = tracker._run
print([run.project, run.id, run.name, run.group, list(run.tags), run.entity, run.notes, run.job_type])
print([run.settings.mode, run.settings.resume, run.settings.root_dir])
tracker.finish()
"""


@pytest.mark.slow
def test_the_run_is_that_of_the_variables(tmp_path: Path) -> None:
    """Bug: the project, id or folder that a user chose for W&B is overridden by ours."""
    other = tmp_path / "other"
    other.mkdir()
    asked = {
        "PROJECT": "theirs", "RUN_ID": "my-run.1", "NAME": "n", "RUN_GROUP": "g", "TAGS": "a,b", "ENTITY": "e",
        "NOTES": "hello", "JOB_TYPE": "j", "RESUME": "must", "DIR": str(other), "MODE": "dryrun",
    }  # fmt: skip
    variables = {f"WANDB_{k}": v for k, v in asked.items()}
    out = tmp_path / "out"
    done = run_script(USED, out, tmp_path / "home", **variables)
    assert done.returncode == 0, done.stderr
    first, second = (ast.literal_eval(line) for line in done.stdout.splitlines())
    assert first == ["theirs", "my-run.1", "n", "g", ["a", "b"], "e", "hello", "j"]
    assert second == ["offline", "must", str(other)]
    assert [x.name for x in other.glob("wandb/offline-run-*/run-*.wandb")] == ["run-my-run.1.wandb"]
    assert list(out.rglob("*.wandb")) == []
    assert (out / "wandb_run_id.txt").read_text() == "my-run.1\n"
    done = run_script(USED, tmp_path / "given", tmp_path / "h2", GIVEN="ours", **variables)
    assert done.stdout.startswith("['ours', 'my-run.1'")


def test_the_run_id_of_the_variable_stands_above_the_stored_one(tmp_path: Path) -> None:
    """Bug: a job that W&B is to continue under a known id gets one of ours."""
    mine = tracking._run_id(tmp_path, resumed=False)
    assert tracking._run_id(tmp_path, resumed=True) == mine
    assert tracking._run_id(tmp_path, resumed=True, given="job-17.b") == "job-17.b"
    assert tracking._run_id(tmp_path, resumed=True) == "job-17.b"
    assert tracking._run_id(tmp_path, resumed=False) not in (mine, "job-17.b")


class Handed:
    """A run of W&B that keeps what it is handed."""

    def __init__(self) -> None:
        self.metrics: list[str] = []
        self.artifacts: list[tuple[str, str, list[str]]] = []

    def log(self, values: dict[str, float]) -> None:
        self.metrics += values

    def log_artifact(self, artifact: Any) -> None:
        self.artifacts.append((artifact.name, artifact.type, sorted(artifact.manifest.entries)))

    def finish(self) -> None: ...


FILES = [
    ("settings", "settings", ["run.yaml"]),
    ("manifest", "dataset", ["manifest.json"]),
]
DRAFT = (
    "draft", "model", ["config.json", "draftsmith.json", "model.safetensors", "tokenizer.json"],
)  # fmt: skip
METRICS = (
    "step", "accept/tau", "accept/alpha", "accept/alpha_1", "accept/alpha_2", "accept/alpha_3", "accept/alpha_4",
    "train/loss", "train/overlap", "train/top1", "train/grad_norm", "train/lr", "train/tokens_per_second",
    "train/learned_per_second", "train/data_wait_share", "train/peak_memory_gb",
)  # fmt: skip
ASKED = {
    None: 0, "false": 0, "": 0, "yes please": 0, "end": 1, "True": 1, "1": 1, "checkpoint": 2,
}  # fmt: skip
"""{WANDB_LOG_MODEL: 0 for no weights, 1 for the draft's, 2 for those of checkpoints as well}."""


@pytest.fixture(scope="module")
def data(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return worlds.sampled(world, tmp_path_factory.mktemp("set"), "--max_new_tokens", 4)


@pytest.mark.parametrize("value", ASKED)
def test_a_tracker_is_handed_this_and_nothing_else(
    value: str | None,
    world: World,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches weights, or anything new, that leave the machine without being asked for."""
    run, configs = Handed(), []

    def start(out: Path, project: str, config: dict, run_id: str, mode: str) -> Handed:
        configs.append(config)
        return run

    monkeypatch.setattr(tracking, "_start_wandb", start)
    monkeypatch.setattr(tracking, "explain_mode", lambda mode: ("offline", []))
    env = {"WANDB_DATA_DIR": str(tmp_path / "data")}
    env |= {} if value is None else {"WANDB_LOG_MODEL": value}
    monkeypatch.setattr(worlds, "ENV", worlds.ENV | env)
    done = worlds.call(
        "train/distill.py", "--target", world.target, "--data", data, "--draft.init", world.draft,
        "--out", tmp_path / "out", "--loop.steps", 2, "--loop.save_every", 1, "--loop.batch_size", 2,
        "--check.prompts", 1, "--check.max_new_tokens", 4,
    ).ok()  # fmt: skip
    level = ASKED[value]
    expected = [*FILES, DRAFT] if level else FILES
    assert [one for one in run.artifacts if one[0] != "checkpoint"] == expected
    checkpoints = [one[1:] for one in run.artifacts if one[0] == "checkpoint"]
    assert [kind for kind, _ in checkpoints] == ["model"] * (2 if level == 2 else 0)
    assert set(run.metrics) == set(METRICS)
    assert {frozenset(config) for config in configs} == {
        frozenset({*(field.name for field in dataclasses.fields(DistillConfig)), "hardware"})
    }
    copied = [x for x in (tmp_path / "data").rglob("*") if x.is_file()]
    weights = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert all(file.read_bytes() != weights for file in copied)
    assert ("W&B gets the weights too" in done.err) is (level > 0)
    assert ("WANDB_LOG_MODEL=yes please is none of" in done.err) is (value == "yes please")


def test_null_tracker_has_every_method_of_the_tracker() -> None:
    """Bug: a call added to the tracker fails on every process but the first."""

    def public(kind: type) -> set[str]:
        return {name for name in vars(kind) if not name.startswith("_")}

    assert public(NullTracker) == public(Tracker)
