"""Files that are whole after a crash, and errors that name the file."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from decode.common.errors import UserError, first_line
from decode.common.files import (
    MAX_DEPTH,
    parse_jsonl,
    parse_yaml,
    read_json,
    read_json_object,
    read_text,
    read_yaml,
    write_atomically,
)


def test_content_is_written_and_replaced(tmp_path: Path) -> None:
    """Catches text in another encoding, bytes that are changed, missing folders, and temporary files that stay."""
    path = tmp_path / "a" / "b.txt"
    for content, want in (("ü\n", "ü\n".encode()), (b"\x00\xff", b"\x00\xff"), ("", b"")):
        write_atomically(path, content)
        assert path.read_bytes() == want
    assert list(path.parent.iterdir()) == [path]


def test_a_crash_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches writing in place: a crash before the data is safe must leave what was there."""
    path = tmp_path / "state.json"
    write_atomically(path, "old")

    def crash(*args: object) -> None:
        raise OSError("disk full")

    for step in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os if step == "fsync" else Path, step, crash)
            with pytest.raises(OSError, match="disk full"):
                write_atomically(path, "new")
        assert path.read_text() == "old"
    write_atomically(path, "new")
    assert path.read_text() == "new"


def test_data_and_folder_are_synced_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a rename before the data is on disk, which after a power cut is an empty file under the right name."""
    steps: list[str] = []
    sync, replace = os.fsync, Path.replace

    def recorded_sync(descriptor: int) -> None:
        steps.append("sync")
        sync(descriptor)

    def recorded_replace(self: Path, target: Path) -> Path:
        steps.append("rename")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", recorded_sync)
    monkeypatch.setattr(Path, "replace", recorded_replace)
    write_atomically(tmp_path / "x", "text")
    assert steps == ["sync", "rename", "sync"]


BOM = b"\xef\xbb\xbf"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: None, "does not exist: check the path"),
        (lambda path: path.symlink_to("nowhere"), "is a link to a file that does not exist"),
        (lambda path: path.symlink_to(path), "cannot be read"),  # a link to itself
        (lambda path: path.mkdir(), "is a folder: name a file in it"),
        (lambda path: path.write_bytes(b"ab\xff\xfe"), r"is not UTF-8 text \(byte 2\)"),
        (lambda path: path.write_bytes("ü".encode("utf-16")), "is not UTF-8 text"),
    ],
)
def test_a_file_that_cannot_be_read(
    tmp_path: Path, make: Callable[[Path], object], reason: str
) -> None:
    """Catches a stack trace, or a message without the file's name, from any of the readers."""
    path = tmp_path / "given.file"
    make(path)
    for read in (read_text, read_json, read_yaml):
        with pytest.raises(UserError, match=f"^{path} {reason}.*$"):
            read(path)


def test_other_names_of_files() -> None:
    """Catches the ValueError of a null character and the OSError of a name that is too long or not permitted."""
    for name in ("a\0b", "a" * 300, "/dev/null/x"):
        with pytest.raises(UserError, match="cannot be read"):
            read_text(name)


@pytest.mark.parametrize("mark", [b"", BOM])
def test_text_with_and_without_byte_order_mark(tmp_path: Path, mark: bytes) -> None:
    """Catches a byte order mark, which editors on Windows write, that ends up in the first word."""
    path = tmp_path / "x"
    path.write_bytes(mark + '{"a": ["ü"]}'.encode())
    assert read_text(path) == '{"a": ["ü"]}'
    assert read_json(path) == read_yaml(path) == {"a": ["ü"]}
    assert list(parse_jsonl(read_text(path), path)) == [(f"{path}:1", {"a": ["ü"]})]


DEEP, DIGITS = 100_000, "9" * 5000
BAD_JSON = {
    '{"a": ': r"is not valid JSON \(.*line 1, column 7\)",
    "[" * DEEP + "]" * DEEP: "nested deeper",
    '{"a": ' * DEEP + "1" + "}" * DEEP: "nested deeper",
    "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1): "nested deeper",
    f"[{DIGITS}]": "number of over 4300 digits",
    '{"prompt": "\\ud800"}': r"has \\ud800, half of a surrogate pair",
    '[{"\\udfff": 1}]': r"has \\udfff, half of a surrogate pair",
}


