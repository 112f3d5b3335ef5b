"""One way to read a draft's files, and the edits of saved files from which readings are made."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from decode.checkpoints import importers, layouts
from decode.checkpoints.draft_folder import METADATA_FILE
from decode.checkpoints.layouts import Shapes, Tensors
from decode.serving.rules import DraftFiles

Edit = Callable[[Path], object]  # a change of the files in a draft's folder
AdjustFn = Callable[[Any], None]
"""Changes a loaded draft in place, where no edit of its files could."""


@dataclass(frozen=True)
class Reading:
    """One way to read a draft's files."""

    about: str  # what is suspected, in a word or two
    says: str  # what this reading does, to be put behind "decoding with"
    edit: Edit  # of a copy of the files (`copy_files`)
    adjust: AdjustFn | None = None  # of the draft that was loaded from them
    dtype: str = ""  # what the draft computes in; empty: as in all other readings
    visible: bool = False
    """The files themselves give rise to it: something is missing, superfluous or said twice in two ways."""


AS_WRITTEN = Reading("", "the files as they are written", lambda folder: None)


def copy_files(d: DraftFiles, out: Path) -> None:
    """The draft's files with all tensors in one file under their own names, and without draftsmith.json. What training
    recorded refuses edited files when they are loaded; here they shall be read by what they say."""
    layouts.write_checkpoint(out, d.raw_config, importers.raw_tensors(d.path))
    for file in Path(d.path).iterdir():
        known = file.name in ("config.json", METADATA_FILE, importers.INDEX_FILE)
        if file.suffix in (".json", ".model", ".jinja", ".txt") and not known:
            (out / file.name).write_bytes(file.read_bytes())


# ---- edits ----


def combine(*edits: Edit) -> Edit:
    return lambda folder: [edit(folder) for edit in edits]


def set_config(section: str = "", /, **changes: Any) -> Edit:
    """Sets keys of config.json, or of its object `section`; None deletes a key."""

    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        part = config[section] if section else config
        part.update(changes)
        for key in [key for key, value in changes.items() if value is None]:
            del part[key]
        (folder / "config.json").write_text(json.dumps(config, indent=1))

    return edit


def edit_tensors(change: Callable[[Tensors], object]) -> Edit:
    """Changes the tensors in place, by their names in the file."""

    def edit(folder: Path) -> None:
        tensors = load_file(folder / layouts.WEIGHTS_FILE)
        change(tensors)
        # A copy of each: safetensors refuses two names of one tensor.
        kept = torch.contiguous_format
        copies = {name: value.clone(memory_format=kept) for name, value in tensors.items()}
        save_file(copies, folder / layouts.WEIGHTS_FILE)

    return edit


def remove_file(name: str) -> Edit:
    return lambda folder: (folder / name).unlink()


def layer_config(d: DraftFiles, **changes: Any) -> Edit:
    return set_config("transformer_layer_config" if d.is_speculators_format else "", **changes)


def rename(old: str, new: str) -> Edit:
    return edit_tensors(lambda tensors: tensors.update({new: tensors.pop(old)}))


def drop_all(d: DraftFiles, names: Sequence[str]) -> Edit:
    return edit_tensors(lambda tensors: [tensors.pop(d.name_in_file[name], None) for name in names])


def fill_tensors(shapes: Shapes, std: float) -> Edit:
    """Adds tensors: norms of one, matrices of zeros or, with `std`, random."""

    def change(tensors: Tensors) -> None:
        generator = torch.Generator().manual_seed(0)
        for name, shape in shapes.items():
            noise = std * torch.randn(shape, generator=generator)
            tensors[name] = torch.ones(shape) if "norm" in name else noise

    return edit_tensors(change)


def reverse_columns(d: DraftFiles, names: Sequence[str], parts: int) -> Edit:
    """Puts the `parts` equal groups of columns of these matrices into the opposite order."""

    def change(tensors: Tensors) -> None:
        for name in (d.name_in_file[name] for name in names if name in d.tensors):
            tensors[name] = torch.cat(tensors[name].chunk(parts, 1)[::-1], 1)

    return edit_tensors(change)
