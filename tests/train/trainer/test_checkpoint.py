"""Damaged checkpoints: the run goes back to the intact one before, says so, and ends with the same bits."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import worlds
from tests.worlds import Done, World, contents
from train.trainer import checkpoint

STEPS, WEIGHTS = 8, "model.safetensors"


def distill(world: World, data: Path, out: Path, *more: object) -> Done:
    """Saves every second step and keeps all checkpoints."""
    return worlds.call(
        "train/distill.py", "--target", world.target, "--data", data, "--draft.init", world.draft,
        "--out", out, "--loop.steps", STEPS, "--loop.batch_size", 8, "--loop.micro_batch", 8,
        "--loop.warmup", 2, "--loop.lr", 3e-3, "--loop.log_every", 1, "--loop.save_every", 2,
        "--loop.eval_every", 0, "--loop.keep", 9, *more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(world: World, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    distill(world, data, out).ok()
    return out


@pytest.fixture
def stopped(undisturbed: Path, tmp_path: Path) -> Path:
    """The run as it was when it had saved steps 2, 4 and 6."""
    out = tmp_path / "out"
    shutil.copytree(undisturbed, out)
    run = (out / "run.yaml").read_text()
    (out / "run.yaml").write_text(run.replace(str(undisturbed), str(out)))
    shutil.rmtree(out / "checkpoints" / "step-000008")
    (out / "checkpoints" / "latest").write_text("step-000006\n")
    for name in (WEIGHTS, "draftsmith.json"):
        (out / name).unlink()
    return out


def goes_on(world: World, data: Path, undisturbed: Path, out: Path, step: int) -> str:
    """The warning of a run that resumes from `step` and ends as the undisturbed one; "" if there is none."""
    done = distill(world, data, out).ok()
    assert f"from step {step}" in done.err
    assert (out / WEIGHTS).read_bytes() == (undisturbed / WEIGHTS).read_bytes()
    shown = [
        [(x["step"], x["train/loss"]) for x in map(json.loads, (run / "metrics.jsonl").open())]
        for run in (out, undisturbed)
    ]
    assert shown[0] == shown[1]
    said = [line for line in done.err.splitlines() if line.startswith("warning: ")]
    assert len(said) < 2
    return said[0] if said else ""


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def other_step(path: Path) -> None:
    """Valid JSON with one digit changed."""
    path.write_text(path.read_text().replace('"step": 6', '"step": 5'))


DAMAGES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "flipped weights": (WEIGHTS, lambda path: worlds.flip_byte(path, -9), "is damaged"),
    "truncated moments": ("optimizer.bin", truncate, "is damaged"),
    "no random states": ("random_states_0.pkl", Path.unlink, "is missing"),
    "torn state": ("contents.json", truncate, "is damaged or missing"),
    "no state": ("contents.json", Path.unlink, "is damaged or missing"),
    "another step": ("contents.json", other_step, "is damaged or missing"),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_it_goes_back_to_the_intact_one_before(
    world: World, data: Path, undisturbed: Path, stopped: Path, what: str
) -> None:
    """Bug: a damaged checkpoint ends the run for good, although an intact one lies beside it."""
    file, damage, message = DAMAGES[what]
    damage(stopped / "checkpoints" / "step-000006" / file)
    said = goes_on(world, data, undisturbed, stopped, 4)
    assert f"step-000006: {file} {message}" in said
    assert "goes on from the intact step-000004" in said


def test_several_damaged_ones_are_passed_over(
    world: World, data: Path, undisturbed: Path, stopped: Path
) -> None:
    """Bug: only one checkpoint back is tried."""
    for step in ("step-000006", "step-000004"):
        truncate(stopped / "checkpoints" / step / WEIGHTS)
    said = goes_on(world, data, undisturbed, stopped, 2)
    assert "step-000006" in said
    assert "step-000004" in said


def test_without_an_intact_one_it_is_refused(world: World, data: Path, stopped: Path) -> None:
    """Bug: a run begins anew, and deletes what might have been restored, because all checkpoints are damaged."""
    for path in (stopped / "checkpoints").glob("step-*"):
        truncate(path / WEIGHTS)
    before = contents(stopped / "checkpoints")
    error = distill(world, data, stopped).error()
    assert f"step-000002: {WEIGHTS} is damaged" in error
    assert "no intact checkpoint is left: restore one from a copy" in error
    assert contents(stopped / "checkpoints") == before


def link_out(pointer: Path) -> None:
    outside = pointer.parents[2] / "outside"
    outside.write_text("step-000099\n")
    pointer.unlink()
    pointer.symlink_to(outside)


POINTERS: dict[str, Callable[[Path], object]] = {
    "empty": lambda pointer: pointer.write_text(""),
    "zeros": lambda pointer: pointer.write_bytes(b"\0\xff\0"),
    "missing step": lambda pointer: pointer.write_text("step-000099\n"),
    "outside": lambda pointer: pointer.write_text("../../elsewhere/step-000002\n"),
    "absolute": lambda pointer: pointer.write_text("/step-000002\n"),
    "itself": lambda pointer: pointer.write_text(".\n"),
    "link": link_out,
    "absent": Path.unlink,
}


@pytest.mark.parametrize("what", POINTERS)
def test_a_pointer_to_nothing_is_said(
    world: World, data: Path, undisturbed: Path, stopped: Path, what: str
) -> None:
    """Bug: an empty `latest` starts the run over or ends in a traceback; one that leads out is followed."""
    POINTERS[what](stopped / "checkpoints" / "latest")
    said = goes_on(world, data, undisturbed, stopped, 6)
    assert "checkpoints/latest " in said
    assert "goes on from the intact step-000006" in said
    assert (stopped / "checkpoints" / "latest").read_text() == "step-000008\n"
    assert not (stopped / "checkpoints" / "latest").is_symlink()


def test_a_checkpoint_that_is_a_link_is_left_alone(
    world: World, data: Path, undisturbed: Path, stopped: Path
) -> None:
    """Bug: a link to another run's checkpoint is resumed from, or its files are deleted when it is written again."""
    outside = stopped.with_name("other-run")
    (stopped / "checkpoints" / "step-000006").rename(outside)
    (stopped / "checkpoints" / "step-000006").symlink_to(outside)
    before = contents(outside)
    assert "step-000004" in goes_on(world, data, undisturbed, stopped, 4)
    assert contents(outside) == before
    assert not (stopped / "checkpoints" / "step-000006").is_symlink()


