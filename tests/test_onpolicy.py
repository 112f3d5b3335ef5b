"""Rows that the draft writes itself, by the real command: its words, the target's labels, the same after a kill."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests import worlds
from tests.worlds import EOS, Done, World
from train import shards
from train.onpolicy import prompt_of
from train.shards import Row

COMMAND = "train/distill.py"
STEPS, EVERY, BATCH = 12, 4, 8


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return worlds.build(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def data(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return worlds.sampled(world, tmp_path_factory.mktemp("data"), "--max_new_tokens", 24)


@pytest.fixture(scope="module")
def undisturbed(world: World, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    done = distill(world, data, out)
    assert done.code == 0, done.err
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


def rounds(out: Path) -> dict[str, dict[str, Row]]:
    """{folder: {id: row}} of what the draft wrote."""
    return {
        folder.name: {row["id"]: row for row in shards.read_shards(folder)}
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

    assert worlds.kill_when(ready, COMMAND, *arguments(world, data, out)) == -9
    assert not (out / "model.safetensors").exists()
    done = distill(world, data, out)
    assert done.code == 0, done.err
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
        with pytest.raises(KeyboardInterrupt):
            distill(world, data, out)
    done = distill(world, data, out)
    assert done.code == 0, done.err
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


@pytest.mark.slow
def test_two_processes_write_the_same(
    world: World, data: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """Bug: processes write the same rows, or one reads before the other has written."""
    out = tmp_path / "out"
    done = worlds.run(COMMAND, *arguments(world, data, out), processes=2)
    assert done.code == 0, done.err
    first = "step-000000-16"  # later ones come from weights that differ in the last bits
    assert listed(out)[first] == listed(undisturbed)[first]
    assert len(list((out / "on_policy" / first / "shards").iterdir())) == 2
    assert losses(out)[:EVERY] == pytest.approx(losses(undisturbed)[:EVERY], abs=1e-5)


def test_the_draft_of_that_step_wrote_the_rows(world: World, data: Path, tmp_path: Path) -> None:
    """Bug: the target writes them, or the draft as it was at the start.

    Greedy, so that transformers' own generate must give the same. Warm-up outlasts the runs: the shorter one ends with
    the weights that the longer one has after as many steps.
    """
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


def written_by(lm: Any, row: Row) -> bool:
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


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (["--draft.family", "medusa", "--draft.init", ""], "medusa heads cannot write"),
        (["--features", "somewhere"], "leave `features` empty"),
        (["--on_policy.share", 1.5], "share 1.5"),
        (["--on_policy.every", 0], "every"),
    ],
)
def test_what_cannot_be_is_refused(
    world: World, data: Path, tmp_path: Path, wrong: list, named: str
) -> None:
    """Bug: heads or stored features fail with a traceback after the first batch."""
    assert named in distill(world, data, tmp_path / "out", *wrong).error()
    assert not (tmp_path / "out").exists()


def test_prompts_end_where_a_reply_begins() -> None:
    """Bug: the draft goes on behind the target's answer, or a text leaves nothing to go on from."""
    rng: Callable[[int], np.random.Generator] = np.random.default_rng
    chat: Row = {
        "id": "a", "source": "s", "origin": "target", "input_ids": range(20),
        "loss_spans": [[5, 9], [12, 20]], "finish_reason": "eos",
    }  # fmt: skip
    ends = {len(prompt_of(chat, 100, rng(i))) for i in range(20)}
    assert ends == {5, 12}
    assert {len(prompt_of(chat, 7, rng(i))) for i in range(20)} == {5, 7}
    text: Row = {**chat, "loss_spans": [[1, 20]]}
    assert {len(prompt_of(text, 100, rng(i))) for i in range(99)} == set(range(1, 10))
    assert prompt_of({**text, "input_ids": [3, 4], "loss_spans": [[1, 2]]}, 9, rng(0)) == [3]
