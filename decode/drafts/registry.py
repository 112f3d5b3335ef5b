"""The registry of draft families: how each is loaded or created.

A new family is one `register_family(DraftFamily(...))`: its decoder is a subclass of `decode.drafts.base.Draft`. What
trains it is registered in train/families/registry.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from decode.checkpoints import importers
from decode.checkpoints.draft_folder import check_saved_draft, check_target_weights, read_metadata
from decode.common.errors import UserError
from decode.devices.choice import pick_device
from decode.drafts import blocks, eagle, early_exit, medusa, mtp, other_tokenizer, swift
from decode.drafts.base import Draft
from decode.drafts.lookup import GrammarDraft, NgramDraft, SuffixDraft
from decode.drafts.settings import SwiftConfig
from decode.drafts.wrappers import CrossDeviceDraft
from decode.model.loading import Target, find_dtype
from decode.verification.tree import TreeShape

LoadDraft = Callable[[str, Target, str, str], Draft]
"""(folder or Hub name, target, device, dtype) -> draft."""
CreateDraft = Callable[[Target, int, TreeShape], Draft]
"""(target, number of the target's first layers to use, tree shape or None for chains) -> draft."""
CreateLookup = Callable[[int], Draft]
"""(tokens that a match has at least) -> draft without a model, whose chains are empty where it has no such match."""


@dataclass(frozen=True)
class DraftFamily:
    """One draft family. It has `load` if it is saved in a folder, `create` if it can do without; swift has both."""

    name: str
    """The name in settings: `draft.family` in training, a method's name in evaluation where there is no folder."""
    load: LoadDraft | None = None
    create: CreateDraft | None = None
    create_lookup: CreateLookup | None = None
    """For a family that copies from the text: it can draft in front of a family with a model (`add_lookup`)."""
    supports_trees: bool = True
    """Its proposals follow `Draft.shape`; False: it ignores the shape."""
    has_weights: bool = True
    """Drafting a token reads weights, its own or the target's (early-exit)."""
    saved_as: str = ""
    """`family` in draftsmith.json; empty: its name. Medusa-2 heads are saved as `medusa`."""

    @property
    def saved_name(self) -> str:
        return self.saved_as or self.name


DRAFT_FAMILIES: dict[str, DraftFamily] = {
    family.name: family
    for family in (
        DraftFamily("causal", load=other_tokenizer.load),
        DraftFamily("pard", load=blocks.load_pard),
        DraftFamily("medusa", load=medusa.load),
        DraftFamily("medusa2", load=medusa.load, saved_as="medusa"),
        DraftFamily("eagle1", load=eagle.load),
        DraftFamily("eagle3", load=eagle.load),
        DraftFamily("peagle", load=blocks.load_peagle),
        DraftFamily("dflash", load=blocks.load_dflash),
        DraftFamily("dflash2", load=blocks.load_dflash),
        DraftFamily("dspark", load=blocks.load_dflash),
        DraftFamily("xpress", load=blocks.load_dflash),
        DraftFamily("domino", load=blocks.load_dflash),
        DraftFamily("dflare", load=blocks.load_dflash),
        DraftFamily("mtp", load=mtp.load),
        DraftFamily(
            "ngram",
            create=lambda target, layers, shape: NgramDraft(),
            # Of several matches those of up to two tokens more are preferred.
            create_lookup=lambda least: NgramDraft(longest=least + 2, shortest=least),
            supports_trees=False,
            has_weights=False,
        ),
        DraftFamily(
            "suffix",
            create=lambda target, layers, shape: SuffixDraft(),
            create_lookup=lambda least: SuffixDraft(shortest=least),
            supports_trees=False,
            has_weights=False,
        ),
        DraftFamily(
            "grammar",
            create=lambda target, layers, shape: GrammarDraft(),
            supports_trees=False,
            has_weights=False,
        ),
        DraftFamily("early-exit", create=early_exit.EarlyExitDraft),
        DraftFamily(
            "swift",
            load=swift.load,
            # `layers` are those that are never skipped
            create=lambda target, layers, shape: swift.SwiftDraft(
                target, SwiftConfig(min_layers=layers)
            ),
            supports_trees=False,
        ),
        DraftFamily("layerskip", load=early_exit.load),
        DraftFamily("layerskip2", load=early_exit.load_own_exit),
    )
}
"""Every known family by name. `register_family` adds to it."""


def register_family(family: DraftFamily) -> None:
    """Makes a family known by its name. UserError if the name is taken or it can neither be loaded nor created."""
    if family.name in DRAFT_FAMILIES:
        raise UserError(f"there is a draft family {family.name!r} already: choose another name")
    if family.load is None and family.create is None:
        raise UserError(f"draft family {family.name!r} needs `load` or `create`")
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
    UserError if its tokenizer is not the target's, which a small language model's need not be, or not the one that it
    was trained for; warnings where heads do not name their tokenizer, where the weights are not those that were trained
    (`check_saved_draft`) and where the target is not the one that they were trained for.
    """
    target_device = target.runner.device
    device = pick_device(device) if device else str(target_device)
    find_dtype(dtype)
    folder = importers.resolve_folder(path)
    try:
        check_saved_draft(folder)
        family = find_family(path)
        assert family.load is not None
        draft = family.load(path, target, device, dtype)
        check_target_weights(folder, target)
    except UserError as error:
        if path in str(error) or folder in str(error):
            raise
        raise UserError(f"draft {path!r}: {error}") from error
    draft.shape, draft.reads = shape, replace(draft.reads, tokenizer=target.fingerprint)
    own = torch.device(device)
    if own.type == target_device.type and own.index in (None, target_device.index):
        return draft
    return CrossDeviceDraft(draft, own, target_device)


def find_family(path: str) -> DraftFamily:
    """The family of the saved draft in `path`. UserError if no registered family is saved under that name."""
    name = draft_family(path)
    families = saved_families()
    if name not in families:
        raise UserError(f"draft {path!r} is of family {name!r}; known: {', '.join(families)}")
    return families[name]


def saved_families() -> dict[str, DraftFamily]:
    """The families of drafts in folders, by `family` in draftsmith.json."""
    loadable = [family for family in DRAFT_FAMILIES.values() if family.load is not None]
    # Medusa-2 heads are loaded and served as the family that they are saved as.
    return {f.saved_name: DRAFT_FAMILIES.get(f.saved_name, f) for f in loadable}


def create_draft(
    name: str, target: Target, layers: int = 0, shape: TreeShape = None
) -> Draft | None:
    """A draft of a family without saved weights; None if there is no such family of that name."""
    family = DRAFT_FAMILIES.get(name)
    return family.create(target, layers, shape) if family and family.create else None


def pick_draft(name: str, target: Target, dtype: str = "float32") -> Draft | None:
    """The draft for a command's setting `draft`: `none`, a family that needs no folder, or a folder or Hub name."""
    if name == "none":
        return None
    created = create_draft(name, target)
    return load_draft(name, target, dtype=dtype) if created is None else created


def draft_family(path: str) -> str:
    """The family of a saved draft: `family` in draftsmith.json, else detected from the names of its tensors."""
    folder = importers.resolve_folder(path)
    family = read_metadata(folder).family
    if family is None and (Path(folder) / "config.json").is_file():
        family = importers.detect_family(importers.tensor_files(folder))
        return "pard" if family == "causal" and blocks.is_pard(folder) else family
    return family or "causal"  # its loader reports what is missing
