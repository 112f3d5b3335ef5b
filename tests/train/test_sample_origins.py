"""train/sample.py on chats of several turns and on texts as they stand; nothing dropped goes uncounted."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from decode.model.loading import load_model
from tests import worlds
from tests.tiny import tiny_model
from tests.train.data.test_conversations import CHATML, REASONING
from tests.worlds import CONTEXT, EOS, Done, World, contents
from train.data import mixture, sample_store
from train.data.manifest import read_manifest
from train.data.sample_store import SampleRow

COMMAND = "train/sample.py"
TURNS = [1, 3, 2, 1, 2, 3, 3, 2, 1, 2]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Its target has a chat template, and its prompts are chats of one to three turns."""
    folder = tmp_path_factory.mktemp("world")
    size: dict[str, Any] = {
        "vocab_size": len(worlds.byte_tokenizer()),
        "num_hidden_layers": 2,
        "max_position_embeddings": CONTEXT,
    }
    model = tiny_model("llama", seed=1, **size)
    talks = [chat(f"zq{i} ", turns) for i, turns in enumerate(TURNS)]
    prompts = write(folder / "chats.jsonl", [{"messages": talk} for talk in talks])
    tokenizer = worlds.byte_tokenizer()
    tokenizer.chat_template = CHATML
    target = worlds.save(folder / "target", model, tokenizer)
    tokenizer.chat_template = REASONING
    stranger = worlds.save(folder / "reasoning", model, tokenizer)
    return World(target, folder, stranger, prompts, [])


def chat(start: str, turns: int) -> list[dict[str, str]]:
    """Questions, and a reply to each, as data sets have them."""
    pairs = [
        (
            {"role": "user", "content": f"{start}{i}"},
            {"role": "assistant", "content": f"THEIRS {i}"},
        )
        for i in range(turns)
    ]
    return [message for pair in pairs for message in pair]


def write(path: Path, records: list) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def arguments(world: World, out: Path) -> list[object]:
    return [
        "--target", world.target, "--sources", source(world.prompts), "--out", out, "--turns", "all",
        "--max_new_tokens", 24, "--batch_size", 3, "--shard_rows", 4, "--sampling.temperature", 0.5,
    ]  # fmt: skip


def source(path: Path, **more: object) -> str:
    return json.dumps([{"kind": "file", "path": str(path), **more}])


def sample(world: World, out: Path, *more: object) -> Done:
    return worlds.call(COMMAND, *arguments(world, out), *more)


def rows_of(out: Path) -> dict[str, dict[str, Any]]:
    rows = sample_store.read_shards(out)
    return {row["id"]: {**row, "input_ids": list(row["input_ids"])} for row in rows}


def text_of(row: SampleRow | dict[str, Any]) -> tuple[str, list[str]]:
    """(the row, what is learned of it) as text."""
    ids, made = list(row["input_ids"]), worlds.byte_tokenizer()
    return made.decode(ids), [made.decode(ids[start:end]) for start, end in row["loss_spans"]]


# ---- the target answers every turn ----


@pytest.fixture(scope="module")
def answered(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("answered") / "out"
    sample(world, out).ok()
    return out


def test_every_reply_is_the_target_s_own(world: World, answered: Path, tmp_path: Path) -> None:
    """Bug: the second reply is to the data set's first one, spans drift, or tokens come back re-tokenised."""
    assert sample(world, tmp_path / "out", "--sampling.temperature", 0).code == 0
    model = load_model(str(world.target), "target", "cpu", "float32")
    replies = 0
    for row in rows_of(tmp_path / "out").values():
        for start, end in row["loss_spans"]:
            prompt = torch.tensor([row["input_ids"][:start]])
            own = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=24,
                eos_token_id=EOS,
            )  # fmt: skip
            assert own[0].tolist() == row["input_ids"][:end]
            replies += 1
    assert replies > len(TURNS)


