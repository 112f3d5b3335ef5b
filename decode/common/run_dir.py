"""A command's output folder: which run may write into it, one run at a time, and no file lost that is not its own.

run.yaml in it holds the settings, below a line that names the command; `--config` reads it back.
"""

import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from decode.common import damage, files, lock, provenance
from decode.common.errors import UserError
from decode.common.files import COMMAND_HEADER, RUN_FILE
from decode.common.journal import Journal
from decode.common.published import Private
from decode.common.ranges import Seed
from decode.common.settings import drop_foreign, rename_keys, renamed_settings, to_dict, to_yaml
from decode.common.typed_json import to_json

JOURNAL = "journal.jsonl"
PREVIOUS_RUN = ".previous-run"
"""Folder within the output folder that keeps the run which --overwrite replaces until the new one has succeeded."""
MOVING = PREVIOUS_RUN + ".tmp"
OWN_NAMES = (RUN_FILE, RUN_FILE + ".tmp", lock.LOCK_FILE, PREVIOUS_RUN, MOVING)
CONTROL_SETTINGS = ("overwrite", "resume", "allow_changed", "dry_run", "publish", "tracker")
"""Settings that say how a run starts and ends, and who logs it. They may differ between two starts of one run."""


@dataclass
class FolderSettings:
    """What every command that writes a folder can be told."""

    out: Private[str] = ""
    """Folder for what is written. A run that was stopped goes on where it stopped."""
    overwrite: Private[bool] = False
    """Replace what an earlier run left in `out`."""


@dataclass
class RunSettings(FolderSettings):
    seed: Seed = 0
    """Of everything that is drawn at random."""


@dataclass(frozen=True)
class RunFolder:
    """An output folder that this run has open."""

    path: Path
    resumes: bool
    """It continues an earlier run in the folder."""

    def journal(self) -> Journal:
        """What has been measured in this folder so far, and where further measurements are kept.

        UserError on another machine than it began on: its figures depend on the machine.
        """
        return Journal(self.path / JOURNAL, to_json(provenance.hardware()))


@contextmanager
def open_run(
    settings: FolderSettings, command: str, writes: Sequence[str], reads: Sequence[str | Path] = ()
) -> Iterator[RunFolder]:
    """Makes `settings.out` the output folder of this run while the block runs, and writes run.yaml into it.

    An earlier run of the same `command` ("train/sample.py") with equal settings is continued, one with others only
    with `settings.resume`. With `settings.overwrite` it is moved to PREVIOUS_RUN, and deleted once a run in the folder
    has ended without an exception. `writes` are patterns of the files that the command writes, see `owns`; `reads` are
    paths that it reads (names of other things are ignored).

    UserError, and nothing is changed, for a folder of another command or of no run, one that another process has open,
    other settings without one of the two, and for --overwrite where the folder holds a foreign file or an input.
    """
    path = Path(settings.out)
    run_file = path / RUN_FILE
    check_folder(path)
    if settings.overwrite and vars(settings).get("resume"):
        raise UserError(
            "overwrite and resume are both true: one replaces the earlier run, the other continues it"
        )
    check_command(path, settings, command)
    path.mkdir(parents=True, exist_ok=True)
    with lock.hold(path / lock.LOCK_FILE, settings.out):
        _move_back(path)
        check_command(path, settings, command)
        text = f"{COMMAND_HEADER}{command}\n{to_yaml(settings)}"
        earlier, before = run_file.read_bytes() if run_file.is_file() else None, _times(path)
        resumes = earlier is not None and not settings.overwrite
        if resumes:
            _check_same_settings(run_file, settings)
        if resumes or earlier is None:
            files.write_atomically(run_file, text)
        else:
            check_inputs_outside(path, reads)
            check_no_foreign_file(path, writes, command)
            _move_aside(path, text)
        try:
            yield RunFolder(path, resumes)
        except BaseException as error:
            if not isinstance(error, UserError):  # a signal, a full disk
                without = " without --overwrite" if settings.overwrite else ""
                error.add_note(
                    f"what is finished is kept in {path}, and the same command{without} goes on"
                )
            if resumes and _times(path) == before:  # refused before it did anything
                files.write_atomically(run_file, earlier or b"")
            if (path / PREVIOUS_RUN).exists():
                error.add_note(f"the earlier run lies in {path / PREVIOUS_RUN}")
            raise
        shutil.rmtree(path / PREVIOUS_RUN, ignore_errors=True)


