"""The reduced output vocabulary of a small language model, in a file beside its weights.

The weights are those of the whole model, so that transformers and serving engines load the folder as any other.
`draft_vocab.json` holds {"ids": [...]}, the target's ids of the tokens that the draft can draft, in rising order. It is
no safetensors file, because vLLM and SGLang read the tensors of every such file in a folder and refuse unknown ones.
FR-Spec: Zhao et al., arXiv 2502.14856.
"""

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from decode.common.errors import UserError
from decode.common.files import read_json_object, write_atomically

VOCAB_FILE = "draft_vocab.json"


def save_ids(folder: Path, ids: torch.Tensor | None) -> None:
    """Writes the ids [Vd] into the draft's folder; None, a whole vocabulary: removes those of an earlier run."""
    if ids is None:
        (folder / VOCAB_FILE).unlink(missing_ok=True)
    else:
        write_atomically(folder / VOCAB_FILE, json.dumps({"ids": ids.tolist()}) + "\n")


def read_ids(folder: str, vocab_size: int, facts: Mapping[str, Any]) -> torch.Tensor | None:
    """[Vd] int64: the ids in the folder of a draft whose draftsmith.json is `facts`; None for a whole vocabulary.

    UserError if the file is missing although draftsmith.json records a reduced vocabulary, if it is damaged, or if its
    ids do not rise within the first `vocab_size` ids.
    """
    file = Path(folder) / VOCAB_FILE
    if not file.is_file():
        if facts.get("vocabulary") is not None:
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
