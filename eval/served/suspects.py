"""The suspects of each family, those that families share, and those of Medusa heads and causal drafts.

A suspect is a function from a draft's files to readings of them with one thing other than they say. Those of EAGLE
heads are in eagle_suspects.py.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from decode.checkpoints.draft_vocab import VOCAB_FILE
from decode.checkpoints.head_layouts import medusa_counts
from decode.checkpoints.importers import Tensors
from decode.checkpoints.layouts import VOCAB_MAPS, Shapes
from decode.common.errors import UserError
from decode.serving import family_rules
from decode.serving.edits import (
    Edit,
    RemoveFile,
    TensorEdit,
    combine,
    rename,
    set_config,
)
from decode.serving.rules import DraftFiles, has_file
from eval.served import eagle_suspects as heads
from eval.served.reading import (
    Reading,
    drop_all,
    fill_tensors,
    layer_config,
)


def readings(d: DraftFiles) -> list[Reading]:
    """The readings of these files, none of them the one that they say. UserError without a target."""
    if d.target is None:
        raise UserError("the suspects depend on the target: give --target")
    return [reading for suspect in SUSPECTS.get(d.family, (rope,)) for reading in suspect(d)]


# ---- RoPE ----


def rope(d: DraftFiles) -> Iterator[Reading]:
    """RoPE with each base that the files and the target name and with the usual one; without scaling, or with the
    target's.
    """
    assert d.target is not None
    own, theirs = d.get("rope_parameters") or {}, d.target.config.get("rope_parameters") or {}
    if any(isinstance(value, dict) for value in (*own.values(), *theirs.values())):
        return  # a RoPE for each kind of layer
    scaling = {**(d.get("rope_scaling") or {}), **own}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    theta = own.get("rope_theta") or d.get("rope_theta", 10000.0)
    options: dict[str, tuple[dict[str, Any], bool]] = {}
    for base in (d.get("rope_theta"), theirs.get("rope_theta"), 10000.0):
        if base is not None and base != theta:
            says = f"{base:g} as the base of RoPE instead of {theta:g}"
            written = {**scaling, "rope_type": kind, "rope_theta": base}
            options.setdefault(says, (written, base == d.get("rope_theta")))
    plain = {"rope_type": "default", "rope_theta": theta}
    if kind != "default":
        options[f"RoPE without its {kind} scaling"] = plain, False
    elif theirs.get("rope_type", "default") != "default":
        says = f"the target's {theirs['rope_type']} scaling of RoPE"
        options[says] = {**theirs, "rope_theta": theta}, False
    for says, (written, visible) in options.items():
        edit = layer_config(
            d, rope_parameters=written, rope_theta=written["rope_theta"], rope_scaling=None
        )
        yield Reading("rope", says, edit, visible=visible)


# ---- tensors ----

HAS_OWN_SUSPECT = re.compile(r"\.bias$|^lm_head|^token_map$|rotary_emb\.|^verifier_")
"""Tensors that may be superfluous, and are either harmless or switched by another suspect."""


def missing_tensors(d: DraftFiles) -> Iterator[Reading]:
    """What is missing left as it may have been allocated, or found under the unknown name of an equal shape."""
    missing = missing_shapes(d)
    implied = {*d.shapes, *VOCAB_MAPS}
    others = [n for n in d.tensors if n not in implied and not HAS_OWN_SUSPECT.search(n)]
    unknown = {d.name_in_file[name]: tuple(d.tensors[name].shape) for name in others}

    def visible(says: str, edit: Edit) -> Reading:
        return Reading("tensors", says, edit, visible=True)

    for name, shape in missing.items():
        for other in (other for other, its in unknown.items() if its == shape):
            yield visible(f"{other} for {name}", rename(other, name))
    without = TensorEdit(lambda tensors: [tensors.pop(name) for name in unknown])
    if unknown and not missing:
        yield visible(f"no {', '.join(unknown)}", without)
    norms = all("norm" in name for name in missing)
    left = {"one": 0.0} if norms else {"zero": 0.0, "at random": 1.0}
    for value, std in left.items() if missing else ():
        says = f"{', '.join(missing)} missing and left {value}"
        yield visible(says, combine(without, fill_tensors(missing, std)))


def missing_shapes(d: DraftFiles) -> Shapes:
    """{name: shape} of the tensors that a decoder needs and that are not there, maps left out."""
    shapes = d.shapes
    optional = {"fc.bias", *VOCAB_MAPS}
    if d.family in EAGLES:
        optional |= family_rules.shared_tensors(d)
    return {n: shape for n, shape in shapes.items() if n not in d.tensors and n not in optional}


# ---- Medusa ----


def medusa_heads(d: DraftFiles) -> Iterator[Reading]:
    """Biases dropped; one projection for all heads, theirs or the target's; the heads one position off."""
    count, shared = medusa_counts(d.config)[0], bool(d.get("original_lm_head", False))
    biases = [name for name in d.tensors if name.endswith(".bias")]
    projections = [name for name in d.tensors if name.startswith("lm_heads.")]
    others = [name for name in projections if name != "lm_heads.0.weight"]

    def without(setting: str, value: bool, names: Sequence[str]) -> Edit:
        return combine(set_config(**{setting: value}), drop_all(d, names))

    if biases:
        edit = without("medusa_fc_bias", False, biases)
        unsaid = d.config.get("medusa_fc_bias") is not True
        says = "the heads' biases dropped"
        yield Reading("biases", says, edit, visible=unsaid)
    options = {
        "the first head's projection for all": without("original_lm_head", True, others),
        "the target's output matrix for all heads": without("original_lm_head", True, projections),
    }
    if shared:
        options["a projection for each head"] = set_config(original_lm_head=False)
    for says, edit in options.items() if others else ():
        yield Reading("matrices", says, edit, visible=shared)
    for says, step in (("after", 1), ("before", -1)):
        edit = rotate_heads(d, count, step)
        yield Reading("heads", f"for each position the head of the one {says}", edit)


