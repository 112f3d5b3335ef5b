"""Output folders: what --overwrite may replace, what it loses (nothing), and what is refused before any change."""

import dataclasses
import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from decode.common import files, lock
from decode.common.command import Terminated
from decode.common.errors import UserError
from decode.common.run_dir import (
    MOVING,
    PREVIOUS_RUN,
    RUN_FILE,
    FolderSettings,
    open_run,
    owns,
    replace_folder,
)
from decode.common.settings import parse_settings
from tests.worlds import contents

COMMAND = "train/work.py"
OWNED = ("result.json", "parts/*.bin", "logs/**")


@dataclass
class Settings(FolderSettings):
    target: str = "assets/target"
    """Model."""
    data: str = ""
    """Samples."""
    steps: int = 1
    """How many."""
    resume: bool = False
    """Go on."""


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def run(out: Path, result: str = "1", inputs: Any = (), **changed: Any) -> bool:
    """A whole run in `out`; True if it resumed an earlier one."""
    settings = Settings(out=str(out), **changed)
    with open_run(settings, COMMAND, OWNED, inputs) as opened:
        files.write_atomically(out / "result.json", result)
        files.write_atomically(out / "parts" / "a.bin", result)
        return opened.resumes


def refused(out: Path, match: str, **changed: Any) -> None:
    """Asserts that a run is refused with this message and that no file below the parent of `out` changes."""
    before = contents(out.parent)
    with pytest.raises(UserError, match=match):
        run(out, "other", **changed)
    assert contents(out.parent) == before


def test_equal_settings_resume_and_others_are_refused(out: Path) -> None:
    assert not run(out)
    assert run(out)
    refused(out, "different: steps", steps=2)
    assert run(out, steps=2, resume=True)
    assert not run(out, steps=3, overwrite=True)


def test_run_yaml_names_the_command_and_is_a_config(out: Path) -> None:
    run(out, steps=7)
    assert (out / RUN_FILE).read_text().startswith(f"# command: {COMMAND}\n")
    read = parse_settings(Settings, "", ["--config", str(out / RUN_FILE)])
    assert read == Settings(out=str(out), steps=7)


def test_overwrite_replaces_the_earlier_run_once_the_new_one_has_succeeded(out: Path) -> None:
    run(out, "old")
    (out / "logs").mkdir()
    (out / "logs" / "x").write_text("old")
    settings = Settings(out=str(out), steps=2, overwrite=True)
    with open_run(settings, COMMAND, OWNED) as opened:
        assert not opened.resumes
        assert {p.name for p in out.iterdir()} == {RUN_FILE, lock.LOCK_FILE, PREVIOUS_RUN}
        assert (out / PREVIOUS_RUN / "result.json").read_text() == "old"
        (out / "result.json").write_text("new")
    assert contents(out).keys() == {RUN_FILE, "result.json"}


@pytest.mark.parametrize("error", [UserError("x"), KeyboardInterrupt(), Terminated(), TypeError()])
def test_a_run_that_fails_keeps_the_earlier_one_and_says_where(
    out: Path, error: BaseException
) -> None:
    run(out, "old")
    before = contents(out)
    settings = Settings(out=str(out), steps=2, overwrite=True)
    with pytest.raises(type(error)) as raised, open_run(settings, COMMAND, OWNED):
        raise error
    assert contents(out / PREVIOUS_RUN) == before
    assert f"the earlier run lies in {out / PREVIOUS_RUN}" in raised.value.__notes__
    assert not (out / lock.LOCK_FILE).exists()
    # once more: nothing of either is lost
    (out / "result.json").write_text("half")
    with pytest.raises(UserError), open_run(settings, COMMAND, OWNED):
        raise UserError("x")
    assert contents(out / PREVIOUS_RUN / PREVIOUS_RUN) == before
    assert (out / PREVIOUS_RUN / "result.json").read_text() == "half"
    assert run(out, "new", steps=2)  # goes on, and is the run that replaces them
    assert not (out / PREVIOUS_RUN).exists()


