"""train/sample.py as users run it, on a tiny target: complete, the same after a kill, and careful with folders."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from decode.common.errors import UserError
from decode.model.loading import load_model
from tests import worlds
from tests.worlds import CONTEXT, EOS, Done, World, contents
from train.data import sample_store
from train.data.manifest import load_set, read_manifest
from train.data.sources import read_prompts
from train.settings.data import PromptSource

COMMAND = "train/sample.py"
FITS, TOO_LONG = "y" * (CONTEXT - 1), "x" * CONTEXT


class Killed(BaseException):
    """What ends the process in place of SIGKILL."""


Rows = dict[str, tuple[list[int], list[list[int]], str]]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """48 short prompts, one that leaves room for one token, and one that leaves none."""
    built = worlds.build(tmp_path_factory.mktemp("world"))
    built.texts.extend([FITS, TOO_LONG])
    worlds.write_prompts(built.prompts, built.texts)
    return built


@pytest.fixture(scope="module")
def undisturbed(world: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    """A set that one process sampled from start to end, and what the command said."""
    out = tmp_path_factory.mktemp("sampled") / "out"
    return out, sample(world, out)


@pytest.fixture
def small(world: World, tmp_path: Path) -> Callable[..., Done]:
    """Samples 8 prompts into tmp_path / "out", in a second."""
    prompts = worlds.write_prompts(tmp_path / "few.jsonl", world.texts[:8])

    def start(*more: object) -> Done:
        return sample(world, tmp_path / "out", "--sources", sources(prompts), *more)

    return start


def sources(path: Path) -> str:
    return json.dumps([{"kind": "file", "path": str(path)}])


def arguments(world: World, out: Path) -> list[object]:
    """Batches of 3 and shards of 6 rows: a kill after the first shard leaves most of the work."""
    return [
        "--target", world.target, "--sources", sources(world.prompts), "--out", out,
        "--max_new_tokens", 24, "--batch_size", 3, "--shard_rows", 6,
    ]  # fmt: skip


def sample(world: World, out: Path, *more: object) -> Done:
    return worlds.call(COMMAND, *arguments(world, out), *more)


def rows_of(out: Path) -> Rows:
    """{id: what was sampled}; refuses an id that occurs twice."""
    return {
        row["id"]: (list(row["input_ids"]), row["loss_spans"], row["finish_reason"])
        for row in sample_store.read_shards(out)
    }


def ids_of(world: World, texts: list[str]) -> list[str]:
    """The prompts' ids, in their order."""
    asked = read_prompts([PromptSource("file", str(world.prompts))], 0)
    return [prompt.id for prompt in asked if prompt.text in texts]


def shard_files(out: Path) -> list[Path]:
    return sorted((out / "shards").glob("*.parquet"))


def test_every_prompt_is_answered_once_or_counted_as_failed(
    world: World, undisturbed: tuple[Path, Done]
) -> None:
    """Bug: prompts vanish, the last incomplete shard is not written, or counts do not add up."""
    out, done = undisturbed
    assert done.code == 0, done.err
    assert "1 failed (1 too long" in done.err
    counts = read_manifest(out).counts
    assert {name: count for name, count in counts.items() if count} == {
        "asked": 50, "answered": 49, "failed": 1,
    }  # fmt: skip
    assert set(rows_of(out)) == set(ids_of(world, world.texts[:-1]))


def test_progress_is_logged_where_there_is_no_terminal(undisturbed: tuple[Path, Done]) -> None:
    """Bug: a log file shows nothing of hours of work, or is full of a bar's control characters."""
    lines = [x for x in undisturbed[1].err.splitlines() if x.startswith("answering ")]
    assert lines
    assert re.fullmatch(r"answering 49/49, [\d.e+]+/s, [\d,]+ tokens/s, 0 s left", lines[-1])
    assert "\x1b" not in undisturbed[1].err
    assert "\r" not in undisturbed[1].err


def test_rows_hold_prompt_answer_and_why_it_ended(
    world: World, undisturbed: tuple[Path, Done]
) -> None:
    """Bug: the span to learn is off by one, covers the prompt, or a finish reason is wrong."""
    tokenizer = worlds.byte_tokenizer()
    rows = rows_of(undisturbed[0])
    reasons = set()
    for name, text in zip(ids_of(world, world.texts[:-1]), world.texts, strict=False):
        ids, spans, reason = rows[name]
        prompt = tokenizer(text)["input_ids"]
        answer = ids[len(prompt) :]
        assert ids[: len(prompt)] == prompt
        assert spans == [[len(prompt), len(ids)]]
        assert not set(answer[:-1]) & set(EOS)
        assert reason == ("eos" if answer[-1] in EOS else "length")
        assert len(answer) == 24 or reason == "eos" or len(ids) == CONTEXT
        reasons.add(reason)
    assert reasons == {"eos", "length"}
    assert len(rows[ids_of(world, [FITS])[0]][0]) == CONTEXT


