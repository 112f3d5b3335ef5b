"""The reduced vocabulary of a draft: which of the target's tokens it can draft.

`ids` [Vd], rising, are the target's ids of draft tokens 0 .. Vd-1. EAGLE-3 heads hold them as every engine reads them:
`d2t` [Vd], an offset (target id = draft id + d2t[draft id], never an index), and `t2d` [V], True for tokens in the
reduced vocabulary. A small language model has them in a file (decode/checkpoints/draft_vocab.py). A draft with the full
vocabulary has none of these. The mapping belongs to one tokenizer, whose hash is saved beside `digest(ids)`.
"""

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from decode.checkpoints.draft_folder import ReducedVocabulary
from decode.common.errors import UserError
from train.data.batching import label_mask
from train.data.sample_store import SampleRow


def count_tokens(rows: Iterable[SampleRow], vocab_size: int) -> Tensor:
    """[V] int64: how often each token is supervised (`batching.label_mask`)."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for row in rows:
        tokens = np.asarray(row["input_ids"])[label_mask(row)]
        if len(tokens) > 0 and not 0 <= tokens.min() <= tokens.max() < vocab_size:
            raise UserError(
                f"sample {row['id']} has tokens outside the target's vocabulary of {vocab_size}: "
                "use the target that the samples were made with"
            )
        np.add.at(counts, tokens, 1)  # a bincount for each row would pass over V numbers each time
    return torch.from_numpy(counts)


def build(counts: Tensor, size: int, always: Sequence[int] = ()) -> Tensor | None:
    """Ids [size] int64, rising, of `always` (say EOS) and the most frequent others; equally frequent: lower id first.

    None if `size` covers the vocabulary [V] of the counts: no mapping is needed.
    """
    kept = sorted(set(always))
    least = max(1, len(kept))
    if not 0 <= min(kept, default=0) <= max(kept, default=0) < len(counts):
        raise UserError(f"token ids to keep must lie in 0..{len(counts) - 1}, not {kept}")
    if size >= len(counts):
        return None
    if size < least:
        raise UserError(f"a draft vocabulary of {size} cannot hold {least} tokens: make it larger")
    if int(counts.sum()) == 0:
        raise UserError("no supervised token was counted, so none is frequent: sample more answers")
    rank = counts.index_fill(0, torch.tensor(kept, dtype=torch.long), torch.iinfo(counts.dtype).max)
    return rank.argsort(descending=True, stable=True)[:size].sort().values


def coverage(ids: Tensor, counts: Tensor) -> float:
    """Share of the counted tokens that the draft can draft: no acceptance on this text exceeds it."""
    return int(counts[ids].sum()) / int(counts.sum())


def describe(ids: Tensor, counts: Tensor) -> ReducedVocabulary:
    return ReducedVocabulary(len(ids), coverage(ids, counts), digest(ids))


def digest(ids: Tensor) -> str:
    """16 hex digits that identify the mapping, on any device and in any integer type."""
    return hashlib.sha256(ids.cpu().numpy().astype("<i8").tobytes()).hexdigest()[:16]