@pytest.mark.parametrize("at", range(6))
def test_a_kill_while_the_earlier_run_is_moved_loses_nothing(
    out: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Catches a folder whose files lie in two places, and one that looks like nobody's."""

    class Killed(BaseException):
        pass

    run(out, "old")
    before = contents(out)
    count = 0

    def killing(real: Callable[..., Any]) -> Callable[..., Any]:
        def rename(self: Path, target: Path) -> Any:
            nonlocal count
            count += 1
            if count > at:
                raise Killed  # from here on everything, as after a kill
            return real(self, target)

        return rename

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killing(Path.rename))
        patch.setattr(Path, "replace", killing(Path.replace))
        settings = Settings(out=str(out), steps=2, overwrite=True)
        try:
            with open_run(settings, COMMAND, OWNED):
                pass
            killed = False
        except Killed:
            killed = True
    assert killed == (at < 5)
    if killed:
        assert run(out, "old")
        assert contents(out) == before


def test_an_error_of_the_world_in_mid_run_says_how_to_go_on(out: Path) -> None:
    with (
        pytest.raises(OSError, match="full") as raised,
        open_run(Settings(out=str(out)), COMMAND, OWNED),
    ):
        raise OSError(errno.ENOSPC, "full")
    assert raised.value.__notes__ == [
        f"what is finished is kept in {out}, and the same command goes on"
    ]
    assert run(out)


def old_run(out: Path) -> None:
    """A run of an earlier version: run.yaml does not name the command, and lacks a setting of today."""
    run(out)
    _, *lines = (out / RUN_FILE).read_text().splitlines()
    (out / RUN_FILE).write_text("\n".join(line for line in lines if "resume" not in line))


def test_a_run_of_an_earlier_version_is_recognised_by_its_keys(out: Path) -> None:
    old_run(out)
    refused(out, "different: steps", steps=2)
    assert run(out, resume=True)
    old_run(out)
    assert not run(out, overwrite=True)


@pytest.mark.parametrize(
    "text",
    [
        "# command: train/other.py\ntarget: x\n",
        "target: x\nwidth: 3\nheight: 4\ndepth: 5\n",
        "target: x\n",
        "",
        "- a list\n",
        "\x00",
    ],
)
@pytest.mark.parametrize("told", ["overwrite", "resume", ""])
def test_a_folder_of_another_command_is_refused(out: Path, text: str, told: str) -> None:
    out.mkdir()
    (out / RUN_FILE).write_text(text)
    (out / "result.json").write_text("a day of work")
    refused(out, f"was written by .*, not by {COMMAND}", **({told: True} if told else {}))


def test_damage_of_our_own_run_yaml_is_said_and_can_be_overwritten(out: Path) -> None:
    run(out)
    (out / RUN_FILE).write_text(f"# command: {COMMAND}\nsteps: [\n")
    refused(out, "run.yaml is damaged")
    assert not run(out, overwrite=True)


@pytest.mark.parametrize(
    "name",
    ["thesis.txt", "parts/notes.txt", "parts/more/a.bin", "parts/.keep", "result.json/x", "old/result.json"],
)  # fmt: skip
def test_a_foreign_file_is_named_and_kept(out: Path, name: str) -> None:
    run(out)
    if name == "result.json/x":
        (out / "result.json").unlink()
    (out / name).parent.mkdir(parents=True, exist_ok=True)
    (out / name).write_text("years of work")
    refused(out, f"{name} was not written by {COMMAND}", overwrite=True)


def test_a_folder_that_no_run_wrote_is_refused(out: Path) -> None:
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    for told in ({}, {"overwrite": True}, {"resume": True}):
        refused(out, "holds files that no run wrote", **told)


@pytest.mark.parametrize("place", ["out", "out/parts/a.bin", "out/result.json", "."])
def test_an_input_inside_out_or_around_it_is_never_overwritten(out: Path, place: str) -> None:
    run(out)
    link = out.parent / "link"
    link.symlink_to(out.parent / place)
    for given in (out.parent / place, link):
        refused(out, "one inside the other", inputs=["", "me/hub-name", str(given)], overwrite=True)
    link.unlink()
    assert not run(out, inputs=["", "me/hub-name"], overwrite=True)


def test_links_in_the_folder_keep_what_they_lead_to(out: Path, tmp_path: Path) -> None:
    run(out)
    disk = tmp_path / "disk"
    disk.mkdir()
    (disk / "x").write_text("kept")
    (out / "logs").symlink_to(disk)
    assert not run(out, overwrite=True)
    assert (disk / "x").read_text() == "kept"
    (out / "elsewhere").symlink_to(disk)
    refused(out, "elsewhere was not written", overwrite=True)


