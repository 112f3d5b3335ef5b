"""One way to read a draft's files, and the edits that several suspects share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from decode.checkpoints import importers, layouts
from decode.checkpoints.draft_folder import METADATA_FILE
from decode.checkpoints.importers import Tensors
from decode.checkpoints.layouts import Shapes
from decode.serving.edits import ConfigEdit, Edit, EditSequence, TensorEdit
from decode.serving.rules import DraftFiles

AdjustFn = Callable[[Any], None]
"""Changes a loaded draft in place, where no edit of its files could."""


@dataclass(frozen=True)
class Reading:
    """One way to read a draft's files."""

    about: str
    """What is suspected, in a word or two."""
    says: str
    """What this reading does, to be put behind "decoding with"."""
    edit: Edit
    """Of a copy of the files (`copy_files`)."""
    adjust: AdjustFn | None = None
    """Of the draft that was loaded from them."""
    dtype: str = ""
    """What the draft computes in; empty: as in all other readings."""
    visible: bool = False
    """The files themselves give rise to it: something is missing, superfluous or said twice in two ways."""


RULES = {
    "taps": ("taps", "taps-disagree", "taps-unread"),
    "norms": ("norm-flags", "nested-norm-flag", "norm-before-residual", "norm-before-fc"),
    "rope": ("rope", "rope-keys"),
    "vocabulary map": ("map", "map-missing", "map-dtype", "missing-tensor", "whole-head"),
    "tensors": ("missing-tensor", "unknown-tensor", "skipped-tensor"),
    "biases": ("bias-flags", "dropped-bias"),
    "matrices": ("shared-projection", "tied"),
}
"""{what is suspected: names of the checker's rules that speak of the same}."""
AS_WRITTEN = Reading("", "the files as they are written", EditSequence(()))
TEXT_FILES = (".json", ".model", ".jinja", ".txt")
"""Endings of what is copied beside the tensors: configs and tokenizers."""


def copy_files(d: DraftFiles, out: Path) -> None:
    """The draft's files with all tensors in one file under their own names, and without draftsmith.json.

    What training recorded refuses edited files when they are loaded; here they shall be read by what they say.
    """
    layouts.write_checkpoint(out, d.raw_config, importers.raw_tensors(d.path))
    for file in Path(d.path).iterdir():
        known = file.name in ("config.json", METADATA_FILE, importers.INDEX_FILE)
        if file.suffix in TEXT_FILES and not known:
            (out / file.name).write_bytes(file.read_bytes())


def layer_config(d: DraftFiles, **changes: Any) -> ConfigEdit:
    """Settings of the decoder layer, where this format has them."""
    return ConfigEdit(changes, "transformer_layer_config" if d.is_speculators_format else "")


def fill_tensors(shapes: Shapes, std: float) -> TensorEdit:
    """Adds tensors: norms of one, matrices of zeros or, with `std`, random."""

    def change(tensors: Tensors) -> None:
        generator = torch.Generator().manual_seed(0)
        for name, shape in shapes.items():
            noise = std * torch.randn(shape, generator=generator)
            tensors[name] = torch.ones(shape) if "norm" in name else noise

    return TensorEdit(change)


def drop_all(d: DraftFiles, names: Sequence[str]) -> TensorEdit:
    """Removes tensors by their canonical names."""
    return TensorEdit(lambda tensors: [tensors.pop(d.name_in_file[name], None) for name in names])


def reverse_columns(d: DraftFiles, names: Sequence[str], parts: int) -> TensorEdit:
    """Puts the `parts` equal groups of columns of these matrices into the opposite order."""

    def change(tensors: Tensors) -> None:
        for name in (d.name_in_file[name] for name in names if name in d.tensors):
            tensors[name] = torch.cat(tensors[name].chunk(parts, 1)[::-1], 1)

    return TensorEdit(change)
