"""Files that are whole after a crash, and errors that name the file."""

import os
from pathlib import Path

import pytest

from decode.common.errors import UserError, first_line
from decode.common.files import read_json, write_atomically


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


def test_json_is_read_or_the_error_names_the_file(tmp_path: Path) -> None:
    """Catches a stack trace, or a message without the file's name, for a file that is absent or damaged."""
    path = tmp_path / "x.json"
    with pytest.raises(UserError, match=f"{path} does not exist"):
        read_json(path)
    path.write_bytes('{"a": ["ü"]}'.encode())
    assert read_json(path) == {"a": ["ü"]}
    for damaged in (b'{"a": ', b"\xff\xfe"):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=f"{path} is not valid JSON"):
            read_json(path)


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