def test_a_second_run_is_refused_and_changes_nothing(out: Path) -> None:
    settings = Settings(out=str(out))
    with open_run(settings, COMMAND, OWNED):
        for changed in ({}, {"overwrite": True}, {"resume": True}, {"steps": 2}):
            refused(out, r"another run is using .*\(pid \d+, host ", **changed)
    assert run(out)


@pytest.mark.parametrize("kind", ["file", "link", "below"])
def test_what_is_no_folder_is_one_line(out: Path, kind: str) -> None:
    if kind == "link":
        out.symlink_to(out.parent / "gone")
    else:
        out.write_text("x")
    if kind == "below":
        with pytest.raises(NotADirectoryError):
            run(out / "below")
    else:
        refused(out, "is a link to" if kind == "link" else "is a file")


def test_a_link_to_a_folder_is_a_folder(out: Path) -> None:
    (out.parent / "disk").mkdir()
    out.symlink_to(out.parent / "disk")
    assert not run(out)
    assert not run(out, overwrite=True)
    assert out.is_symlink()


def test_a_full_disk_while_the_earlier_run_is_moved_changes_nothing(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(out, "old")
    before = contents(out)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "run.yaml")

    with monkeypatch.context() as patch:
        patch.setattr(files, "write_atomically", full)
        with pytest.raises(OSError, match="No space"):
            run(out, overwrite=True)
    assert contents(out) == before
    assert not (out / MOVING).exists()


def test_patterns() -> None:
    ours = [
        "result.json",
        "result.json.tmp",
        "parts/a.bin",
        "logs/a/b",
        "logs",
        "parts/a.bin.damaged-2",
    ]
    others = ["result.json5", "a/result.json", "parts/b/a.bin", "parts", "log/a", "result.json/x"]
    assert [p for p in ours + others if any(owns(x, Path(p)) for x in OWNED)] == ours


def test_settings_without_resume(out: Path) -> None:
    """Catches a command without that setting, such as eval/run.py."""

    @dataclass
    class Few(FolderSettings):
        steps: int = 1

    def start(settings: Few) -> bool:
        with open_run(settings, COMMAND, OWNED) as opened:
            return opened.resumes

    few = Few(str(out))
    assert [start(few), start(few)] == [False, True]
    with pytest.raises(UserError) as raised:
        start(dataclasses.replace(few, steps=2))
    assert "--resume" not in str(raised.value)


# ---- folders that are written beside their place ----


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with replace_folder(out) as new:
        (new / "a").write_text("1")
        assert not out.exists()
    assert contents(tmp_path).keys() == {"out/a"}
    with pytest.raises(FileNotFoundError), replace_folder(out) as new:
        (new / "b" / "c").write_text("2")
    assert contents(tmp_path).keys() == {"out/a"}
    with replace_folder(out) as new:
        (new / "b").write_text("2")
    assert contents(tmp_path).keys() == {"out/b"}


def test_two_that_replace_one_folder(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with replace_folder(out) as new:
        (new / "a").write_text("1")
        with pytest.raises(UserError, match="another run is using"), replace_folder(out):
            pass
    assert contents(tmp_path).keys() == {"out/a"}


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    """Catches a mount point, or a link to one, that cannot be renamed."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    with replace_folder(tmp_path / "out") as new:
        (new / "a").write_text("1")
        (new / "b").mkdir()
    assert (tmp_path / "disk" / "a").is_file()
    assert (tmp_path / "out").is_symlink()
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match="link to"), replace_folder(tmp_path / "gone"):
        pass


@pytest.mark.parametrize("folder", ["scripts/experiments", "eval", "train/older/place"])
def test_a_command_that_has_moved_goes_on_with_its_folder(out: Path, folder: str) -> None:
    """Catches a folder of an earlier version that a command in another place takes for a stranger's."""
    run(out)
    text = (out / RUN_FILE).read_text()
    (out / RUN_FILE).write_text(text.replace(COMMAND, f"{folder}/work.py"))
    assert run(out)
    assert (out / RUN_FILE).read_text() == text