def rotate_heads(d: DraftFiles, count: int, step: int) -> TensorEdit:
    """Head i becomes what head i + step was."""

    def change(tensors: Tensors) -> None:
        before = dict(tensors)
        for name, own in d.name_in_file.items():
            kind, number, *rest = name.split(".")
            if number.isdecimal():
                other = ".".join([kind, str((int(number) + step) % count), *rest])
                tensors[own] = before[d.name_in_file.get(other, own)]

    return TensorEdit(change)


# ---- causal drafts ----


def tied_head(d: DraftFiles) -> Iterator[Reading]:
    """The embedding as output matrix where there is another, or the other where the embedding is to be it."""
    if family_rules.LM_HEAD in d.tensors:
        tied = bool(d.get("tie_word_embeddings", False))
        says = (
            f"{family_rules.LM_HEAD} as output matrix" if tied else "the embedding as output matrix"
        )
        edit = set_config(tie_word_embeddings=not tied)
        yield Reading("matrices", says, edit, visible=tied)


def full_head(d: DraftFiles) -> Iterator[Reading]:
    """All rows of the output matrix of a draft that was trained on some of them."""
    if has_file(d.path, VOCAB_FILE):
        yield Reading("vocabulary map", f"no {VOCAB_FILE}", RemoveFile(VOCAB_FILE), visible=True)


EAGLES = ("eagle1", "eagle3", "peagle")
EAGLE3 = (
    heads.taps,
    heads.norms,
    rope,
    heads.vocabulary_map,
    missing_tensors,
    heads.biases,
    heads.swapped_inputs,
    heads.shared_matrices,
)
SUSPECTS: dict[str, tuple[Callable[[DraftFiles], Iterator[Reading]], ...]] = {
    "eagle3": EAGLE3,
    "peagle": EAGLE3,
    "eagle1": (
        heads.earlier_state,
        rope,
        missing_tensors,
        heads.biases,
        heads.swapped_inputs,
        heads.shared_matrices,
    ),
    "medusa": (heads.earlier_state, medusa_heads, missing_tensors),
    "causal": (rope, missing_tensors, tied_head, full_head),
}
"""The suspects of a family. For the others only RoPE is switched."""
