"""The rows of a step, padded or packed into a Batch with its loss mask.

The logits at position t predict token t + 1, so position t is supervised if token t + 1 lies in a loss span. The last
position of a prompt is supervised (it predicts the first token of the answer); the last position of a row never is.
"""

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from decode.common.damage import warn_once
from decode.common.errors import UserError
from train.data.sample_store import SampleRow, Subset

T = TypeVar("T")
WORTH_SAYING = 0.1
"""Share of labels, cut off by max_length, from which a line says so."""


@dataclass
class Batch:
    """Rows padded on the right, with their supervised positions.

    Attention is causal, so padding on the right needs no attention mask. Where several rows are packed into a line,
    attention stays within the tokens of one document.
    """

    input_ids: Tensor  # [B, T] int64
    loss_mask: Tensor  # [B, T] bool, True where the next token is a label
    ids: tuple[str, ...] = ()  # ids of the rows
    starts: tuple[tuple[int, int], ...] = ()  # line and column at which each row begins
    # [B, T] int64, number of the row that each token belongs to; None: unpacked
    documents: Tensor | None = None
    draw: int = 0  # number of the step, which seeds what a family draws anew for each row
    # {number of a row with images: their files}
    images: dict[int, list[str]] = field(default_factory=dict)

    def to(self, device: torch.device | str) -> "Batch":
        moved = {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}
        moved = {name: x.to(device, non_blocking=True) for name, x in moved.items()}
        return Batch(**vars(self) | moved)

    def positions(self) -> Tensor:
        """[B, T] or [1, T] int64: position of each token in its row."""
        if self.documents is None:
            return torch.arange(self.input_ids.shape[1], device=self.input_ids.device)[None]
        return document_positions(self.input_ids, self.documents)

    def row_tokens(self, number: int) -> Tensor:
        """[L] the tokens of a row; if rows are not packed, with the padding behind them, which no earlier state depends
        on."""
        line, column = self.starts[number]
        if self.documents is None:
            return self.input_ids[line, column:]
        return self.input_ids[line][self.documents[line] == number]


