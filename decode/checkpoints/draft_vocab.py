"""The reduced output vocabulary of a small language model, in a file beside its weights.

The weights are those of the whole model, so that transformers and serving engines load the folder as any other.
`draft_vocab.json` holds {"ids": [...]}, the target's ids of the tokens that the draft can draft, in rising order. It is
no safetensors file, because serving engines read the tensors of every such file in a folder and refuse unknown ones.
FR-Spec: Zhao et al., arXiv 2502.14856.
"""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from decode.common.errors import UserError
from decode.common.files import read_json_object, write_atomically
from decode.model.formats import tied_heads

VOCAB_FILE = "draft_vocab.json"


def save_ids(folder: Path, ids: torch.Tensor | None) -> None:
    """Writes the ids [Vd] into the draft's folder; None, a whole vocabulary: removes those of an earlier run."""
    if ids is None:
        (folder / VOCAB_FILE).unlink(missing_ok=True)
    else:
        write_atomically(folder / VOCAB_FILE, json.dumps({"ids": ids.tolist()}) + "\n")


def read_ids(folder: str, vocab_size: int, recorded: bool) -> torch.Tensor | None:
    """[Vd] int64: the ids in a draft's folder; None for a whole vocabulary. UserError if the file is missing although
    draftsmith.json `recorded` one, if it is damaged, or if its ids do not rise within the first `vocab_size` ids."""
    file = Path(folder) / VOCAB_FILE
    if not file.is_file():
        if recorded:
            raise UserError(
                f"draft {folder!r} was trained on a reduced vocabulary and has no {VOCAB_FILE}: get its files again"
            )
        return None
    ids = read_json_object(file, "the vocabulary of a draft", ("ids",))["ids"]
    numbers = isinstance(ids, list) and len(ids) > 0 and all(type(one) is int for one in ids)
    if not numbers or ids[0] < 0 or ids[-1] >= vocab_size or any(a >= b for a, b in pairwise(ids)):
        raise UserError(
            f"{file}: ids must be whole numbers that rise within 0..{vocab_size - 1}: the file is damaged or the "
            "draft belongs to another target"
        )
    return torch.tensor(ids, dtype=torch.int64)


def resize_vocabulary(model: Any, size: int) -> None:
    """Gives `model` as many logits as the target has, in place: engines take no draft with more or fewer. Models of one
    tokenizer are padded to different sizes. Surplus rows are cut off: the target has no such ids. New rows are the mean
    of all others, so that the logit of each is the mean of the model's logits: it is never the largest, and its
    probability is below 1 / V everywhere. Training moves them to the target's distribution."""
    head = model.get_output_embeddings()
    old = head.weight.shape[0]
    if old == size:
        return
    model.resize_token_embeddings(size, mean_resizing=False)
    if old > size:
        return
    head = model.get_output_embeddings()
    tables = {id(w): w for w in (model.get_input_embeddings().weight, head.weight)}
    with torch.no_grad():
        for weight in [*tables.values(), *([] if head.bias is None else [head.bias])]:
            weight[old:] = weight[:old].mean(0)


def silence_other_tokens(model: Any, ids: torch.Tensor) -> None:
    """Gives the tokens outside the reduced vocabulary `ids` [Vd] the mean of its rows in the LM head, in place: rows
    that had no part in training could else be the most probable. The logit of each is then the mean of the others',
    which is never the largest, and its probability below 1 / Vd. A head that is the embedding becomes a matrix of its
    own."""
    head = model.get_output_embeddings()
    if tied_heads.are_tied(model):
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
        tied_heads.set_flag(model.config, False)
    others = torch.ones(len(head.weight), dtype=torch.bool).index_fill(0, ids, False)
    with torch.no_grad():
        for value in (head.weight, head.bias):
            if value is not None:
                value[others] = value[ids].float().mean(0).to(value.dtype)