def test_settings_of_the_target_are_named_and_not_followed(
    world: World, small: Callable[..., Done], tmp_path: Path
) -> None:
    """One line names those of generation_config.json that the run does not share; rows and manifest are the run's."""
    told = tmp_path / "told"
    shutil.copytree(world.target, told)
    said = {"eos_token_id": EOS, "do_sample": True, "temperature": 1.0, "max_new_tokens": 24}
    said |= {"top_k": 1, "repetition_penalty": 1.05, "bad_words_ids": [[40]], "num_beams": 1}
    (told / "generation_config.json").write_text(json.dumps(said))
    done = small("--target", told).ok()
    (line,) = [line for line in done.err.splitlines() if "generation_config.json" in line]
    assert line == (
        f"warning: {told}: answers do not follow what its generation_config.json asks for (repetition_penalty 1.05, "
        "top_k 1, bad_words_ids): --sampling and --max_new_tokens alone say how they are drawn"
    )
    rows = rows_of(tmp_path / "out")
    sampling = read_manifest(tmp_path / "out").sampling
    assert sampling == {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": 24}
    plain = small("--overwrite", "true")
    assert "generation_config.json" not in plain.err
    assert rows_of(tmp_path / "out") == rows


@pytest.mark.slow
def test_killed_and_started_again_gives_the_undisturbed_rows(
    world: World, undisturbed: tuple[Path, Done], tmp_path: Path
) -> None:
    """Bug: a kill loses or repeats prompts, or the rest is sampled with other random numbers."""
    out = tmp_path / "out"
    ready = lambda: len(shard_files(out)) > 0  # noqa: E731
    code = worlds.kill_when(ready, COMMAND, *arguments(world, out))
    before = contents(out / "shards")
    assert code == -9
    assert 0 < len(rows_of(out)) < 40
    sample(world, out).ok()
    assert before.items() <= contents(out / "shards").items()  # nothing is sampled twice
    assert rows_of(out) == rows_of(undisturbed[0])
    assert read_manifest(out).counts == read_manifest(undisturbed[0]).counts


def test_rows_do_not_depend_on_the_batch(
    world: World, undisturbed: tuple[Path, Done], tmp_path: Path
) -> None:
    """Bug: random numbers hang on the place in the batch, so that other company gives another answer."""
    assert sample(world, tmp_path / "out", "--batch_size", 7).code == 0
    assert rows_of(tmp_path / "out") == rows_of(undisturbed[0])


def test_rows_do_not_depend_on_the_group(
    world: World, undisturbed: tuple[Path, Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: prompts of a second group get the answers, seeds or rows of the first."""
    monkeypatch.setattr("train.sampling.local_engine.GROUP_BATCHES", 2)
    assert sample(world, tmp_path / "out").code == 0
    assert rows_of(tmp_path / "out") == rows_of(undisturbed[0])


@pytest.mark.parametrize("suffix", ["run.yaml.tmp", ".parquet.tmp", "manifest.json.tmp"])
def test_killed_just_before_a_rename(
    small: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    """Bug: a half-written file is taken for a whole one, or makes the folder look like somebody else's."""
    replace = Path.replace

    def killed(self: Path, target: Path) -> Path:
        if self.name.endswith(suffix):
            raise Killed
        return replace(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(Killed):
            small()
    small().ok()
    assert len(rows_of(tmp_path / "out")) == 8
    assert list(tmp_path.rglob("*.tmp")) == []


@pytest.mark.slow
def test_killed_over_and_over_it_still_ends_the_same(
    world: World, undisturbed: tuple[Path, Done], tmp_path: Path
) -> None:
    """Bug: only the first resumption works, or what a kill leaves behind stops the next start."""
    out = tmp_path / "out"

    def once() -> int:
        wanted = len(shard_files(out)) + 2
        return worlds.kill_when(
            lambda: len(shard_files(out)) >= wanted, COMMAND, *arguments(world, out)
        )

    kills = 0
    while once() != 0:
        kills += 1
        assert kills < 20
    assert kills >= 2
    assert rows_of(out) == rows_of(undisturbed[0])


@pytest.mark.slow
def test_two_processes_share_the_work_and_give_the_same_rows(
    world: World, undisturbed: tuple[Path, Done], tmp_path: Path
) -> None:
    """Bug: processes repeat each other's work, or a row depends on who sampled it. Process r of n takes every n-th
    prompt, so that two really ran shows in every shard's prompts being all even or all odd ones; one process mixes
    them."""
    worlds.fork(COMMAND, *arguments(world, tmp_path / "out"), processes=2).ok()
    assert rows_of(tmp_path / "out") == rows_of(undisturbed[0])
    order = ids_of(world, world.texts[:-1])

    def parities(out: Path) -> list[set[int]]:
        return [
            {
                order.index(name) % 2
                for name in pq.read_table(path, columns=["id"])["id"].to_pylist()
            }
            for path in shard_files(out)
        ]

    assert {0, 1} in parities(undisturbed[0])
    assert {0, 1} not in parities(tmp_path / "out")
    assert {0} in parities(tmp_path / "out")
    assert {1} in parities(tmp_path / "out")


def test_greedy_rows_are_the_target_s_own(world: World, small: Callable, tmp_path: Path) -> None:
    """Bug: at temperature 0 ragged rows mix, see padding or stop at the wrong place."""
    small("--sampling.temperature", 0).ok()
    model = load_model(str(world.target), "target", "cpu", "float32")
    rows = rows_of(tmp_path / "out")
    assert len(rows) == 8
    for ids, spans, _ in rows.values():
        prompt = torch.tensor([ids[: spans[0][0]]])
        own = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=24
        )
        assert ids == own[0].tolist()


def test_a_complete_set_is_left_as_it_is(small: Callable, tmp_path: Path) -> None:
    """Bug: the same command again samples all over, or fails because nothing is left to do."""
    assert small().code == 0
    before = contents(tmp_path / "out" / "shards")
    assert small().code == 0
    assert contents(tmp_path / "out" / "shards") == before


def test_exactly_the_lost_prompts_are_sampled_again(small: Callable, tmp_path: Path) -> None:
    """Bug: lost prompts stay lost, the command stops at a damaged shard, or answers intact prompts again."""
    out = tmp_path / "out"
    assert small().code == 0
    whole, first, second = rows_of(out), *shard_files(out)
    others = {name: x for name, x in contents(out / "shards").items() if name != first.name}
    worlds.flip_byte(first, 300)
    with pytest.raises(UserError, match=first.name):
        load_set(out)
    done = small().ok()
    lost = len(whole) - len(pq.read_table(second))
    assert f"8 prompts (0 dropped as evaluation prompts), {lost} to answer" in done.err
    [said] = [line for line in done.err.splitlines() if line.startswith("warning: shard ")]
    assert first.name in said
    assert others.items() <= contents(out / "shards").items()
    assert rows_of(out) == whole
    assert len(load_set(out)[1]) == 8


def test_another_run_s_folder_is_refused_until_told(
    world: World, small: Callable, tmp_path: Path
) -> None:
    """Bug: samples of two settings are mixed, or an earlier set is deleted, without a word."""
    assert small().code == 0
    first = contents(tmp_path / "out")
    more = sources(worlds.write_prompts(tmp_path / "more.jsonl", world.texts[:12]))
    error = small("--sources", more).error()
    assert "sources" in error
    assert "--resume" in error
    assert "--overwrite" in error
    assert contents(tmp_path / "out") == first

    assert small("--sources", more, "--resume", "true").code == 0
    kept = {name: digest for name, digest in first.items() if name.startswith("shards/")}
    assert kept.items() <= contents(tmp_path / "out").items()
    assert set(rows_of(tmp_path / "out")) == set(ids_of(world, world.texts[:12]))
    assert read_manifest(tmp_path / "out").counts["answered"] == 12

    assert small("--seed", 1, "--overwrite", "true").code == 0
    assert set(rows_of(tmp_path / "out")) == set(ids_of(world, world.texts[:8]))
    assert not kept.items() & contents(tmp_path / "out").items()
    assert read_manifest(tmp_path / "out").seed == 1


@pytest.mark.parametrize(
    ("asked", "shards"),
    [(slice(0, 3), 2), (slice(6, 8), 2), (slice(4, 12), 3), (slice(48, 50), 3)],
    ids=["fewer", "of the last shard", "some others", "all others"],
)
def test_the_manifest_counts_the_rows_of_the_shards(
    asked: slice, shards: int, world: World, small: Callable, tmp_path: Path
) -> None:
    """Catches a set of 8 rows that counts 3, because the last start asked 3 prompts of them."""
    assert small().code == 0
    first = set(rows_of(tmp_path / "out"))
    now = world.texts[asked]
    other = sources(worlds.write_prompts(tmp_path / "other.jsonl", now))
    assert small("--sources", other, "--resume", "true").code == 0
    made, rows = load_set(tmp_path / "out")
    wanted = first | set(ids_of(world, [text for text in now if text != TOO_LONG]))
    assert {row["id"] for row in rows} == wanted
    assert made.counts["answered"] + made.counts["answers_too_short"] == len(wanted)
    assert made.counts["failed"] == (TOO_LONG in now)
    assert made.counts["asked"] == len(wanted) + made.counts["failed"]
    assert len(made.shards or {}) == shards
    assert sum(shard.rows or 0 for shard in (made.shards or {}).values()) == len(wanted)
