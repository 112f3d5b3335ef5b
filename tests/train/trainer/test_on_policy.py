"""Rows that the draft writes itself, by the real command: its words, the target's labels, the same after a kill."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from decode.model.runner import ModelRunner
from eval.metrics.roofline import GpuSpec
from tests import worlds
from tests.worlds import EOS, Done, World
from train.data import sample_store
from train.data.sample_store import SampleRow
from train.families.settings.causal import CausalSettings
from train.planning import resources
from train.planning.shape_run import ShapeRun
from train.trainer import throughput
from train.trainer.on_policy import OnPolicyBuffer
from train.trainer.settings import DistillConfig

pytestmark = pytest.mark.slow  # each trains a draft on texts that it writes

COMMAND = "train/distill.py"
STEPS, EVERY, BATCH = 12, 4, 8


@pytest.fixture(scope="module")
def undisturbed(world: World, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    distill(world, data, out).ok()
    return out


def arguments(world: World, data: Path, out: Path) -> list[object]:
    """Checkpoints fall between the rounds, so that a resumed run needs rows of weights that are gone."""
    return [
        "--target", world.target, "--data", data, "--draft.init", world.draft, "--out", out,
        "--loop.steps", STEPS, "--loop.batch_size", BATCH, "--loop.warmup", 100, "--loop.lr", 0.1,
        "--loop.log_every", 1, "--loop.save_every", 3, "--loop.eval_every", 0,
        "--on_policy.share", 0.5, "--on_policy.every", EVERY, "--on_policy.max_new_tokens", 16,
    ]  # fmt: skip


def distill(world: World, data: Path, out: Path, *more: object) -> Done:
    return worlds.call(COMMAND, *arguments(world, data, out), *more)


def rounds(out: Path) -> dict[str, dict[str, SampleRow]]:
    """{folder: {id: row}} of what the draft wrote."""
    return {
        folder.name: {row["id"]: row for row in sample_store.read_shards(folder)}
        for folder in sorted((out / "on_policy").iterdir())
    }


def listed(out: Path) -> dict[str, dict[str, Any]]:
    return {
        folder: {name: {**row, "input_ids": list(row["input_ids"])} for name, row in rows.items()}
        for folder, rows in rounds(out).items()
    }


def losses(out: Path) -> list[float]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["train/loss"] for line in lines if "train/loss" in line]


def test_rounds_hold_what_their_steps_read(undisturbed: Path) -> None:
    """Bug: rows are written that no step reads, or a step's share is another one."""
    found = rounds(undisturbed)
    assert list(found) == ["step-000000-16", "step-000004-16", "step-000008-16"]
    numbers = [int(name.split("/")[1]) for rows in found.values() for name in rows]
    assert sorted(numbers) == list(range(STEPS * BATCH // 2))
    for row in found["step-000000-16"].values():
        [[start, end]] = row["loss_spans"]
        assert row["origin"] == "draft"
        assert 0 < start < end == len(row["input_ids"]) <= start + 16


def test_killed_and_started_again_ends_with_the_same_bits(
    world: World, data: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """Bug: a run that goes on in mid-round writes the rest of it with later weights."""
    out = tmp_path / "out"

    def ready() -> bool:  # step 6 is saved: the weights of step 4, which wrote this round, are gone
        return (out / "checkpoints" / "step-000006").is_dir()

    words = arguments(world, data, out)
    assert worlds.kill_when(ready, COMMAND, *words) == -9
    assert not (out / "model.safetensors").exists()
    done = distill(world, data, out).ok()
    assert "from step 0" not in done.err
    assert listed(out) == listed(undisturbed)
    assert losses(out) == losses(undisturbed)
    assert weights_of(out) == weights_of(undisturbed)


def test_killed_while_it_writes_the_rest_is_written(
    world: World, data: Path, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a round that is half there is taken for whole, or written twice."""
    out = tmp_path / "out"
    replace = Path.replace

    def killed(self: Path, target: Path) -> Path:
        if "step-000004-16" in str(self):
            raise KeyboardInterrupt
        return replace(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        assert distill(world, data, out).code == 130
    distill(world, data, out).ok()
    assert listed(out) == listed(undisturbed)
    assert weights_of(out) == weights_of(undisturbed)


@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_a_run_that_lost_rows_goes_back_to_where_they_are_made(
    world: World, data: Path, undisturbed: Path, tmp_path: Path, damage: str
) -> None:
    """Bug: rows of a round are made by later weights, or the advice for a damaged shard is to run train/sample.py."""
    out, keep = tmp_path / "out", ["--loop.keep", 9]
    assert distill(world, data, out, *keep).code == 0
    for step in ("step-000009", "step-000012"):
        shutil.rmtree(out / "checkpoints" / step)
    (out / "checkpoints" / "latest").write_text("step-000006\n")
    [shard] = (out / "on_policy" / "step-000004-16" / "shards").iterdir()
    if damage == "missing":
        shard.unlink()
    else:
        shard.write_bytes(shard.read_bytes()[:-40])
    done = distill(world, data, out, *keep).ok()
    assert "goes on from the intact step-000003" in done.err
    assert "step-000004-16, which its next steps read" in done.err
    assert listed(out) == listed(undisturbed)
    assert weights_of(out) == weights_of(undisturbed)


def test_damaged_rows_of_a_round_that_begins_are_made_again(
    world: World, data: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """Bug: a damaged shard ends the run although the weights that made its rows are there."""
    out, every = tmp_path / "out", ["--loop.save_every", 4, "--loop.keep", 9]
    assert distill(world, data, out, *every).code == 0
    (out / "checkpoints" / "latest").write_text("step-000004\n")
    [shard] = (out / "on_policy" / "step-000004-16" / "shards").iterdir()
    worlds.flip_byte(shard, 200)
    done = distill(world, data, out, *every).ok()
    assert "from step 4" in done.err
    assert listed(out) == listed(undisturbed)
    assert weights_of(out) == weights_of(undisturbed)


def weights_of(out: Path) -> bytes:
    return (out / "model.safetensors").read_bytes()


def test_steps_that_are_trained_again_are_written_for_again(
    world: World, data: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """Bug: gone on from before a loss that diverged, a run reads what the ruined draft wrote."""
    out = tmp_path / "out"
    assert distill(world, data, out, "--loop.keep", 9).code == 0
    (out / "checkpoints" / "latest").write_text("step-000006\n")
    again = ["--loop.keep", 9, "--resume", "true", "--loop.lr", 0.01]
    assert distill(world, data, out, *again).code == 0
    before, after = listed(undisturbed), listed(out)
    assert before.keys() == after.keys()
    same = [before[folder] == after[folder] for folder in before]
    assert same == [True, True, False]


def test_two_processes_write_the_same(
    world: World, data: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """Bug: processes write the same rows, or one reads before the other has written."""
    out = tmp_path / "out"
    worlds.fork(COMMAND, *arguments(world, data, out), processes=2).ok()
    first = "step-000000-16"  # later ones come from weights that differ in the last bits
    assert listed(out)[first] == listed(undisturbed)[first]
    assert len(list((out / "on_policy" / first / "shards").iterdir())) == 2
    assert losses(out)[:EVERY] == pytest.approx(losses(undisturbed)[:EVERY], abs=1e-5)


def test_the_draft_of_that_step_wrote_the_rows(world: World, data: Path, tmp_path: Path) -> None:
    """Bug: the target writes them, or the draft as it was at the start. Greedy, so that transformers' own generate
    must give the same. Warm-up outlasts the runs: the shorter one ends with the weights that the longer one has after
    as many steps."""
    greedy = ["--on_policy.sampling.temperature", 0, "--on_policy.share", 1]
    assert distill(world, data, tmp_path / "short", *greedy, "--loop.steps", EVERY).code == 0
    assert distill(world, data, tmp_path / "long", *greedy, "--loop.steps", 2 * EVERY).code == 0
    found = rounds(tmp_path / "long")
    authors = {"step-000000-32": world.draft, "step-000004-32": tmp_path / "short"}
    assert list(found) == list(authors)
    for other in (world.draft, tmp_path / "short", world.target):
        lm = AutoModelForCausalLM.from_pretrained(other)
        for folder, author in authors.items():
            same = (written_by(lm, row) for row in found[folder].values())
            assert all(same) == (other == author)


def written_by(lm: Any, row: SampleRow) -> bool:
    [[start, _]] = row["loss_spans"]
    prompt = torch.tensor([list(row["input_ids"][:start])])
    own = lm.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=16,
        eos_token_id=EOS,
    )  # fmt: skip
    return own[0].tolist() == list(row["input_ids"])


def test_the_target_labels_them(world: World, data: Path, tmp_path: Path) -> None:
    """Bug: the draft learns its own words, or is compared with the target at other places than those it wrote."""
    out = tmp_path / "out"
    assert distill(world, data, out, "--on_policy.share", 1, "--loop.steps", 1).code == 0
    target = AutoModelForCausalLM.from_pretrained(world.target)
    draft = AutoModelForCausalLM.from_pretrained(world.draft)
    total = count = 0.0
    [rows] = rounds(out).values()
    assert len(rows) == BATCH
    for row in rows.values():
        ids = torch.tensor([list(row["input_ids"])])
        [[start, end]] = row["loss_spans"]
        with torch.no_grad():
            p, q = (
                model(ids).logits[0, start - 1 : end - 1].log_softmax(-1)
                for model in (target, draft)
            )
        total += float((p.exp() * (p - q)).sum())
        count += end - start
    assert losses(out) == [pytest.approx(total / count, rel=1e-4)]


def test_what_the_draft_writes_counts_for_mfu(
    world: World, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the time of writing counts and its arithmetic does not; or rows that lay there are counted again."""
    monkeypatch.setattr(
        throughput, "gpu_peaks", lambda device: GpuSpec(1.0, 1.0, bf16=1.0, fp32=1.0)
    )
    real, told = resources.generation_flops, []

    def work(cost: Any, rows: list[SampleRow]) -> float:
        told.append([row["id"] for row in rows])
        return real(cost, rows)

    monkeypatch.setattr(resources, "generation_flops", work)
    out = tmp_path / "out"
    assert distill(world, data, out, "--loop.steps", 8, "--loop.keep", 9).code == 0
    first, second = (list(rows) for rows in rounds(out).values())
    assert list(map(sorted, told)) == [sorted(first), [], [], [], sorted(second), [], [], []]
    told.clear()
    (out / "checkpoints" / "latest").write_text("step-000006\n")
    assert distill(world, data, out, "--resume", "true", "--loop.steps", 8).code == 0
    assert told == [[], []]


def test_writing_is_two_operations_for_each_weight_that_a_token_passes() -> None:
    """Bug: prompts are projected to the vocabulary, or tokens that were written are read for nothing."""
    config = AutoConfig.for_model(
        "llama", hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=97,
    )  # fmt: skip
    run = ShapeRun(DistillConfig(draft=CausalSettings(layers=[0, 1])), config)
    row: Any = {"input_ids": range(10), "loss_spans": [[6, 10]]}
    layers = 2 * 10 * 2 * (64 * (64 + 2 * 32 + 64) + 3 * 64 * 128)
    attention = sum(4 * t * 64 * 2 for t in range(10)) + 10 * 2 * 64 * 2  # half of its own token
    found = resources.generation_flops(resources.reading_cost(run), [row, row])
    assert found == 2 * (layers + attention + 4 * 2 * 64 * 97)


def tried(done: Done) -> dict[str, Any]:
    assert done.code == 0, done.err
    return json.loads(done.out.splitlines()[-1])


def test_a_dry_run_writes_one_round_and_keeps_nothing(
    world: World, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the draft writes nothing in the rehearsal, so that what takes most of a run's time and memory is found out
    in the run; or it writes into the run's folder."""
    wrote, held = [], list[int]()
    real = OnPolicyBuffer._generate_rows

    def continued(self: OnPolicyBuffer, numbers: Sequence[int]) -> list[SampleRow]:
        wrote.append(len(numbers))
        return real(self, numbers)

    def allocate(self: ModelRunner, rows: int, size: int) -> None:
        real_allocate(self, rows, size)
        held.append(rows)

    real_allocate = ModelRunner.allocate
    monkeypatch.setattr(OnPolicyBuffer, "_generate_rows", continued)
    monkeypatch.setattr(ModelRunner, "allocate", allocate)
    out = tmp_path / "out"
    share = ["--on_policy.share", 1, "--on_policy.batch_size", 5]
    done = distill(world, data, out, *share, "--dry_run", "true")
    found = tried(done)
    assert wrote == [EVERY * BATCH]
    assert list(tmp_path.iterdir()) == []
    measured = found["measured"]
    assert measured["writing_seconds"] > 0
    each = measured["seconds"] + measured["writing_seconds"] / EVERY
    assert measured["hours"] == pytest.approx(each * STEPS / 3600)
    assert held[0] == 5


def test_a_dry_run_of_one_step_writes_too(world: World, data: Path, tmp_path: Path) -> None:
    """Bug: the second step of the rehearsal asks for rows that no run of one step has."""
    steps = ["--loop.steps", 1, "--on_policy.share", 1, "--dry_run", "true"]
    assert tried(distill(world, data, tmp_path / "out", *steps))["measured"]["hours"] > 0
