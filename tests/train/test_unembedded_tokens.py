"""Tokens that were added to the tokenizer alone: named before anything is decoded, and only their rows are left out."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AddedToken

from decode.common.errors import UserError
from decode.engine.engine import decode
from decode.model.loading import load_target
from decode.model.vocabularies import check_embedded
from tests import worlds
from tests.rows import sample, write_rows
from tests.tiny import tiny_model
from tests.worlds import byte_tokenizer
from train.data import sample_store
from train.data.manifest import read_manifest

PLAIN = (
    "{% for m in messages %}<2>{{ m.role }}\n{{ m.content }}<1>\n{% endfor %}"
    "{% if add_generation_prompt %}<2>assistant\n{% endif %}"
)
EVERY = PLAIN.replace("<2>", "<|turn|>")
TURN, NOTE = 268, 269
"""Ids of the added tokens <|turn|> and <|note|>."""
SYSTEM_ONLY = PLAIN.replace(
    "<2>{{ m.role }}", "{{ '<|note|>' if m.role == 'system' else '<2>' }}{{ m.role }}"
)


def make(folder: Path, template: str | None, rows: int = 268) -> Path:
    """A target that embeds `rows` tokens; its tokenizer has 268 and two that were added."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken("<|turn|>", special=True), AddedToken("<|note|>")])
    tokenizer.chat_template = template
    assert tokenizer.convert_tokens_to_ids(["<|turn|>", "<|note|>"]) == [TURN, NOTE]
    model = tiny_model("llama", vocab_size=rows, max_position_embeddings=512, num_hidden_layers=2)
    return worlds.save(folder, model, tokenizer)


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("targets")
    return {
        "every": make(folder / "every", EVERY),
        "system": make(folder / "system", SYSTEM_ONLY),
        "plain": make(folder / "plain", PLAIN),
        "none": make(folder / "none", None),
        "resized": make(folder / "resized", EVERY, 270),
        "padded": make(folder / "padded", EVERY, 320),
    }


def said(target: Path, token: str, number: int) -> str:
    return f"token {token!r} has id {number}, and the target embeds 268 tokens, the last one with id 267"


QUESTIONS = [{"prompt": f"zq{i} count", "completion": f"to {i}"} for i in range(12)]


@pytest.mark.parametrize("origin", ["target", "text"])
def test_a_template_that_writes_it_in_every_row_ends_sampling(
    targets: dict[str, Path], tmp_path: Path, origin: str
) -> None:
    """Bug: IndexError of the embedding, from within torch."""
    path = write_rows(tmp_path / "rows.jsonl", QUESTIONS)
    done = sample(targets["every"], path, tmp_path / "out", "--origin", origin)
    line = done.err.splitlines()[-1]
    assert done.code == 2, done.err
    assert "12 of 12 rows are refused" in line
    assert f"{path}:1: " in line
    assert said(targets["every"], "<|turn|>", TURN) in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["resized", "padded"])
@pytest.mark.parametrize("origin", ["target", "text"])
def test_tokens_with_rows_of_their_own_are_like_any_other(
    targets: dict[str, Path], tmp_path: Path, name: str, origin: str
) -> None:
    path = write_rows(tmp_path / "rows.jsonl", QUESTIONS)
    sample(targets[name], path, tmp_path / "out", "--origin", origin).ok()
    rows = list(sample_store.read_shards(tmp_path / "out"))
    assert len(rows) == 12
    assert all(TURN in list(row["input_ids"]) for row in rows)


@pytest.mark.parametrize(
    ("name", "bad", "token", "number", "origin"),
    [
        ("plain", {"prompt": "a <|note|> b", "completion": "x"}, "<|note|>", NOTE, "target"),
        ("plain", {"prompt": "a b", "completion": "<|turn|>x"}, "<|turn|>", TURN, "text"),
        ("none", {"prompt": "a <|turn|> b"}, "<|turn|>", TURN, "target"),
        ("none", {"text": "one two <|note|> three"}, "<|note|>", NOTE, "text"),
        ("system", {"messages": [{"role": "system", "content": "Be."}, {"role": "user", "content": "Hi"},
                                 {"role": "assistant", "content": "Yes."}]}, "<|note|>", NOTE, "target"),
        ("system", {"messages": [{"role": "system", "content": "Be."}, {"role": "user", "content": "Hi"},
                                 {"role": "assistant", "content": "Yes."}]}, "<|note|>", NOTE, "text"),
    ],
)  # fmt: skip
def test_a_row_with_it_costs_itself(
    targets: dict[str, Path], tmp_path: Path, name: str, bad: dict[str, Any], token: str,
    number: int, origin: str,
) -> None:  # fmt: skip
    good = [{"text": f"zq{i} count to {i}"} for i in range(12)] if "text" in bad else QUESTIONS
    path = write_rows(tmp_path / "rows.jsonl", [*good[:7], bad, *good[7:]])
    out = tmp_path / "out"
    assert sample(targets[name], path, out, "--origin", origin).code == 2  # 1 of 13 is over 5 %
    done = sample(targets[name], path, out, "--origin", origin, "--max_bad_rows", 0.1).ok()
    assert f"skipped {path}:8: " in done.err
    assert said(targets[name], token, number) in done.err
    counts = read_manifest(out).counts
    assert (counts["dropped_as_refused"], counts["answered"]) == (1, 12)
    rows = list(sample_store.read_shards(out))
    assert len(rows) == 12
    assert max(max(row["input_ids"]) for row in rows) < 268


