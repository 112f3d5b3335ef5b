"""Folders that are made once of a model's files and kept in the cache: of a GGUF, quantised weights, an adapter.

The files beside the weights are copied into them, and into exports, by functions of this module.
"""

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from huggingface_hub import constants

from decode.common.errors import UserError
from decode.common.lock import hold
from decode.model.names import cache_error


def made_folder(
    kind: str, name: str, last_file: str, what: str, make: Callable[[Path], None]
) -> Path:
    """The folder `name` of this `kind` in the cache, which `make` fills unless it is there whole.

    `make` gets an empty folder, which takes its name once it is full, and writes `last_file` last: a folder with that
    file is whole. One process at a time makes it, and others wait: they come here together in a launch, and making may
    take the memory of the whole model. UserError if the disk of the cache refuses; it says what the folder is made of.
    """
    folder = Path(constants.HF_HOME) / "draftsmith" / kind / name
    if (folder / last_file).is_file():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with hold(folder.with_name(f"{name}.lock"), folder, wait=True):
            if not (folder / last_file).is_file():
                _make(folder, make)
    except UserError:
        raise
    except Exception as error:
        refused = cache_error(error)
        if refused is None:
            raise
        raise UserError(f"{what} is converted in the cache: {refused}") from error
    return folder


def _make(folder: Path, make: Callable[[Path], None]) -> None:
    partial = folder.with_name(f"{folder.name}.partial")
    for rest in (partial, folder):  # of a process that was killed, or without its last file
        shutil.rmtree(rest, ignore_errors=True)
    try:
        partial.mkdir()
        make(partial)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def files_named(folder: Path, patterns: Iterable[str]) -> list[Path]:
    """The files of a folder with names of these patterns, in the order of their names."""
    return sorted({file for p in patterns for file in folder.glob(p) if file.is_file()})


def copy_files(files: Iterable[Path], folder: Path, out: Path) -> None:
    """Copies files of `folder`, or of folders in it, to the same places in `out`."""
    for file in files:
        copy = out / file.relative_to(folder)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)