@pytest.mark.parametrize("text", BAD_JSON, ids=lambda text: text[:12])
def test_bad_json(tmp_path: Path, text: str) -> None:
    """Catches RecursionError and ValueError of the parser, and text that breaks when it is written or hashed."""
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(UserError, match=f"^{path} .*{BAD_JSON[text]}"):
        read_json(path)
    with pytest.raises(UserError, match=f"^{path}:2 .*{BAD_JSON[text]}"):
        list(parse_jsonl("1\n" + text.replace("\n", " "), path))


def test_empty_json_and_what_is_allowed(tmp_path: Path) -> None:
    """Catches a limit that refuses values which are fine: whole surrogate pairs, deep lists, long numbers."""
    path = tmp_path / "x.json"
    path.write_text(" \n")
    with pytest.raises(UserError, match=f"^{path} is empty"):
        read_json(path)
    fine = ['"\\ud83d\\ude00"', "[" * MAX_DEPTH + "]" * MAX_DEPTH, "9" * 4000]
    assert [value for _, value in parse_jsonl("\n".join(fine), path)] == list(map(json.loads, fine))


def test_json_of_another_kind(tmp_path: Path) -> None:
    """Catches a file of another command, or a list, that is taken for what it is not."""
    path = tmp_path / "x.json"
    for text, reason in (("[]", "a list"), ("3", "a single value"), ("{}", "no 'chosen'")):
        path.write_text(text)
        with pytest.raises(
            UserError, match=f"^{path} is not tuned.json of tune: it has|holds {reason}"
        ):
            read_json_object(path, "tuned.json of tune", ["chosen"])
    path.write_text('{"chosen": 1}')
    assert read_json_object(path, "tuned.json of tune", ["chosen"]) == {"chosen": 1}


BILLION_LAUGHS = "a0: &a0 [lol]\n" + "\n".join(
    f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 9)}]" for i in range(9)
)
LADDER = "a0: &a0 [x]\n" + "\n".join(f"a{i + 1}: &a{i + 1} [*a{i}]" for i in range(120))
BAD_YAML = {
    "k: 1\nk: 2": "x.yaml:2: 'k' is set twice",
    "a:\n  b: {c: 1, c: 2}": "x.yaml:2: 'c' is set twice",
    BILLION_LAUGHS: "expands to over 100,000 values",
    LADDER: "nested deeper",
    "a: &a [*a]": "an alias contains itself",
    "a: *b": "x.yaml:1 is not valid YAML .*undefined alias",
    "a: " + "[" * DEEP: "nested deeper",
    "a: " + "[" * 150 + "]" * 150: "nested deeper",
    "a:\n\tb: 1": "x.yaml:2 is not valid YAML .*cannot start any token",
    "a: [1": "is not valid YAML",
    "a: !!python/object:os.system x": "is not valid YAML",
    "? [a]\n: b": "is not valid YAML",
    f"a: {DIGITS}": "is not valid YAML",
    "a: \x07": "is not valid YAML",
    'a: "\\ud800"': "half of a surrogate pair",
    "- a": "holds a list: write settings as",
    "text": "holds text",
    "3": "holds a single value",
    "1: a": "the name 1 is no text",
}


@pytest.mark.parametrize("text", BAD_YAML, ids=lambda text: text[:12])
def test_bad_yaml(text: str) -> None:
    """Catches a setting whose first value is lost in silence, files that grow a billionfold, and stack traces."""
    with pytest.raises(UserError, match=BAD_YAML[text]) as error:
        parse_yaml(text, "x.yaml")
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("x.yaml")


def test_good_yaml() -> None:
    """Catches a check that refuses empty files, or aliases and merged keys as people use them."""
    assert parse_yaml("", "x") == parse_yaml("# nothing", "x") == parse_yaml("---", "x") == {}
    text = "base: &b {lr: 1, k: 2}\nrun: {<<: *b, k: 3}\nagain: *b"
    want = {"base": {"lr": 1, "k": 2}, "run": {"lr": 1, "k": 3}, "again": {"lr": 1, "k": 2}}
    assert parse_yaml(text, "x") == want


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("one\ntwo"), "one"),
        (ValueError("\n one\n"), "one"),
        (KeyError(), "KeyError"),
        (ValueError(" \n"), "ValueError"),
    ],
)
def test_first_line(error: Exception, line: str) -> None:
    """Catches an index error, or an empty reason, for an exception without a message."""
    assert first_line(error) == line
