"""Ctrl-C and SIGTERM in the middle of each command: exit code, one line, and the same command goes on."""

import itertools
import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from decode.common import progress
from decode.common.journal import Journal
from decode.model import linear
from tests import worlds
from tests.train.test_sample_command import rows_of
from tests.worlds import ROOT, Done, World, contents
from train.data import python_corpus, sample_store
from train.sampling import rows
from train.trainer.throughput import ThroughputMeter

SIGNALS = {signal.SIGINT: "stopped by Ctrl-C: ", signal.SIGTERM: "stopped by SIGTERM: "}
SAMPLE = ["--max_new_tokens", 24, "--batch_size", 3]
TUNE = ["--ks", "[1, 2, 3]", "--calibrate", "[1, 3]", "--batch_sizes", "[]", "--tree_nodes", "[]"]
DISTILL = ["--loop.steps", 8, "--loop.batch_size", 4, "--loop.eval_every", 0]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return worlds.build(tmp_path_factory.mktemp("world"), 24)


@pytest.fixture(scope="module")
def data(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return worlds.sampled(world, tmp_path_factory.mktemp("data"), *SAMPLE)


def sample_words(world: World) -> list[object]:
    sources = json.dumps([{"kind": "file", "path": str(world.prompts)}])
    return ["train/sample.py", "--target", world.target, "--sources", sources, *SAMPLE]


def distill_words(world: World, data: Path) -> list[object]:
    models = ["--target", world.target, "--draft.init", world.draft, "--data", data]
    return ["train/distill.py", *models, *DISTILL]


def measure_words(world: World, command: str) -> list[object]:
    tasks = json.dumps([{"name": "own", "path": str(world.prompts), "limit": 8}])
    return [
        command, "--target", world.target, "--tasks", tasks, "--temperatures", "[0.0]",
        "--max_new_tokens", 8,
    ]  # fmt: skip


def on_call(
    patch: pytest.MonkeyPatch, place: Any, name: str, number: int, action: Callable[[], None]
) -> None:
    """Does `action` when `place.name` is called for the `number`th time, then calls it."""
    real, count = getattr(place, name), itertools.count(1)

    def calls(*args: Any, **named: Any) -> Any:
        if next(count) == number:
            action()
        return real(*args, **named)

    patch.setattr(place, name, calls)


def stop_at(
    place: Any, name: str, number: int, sent: signal.Signals, out: Path, *words: object
) -> str:
    """Runs the command until that call, in which the signal comes; returns its one line after asserting its end."""
    with pytest.MonkeyPatch.context() as patch:
        on_call(patch, place, name, number, lambda: os.kill(os.getpid(), sent))
        done = worlds.call(*map(str, words), "--out", out)
    assert done.code == 128 + sent, done.err
    assert "Traceback" not in done.err
    last = done.err.splitlines()[-1]
    assert last.startswith(SIGNALS[sent])
    assert done.err.count("stopped by") == 1
    assert str(out) in last
    assert not (out / ".lock").exists()
    assert list(out.rglob("*.tmp")) == []
    return last


def again(out: Path, *words: object) -> Done:
    """The same command once more, to its end."""
    done = worlds.call(*map(str, words), "--out", out).ok()
    return done


@pytest.mark.parametrize("sent", SIGNALS)
def test_sampling_saves_every_finished_answer(
    world: World, data: Path, tmp_path: Path, sent: signal.Signals
) -> None:
    """Catches the loss of all answers since the last shard, of which there is none yet here."""
    words, out = sample_words(world), tmp_path / "out"
    stop_at(rows, "join_turns", 24 + 12, sent, out, *words)  # the 12th answer's
    saved = rows_of(out)
    assert len(saved) == 11
    assert saved.items() <= rows_of(data).items()
    done = again(out, *words)
    assert f"{24 - len(saved)} to answer" in done.err
    assert rows_of(out) == rows_of(data)


def test_finished_answers_are_on_disk_before_the_end(
    world: World, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches all answers of a shard that a kill or a power cut takes; nothing is there twice, and a line says how it
    goes before the first answer is finished."""
    words, out, seen = sample_words(world), tmp_path / "out", []
    monkeypatch.setattr(rows, "KEEP_SECONDS", 0.0)
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    with pytest.MonkeyPatch.context() as patch:
        on_call(patch, rows, "make_row", 13, lambda: seen.append(len(rows_of(out))))
        done = again(out, *words)
    assert 10 <= seen[0] <= 12
    assert rows_of(out) == rows_of(data)
    assert re.search(r"^answering 0/24, 0/s, [1-9]\d* tokens/s$", done.err, re.MULTILINE)
    assert "0 to answer" in again(out, *words).err


def test_a_signal_while_a_shard_is_written_loses_and_repeats_nothing(
    world: World, data: Path, tmp_path: Path
) -> None:
    words, out = [*sample_words(world), "--shard_rows", 6], tmp_path / "out"
    real = sample_store.write_atomically

    def write(path: Path, content: Any) -> None:
        real(path, content)
        if path.suffix == ".parquet" and len(list(out.glob("shards/*"))) == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample_store, "write_atomically", write)
        assert worlds.call(*map(str, words), "--out", out).code == 143
    assert len(rows_of(out)) >= 12
    again(out, *words)
    assert rows_of(out) == rows_of(data)


@pytest.mark.parametrize("sent", SIGNALS)
def test_training_saves_the_step(
    world: World, data: Path, tmp_path: Path, sent: signal.Signals
) -> None:
    """Catches Ctrl-C that loses the steps since the last checkpoint."""
    words, out = distill_words(world, data), tmp_path / "out"
    again(tmp_path / "whole", *words)
    line = stop_at(ThroughputMeter, "add", 3, sent, out, *words)
    assert "step 4 is saved" in line
    assert "from step 4" in again(out, *words).err
    name = "model.safetensors"
    assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize("sent", SIGNALS)
@pytest.mark.parametrize(
    ("command", "more", "result"),
    [
        ("eval/run.py", ["--methods", "[{name: ngram}]"], "report.json"),
        ("eval/tune.py", TUNE, "tuned.json"),
    ],
)
def test_measurements_are_kept(
    world: World, tmp_path: Path, sent: signal.Signals, command: str, more: list[str], result: str
) -> None:
    words, out = [*measure_words(world, command), *more], tmp_path / "out"
    stop_at(Journal, "put", 8, sent, out, *words)
    kept = (out / "journal.jsonl").read_bytes()
    assert kept.count(b"\n") == 7
    again(out, *words)
    assert (out / "journal.jsonl").read_bytes().startswith(kept)
    assert (out / result).is_file()


@pytest.mark.parametrize("sent", SIGNALS)
@pytest.mark.parametrize(
    ("command", "writes"), [("scripts/export.py", "replace"), ("scripts/publish.py", "write_text")]
)
def test_a_folder_that_is_being_written_is_not_there(
    world: World, data: Path, tmp_path: Path, sent: signal.Signals, command: str, writes: str
) -> None:
    """Catches half a folder that looks like a whole one, and a published one that is gone."""
    draft, out = tmp_path / "draft", tmp_path / "to" / "out"
    again(draft, *distill_words(world, data))
    words = [command, "--draft", draft, *(
        ("--format", "hf", "--target", world.target) if "export" in command else ("--repo", "me/x")
    )]  # fmt: skip
    if "publish" in command:
        again(out, *words)
    before = contents(tmp_path)

    def write(self: Path, *args: Any, **named: Any) -> Any:
        if out.parent in self.parents:
            os.kill(os.getpid(), sent)
        return real(self, *args, **named)

    real = getattr(Path, writes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, writes, write)
        done = worlds.call(*map(str, words), "--out", str(out))
    assert (done.code, "Traceback" in done.err) == (128 + sent, False)
    assert contents(tmp_path) == before
    again(out, *words)


@pytest.mark.parametrize("sent", SIGNALS)
def test_an_answer_on_the_terminal(world: World, sent: signal.Signals) -> None:
    from decode.engine.engine import SpeculativeEngine

    with pytest.MonkeyPatch.context() as patch:
        stop = lambda: os.kill(os.getpid(), sent)  # noqa: E731
        on_call(patch, SpeculativeEngine, "speculate", 1, stop)
        done = worlds.call("decode/generate.py", "--target", str(world.target), "--prompt", "a")
    assert done.code == 128 + sent
    assert done.err == SIGNALS[sent].removesuffix(": ") + "\n"


# ---- through accelerate launch ----


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "to", "processes", "command"),
    [
        (signal.SIGINT, "group", 2, "distill"),  # as a terminal does it
        (signal.SIGTERM, "launcher", 2, "sample"),  # as a scheduler does it
    ],
)
def test_through_accelerate_launch(
    world: World, data: Path, tmp_path: Path, sent: signal.Signals, to: str, processes: int,
    command: str,
) -> None:  # fmt: skip
    """Catches workers that go on without their launcher, and workers that are killed before they have saved. The
    launcher's own exit code and traceback are its own: 128 + the signal or 1."""
    out, ready = tmp_path / "out", "checkpoints/latest"
    words = [*distill_words(world, data), "--loop.steps", 200, "--loop.save_every", 20]
    if command == "sample":
        ready = "shards/*.parquet"
        words = sample_words(worlds.build(tmp_path / "world", 200))[:-4]
        words += ["--max_new_tokens", 100, "--shard_rows", 20]
    several = ["--multi_gpu", "--main_process_port", worlds._free_port()]
    launch = ["--num_processes", processes, "--num_machines", 1, "--mixed_precision", "no"]
    launch += ["--dynamo_backend", "no", *(several if processes > 1 else ["--cpu"])]
    command_file, *told = words
    start = [*launch, ROOT / str(command_file), *told, "--out", out]
    with worlds.forked(worlds.launcher(), *start) as [launcher]:
        end = time.monotonic() + worlds.PATIENCE
        while not list(out.glob(ready)):
            assert launcher.poll() is None
            assert time.monotonic() < end
            time.sleep(0.01)
        launcher.send(sent) if to == "launcher" else launcher.send_group(sent)
        done = launcher.end()
        while (out / ".lock").exists() or "stopped by " not in done.err:
            assert time.monotonic() < end, done.err
            time.sleep(0.05)
            done = launcher.end()  # it may end before its child
    assert done.code in (-sent, 128 + sent, 1)
    assert done.err.count("stopped by ") == 1, done.err
    assert SIGNALS[sent] in done.err
    done = again(out, *words)  # any number of processes goes on
    assert "from step 0" not in done.err
    assert ", 200 to answer" not in done.err


@pytest.mark.slow
@pytest.mark.skipif(
    not linear.PACKED_BFLOAT16, reason="Muon multiplies in bf16, which takes minutes on this CPU"
)
def test_building_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches steps lost since the last checkpoint, and other weights after going on."""
    text = " ".join(f"x{i} = {i * i}" for i in range(60))
    for name in ("read_modules", "read_help_topics"):
        monkeypatch.setattr(python_corpus, name, lambda held_out: {"a": text, "b": text[::-1]})
    questions = tmp_path / "questions.jsonl"
    row = json.dumps({"question": "How many?", "answer": "3"})
    questions.write_text((row + "\n") * 500)

    def build(name: str) -> Done:
        return worlds.call(
            "scripts/lab/build_target.py", "--gsm8k", questions, "--work", tmp_path / name / "work",
            "--assets", tmp_path / name, "--compile", "false", "--window", 64, "--short_window", 32,
            "--batch_tokens", 64, "--tokens", 64 * 8,
        )  # fmt: skip

    assert build("whole").code == 0
    with pytest.MonkeyPatch.context() as patch:
        stop = lambda: os.kill(os.getpid(), signal.SIGTERM)  # noqa: E731
        on_call(patch, torch.nn.utils, "clip_grad_norm_", 3, stop)
        done = build("stopped")
    assert done.code == 128 + signal.SIGTERM
    assert done.err.splitlines()[-1].startswith(f"{SIGNALS[signal.SIGTERM]}step 3 is saved; ")
    done = build("stopped").ok()
    assert "resumed at step 3 of 8" in done.out
    weights = [tmp_path / name / "target" / "model.safetensors" for name in ("whole", "stopped")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert list(tmp_path.rglob(".lock")) == []