def test_generating_and_the_library_name_it(targets: dict[str, Path]) -> None:
    for name, prompt, token, number in (
        ("every", "hello", "<|turn|>", TURN),
        ("plain", "a <|note|> b", "<|note|>", NOTE),
    ):
        done = worlds.call("decode/generate.py", "--target", targets[name], "--prompt", prompt)
        assert said(targets[name], token, number) in done.error()
        assert done.out == ""
    target = load_target(str(targets["none"]), "cpu")
    with pytest.raises(UserError, match=r"token '<\|turn\|>' has id 268"):
        decode(target, None, [[20, 21], [20, TURN]], max_new_tokens=2)


def test_evaluation_names_the_row(targets: dict[str, Path], tmp_path: Path) -> None:
    for name, row in (("every", 1), ("plain", 3)):
        texts = ["one", "two", "a <|turn|> b" if name == "plain" else "three"]
        path = write_rows(tmp_path / f"{name}.jsonl", [{"prompt": text} for text in texts])
        done = worlds.call(
            "eval/run.py", "--target", targets[name], "--methods", "[{name: ngram}]", "--out", tmp_path / name,
            "--tasks", json.dumps([{"name": "own", "path": str(path)}]),
        )  # fmt: skip
        assert f"{path}:{row}: {said(targets[name], '<|turn|>', TURN)}" in done.error()
        assert not (tmp_path / name).exists()


def test_the_doctor_names_the_row(targets: dict[str, Path], tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [*QUESTIONS, {"prompt": "a <|note|> b"}])
    sources = json.dumps([{"kind": "file", "path": str(path)}])
    out = tmp_path / "doctor.json"
    worlds.call(
        "train/doctor.py", "--target", targets["plain"], "--sources", sources, "--out", out
    ).ok()
    (found,) = [
        x for x in json.loads(out.read_text())["findings"] if x["name"] == "prompt is refused"
    ]
    assert (found["rows"], found["of"]) == (1, 13)
    assert f"{path}:13" in found["cost"]
    assert "token '<|note|>' has id 269" in found["cost"]


def train(target: Path, data: Path, out: Path, *more: object) -> worlds.Done:
    return worlds.call(
        "train/distill.py", "--target", target, "--data", data, "--out", out, "--draft.init", "",
        "--draft.family", "eagle1", "--loop.steps", 2, "--loop.batch_size", 2, *more,
    )  # fmt: skip


def test_distilling_names_the_sample(targets: dict[str, Path], tmp_path: Path) -> None:
    """A set with such a token may come from a target of the same tokenizer whose embedding was resized."""
    path = write_rows(tmp_path / "rows.jsonl", QUESTIONS)
    data = tmp_path / "set"
    assert sample(targets["resized"], path, data, "--origin", "text").code == 0
    done = train(targets["every"], data, tmp_path / "out", "--loop.eval_every", 0)
    first = next(iter(sample_store.read_shards(data)))["id"]
    assert f"sample {first}: {said(targets['every'], '<|turn|>', TURN)}" in done.error()
    assert train(targets["resized"], data, tmp_path / "out", "--loop.eval_every", 0).code == 0
    # texts without a template have no such token, but what is measured in training has
    texts = write_rows(tmp_path / "texts.jsonl", [{"text": f"zq{i} to {i}"} for i in range(9)])
    assert sample(targets["every"], texts, tmp_path / "texts", "--origin", "text").code == 0
    measured = train(targets["every"], tmp_path / "texts", tmp_path / "b", "--loop.eval_every", 1)
    assert said(targets["every"], "<|turn|>", TURN) in measured.error()
    train(targets["every"], tmp_path / "texts", tmp_path / "b", "--loop.eval_every", 0).ok()


def test_the_first_token_beyond_is_named() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<a>", "<b>"])
    for ids in ([], [0, 267], torch.tensor([5]).tolist()):
        check_embedded(tokenizer, ids, 268)
    with pytest.raises(UserError, match="token '<b>' has id 269"):
        check_embedded(tokenizer, [1, 269, 268], 268)
