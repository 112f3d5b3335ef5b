"""Answers scored against values worked out by hand, and code kept in its sandbox."""

import socket
import sys
import time
from pathlib import Path

import pytest

from eval.checks import answer_quality, sandbox
from eval.tasks.loading import TaskPrompt


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 2 + 3 = 5", 5.0),
        ("He pays $1,250.50 in all.", 1250.5),
        ("#### 18 \nQuestion: 7", 18.0),
        ("#### -3", -3.0),
        ("the answer is 12.", 12.0),
        ("7 apples\n####", 7.0),
        ("none", None),
    ],
)
def test_last_number(text: str, number: float | None) -> None:
    """Bug: the first number counts, a comma splits one, a full stop belongs to it, or what follows #### is ignored."""
    assert answer_quality.last_number(text) == number


def test_exact_match() -> None:
    """Bug: two answers without a number are equal."""
    assert answer_quality.exact_match("it is 1,000", "1000.0") == 1
    assert answer_quality.exact_match("it is 100", "1000") == 0
    assert answer_quality.exact_match("no idea", "nothing") == 0


@pytest.mark.parametrize(
    ("answer", "reference", "value"),
    [
        ("police killed the gunman", "police kill the gunman", 0.75),  # LCS 3 of 4 and 4
        ("the gunman kill police", "police kill the gunman", 0.5),  # LCS 2
        ("The cat, the cat!", "the cat", 2 * 2 / (4 + 2)),
        ("a b c d e", "a c e", 2 * 3 / (5 + 3)),
        ("", "a", 0.0),
        ("x", "y", 0.0),
        ("grün wie Gras", "Grün wie Gras.", 1.0),
    ],
)
def test_rouge_l_by_hand(answer: str, reference: str, value: float) -> None:
    """Bug: order is ignored, a word counts twice, or recall is reported for F1. Lin (2004)'s own sentences first."""
    assert answer_quality.rouge_l(answer, reference) == pytest.approx(value)


def prompt_of(name: str, metric: str = "number") -> TaskPrompt:
    return TaskPrompt("t", name, [1], metric=metric, reference="1")


def test_parity_is_paired_and_has_an_interval() -> None:
    """Bug: the methods are scored on different prompts, or a difference is called significant when there is none."""
    plain: dict[tuple[str, str], float | None] = {("t", str(i)): float(i % 2) for i in range(40)}
    items = [prompt_of(str(i)) for i in range(39)] + [prompt_of("x", metric="")]
    scores: dict[tuple[str, str], float | None] = {
        (item.task, item.id): float(i % 2) for i, item in enumerate(items)
    }
    found = answer_quality.compare_answer_quality(items, scores, plain, seed=0)
    assert [(x.metric, x.prompts, x.difference.value) for x in found] == [("exact match", 39, 0.0)]
    assert found[0].difference.ci == (0.0, 0.0)
    value, ci = found[0].value
    assert ci is not None
    assert value is not None
    assert ci[0] < value < ci[1]
    zeros = dict.fromkeys(scores, 0.0)
    worse = answer_quality.compare_answer_quality(items, zeros, plain, seed=0)[0]
    assert worse.difference.value == pytest.approx(-19 / 39)
    assert worse.difference.ci[1] < 0


@pytest.mark.parametrize(
    ("answer", "valid"),
    [
        ('{"name": "A", "ages": [1, 2]}', 1.0), (' [1]\n', 1.0), ('"a"', 1.0),
        ('{"name": "A"', 0.0), ('{"a": 1} and more', 0.0), ("```json\n{}\n```", 0.0), ("", 0.0), ("{'a': 1}", 0.0),
    ],
)  # fmt: skip
def test_only_a_whole_json_value_is_valid(answer: str, valid: float) -> None:
    """Bug: an answer that was cut off, or wrapped in talk, counts as JSON."""
    assert answer_quality.is_json(answer) == valid


def test_code_is_only_run_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: code that a model wrote runs although run_code is off."""
    monkeypatch.setattr(sandbox, "run", lambda code: pytest.fail("it ran"))
    item = prompt_of("a", metric="code")
    assert answer_quality.score_answer(item, [1], None, run_code=False) is None


# ---- the sandbox ----


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("assert 1 == 2", "AssertionError"),
        ("import sys; sys.exit(0)", "ended with 0"),
        ("import os; os._exit(0)", "ended with 0"),
        ("import sys; print('PASSED', file=sys.stderr); sys.exit(0)", "PASSED"),
        ("def f(:", "SyntaxError"),
        ("import os; assert 'SECRET' not in os.environ; raise KeyError", "KeyError"),
        pytest.param(
            "x = 'x' * (1 << 31)",
            "MemoryError",
            marks=pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_AS"),
        ),
    ],
)
def test_code_that_fails(code: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a program that ends early, or says so itself, counts as passed; or it sees the caller's environment."""
    monkeypatch.setenv("SECRET", "x")
    verdict = sandbox.run(code)
    assert not verdict.passed
    assert reason in verdict.reason


def test_code_that_passes_and_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: nothing passes; or what a program writes lands in the caller's folder."""
    monkeypatch.chdir(tmp_path)
    code = "open('here', 'w').write('x')\nif __name__ == '__main__':\n    import math\nmath.pi"
    assert sandbox.run(code).passed
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code", ["while True: pass", "import os\nos.fork()\nwhile True: pass"])
def test_an_endless_program_is_ended(code: str) -> None:
    """Bug: a loop, or the child that a program leaves behind, keeps the evaluation waiting."""
    start = time.monotonic()
    verdict = sandbox.run(code, seconds=1.0)
    assert not verdict.passed
    assert time.monotonic() - start < 20


def test_there_is_no_network() -> None:
    """Bug: a program reaches what the machine reaches: here a server of our own, which must hear nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.5)
        port = server.getsockname()[1]
        code = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)"
        verdict = sandbox.run(code)
        assert not verdict.passed
        assert verdict.network in ("namespace", "sockets")
        with pytest.raises(TimeoutError):
            server.accept()
