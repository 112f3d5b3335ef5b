"""Whether embedding and LM head of a model are one matrix: its tensors decide, not what its config says.

A head that was trained apart from the embedding stays apart although `tie_word_embeddings` is still true, as it was in
the config of the model that it was trained from; and where the files hold no head, the embedding is both.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

ROWS = 4096
"""Rows that are compared at once: matrices that differ do so in the first ones."""


def are_tied(model: Any) -> bool:
    """Whether one matrix of a loaded model is its embedding and its LM head."""
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def follow_tensors(model: Any) -> None:
    """Makes the config of a loaded decoder say whether its head is tied, for all that is built or saved after it.

    Encoder-decoders keep theirs: it ties the embeddings of both sides as well.
    """
    if model.get_output_embeddings() is not None and not model.config.is_encoder_decoder:
        set_flag(model.config, are_tied(model))


def flag(config: Any) -> bool:
    """What a config says of its head."""
    return bool(vars(config.get_text_config(decoder=True)).get("tie_word_embeddings"))


def set_flag(config: Any, tied: bool) -> None:
    for part in (config, config.get_text_config(decoder=True)):
        if vars(part).get("tie_word_embeddings") != tied:
            part.tie_word_embeddings = tied


def stored_tied(folder: Path, pairs: Mapping[str, str] | None) -> bool | None:
    """Whether the safetensors of a folder hold one matrix for head and embedding; None if that cannot be told, and for
    two that are equal, which may be one or be trained apart.

    `pairs` is transformers' `_tied_weights_keys` of the model's class: {name of the head: name of the embedding}.
    """
    found = [(head, embedding) for head, embedding in (pairs or {}).items() if "head" in head]
    if len(found) != 1:
        return None
    files = [file for file in folder.glob("*.safetensors") if not file.name.startswith("adapter_")]
    try:
        places: dict[str, Path] = {}
        for file in sorted(files):
            with safe_open(file, "pt") as tensors:
                places |= dict.fromkeys(tensors.keys(), file)
        heads, embeddings = (_stored_names(name, places) for name in found[0])
        if len(heads) > 1 or len(embeddings) != 1:
            return None
        if not heads:
            packed = any("lm_head." in name for name in places)
            return None if packed else True
        head, embedding = heads[0], embeddings[0]
        states = [
            (places[name], name, places[name].stat().st_mtime_ns) for name in (head, embedding)
        ]
        return None if _equal(*states) else False
    except (OSError, SafetensorError):  # loading them will tell
        return None


def _stored_names(name: str, places: Mapping[str, Path]) -> list[str]:
    """The names that a tensor may have in the files, where the modules around a model are named or left out."""
    return [n for n in places if n == name or n.endswith(f".{name}") or name.endswith(f".{n}")]


@cache
def _equal(first: tuple[Path, str, int], second: tuple[Path, str, int]) -> bool:
    """Whether two tensors (file, name, time of its last change) hold the same numbers."""
    with safe_open(first[0], "pt") as one, safe_open(second[0], "pt") as two:
        a, b = one.get_slice(first[1]), two.get_slice(second[1])
        if a.get_shape() != b.get_shape():
            return False
        starts = range(0, a.get_shape()[0], ROWS)
        return all(torch.equal(a[i : i + ROWS].float(), b[i : i + ROWS].float()) for i in starts)


def module_names(model: Any) -> list[str]:
    """The names of a model's embedding and LM head; "" for a part that it has not."""
    parts = (model.get_input_embeddings(), model.get_output_embeddings())
    names = {id(module): name for name, module in model.named_modules()}
    return [names.get(id(part), "") for part in parts]