def refuse_change(what: str, allowed: bool, advice: str = "") -> None:
    """UserError for an input that is another one than before, where the result would be a mixture; with `allowed`, the
    setting `allow_changed`, a warning. `advice` is what else may be done."""
    if not allowed:
        others = advice or "--overwrite true begins anew, --out names another folder"
        raise UserError(f"{what}: --allow_changed true goes on all the same, {others}")
    damage.warn(f"{what}: it goes on all the same, as --allow_changed says")


@contextmanager
def replace_folder(out: Path) -> Iterator[Path]:
    """Gives a new, empty folder that takes the place of `out` when the block ends without an exception.

    Until then, and after an exception, `out` is as it was. UserError while another process replaces it.
    """
    check_folder(out)
    out = out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    with (
        lock.hold(out.with_name(f".{out.name}.lock"), out),
        tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch,
    ):
        new, old = Path(scratch) / "new", Path(scratch) / "old"
        new.mkdir()
        yield new
        if out.exists() and not any(out.iterdir()):  # it may be a mount point
            for entry in new.iterdir():
                shutil.move(entry, out / entry.name)
            return
        if out.exists():
            out.rename(old)
        try:
            new.rename(out)
        except BaseException:
            if old.exists():
                old.rename(out)
            raise


def _times(folder: Path) -> dict[str, int]:
    """{path: time of its last change} of the files in the folder, without those of this module."""
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.stat().st_mtime_ns for name, path in found.items() if name not in OWN_NAMES}


def check_folder(path: Path) -> None:
    """UserError if `path` is a file or a broken link, where a folder is to be made."""
    if path.is_dir() or not (path.exists() or path.is_symlink()):
        return
    is_what = "is a file: name a folder"
    if not path.exists():
        is_what = "is a link to a folder that does not exist: mend it or name another"
    raise UserError(f"{path} {is_what} with --out")


def check_file(path: str, inputs: Sequence[str] = (), flag: str = "--out") -> None:
    """UserError if the file `path` cannot be written at the end of a command, or is one of the `inputs`; "" is none.

    `flag` is the setting that names the file.
    """
    if not path:
        return
    file = Path(path)
    folder = next(parent for parent in file.absolute().parents if parent.exists())
    wrong = (
        " is a folder: name a file" if file.is_dir()
        else f": {folder} is a file, not a folder: name another file" if not folder.is_dir()
        else f": no permission to write into {folder}: name another file" if not os.access(folder, os.W_OK)
        else " is read by this command: name another file"
        if any(given and Path(given).resolve() == file.resolve() for given in inputs)
        else ""
    )  # fmt: skip
    if wrong:
        raise UserError(f"{path}{wrong} with {flag}")


def check_inputs_outside(out: Path, inputs: Sequence[str | Path]) -> None:
    """UserError if one of the inputs that exist lies within `out`, or `out` within it: `out` is to be replaced."""
    here = out.resolve()
    for given in filter(str, inputs):
        there = Path(given).resolve()
        if there.exists() and (there.is_relative_to(here) or here.is_relative_to(there)):
            raise UserError(
                f"--out {out} and {given}, which this run reads, are one inside the other: name another folder "
                "with --out"
            )


