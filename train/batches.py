"""Which rows a step trains on, and at which positions of them.

The logits at position t predict token t + 1. So t is supervised if token t + 1 lies in a loss span:
the last position of a prompt is (it predicts the first token of the answer), the last position of
a row never is.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from decode.settings import UserError
from train.shards import Row

T = TypeVar("T")


@dataclass
class Batch:
    """Rows padded on the right, and where their logits are wanted.

    Causal attention never looks to the right, so padding there needs no attention mask.
    """

    input_ids: Tensor  # [B, T] int64
    loss_mask: Tensor  # [B, T] bool, True where the next token is to be learned
    ids: tuple[str, ...] = ()  # of the rows

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on `device`."""
        return Batch(
            self.input_ids.to(device, non_blocking=True),
            self.loss_mask.to(device, non_blocking=True),
            self.ids,
        )


def step_indices(n: int, batch: int, seed: int, step: int) -> list[int]:
    """Indices of the global batch of `step` (from 0), a function of the arguments alone.

    Every epoch is a fresh permutation of n, and epochs follow each other without a gap, so a batch
    may hold the end of one and the start of the next.
    """
    places = range(step * batch, (step + 1) * batch)
    return [int(_permutation(n, seed, place // n)[place % n]) for place in places]


def split_for(rank: int, world: int, rows: Sequence[T]) -> Sequence[T]:
    """The slice of a global batch that process `rank` of `world` works on; all are equally long."""
    if len(rows) % world != 0:
        raise UserError(
            f"a global batch of {len(rows)} rows cannot be split evenly over {world} processes: "
            f"make the batch size a multiple of {world}"
        )
    size = len(rows) // world
    return rows[rank * size : (rank + 1) * size]


def fit(rows: Sequence[Row], max_length: int) -> tuple[list[Row], int]:
    """(rows cut to `max_length` tokens, number of rows dropped with nothing left to learn)."""
    kept = [row for row in (_cut(row, max_length) for row in rows) if len(learned(row)) > 0]
    if len(kept) == 0:
        raise UserError(
            f"none of the {len(rows)} samples has a token to learn within max_length {max_length}: "
            "raise max_length or sample again"
        )
    return kept, len(rows) - len(kept)


def collate(rows: Sequence[Row], pad_id: int, multiple: int = 8) -> Batch:
    """The batch of `rows`, with T rounded up to `multiple` so that fewer shapes are compiled."""
    length = -(-max(len(row["input_ids"]) for row in rows) // multiple) * multiple
    batch = Batch(
        input_ids=torch.full((len(rows), length), pad_id),
        loss_mask=torch.zeros(len(rows), length, dtype=torch.bool),
        ids=tuple(row["id"] for row in rows),
    )
    for i, row in enumerate(rows):
        batch.input_ids[i, : len(row["input_ids"])] = torch.tensor(row["input_ids"])
        batch.loss_mask[i, learned(row)] = True
    return batch


def token_count(rows: Sequence[Row]) -> int:
    """Number of supervised positions, by which a step's loss is divided."""
    return sum(len(learned(row)) for row in rows)


def learned(row: Row) -> Tensor:
    """Supervised positions t, ascending, whose next token lies in a loss span; tokens count once."""
    learned = np.zeros(len(row["input_ids"]), dtype=bool)
    for start, end in row["loss_spans"]:
        learned[start:end] = True
    return torch.from_numpy(np.flatnonzero(learned[1:]))


def _cut(row: Row, max_length: int) -> Row:
    if len(row["input_ids"]) <= max_length:
        return row
    spans = [[start, min(end, max_length)] for start, end in row["loss_spans"]]
    spans = [[start, end] for start, end in spans if start < end]
    return {**row, "input_ids": row["input_ids"][:max_length], "loss_spans": spans}


@functools.lru_cache(maxsize=2)  # a batch touches two epochs at its seam
def _permutation(n: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(n)
