"""What happens to a training while it runs for days: signals, kills, full memory, several processes, the best draft."""

import json
import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file

from eval.metrics.roofline import GpuSpec
from tests import hub, worlds
from tests.train.test_distill_command import (
    COMMAND,
    STEPS,
    WEIGHTS,
    arguments,
    assert_same_run,
    distill,
    facts_of,
    losses_of,
    metrics_of,
    norms_of,
)
from tests.worlds import Done, World
from train.data import mixture, sample_store
from train.data.manifest import read_manifest, write_manifest
from train.families import causal
from train.families.settings.causal import CausalSettings
from train.planning.estimates import FlopsCounter
from train.settings.training import LoopConfig
from train.trainer import checkpoint, loop, throughput
from train.trainer.acceptance_eval import AcceptanceEval
from train.trainer.settings import DistillConfig
from train.trainer.throughput import ThroughputMeter

pytestmark = pytest.mark.slow  # each is a run of many steps, ended in some way

Train = Callable[..., Done]
SPARSE = ["--loop.log_every", 4, "--loop.save_every", STEPS]
"""Nothing is logged or saved on the way but at step 4."""


@pytest.fixture
def train(world: World, data: Path, tmp_path: Path) -> Train:
    """Trains into tmp_path / "out"."""
    return lambda *more: distill(world, data, tmp_path / "out", *more)


def at_step(step: int, action: Callable[[], None]) -> Callable[..., None]:
    """In place of Meter.add: does `action` once, when `step` steps of this process are done."""
    real, count = ThroughputMeter.add, [0]

    def add(self: ThroughputMeter, *args: Any) -> None:
        count[0] += 1
        if count[0] == step:
            action()
        real(self, *args)

    return add


# ---- SIGTERM ----