def test_two_are_kept_at_least(world: World, data: Path, tmp_path: Path) -> None:
    """Bug: with loop.keep 1 a damaged checkpoint is the end of the run."""
    assert distill(world, data, tmp_path / "out", "--loop.keep", 1).code == 0
    left = sorted(path.name for path in (tmp_path / "out" / "checkpoints").iterdir())
    assert left == ["latest", "step-000006", "step-000008"]


def test_a_ruined_checkpoint_is_not_gone_on_from(stopped: Path) -> None:
    """Bug: a kill while the weights of a diverged run are deleted leaves them as the newest checkpoint."""
    checkpoint.discard_checkpoint(stopped, 6)
    latest = checkpoint.latest_checkpoint(stopped)
    assert latest == stopped / "checkpoints" / "step-000004"
    for step in (4, 2):
        checkpoint.discard_checkpoint(stopped, step)
    assert checkpoint.latest_checkpoint(stopped) is None
    assert list((stopped / "checkpoints").iterdir()) == []


def test_a_damaged_best_checkpoint_is_said(
    world: World, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the draft with the best τ is read from a damaged file at the end of the training."""
    best = ["--loop.keep_best", "true", "--loop.eval_every", 2, "--check.prompts", 2]
    best += ["--check.max_new_tokens", 2]
    out = tmp_path / "out"
    measured = iter([2.0, 1.0, 1.0, 1.0])
    monkeypatch.setattr(
        "train.trainer.acceptance_eval.AcceptanceEval.measure",
        lambda self, draft: {"accept/tau": next(measured)},
    )
    save = checkpoint.save

    def save_and_damage(*args: object) -> None:
        save(*args)  # type: ignore[arg-type]
        if args[2].step == STEPS:  # type: ignore[attr-defined]
            truncate(out / "checkpoints" / "step-000002" / WEIGHTS)

    monkeypatch.setattr(checkpoint, "save", save_and_damage)
    done = distill(world, data, out, *best)
    assert done.code == 2
    line = done.err.splitlines()[-1]
    assert f"step-000002, whose τ was best: {WEIGHTS} is damaged" in line
    assert "--loop.keep_best false" in line
    monkeypatch.setattr(checkpoint, "save", save)
    distill(world, data, out, "--loop.keep_best", "false", "--resume", "true").ok()
    assert (out / WEIGHTS).is_file()


def test_checkpoints_of_an_earlier_version_are_read(
    world: World, data: Path, undisturbed: Path, stopped: Path
) -> None:
    """Bug: contents.json without its own checksum is taken for damaged."""
    path = stopped / "checkpoints" / "step-000006" / "contents.json"
    content = json.loads(path.read_text())
    del content["sha256"]
    path.write_text(json.dumps(content))
    assert goes_on(world, data, undisturbed, stopped, 6) == ""