def check_no_foreign_file(folder: Path, writes: Sequence[str], command: str) -> None:
    """UserError that names a file of `folder` which the command does not write."""
    for parent, folders, names in os.walk(folder):
        here = Path(parent)
        links = [name for name in folders if (here / name).is_symlink()]
        for path in sorted((here / name).relative_to(folder) for name in [*names, *links]):
            ours = path.parts[0] in OWN_NAMES
            if not ours and not any(owns(pattern, path) for pattern in writes):
                raise UserError(
                    f"{folder / path} was not written by {command}, and would be lost: move it away or name another "
                    "folder with --out"
                )


def owns(pattern: str, path: Path) -> bool:
    """Whether the relative `path` fits `pattern`, part by part; a pattern that ends in `/**` fits all below as well.

    The temporary file of an atomic write and the copy of a damaged file fit where their file does.
    """
    wanted, parts = pattern.split("/"), list(path.parts)
    parts[-1] = re.sub(r"\.(tmp|damaged(-\d+)?)$", "", parts[-1])
    if wanted[-1] == "**":
        wanted.pop()
        parts = parts[: len(wanted)]
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def check_command(path: Path, settings: Any, command: str) -> None:
    """UserError unless the folder is absent, empty, or of an earlier run of this command, wherever it lay then."""
    run_file = path / RUN_FILE
    if run_file.is_file():
        writer = _written_by(run_file, settings, command)
        # By the file's name alone: a command that has moved to another folder goes on with what it wrote before.
        if Path(writer).name != Path(command).name:
            raise UserError(
                f"{path} was written by {writer}, not by {command}: name another folder with --out"
            )
    elif path.is_dir() and any(entry.name not in OWN_NAMES for entry in path.iterdir()):
        raise UserError(f"{path} holds files that no run wrote: choose another folder with --out")


def _written_by(run_file: Path, settings: Any, command: str) -> str:
    """The command that wrote run.yaml. Earlier versions did not name it: then its keys decide."""
    first = run_file.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
    if first.startswith(COMMAND_HEADER):
        return first.removeprefix(COMMAND_HEADER).strip()
    try:
        earlier = files.read_yaml(run_file)
    except UserError:
        return "an unknown command"
    renamed = renamed_settings(type(settings))
    found, known = {renamed.get(key, key) for key in earlier}, set(to_dict(settings))
    return command if 3 * len(found & known) > 2 * len(found | known) else "another command"


def _check_same_settings(run_file: Path, settings: Any) -> None:
    """UserError if the settings of the earlier run, read under their new names, differ and `settings.resume` is not
    set."""
    asked = to_dict(settings)
    try:
        earlier = files.read_yaml(run_file)
    except UserError:
        differing = [f"{run_file.name} is damaged"]
    else:
        earlier = rename_keys(earlier, renamed_settings(type(settings)), str(run_file))
        drop_foreign(earlier, type(settings))
        keys = (set(earlier) | set(asked)) - set(CONTROL_SETTINGS)
        differing = sorted(key for key in keys if earlier.get(key) != asked.get(key))
    if differing and not asked.get("resume", False):
        advice = "--resume true continues it, " if "resume" in asked else ""
        raise UserError(
            f"{run_file.parent} belongs to another run (different: {', '.join(differing)}): {advice}"
            "--overwrite true replaces it, --out names another folder"
        )


def _move_aside(path: Path, run_text: str) -> None:
    """Moves what is in the folder to PREVIOUS_RUN (an earlier one of these too) and writes the new run.yaml."""
    moving = path / MOVING
    moving.mkdir()
    try:
        for entry in sorted(path.iterdir(), key=lambda entry: entry.name == RUN_FILE):
            if entry.name not in (lock.LOCK_FILE, MOVING):
                entry.rename(moving / entry.name)
        files.write_atomically(path / RUN_FILE, run_text)
        moving.rename(path / PREVIOUS_RUN)
    except BaseException:
        _move_back(path)
        raise


def _move_back(path: Path) -> None:
    moving = path / MOVING
    if moving.is_dir():
        for entry in moving.iterdir():
            entry.rename(path / entry.name)
        moving.rmdir()