def test_sigterm_saves_after_the_step_and_the_same_command_goes_on(
    world: World, data: Path, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches work lost since the last checkpoint, a line of the log over fewer steps, and exit code 0."""
    whole = tmp_path / "whole"
    assert distill(world, data, whole, *SPARSE).code == 0
    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        patch.setattr(
            ThroughputMeter, "add", at_step(5, lambda: os.kill(os.getpid(), signal.SIGTERM))
        )
        done = train(*SPARSE)
    assert done.code == 128 + signal.SIGTERM
    assert "stopped by SIGTERM: step 6 is saved" in done.err
    assert signal.getsignal(signal.SIGTERM) is before
    assert not (tmp_path / "out" / WEIGHTS).exists()
    done = train(*SPARSE).ok()
    assert "from step 6" in done.err
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == (whole / WEIGHTS).read_bytes()
    for names in (["train/loss", "train/overlap"], ["accept/tau"]):
        assert metrics_of(tmp_path / "out", *names) == metrics_of(whole, *names)
    assert facts_of(tmp_path / "out")["measured_in_training"] == metrics_last(whole)
    here, there = (facts_of(out)["cost"] for out in (tmp_path / "out", whole))
    assert here["tokens"] == there["tokens"] > 0  # those before the stop are counted
    assert here["wall_seconds"] > 0


def metrics_last(out: Path) -> dict[str, float]:
    """The last measurement in the log."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if "accept/tau" in line][-1]
    return {name: value for name, value in last.items() if name != "step"}


def test_a_finished_run_keeps_its_measurement(train: Train, tmp_path: Path) -> None:
    """Catches facts that a second start empties: nothing is measured in it."""
    assert train().code == 0
    measured = facts_of(tmp_path / "out")["measured_in_training"]
    assert measured["accept/tau"] >= 1
    assert train().code == 0
    assert facts_of(tmp_path / "out")["measured_in_training"] == measured


# ---- several processes ----


@pytest.fixture(scope="module")
def of_two(world: World, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft that two processes trained from start to end."""
    out = tmp_path_factory.mktemp("two") / "out"
    done = worlds.fork(COMMAND, *arguments(world, data, out), processes=2).ok()
    assert len([line for line in done.out.splitlines() if line.startswith("{")]) == 1
    assert done.err.count("samples (0 dropped)") == done.err.count("draft saved") == 1
    return out


def stopped(world: World, data: Path, out: Path, sent: signal.Signals) -> Done:
    """How two processes end that get this signal, one after the other, as soon as a checkpoint is there."""
    latest = out / "checkpoints" / "latest"
    with worlds.forked(COMMAND, *arguments(world, data, out), processes=2) as forks:
        end = time.monotonic() + worlds.PATIENCE
        while not latest.is_file():
            assert all(fork.poll() is None for fork in forks), [fork.end() for fork in forks]
            assert time.monotonic() < end
            time.sleep(0.01)
        for fork in forks:
            fork.send(sent)
            time.sleep(0.05)
        ends = [fork.end() for fork in forks]
    assert not (out / WEIGHTS).exists()
    assert 0 not in [done.code for done in ends]
    return Done(ends[0].code, "", "".join(done.err for done in ends))


def test_two_processes_killed_in_mid_run_end_with_the_same_bits(
    world: World, data: Path, of_two: Path, tmp_path: Path
) -> None:
    """Catches a checkpoint that holds one process's state only."""
    out = tmp_path / "out"
    assert "stopped by SIGTERM" not in stopped(world, data, out, signal.SIGKILL).err
    done = worlds.fork(COMMAND, *arguments(world, data, out), processes=2).ok()
    assert "from step 0" not in done.err
    assert_same_run(out, of_two)


def test_what_two_processes_saved_one_goes_on_with(
    world: World, data: Path, of_two: Path, tmp_path: Path
) -> None:
    """Catches processes that stop after different steps, and a checkpoint that only as many processes can read."""
    out = tmp_path / "out"
    done = stopped(world, data, out, signal.SIGTERM)
    assert (done.code, done.err.count("stopped by SIGTERM")) == (143, 1), done.err
    done = distill(world, data, out).ok()
    assert "from step 0" not in done.err
    assert facts_of(out)["processes"] == 1
    assert losses_of(out) == pytest.approx(losses_of(of_two), abs=1e-5)
    assert norms_of(out) == pytest.approx(norms_of(of_two), rel=1e-4)


@pytest.mark.parametrize("why", ["another run's folder", "a draft without finite weights"])
def test_a_refusal_ends_every_process_with_one_line(
    world: World, data: Path, tmp_path: Path, why: str
) -> None:
    """Catches process 1 that waits for ever for a main process that has refused, and a line for every process."""
    out = tmp_path / "out"
    settings = arguments(world, data, out)
    if why == "another run's folder":
        assert distill(world, data, out, "--loop.lr", 1e-5).code == 0
    else:
        settings += ["--loop.lr", 10, "--loop.weight_decay", 100, "--loop.warmup", 0]
        settings += ["--loop.steps", 40]
    with worlds.forked(COMMAND, *settings, processes=2) as forks:
        ends = [fork.end() for fork in forks]
    assert [done.code for done in ends] == [2, 2], "\n\n".join(done.err for done in ends)
    errors = [sum(x.startswith("error: ") for x in done.err.splitlines()) for done in ends]
    assert errors == [1, 0]
    assert all("Traceback" not in done.err for done in ends)


# ---- the best draft ----


def script(monkeypatch: pytest.MonkeyPatch, taus: list[float]) -> None:
    """Measurements say these numbers, one after the other."""
    left = iter(taus)
    measured = lambda *_: {"accept/tau": next(left), "accept/alpha": 0.5}  # noqa: E731
    monkeypatch.setattr(AcceptanceEval, "measure", measured)


def test_the_best_draft_is_kept_and_saved(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches the last draft saved as the best one, and a best checkpoint that is pruned with the old ones."""
    settings = ["--loop.eval_every", 1, "--loop.keep_best", "true", "--loop.keep", 1]
    out = tmp_path / "out"
    script(monkeypatch, [1.5, 1.7, 2.5, 1.6, 2.4, 2.3, 2.2, 2.1])
    done = train(*settings).ok()
    assert "the draft is that of step 3" in done.err
    kept = sorted(path.name for path in (out / "checkpoints").glob("step-*"))
    assert kept == ["step-000003", "step-000006", f"step-{STEPS:06d}"]  # two are kept at least
    weights, best, last = (
        load_file(folder / WEIGHTS)
        for folder in (out, *(out / "checkpoints" / kept[i] for i in (0, -1)))
    )
    assert all(torch.equal(weights[name.removeprefix("lm.")], best[name]) for name in best)
    assert not all(torch.equal(weights[name.removeprefix("lm.")], last[name]) for name in last)
    assert facts_of(out)["trained_steps"] == 3
    assert facts_of(out)["measured_in_training"]["accept/tau"] == 2.5
    script(monkeypatch, [])
    (out / WEIGHTS).unlink()
    assert train(*settings).code == 0  # a finished run chooses the same
    assert all(torch.equal(load_file(out / WEIGHTS)[name], weights[name]) for name in weights)


def test_the_best_is_remembered_over_a_kill(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a run that after a kill takes its first measurement for the best."""
    settings = ["--loop.eval_every", 2, "--loop.keep_best", "true"]
    script(monkeypatch, [1.5, 2.5, 1.6])
    with monkeypatch.context() as patch:
        patch.setattr(
            ThroughputMeter, "add", at_step(6, lambda: os.kill(os.getpid(), signal.SIGTERM))
        )
        assert train(*settings).code == 143
    script(monkeypatch, [2.0])
    assert train(*settings).code == 0
    assert facts_of(tmp_path / "out")["trained_steps"] == 4


# ---- memory and numbers that run out ----


@pytest.mark.parametrize(
    ("size", "named"),
    [(8, "lower loop.micro_batch from 8 to 4"), (1, "lower loop.max_length from 512")],
)
def test_full_memory_is_one_line(
    train: Train, monkeypatch: pytest.MonkeyPatch, size: int, named: str
) -> None:
    """Catches a page of traceback after hours, and advice that no longer helps."""

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(causal.CausalTrainer, "forward", full)
    done = train("--loop.micro_batch", size, "--loop.max_length", 512)
    assert done.code == 2
    line = done.err.splitlines()[-1]
    assert line.startswith("error: out of memory: ")
    assert named in line
    assert "Traceback" not in done.err


def test_a_gradient_that_is_not_finite_is_refused(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches weights that become NaN although every loss that was looked at was finite."""
    count = [0]
    real = Accelerator.clip_grad_norm_

    def ruined(self: Accelerator, *args: Any) -> Any:
        count[0] += 1
        return torch.tensor(float("inf")) if count[0] == 3 else real(self, *args)

    monkeypatch.setattr(Accelerator, "clip_grad_norm_", ruined)
    done = train()
    assert done.code == 2
    assert "the gradient's norm is inf at step 3" in done.err.splitlines()[-1]
    assert "step-000002" in done.err.splitlines()[-1]
    assert not (tmp_path / "out" / WEIGHTS).exists()
    monkeypatch.undo()
    assert "from step 2" in train().err


@pytest.mark.parametrize("loss", ["nan", "inf"])
def test_a_loss_that_is_no_number_before_any_step_is_not_the_learning_rates(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    """Bug: it is answered with "lower loop.lr", which had no part in it."""
    real = loop._reduce_metrics
    monkeypatch.setattr(loop, "_reduce_metrics", lambda *args: {**real(*args), "loss": float(loss)})
    done = train("--target_dtype", "bfloat16")
    assert done.code == 2
    line = done.err.splitlines()[-1]
    assert f"the loss is {loss} at step 1, before any weight has changed: target" in line
    assert (
        "in bfloat16 gives numbers for each row: the draft began with weights that give none"
        in line
    )
    assert "loop.lr" not in line
    assert not (tmp_path / "out" / WEIGHTS).exists()


@pytest.mark.parametrize("family", ["causal", "medusa"])
def test_a_row_that_the_teacher_cannot_read_is_named(
    world: World, data: Path, tmp_path: Path, family: str
) -> None:
    """Bug: a row whose states overflow in the target's float16 is met after some steps, and answered with "lower
    loop.lr" and the loss of a checkpoint. Before, the first step alone blamed the teacher, and no row was named."""
    rows = sorted(sample_store.read_shards(data), key=lambda row: -row["loss_spans"][0][1])
    common = set().union(*(row["input_ids"] for row in rows[1:]))
    token = next(t for t in range(12, 268) if t not in common | {*rows[0]["input_ids"]})
    folder = worlds.copied(world, tmp_path / "world")
    weights = load_file(folder.target / WEIGHTS)
    weights["model.embed_tokens.weight"][token] = 65504.0
    weights["model.layers.0.mlp.down_proj.weight"] *= 200.0
    save_file(weights, folder.target / WEIGHTS, metadata={"format": "pt"})
    bad = rows[0] | {"input_ids": [token, *rows[0]["input_ids"][1:]]}  # type: ignore[operator]
    out = tmp_path / "set"
    sample_store.write_shard(out, [bad, *rows[1:]])
    write_manifest(out, read_manifest(data))
    batches = mixture.load(str(out), 512)[0].global_batch
    met = next(n for n in range(16) if bad["id"] in [x["id"] for x in batches(8, 0, n)]) + 1
    more = ["--draft.family", family, "--target_dtype", "float16", "--loop.steps", 16]
    more += ["--draft.init", ""] if family == "medusa" else []
    done = distill(
        folder, out, tmp_path / "out", *more, "--loop.save_every", 1, "--allow_changed", "true"
    )
    assert done.code == 2
    line = done.err.splitlines()[-1]
    assert (
        f"at step {met}, because target '{folder.target}' in float16 gives NaN or infinity for row {bad['id']} of"
        in line
    )
    assert "loop.lr" not in line
    kept = checkpoint.latest_checkpoint(tmp_path / "out")
    assert (kept is None) == (met == 1)
    assert kept is None or kept.name == f"step-{met - 1:06d}"


# ---- going on ----


def test_checkpoints_of_another_tokenizer_or_draft_are_refused(
    train: Train, tmp_path: Path
) -> None:
    """Catches weights that fit and mean other tokens, and a traceback where they do not fit."""
    assert train("--loop.steps", 2).code == 0
    contents = tmp_path / "out" / "checkpoints" / "step-000002" / checkpoint.CONTENTS
    settings = (tmp_path / "out" / "run.yaml").read_text()
    other = ["--draft.init", "", "--draft.layers", "[1]", "--resume", "true"]
    done = train(*other)
    assert done.code == 2
    assert "is of another draft" in done.err.splitlines()[-1]
    (tmp_path / "out" / "run.yaml").write_text(settings)
    own = json.loads(contents.read_text())
    del own["sha256"]  # as earlier versions wrote it, which had no checksum of this file
    contents.write_text(json.dumps(own | {"tokenizer": "0" * 16}))
    error = train("--resume", "true").error()
    assert "0" * 16 in error
    assert own["tokenizer"] in error
    assert (tmp_path / "out" / "run.yaml").read_text() == settings


def test_what_a_kill_left_half_written_is_cleaned(train: Train, tmp_path: Path) -> None:
    """Catches gigabytes of half a checkpoint, or of half a shard, that nothing overwrites later."""
    out, features = tmp_path / "out", tmp_path / "features"
    settings = ["--loop.steps", 2, "--loop.eval_every", 0, "--features", features]
    assert train(*settings).code == 0
    shard, *_ = sorted(features.rglob("*.safetensors"))
    shard.unlink()  # as if killed before it was there
    checkpoint_left = out / "checkpoints" / "step-000099.tmp" / "optimizer.bin"
    shards_left = [out / "on_policy" / "x" / "shards" / "a.parquet.tmp"]
    shards_left += [shard.with_name("000099.safetensors.tmp")]
    for left in (checkpoint_left, *shards_left):
        left.parent.mkdir(parents=True, exist_ok=True)
        left.write_bytes(b"half")
    train(*settings).ok()
    assert list(tmp_path.rglob("*.tmp")) == []


def test_half_a_shard_of_samples_is_cleaned(world: World, tmp_path: Path) -> None:
    """Catches files that grow in number with every kill of sampling."""
    sources = json.dumps([{"kind": "file", "path": str(world.prompts), "limit": 2}])
    settings = ["--target", world.target, "--sources", sources, "--out", tmp_path / "samples"]
    command = ["train/sample.py", *settings, "--max_new_tokens", 2]
    assert worlds.call(*command).code == 0
    left = tmp_path / "samples" / "shards" / "zzz.parquet.tmp"
    left.write_bytes(b"half")
    assert worlds.call(*command).code == 0
    assert not left.exists()


# ---- settings and the log ----


def test_epochs_are_counted_in_steps(data: Path, train: Train, tmp_path: Path) -> None:
    """Catches epochs that forget the last batch, or the batch size."""
    assert train("--loop.epochs", 0.5, "--loop.eval_every", 0).code == 0
    steps = -(-len(sample_store.read_shards(data)) // 2 // 8)
    assert len(losses_of(tmp_path / "out")) == steps
    assert facts_of(tmp_path / "out")["training"]["loop"]["steps"] == steps


def test_speed_and_memory_are_logged(train: Train, tmp_path: Path) -> None:
    """Catches speeds of padding, or of measuring and saving; and a share of arithmetic that nobody can know."""
    assert train("--loop.eval_every", 1).code == 0
    names = ("tokens_per_second", "learned_per_second", "data_wait_share", "peak_memory_gb")
    lines = metrics_of(tmp_path / "out", *(f"train/{name}" for name in names))
    assert len(lines) == STEPS
    for _, read, learned, waited, memory in lines:
        assert read > learned > 0
        assert 0 <= waited < 1
        assert 0.01 < memory < 100
    assert metrics_of(tmp_path / "out", "train/mfu") == []


def test_the_meter_divides_what_it_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a share of one GPU that eight have earned, steps that count again at the next line, and fp32 that is
    measured against bf16."""
    monkeypatch.setattr(
        throughput, "gpu_peaks", lambda device: GpuSpec(1.0, 1.0, bf16=2e6, fp32=1e6)
    )
    rows: list[Any] = [{"input_ids": range(10), "loss_spans": [[4, 10]]}]
    asked = []

    def work(rows: Sequence[Any]) -> dict[str, float]:
        asked.append(len(rows))
        return {"bfloat16": 4e6, "float32": 2e6}

    measured = ThroughputMeter(torch.device("cpu"), 8, work)
    for _ in range(2):
        measured.add(rows, 0.5, 0.1)
        measured.add(rows, 1.5, 0.3)
        found = measured.flush()
        assert found["tokens_per_second"] == 10.0
        assert found["learned_per_second"] == 6.0
        assert found["data_wait_share"] == pytest.approx(0.2)
        assert found["mfu"] == pytest.approx(2 * (4 / 2 + 2 / 1) / 2.0 / 8)
    assert asked == [1] * 4  # once a step: what was written since then is told once


@pytest.mark.parametrize("lora", [0, 8])
def test_arithmetic_for_mfu_is_that_of_the_models(lora: int, data: Path) -> None:
    """Catches a share that leaves the target out, or that counts weights which have no gradient as if they had one."""
    target, draft = str(worlds.ROOT / "assets" / "target"), str(worlds.ROOT / "assets" / "draft")
    settings = DistillConfig(target=target, draft=CausalSettings(init=draft, lora_rank=lora))
    rows: list[Any] = [{"input_ids": range(100), "loss_spans": [[1, 100]]}] * 4
    head = math.prod(load_file(Path(target) / WEIGHTS)["model.embed_tokens.weight"].shape)
    sizes = []
    for name in (target, draft):
        weights = load_file(Path(name) / WEIGHTS)
        if "lm_head.weight" in weights:  # else the embedding is the head
            weights.pop("model.embed_tokens.weight")  # which is read, not multiplied
        sizes.append(sum(value.numel() for value in weights.values()))
    of_weights = 2 * sizes[0] + (4 if lora else 6) * sizes[1]

    def work(**changes: Any) -> dict[str, float]:
        return FlopsCounter(replace(settings, **changes), mixed=True).count(rows)

    plain = work()
    assert sum(plain.values()) == pytest.approx(400 * of_weights, rel=0.25)
    assert plain["float32"] == pytest.approx(400 * 2 * (sizes[0] - head), rel=0.25)
    if lora > 0:
        return
    same = work(target_dtype="bfloat16")
    assert same["float32"] == 0
    assert same["bfloat16"] == pytest.approx(sum(plain.values()))
    # Stored states spare the target's layers, and stored laws its head as well.
    half = work(features="somewhere")
    assert half["float32"] == 0
    assert half["bfloat16"] == plain["bfloat16"]
    none = work(features="somewhere", features_top=8)
    assert half["bfloat16"] - none["bfloat16"] == 4 * 99 * 2 * head


def test_every_gpu_is_found_by_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an L40S that counts as an L4, an A100 as an A10, and a card of which nothing is known."""
    names = {"NVIDIA L40S": 362e12, "NVIDIA A100-SXM4-80GB": 312e12, "NVIDIA L4": 121e12}
    names |= {
        "NVIDIA A10G": 70e12, "NVIDIA H200 NVL": 835e12, "NVIDIA H100 PCIe": 756e12,
        "NVIDIA H100 80GB HBM3": 989e12,
    }  # fmt: skip
    for name, peak in names.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        found = throughput.gpu_peaks(torch.device("cuda"))
        assert found is not None
        assert found.bf16 == peak
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Voodoo 2")
    assert throughput.gpu_peaks(torch.device("cuda")) is None
    assert throughput.gpu_peaks(torch.device("cpu")) is None


def test_keeping_one_epoch_apart_from_steps() -> None:
    """Catches rounding that drops the last part of an epoch."""
    assert LoopConfig(epochs=3, batch_size=8).resolve_epochs(25).steps == 10
    assert LoopConfig(steps=7).resolve_epochs(25).steps == 7


# ---- a published draft ----


def test_a_published_draft_is_trained_on(world: World, data: Path, tmp_path: Path) -> None:
    """Catches a hub name that is taken for a folder, or whose weights are not those that training starts from."""
    out = tmp_path / "out"
    with hub.serving() as server:
        repo = server.repos["model", "me/draft"] = hub.Repo(False)
        files = {path.name: path.read_bytes() for path in world.draft.iterdir() if path.is_file()}
        repo.commit(repo.files | files)
        env = hub.environment(server, tmp_path / "home")
        more = [
            "--draft.init", "me/draft", "--loop.lr", 1e-30, "--loop.steps", 2, "--loop.eval_every",
            0,
        ]  # fmt: skip
        worlds.run(COMMAND, *arguments(world, data, out), *more, env=env).ok()
        assert server.sent("GET", WEIGHTS)
    before, after = load_file(world.draft / WEIGHTS), load_file(out / WEIGHTS)
    assert all(torch.equal(value, after[name]) for name, value in before.items())