def shuffled_index(n: int, seed: int, place: int, source: int = 0) -> int:
    """The row index at `place` of the endless shuffled order of n rows; each `source` has a different order.

    Every epoch is a new permutation. A batch may hold the end of one epoch and the beginning of the next.
    """
    return int(_permutation(n, seed, place // n, source)[place % n])


@functools.lru_cache(maxsize=32)  # a batch may reach into two epochs of each source
def _permutation(n: int, seed: int, epoch: int, source: int) -> np.ndarray:
    order = np.random.default_rng([seed, epoch, source]).permutation(n)
    return order.astype(np.int32)


def rank_slice(rank: int, world: int, rows: Sequence[T]) -> Sequence[T]:
    """The slice of a global batch for process `rank` of `world`; all slices have the same length."""
    size, rest = divmod(len(rows), world)
    if rest != 0:
        raise UserError(
            f"a global batch of {len(rows)} rows cannot be split evenly over {world} processes: "
            f"make the batch size a multiple of {world}"
        )
    return rows[rank * size : (rank + 1) * size]


def truncate_rows(rows: Sequence[SampleRow], max_length: int) -> tuple[Sequence[SampleRow], int]:
    """(rows cut to `max_length` tokens, number of rows dropped because no label was left).

    Rows are cut when they are indexed, so a set on disk is not loaded. UserError if no row is left; a warning where
    more than WORTH_SAYING of all labels are cut off.
    """
    counts = np.array([count_labels(row, max_length) for row in rows]).reshape(-1, 2)
    (labels, left), kept = counts.sum(0), np.flatnonzero(counts[:, 1])
    if 0 < left < (1 - WORTH_SAYING) * labels and os.environ.get("RANK", "0") == "0":
        warn_once(
            f"{1 - left / labels:.0%} of what the target answered lies behind max_length {max_length} and is "
            "not learned: raise --loop.max_length"
        )
    if len(kept) == 0:
        raise UserError(
            f"none of the {len(rows)} samples has a token to learn within max_length {max_length}: "
            "raise max_length or sample again"
        )
    return Subset(rows, kept, lambda row: truncate_row(row, max_length)), len(rows) - len(kept)


def count_labels(row: SampleRow, max_length: int) -> tuple[int, int]:
    """(labels of a row, those that `truncate_row` leaves)."""
    mask = label_mask(row)
    return mask.sum(), 0 if cuts_images(row, max_length) else mask[:max_length].sum()


def cuts_images(row: SampleRow, max_length: int) -> bool:
    """Whether an image of the row does not end within `max_length` tokens."""
    return any(end > max_length for _, end in row.get("image_spans", ()))


def truncate_row(row: SampleRow, max_length: int) -> SampleRow:
    """The first `max_length` tokens of a row; without labels where that cuts its images."""
    if len(row["input_ids"]) <= max_length:
        return row
    spans = [
        [start, min(end, max_length)] for start, end in row["loss_spans"] if start < max_length
    ]
    if cuts_images(row, max_length):
        spans = []
    return {**row, "input_ids": row["input_ids"][:max_length], "loss_spans": spans}


def supervise_whole_row(row: SampleRow) -> SampleRow:
    """The row with all its tokens as labels: the target has a distribution where it reads a prompt too."""
    return {**row, "loss_spans": [[0, len(row["input_ids"])]]}


def label_mask(row: SampleRow) -> np.ndarray:
    """[T] bool: the tokens that are learned, those in a loss span; the first one has nothing that predicts it, and what
    stands for an image is no text."""
    mask = np.zeros(len(row["input_ids"]), dtype=bool)
    for start, end in row["loss_spans"]:
        mask[max(start, 1) : end] = True
    for start, end in row.get("image_spans", ()):
        mask[start:end] = False
    return mask


def supervised_positions(row: SampleRow) -> Tensor:
    """Positions t, ascending, whose next token lies in a loss span; overlapping spans count once."""
    return torch.from_numpy(np.flatnonzero(label_mask(row)[1:]))


def supervised_token_count(rows: Sequence[SampleRow]) -> int:
    return sum(int(label_mask(row).sum()) for row in rows)


def collate(rows: Sequence[SampleRow], pad_id: int, multiple: int = 8) -> Batch:
    """The batch of `rows`, one per line, with T rounded up to `multiple` so that fewer shapes are compiled."""
    return _place_rows(rows, [(i, 0) for i in range(len(rows))], pad_id, multiple)


def pack(rows: Sequence[SampleRow], pad_id: int, multiple: int = 8) -> Batch:
    """The batch of `rows` packed into lines of up to about twice the longest row, with the least padding."""
    lengths = [len(row["input_ids"]) for row in rows]
    max_lines = -(-sum(lengths) // max(lengths))
    line_counts = range(-(-max_lines // 2), max_lines + 1)
    layouts = [_pack_layout(lengths, lines) for lines in line_counts]
    starts, _ = min(layouts, key=lambda layout: layout[1])
    batch = _place_rows(rows, starts, pad_id, multiple)
    # padding is a document of its own
    batch.documents = torch.full_like(batch.input_ids, len(rows))
    for i, (line, column) in enumerate(starts):
        batch.documents[line, column : column + lengths[i]] = i
    return batch


def _pack_layout(lengths: Sequence[int], lines: int) -> tuple[list[tuple[int, int]], int]:
    """((line, column) of each row, lines x longest line): longest rows first, each at the end of the shortest line."""
    ends, starts = [0] * lines, [(0, 0)] * len(lengths)
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        line = ends.index(min(ends))
        starts[i] = line, ends[line]
        ends[line] += lengths[i]
    return starts, lines * max(ends)


def _place_rows(
    rows: Sequence[SampleRow], starts: Sequence[tuple[int, int]], pad_id: int, multiple: int
) -> Batch:
    """The batch with each row at its (line, column) of `starts`, and padding elsewhere."""
    ends = [column + len(row["input_ids"]) for row, (_, column) in zip(rows, starts, strict=True)]
    shape = max(line for line, _ in starts) + 1, -(-max(ends) // multiple) * multiple
    batch = Batch(
        input_ids=torch.full(shape, pad_id),
        loss_mask=torch.zeros(shape, dtype=torch.bool),
        ids=tuple(row["id"] for row in rows),
        starts=tuple(starts),
        images={i: row["images"] for i, row in enumerate(rows) if "images" in row},
    )
    for row, (line, column), end in zip(rows, starts, ends, strict=True):
        batch.input_ids[line, column:end] = torch.tensor(row["input_ids"])
        batch.loss_mask[line, column + supervised_positions(row)] = True
    return batch


def document_positions(input_ids: Tensor, documents: Tensor | None = None) -> Tensor:
    """[B, T] int64: number of tokens before t in its document."""
    index = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    if documents is None:
        return index
    starts = ~next_in_same_document(input_ids, documents)[:, :-1]  # [B, T - 1] at tokens 1 .. T-1
    return index - pad(torch.where(starts, index[:, 1:], 0), (1, 0)).cummax(1).values


def next_in_same_document(like: Tensor, documents: Tensor | None) -> Tensor:
    """[B, T] bool: token t + 1 exists and belongs to the same document as token t."""
    if documents is None:
        same = torch.ones_like(like[:, 1:], dtype=torch.bool)
    else:
        same = documents[:, 1:] == documents[:, :-1]
    return pad(same, (0, 1))