def test_turns_are_joined_as_the_template_does(answered: Path) -> None:
    """Bug: a turn's end is missing or there twice, a reply of the data set is left in, or it goes on after a cut."""
    turns = []
    for row in rows_of(answered).values():
        whole, learned = text_of(row)
        assert "THEIRS" not in whole
        assert whole.startswith("<2>user\nzq")
        spans = row["loss_spans"]
        asked = next(i for i in range(len(TURNS)) if f"zq{i} 0" in whole)
        for i, ((_, end), (start, _)) in enumerate(zip(spans, spans[1:], strict=False)):
            between = worlds.byte_tokenizer().decode(row["input_ids"][end:start])
            ended_by = "" if row["input_ids"][end - 1] == 1 else "<1>"
            assert between == f"{ended_by}\n<2>user\nzq{asked} {i + 1}<1>\n<2>assistant\n"
            assert row["input_ids"][end - 1] in EOS
        assert row["finish_reason"] == ("eos" if row["input_ids"][-1] in EOS else "length")
        assert len(learned) == TURNS[asked] or row["finish_reason"] == "length"
        turns.append(len(learned))
    assert max(turns) == 3


@pytest.mark.slow
def test_killed_and_started_again_gives_the_undisturbed_rows(
    world: World, answered: Path, tmp_path: Path
) -> None:
    """Bug: later turns draw random numbers that hang on the batch or on what was done before the kill."""
    out = tmp_path / "out"
    ready = lambda: len(list((out / "shards").glob("*.parquet"))) > 1  # noqa: E731
    assert worlds.kill_when(ready, COMMAND, *arguments(world, out)) == -9
    before = contents(out / "shards")
    assert sample(world, out).code == 0
    assert before.items() <= contents(out / "shards").items()
    assert rows_of(out) == rows_of(answered)
    assert sample(world, tmp_path / "other", "--batch_size", 7, "--shard_rows", 100).code == 0
    assert rows_of(tmp_path / "other") == rows_of(answered)


def test_chats_end_where_the_context_does(world: World, tmp_path: Path) -> None:
    """Bug: a chat that grows beyond the context ends the command in its second turn."""
    long = [{"role": "user", "content": "zq " + "x" * (CONTEXT - 60)}, *chat("zq", 1)[1:]]
    long.append({"role": "user", "content": "more " * 20})
    prompts = write(tmp_path / "long.jsonl", [{"messages": long}])
    sample(world, tmp_path / "out", "--sources", source(prompts)).ok()
    [row] = rows_of(tmp_path / "out").values()
    assert len(row["loss_spans"]) == 1
    assert row["loss_spans"][0][1] == len(row["input_ids"]) <= CONTEXT


def test_a_template_that_rewrites_turns_is_refused(world: World, tmp_path: Path) -> None:
    """Bug: a reasoning model is trained on contexts that it never meets."""
    error = sample(world, tmp_path / "out", "--target", world.stranger).error()
    assert "set turns to last" in error
    assert not (tmp_path / "out").exists()


# ---- texts as they stand ----


def text(world: World, out: Path, *more: object) -> Done:
    return worlds.call(COMMAND, *arguments(world, out), "--origin", "text", *more)


def test_reference_replies_become_rows(world: World, tmp_path: Path) -> None:
    """Bug: the target is asked after all, or only the last reply is learned."""
    text(world, tmp_path / "out").ok()
    rows = rows_of(tmp_path / "out")
    assert len(rows) == len(TURNS)
    found = []
    for row in rows.values():
        _, learned = text_of(row)
        assert learned == [f"THEIRS {i}<1>" for i in range(len(learned))]
        assert (row["origin"], row["finish_reason"]) == ("text", "text")
        found.append(len(learned))
    assert sorted(found) == sorted(TURNS)
    manifest = read_manifest(tmp_path / "out")
    assert manifest.sampling == {}
    assert manifest.counts["answered"] == manifest.counts["asked"] == len(TURNS)
    before = contents(tmp_path / "out" / "shards")
    assert text(world, tmp_path / "out").code == 0
    assert contents(tmp_path / "out" / "shards") == before


