"""The registry of draft families: how each is loaded or created, and which class trains it.

A new family is one `register_family(DraftFamily(...))`: its decoder is a subclass of `decode.drafts.base.Draft`, its
trainer a subclass of `train.families.base.FamilyTrainer` named in `trainer`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from decode.checkpoints import importers
from decode.common.errors import UserError
from decode.drafts import causal, eagle, medusa
from decode.drafts.base import Draft, read_metadata
from decode.drafts.early_exit import EarlyExitDraft
from decode.drafts.ngram import NgramDraft
from decode.drafts.suffix import SuffixDraft
from decode.drafts.wrappers import CrossDeviceDraft
from decode.model.loading import Target
from decode.verification.tree import TreeShape

LoadDraft = Callable[[str, Target, str, str], Draft]
"""(folder or Hub name, target, device, dtype) -> draft."""
CreateDraft = Callable[[Target, int, TreeShape], Draft]
"""(target, number of the target's first layers to use, tree shape or None for chains) -> draft."""


@dataclass(frozen=True)
class DraftFamily:
    """One draft family. It has `load` if its weights are saved in a folder, `create` if it needs none."""

    name: str
    """The name in settings: `draft.family` in training, a method's name in evaluation where there is no folder."""
    load: LoadDraft | None = None
    create: CreateDraft | None = None
    trainer: str = ""
    """"module:Class" of its FamilyTrainer; empty for a family that is not trained. Only train/ imports it."""
    supports_trees: bool = True
    """Its proposals follow `Draft.shape`; False: it ignores the shape."""
    has_weights: bool = True
    """Drafting a token reads weights, its own or the target's (early-exit)."""
    saved_as: str = ""
    """`family` in draftsmith.json; empty: its name. Medusa-2 heads are saved as `medusa`."""

    @property
    def saved_name(self) -> str:
        return self.saved_as or self.name


def create_ngram(target: Target, layers: int, shape: TreeShape) -> Draft:
    return NgramDraft()


def create_suffix(target: Target, layers: int, shape: TreeShape) -> Draft:
    return SuffixDraft()


def create_early_exit(target: Target, layers: int, shape: TreeShape) -> Draft:
    """UserError unless 0 < layers < the target's number of layers."""
    target.decoder.first_layers(layers)  # raises the error before anything is decoded
    return EarlyExitDraft(target, layers, shape)


DRAFT_FAMILIES: dict[str, DraftFamily] = {
    family.name: family
    for family in (
        DraftFamily("causal", load=causal.load, trainer="train.families.causal:Causal"),
        DraftFamily("medusa", load=medusa.load, trainer="train.families.medusa:Medusa"),
        DraftFamily(
            "medusa2",
            load=medusa.load,
            trainer="train.families.medusa2:Medusa2",
            saved_as="medusa",
        ),
        DraftFamily("eagle1", load=eagle.load, trainer="train.families.eagle:Eagle1"),
        DraftFamily("eagle3", load=eagle.load, trainer="train.families.eagle:Eagle3"),
        DraftFamily("ngram", create=create_ngram, supports_trees=False, has_weights=False),
        DraftFamily("suffix", create=create_suffix, supports_trees=False, has_weights=False),
        DraftFamily("early-exit", create=create_early_exit),
    )
}
"""Every known family by name. `register_family` adds to it."""


def register_family(family: DraftFamily) -> None:
    """Adds a family. ValueError if the name is taken, or if the family can neither be loaded nor created."""
    if family.name in DRAFT_FAMILIES:
        raise ValueError(f"draft family {family.name!r} is registered already")
    if family.load is None and family.create is None:
        raise ValueError(f"draft family {family.name!r} needs `load` or `create`")
    DRAFT_FAMILIES[family.name] = family


def load_draft(
    path: str,
    target: Target,
    device: str | None = None,
    dtype: str = "float32",
    shape: TreeShape = None,
) -> Draft:
    """The draft in `path` (folder or Hub name) on `device` (None: the target's), which drafts trees of `shape`.

    It loads drafts that were saved here and published ones in the layouts of decode/checkpoints/importers.py.
    UserError if the draft's tokenizer is not the target's; a warning where heads do not name their tokenizer.
    """
    family = find_family(path)
    target_device = target.decoder.device
    assert family.load is not None
    draft = family.load(path, target, device or str(target_device), dtype)
    draft.shape = shape
    draft_device = torch.device(device or target_device)
    if draft_device.type == target_device.type and draft_device.index in (
        None,
        target_device.index,
    ):
        return draft
    return CrossDeviceDraft(draft, draft_device, target_device)


def find_family(path: str) -> DraftFamily:
    """The registered family that loads the saved draft in `path`. UserError if there is none."""
    name = draft_family(path)
    loadable = {f.saved_name: f for f in DRAFT_FAMILIES.values() if f.load is not None}
    if name not in loadable:
        raise UserError(f"draft {path!r} is of family {name!r}; known: {', '.join(loadable)}")
    return loadable[name]


def create_draft(
    name: str, target: Target, layers: int = 0, shape: TreeShape = None
) -> Draft | None:
    """A draft of a family without saved weights; None if there is no such family of that name."""
    family = DRAFT_FAMILIES.get(name)
    return family.create(target, layers, shape) if family and family.create else None


def pick_draft(name: str, target: Target, dtype: str = "float32") -> Draft | None:
    """The draft for a command's setting `draft`: `none`, `ngram`, or a draft's folder or Hub name."""
    if name == "none":
        return None
    created = create_draft(name, target)
    return load_draft(name, target, dtype=dtype) if created is None else created


def draft_family(path: str) -> str:
    """The family of a saved draft: `family` in draftsmith.json, else detected from the names of its tensors."""
    folder = importers.resolve_folder(path)
    family = read_metadata(folder).get("family")
    if family is None and (Path(folder) / "config.json").is_file():
        return importers.detect_family(importers.tensor_files(folder))
    return family or "causal"  # its loader reports what is missing
