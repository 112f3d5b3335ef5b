"""Prompts for tasks: nothing of a function's body, the target's own articles without special tokens, the same twice."""

import json
from pathlib import Path

import pytest

from scripts.lab.task_prompts import COMMAND, function_stubs
from tests import worlds
from train.data import python_corpus, sample_store


@pytest.fixture(autouse=True)
def some_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fifth of the library: parsing all of it takes seconds."""
    every = sorted(python_corpus.read_modules(False).items())
    some = dict([*every[::5], *((name, text) for name, text in every if name == "bisect")])
    monkeypatch.setattr(python_corpus, "read_modules", lambda held_out: some)


def prompts(path: Path) -> list[str]:
    chats = [json.loads(line)["messages"] for line in path.read_text().splitlines()]
    assert all(len(chat) == 1 and chat[0]["role"] == "user" for chat in chats)
    return [chat[0]["content"] for chat in chats]


def test_a_stub_is_a_documented_function_without_its_body() -> None:
    """Catches bodies, which would be the answers, `self`, and stubs that are no Python."""
    stubs = function_stubs()
    assert len(stubs) == len(set(stubs)) > 500
    for stub in stubs:
        lines = stub.splitlines()
        assert lines[0].startswith("def ")
        assert lines[0].endswith(":")
        assert not lines[0].partition("(")[2].startswith(("self,", "self)", "cls,", "cls)"))
        assert lines[1].startswith('    """')
        assert lines[-1].endswith('"""')
        assert stub.count('"""') == 2
    sample = next(stub for stub in stubs if stub.startswith("def insort_right("))
    assert "Insert item x in list a" in sample
    assert "a.insert" not in sample


def test_the_command_writes_what_was_asked_for(tmp_path: Path) -> None:
    """Catches questions left out of their style, counts that are ignored, and prompts that change from run to run."""
    questions = [f"How much is {i} plus {i}?" for i in range(9)]
    source = tmp_path / "q.jsonl"
    source.write_text("".join(json.dumps({"question": q}) + "\n" for q in questions))
    more = ["--math", source, "--math_count", 5, "--code_count", 4, "--article_count", 3]
    for name in ("one", "two"):
        worlds.call(COMMAND, *more, "--out", tmp_path / name).ok()
    math = prompts(tmp_path / "one" / "math.jsonl")
    assert len({q for q in questions for text in math if q in text}) == len(math) == 5
    assert len(prompts(tmp_path / "one" / "code.jsonl")) == 4
    assert len(set(prompts(tmp_path / "one" / "articles.jsonl"))) == 3
    for name in ("math.jsonl", "code.jsonl", "articles.jsonl"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_summaries_hold_the_targets_words(tmp_path: Path) -> None:
    """Catches articles with the prompt in them or with special tokens, and answers that are left out."""
    world = worlds.build(tmp_path / "world")
    samples = worlds.sampled(world, tmp_path / "samples", "--max_new_tokens", 12)
    worlds.call(COMMAND, "--articles", samples, "--out", tmp_path / "out").ok()
    tokenizer = worlds.byte_tokenizer()
    rows = list(sample_store.read_shards(samples))
    texts = [
        tokenizer.decode(list(row["input_ids"])[start:end], skip_special_tokens=True).strip()
        for row in rows
        for start, end in row["loss_spans"]
    ]
    found = prompts(tmp_path / "out" / "summaries.jsonl")
    assert len(found) == len(texts) > 0
    assert all(any(text in prompt for prompt in found) for text in texts)
    assert not any(token in prompt for prompt in found for token in tokenizer.all_special_tokens)