@pytest.mark.slow
def test_texts_pairs_and_the_library_train_beside_samples(
    world: World, answered: Path, tmp_path: Path
) -> None:
    """Bug: text rows are not such as training reads, or windows of modules are lost."""
    own = write(
        tmp_path / "own.jsonl", [{"prompt": "1 + 1 =", "response": " 2"}, {"text": "x = 1\n" * 90}]
    )
    sources = [{"kind": "file", "path": str(own)}, {"kind": "stdlib", "limit": 2}]
    sources.append({"kind": "bundled", "path": "prose", "limit": 3})
    text(world, tmp_path / "out", "--sources", json.dumps(sources), "--window", 64).ok()
    rows = sample_store.read_shards(tmp_path / "out")
    assert {row["source"] for row in rows} == {"own.jsonl", "stdlib", "bundled/prose"}
    assert max(len(row["input_ids"]) for row in rows) == 64
    parts = [mixture.MixturePart(str(tmp_path / "out")), mixture.MixturePart(str(answered))]
    mixed, _ = mixture.load(parts, 100)
    assert {row["origin"] for row in mixed.global_batch(4, 0, 0)} == {"text", "target"}
    counts = read_manifest(tmp_path / "out").counts
    assert counts["dropped_as_repeats"] > 0  # windows of a text that repeats itself
    assert counts["asked"] == counts["answered"] == len(rows)


# ---- what is dropped ----


@pytest.mark.parametrize("origin", ["target", "text"])
def test_everything_dropped_is_counted(world: World, tmp_path: Path, origin: str) -> None:
    """Bug: prompts vanish between the file and the set, and nobody can say why."""
    words = [f"q{i}" for i in range(60)]
    texts = [
        " ".join(words),
        " ".join(words),  # again
        " ".join([*words[:58], "other"]),  # nearly
        "the user measures on this",
        "tiny",  # too short
        "long " * 60,
        *(f"zq fine {i}" for i in range(5)),
        "y" * CONTEXT,  # does not fit
    ]
    records = [{"prompt": text, "response": "r" * (len(text) % 7 + 1)} for text in texts]
    prompts = write(tmp_path / "prompts.jsonl", records)
    evaluation = write(tmp_path / "eval.jsonl", [{"prompt": "user measures"}])
    out = tmp_path / "out"
    command = [
        "--sources", source(prompts), "--origin", origin, "--decontaminate", evaluation,
        "--filters", '{min_prompt: 25, max_prompt: 300, near_duplicates: 0.8}',
        "--filters.min_answer", 5, "--seed", 3,
    ]  # fmt: skip
    if origin == "target":
        command += ["--filters.max_prompt", 10_000]  # so that something does not fit
    sample(world, out, *command).ok()
    counts = read_manifest(out).counts
    assert counts["asked"] == counts["answered"] + counts["failed"] + counts["answers_too_short"]
    assert counts["asked"] + sum(n for why, n in counts.items() if "dropped" in why) == len(texts)
    assert counts["dropped_as_repeats"] == counts["dropped_as_near_duplicates"] == 1
    assert counts["dropped_as_evaluation"] == 1
    assert counts["dropped_by_length"] == (1 if origin == "target" else 3)
    assert counts["failed"] == (1 if origin == "target" else 0)
    rows = sample_store.read_shards(out)
    short = [row for row in rows if not row["loss_spans"]]
    assert len(short) == counts["answers_too_short"] > 0
    assert len(rows) == counts["asked"] - counts["failed"]
    kept, dropped = mixture.load(str(out), CONTEXT)
    assert (len(kept), dropped) == (counts["answered"], counts["answers_too_short"])
    assert sample(world, out, *command).code == 0  # none of them is asked again
    assert read_manifest(out).counts == counts
