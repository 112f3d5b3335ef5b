"""What is kept when a run is killed, at any byte."""

from pathlib import Path

import pytest

from decode.common.errors import UserError
from decode.common.journal import Journal

MACHINE = {"device": "here"}


def test_a_value_is_measured_once(tmp_path: Path) -> None:
    """Bug: a rerun measures again, or a fresh value differs in type from a restored one."""
    path, calls = tmp_path / "journal.jsonl", []

    def measure() -> list[tuple[int, float]]:
        calls.append(1)
        return [(1, 0.1)]

    first = Journal(path, MACHINE).get_or_measure(["runs", 0.0, "a"], measure)
    again = Journal(path, MACHINE)
    assert first == again.get_or_measure(["runs", 0.0, "a"], measure) == [[1, 0.1]]
    assert (len(calls), again.num_resumed) == (1, 1)
    assert again.get(["runs", 1.0, "a"]) is None


def test_killed_at_any_byte(tmp_path: Path) -> None:
    """Bug: a line that was torn by a kill makes the file unreadable, or takes a whole one with it."""
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, MACHINE)
    journal.put(["a"], "é")
    journal.put(["b"], 2)
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for size in range(ends[0], len(whole) + 1):
        path.write_bytes(whole[:size])
        found = Journal(path, MACHINE)
        assert (found.get(["a"]), found.get(["b"])) == (
            "é" if size >= ends[1] else None,
            2 if size >= ends[2] else None,
        )
        found.put(["c"], 3)
        assert Journal(path, MACHINE).get(["c"]) == 3


def test_another_machine_is_refused(tmp_path: Path) -> None:
    """Bug: seconds of two machines become one report."""
    path = tmp_path / "journal.jsonl"
    Journal(path, MACHINE).put(["a"], 1)
    with pytest.raises(UserError, match="--overwrite"):
        Journal(path, {"device": "there"})


DAMAGE = [
    b'{"key": ["b"], "value": "\xff"}',
    b'{"key": ["b"], "va',
    b"\0" * 4096,
    b'{"key": "b"}',
    b"[]",
]


@pytest.mark.parametrize("bad", DAMAGE)
def test_damage_in_the_middle_is_said_and_measured_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bad: bytes
) -> None:
    """Bug: a damaged line blocks every further start, is passed over in silence, or takes the lines behind it along."""
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, MACHINE)
    for key in "abc":
        journal.put([key], key)
    whole = path.read_bytes()
    rows = whole.split(b"\n")
    path.write_bytes(b"\n".join([*rows[:2], bad, *rows[3:]]))
    before = path.read_bytes()
    again = Journal(path, MACHINE)
    assert [again.get([key]) for key in "abc"] == ["a", None, "c"]
    assert again.num_resumed == 2
    [said] = capsys.readouterr().err.splitlines()
    assert "journal.jsonl: line 3 is damaged, and 1 of 4 lines are lost" in said
    assert (tmp_path / "journal.jsonl.damaged").read_bytes() == before
    assert again.get_or_measure(["b"], lambda: "b") == "b"
    assert sorted(path.read_bytes().split(b"\n")) == sorted(rows)
    Journal(path, MACHINE)
    assert capsys.readouterr().err == ""  # mended


def test_nothing_is_kept_without_the_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: what was measured on an unknown machine is taken for measured here, or called an earlier version."""
    path = tmp_path / "journal.jsonl"
    Journal(path, MACHINE).put(["a"], 1)
    path.write_bytes(b"\xff" + path.read_bytes())
    again = Journal(path, {"device": "there"})
    assert (again.get(["a"]), again.num_resumed) == (None, 0)
    assert "2 of 2 lines are lost" in capsys.readouterr().err
    assert Journal(path, {"device": "there"}).get(["machine", 2]) == {"device": "there"}


def test_an_earlier_version_is_refused(tmp_path: Path) -> None:
    """Bug: the records of a journal in an older format end a rerun in a traceback."""
    path = tmp_path / "journal.jsonl"
    path.write_text('{"key": ["machine"], "value": {"device": "here"}}\n')
    with pytest.raises(UserError, match="earlier version: --overwrite"):
        Journal(path, MACHINE)
