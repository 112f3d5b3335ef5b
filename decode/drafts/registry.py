"""TODO: decode.drafts.registry."""

from pathlib import Path

import torch

from decode.checkpoints import importers
from decode.common.errors import UserError
from decode.drafts.base import Draft, read_metadata
from decode.model.loading import Target
from decode.verification.tree import TreeShape


def load_draft(
    path: str,
    target: Target,
    device: str | None = None,
    dtype: str = "float32",
    shape: TreeShape = None,
) -> Draft:
    """The draft in `path` (folder or hub name), on `device` (None: the target's), drafting in `shape`.

    Any that is saved here, and published ones in the layouts of decode/checkpoints/importers.py. UserError if its tokenizer is
    not the target's; a warning where heads do not say which theirs is.
    """
    from decode.drafts import causal, eagle, medusa
    from decode.drafts.cross_device import CrossDeviceDraft

    families = {
        "causal": causal.load,
        "medusa": medusa.load,
        "eagle1": eagle.load,
        "eagle3": eagle.load,
    }
    family = draft_family(path)
    if family not in families:
        raise UserError(f"draft {path!r} is of family {family!r}; known: {', '.join(families)}")
    home = target.decoder.device
    draft = families[family](path, target, device or str(home), dtype)
    draft.shape = shape
    place = torch.device(device or home)
    return (
        draft
        if place.type == home.type and place.index in (None, home.index)
        else CrossDeviceDraft(draft, place, home)
    )


def pick_draft(name: str, target: Target, dtype: str = "float32") -> Draft | None:
    """`none`, `ngram`, or a draft's folder or hub name, as commands take it."""
    from decode.drafts.ngram import NgramDraft

    if name == "none":
        return None
    return NgramDraft() if name == "ngram" else load_draft(name, target, dtype=dtype)


def draft_family(path: str) -> str:
    """The family of a draft: as draftsmith.json says, else as its tensors tell."""
    folder = importers.resolve_folder(path)
    family = read_metadata(folder).get("family")
    if family is None and (Path(folder) / "config.json").is_file():
        return importers.detect_family(importers.tensor_files(folder))
    return family or "causal"  # whose loader says what is missing
