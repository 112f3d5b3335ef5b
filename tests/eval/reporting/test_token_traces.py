"""Token traces: every character of an answer once, with the origin that its round gives it."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from decode.common.errors import UserError
from decode.engine.text_stream import split_by_origin
from eval.reporting.token_traces import read_outputs, select_traces
from eval.results.report import EvalReport
from tests import drafts
from tests.decode.engine.test_text_stream import KINDS, random_ids
from tests.eval.reporting.test_report import entry, parsed, plain
from tests.worlds import byte_tokenizer

TOKENIZER = byte_tokenizer()


def ids_of(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def test_segments_follow_the_rounds() -> None:
    """Catches the first token counted into a round, and the bonus of a full draft taken for a drafted token."""
    found = split_by_origin(ids_of("abcdefgh"), [(3, 2), (2, 0), (2, 2)], TOKENIZER)
    assert [(p.text, p.kind, p.rejected) for p in found] == [
        ("a", "own", 0), ("bc", "accepted", 0), ("d", "own", 1), ("e", "own", 2),
        ("fg", "accepted", 0), ("h", "own", 0),
    ]  # fmt: skip


def test_last_round_is_trimmed() -> None:
    """Catches text behind the end: a round is recorded before it is cut at EOS or the limit."""
    found = split_by_origin(ids_of("abc"), [(4, 4)], TOKENIZER)
    assert [(p.text, p.kind) for p in found] == [("a", "own"), ("bc", "accepted")]


def test_letters_of_several_tokens_stay_whole() -> None:
    """Catches replacement characters where a letter begins in one segment and ends in the next."""
    text = "aτα→b"
    for rounds in ([(0, 0)] * 20, [(2, 1)] * 10, [(4, 3)] * 5):
        found = split_by_origin(ids_of(text), rounds, TOKENIZER)
        assert "".join(p.text for p in found) == text
        assert not any("\ufffd" in p.text for p in found)


@pytest.mark.parametrize("kind", KINDS)
def test_the_segments_are_the_text(kind: str) -> None:
    """Catches spaces lost between segments, bytes at the end left out, and a rejection that no segment tells of."""
    tokenizer = KINDS[kind]()
    rng = random.Random(3)
    for _ in range(50):
        ids = random_ids(tokenizer, rng)
        rounds = [(3, rng.randint(0, 3)) for _ in range(len(ids) + 1)]
        found = split_by_origin(ids, rounds, tokenizer)
        assert "".join(p.text for p in found) == tokenizer.decode(ids, skip_special_tokens=True)
    first, last = byte_tokenizer(), "é🙂"
    found = split_by_origin(first(last)["input_ids"], [(2, 0), (3, 1), (2, 1)], first)
    assert [(p.text, p.kind, p.rejected) for p in found] == [("é", "own", 2), ("🙂", "own", 3)]


def line(task: str, number: int, method: str, temperature: float) -> dict[str, Any]:
    return {
        "task": task, "id": str(number), "method": method, "temperature": temperature,
        "prompt_ids": ids_of(f"{task} {number}"), "output_ids": ids_of("answer"),
        "rounds": [(2, 2), (2, 1)],
    }  # fmt: skip


def report_of(methods: list[dict[str, Any]]) -> EvalReport:
    return parsed(drafts.report("") | {"methods": methods})


def test_three_prompts_of_different_tasks() -> None:
    """Catches three prompts of one task, plain decoding, a tree or another temperature among the traces."""
    methods = [plain("all"), entry("causal", "all", 1.2), entry("ngram", "all", 1.1)]
    methods.append(entry("tree", "all", 3.0, tree={"width": 4, "nodes": 8}))
    methods.append(entry("made-up", "all", 9.0, simulated=[0.9]))
    lines = [
        line(task, number, name, temperature)
        for temperature in (1.0, 0.0)
        for name in ("plain", "ngram", "tree", "causal", "made-up")
        for task in ("a", "b")
        for number in (0, 1)
    ]
    found = select_traces(report_of(methods), lines, TOKENIZER)
    assert [(t.method, t.prompt) for t in found] == [
        ("causal", "a 0"), ("causal", "b 0"), ("causal", "a 1"),
    ]  # fmt: skip
    assert found[0].tokens == 6
    assert found[0].rounds == 2
    assert select_traces(report_of([plain("all")]), lines, TOKENIZER) == []


def test_damaged_outputs_are_named(tmp_path: Path) -> None:
    """Catches a traceback, and a letter that str.splitlines() takes for the end of a line."""
    path = tmp_path / "outputs.jsonl"
    line = {"task": "a\u2028b", "method": "m", "temperature": 0}
    line |= {"prompt_ids": [], "output_ids": [], "rounds": []}
    whole = json.dumps(line, ensure_ascii=False)
    path.write_text(f"{whole}\n")
    assert read_outputs(path) == [line]
    for bad in ("{", "3", "{}", json.dumps({**line, "rounds": 1}).replace("rounds", "round")):
        path.write_text(f"{whole}\n{bad}")
        with pytest.raises(UserError, match="outputs.jsonl:2"):
            read_outputs(path)
