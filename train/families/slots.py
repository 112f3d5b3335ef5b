"""The slots of a batch of block drafts: anchors, depths, and which slot attends to which.

A block has an anchor a, the last token that is known, and depths 0, 1, …: the slot at depth d stands at position a + d
and predicts token a + d + 1. Depth 0 reads the anchor itself, deeper slots a mask token. Training all depths at every
position would cost K times the text; conditional drop (COD, An et al. 2504.18583) trains depth d at a share
max(r^d, least) of the anchors, always a subset of those of depth d - 1, whose keys a slot needs.
"""

import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from decode.common.errors import UserError
from decode.model.masks import AttentionMask, first_tokens
from train.data import vocab_mapping
from train.data.batching import Batch
from train.data.sample_store import SampleRow
from train.families.alignment import target_run_length


@dataclass(frozen=True)
class Retention:
    """Which share of a row's positions are anchors, and which share of these keeps a depth: max(ratio^depth, least)."""

    ratio: float
    least: float
    anchors: float = 1.0

    def counts(self, positions: int, depths: int) -> list[int]:
        """Anchors that are trained at each depth, of a row with that many supervised positions."""
        shares = [max(self.ratio**d, self.least) if d else 1.0 for d in range(depths)]
        return [math.ceil(positions * self.anchors * share) for share in shares]


def draw_depths(batch: Batch, depths: int, retention: Retention, skip: int = 0) -> Tensor:
    """[B, T] int64: at how many depths each position is trained as an anchor; 0: it is none.

    Position a is an anchor if the target wrote token a + 1, and is trained at depth d only if it wrote all tokens up to
    a + d + 1. With `skip` 1 blocks begin a token later: a stands for the slot whose hidden state is the last one known,
    and the anchor is token a + 1, which the target has to have written too. Which anchors keep a depth is a function of
    the row's id and `batch.draw`: packing, the number of processes and a resumed run change nothing.
    """
    written = (target_run_length(batch.loss_mask, batch.documents) - skip).clamp_min(0)
    drawn = torch.zeros(written.shape, dtype=torch.int64)
    anchors = (written > 0).cpu()
    numbers = None if batch.documents is None else batch.documents.cpu()
    for i, (line, _) in enumerate(batch.starts):
        own = anchors[line] if numbers is None else anchors[line] & (numbers[line] == i)
        places = own.nonzero()[:, 0]
        seed = zlib.crc32(f"{batch.ids[i]}:{batch.draw}".encode())
        order = torch.randperm(len(places), generator=torch.Generator().manual_seed(seed))
        kept = torch.zeros(len(places), dtype=torch.int64)
        for count in retention.counts(len(places), depths):
            kept[:count] += 1
        drawn[line, places[order]] = kept
    return torch.minimum(drawn.to(written.device), written)


class BlockSlots:
    """The slots of one batch: depth 0 at every token, then `count` columns of deeper slots.

    Rows with fewer deeper slots than others are filled up with ones that are not `valid`.
    """

    def __init__(self, batch: Batch, depths: Tensor, size: int):
        """`depths` [B, T] as `draw_depths` returns it, for blocks of `size` depths."""
        self.batch, self.depths, self.size = batch, depths, size
        deeper = depths[..., None] > torch.arange(1, size, device=depths.device)  # [B, T, size - 1]
        flat = deeper.flatten(1)
        count = max(1, int(flat.sum(1).max()))
        index = (~flat).long().argsort(dim=1, stable=True)[:, :count]
        self.anchor = index // max(1, size - 1)  # [B, M] index of the token in its line
        self.depth = index % max(1, size - 1) + 1  # [B, M] from 1 on
        self.valid = flat.gather(1, index)  # [B, M]

    @cached_property
    def positions(self) -> Tensor:
        """[B, T + M]: position of each slot in its text."""
        rows = len(self.depths)
        real = self.batch.positions().expand(rows, -1)
        return torch.cat([real, real.gather(1, self.anchor) + self.depth], 1)

    @cached_property
    def supervised(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(line, column, anchor, depth), each [N]: all trained slots, `column` among the T + M of a line."""
        line, token = (self.depths > 0).nonzero(as_tuple=True)
        deep_line, deep = self.valid.nonzero(as_tuple=True)
        length = self.depths.shape[1]
        return (
            torch.cat([line, deep_line]),
            torch.cat([token, deep + length]),
            torch.cat([token, self.anchor[deep_line, deep]]),
            torch.cat([torch.zeros_like(token), self.depth[deep_line, deep]]),
        )


class BlockMask(AttentionMask):
    """Which of T + M slots each of them attends to: the tokens up to its anchor, and its own block up to itself."""

    def __init__(self, slots: BlockSlots):
        rows, length = slots.depths.shape
        count = length + slots.anchor.shape[1]
        super().__init__(rows, count, count, slots.anchor.device)
        tokens = torch.arange(length, device=slots.anchor.device).expand(rows, -1)
        self.length, self.size = length, slots.size
        self.anchor = torch.cat([tokens, slots.anchor], 1)  # [B, T + M]
        self.depth = torch.cat([torch.zeros_like(tokens), slots.depth], 1)  # [B, T + M]
        self.numbers, self.positions = slots.batch.documents, slots.positions

    def visible(self, row: Tensor, query: Tensor, key: Tensor, window: int | None) -> Tensor:
        anchor = self.anchor[row, query]
        found = key <= anchor
        if self.numbers is not None:
            token = key.clamp_max(self.length - 1)
            found = found & (self.numbers[row, anchor] == self.numbers[row, token])
        own = (anchor == self.anchor[row, key]) & (self.depth[row, query] >= self.depth[row, key])
        found = torch.where(key < self.length, found, own)
        if window is None:
            return found
        return found & (self.positions[row, query] - self.positions[row, key] < window)

    def key_ranges(self, start: int, stop: int, window: int | None) -> list[tuple[int, int]]:
        anchor = self.anchor[:, start:stop]
        first, end = int(anchor.min()), int(anchor.max()) + 1
        earliest = 0
        if self.numbers is not None:
            earliest = int(first_tokens(self.numbers).gather(1, anchor).min())
        if window is not None:
            earliest = max(earliest, first - window + 1)
        if stop <= self.length:
            return [(earliest, end)]
        # the slots of a block are neighbours
        return [(earliest, end), (max(self.length, start - self.size), stop)]


def choose_mask_token(
    given: int | None, saved: int | None, size: int, rows: Iterable[SampleRow]
) -> int:
    """draft.mask_token `given`; that `saved` in the draft of draft.init; else the token that answers have least often.

    Of several the last one, so that a row of the embedding that no token uses comes first. UserError for an id outside
    the embedding of `size` rows, or another than the saved one.
    """
    if given is not None and not 0 <= given < size:
        raise UserError(f"draft.mask_token {given}: name a token of 0 … {size - 1}")
    if saved is not None:
        if given not in (None, saved):
            raise UserError(
                f"draft.mask_token is {given}, and the draft in draft.init has {saved}: leave it out"
            )
        return saved
    if given is not None:
        return given
    counts = vocab_mapping.count_tokens(rows, size)
    return size - 1 - int(counts.flip(0).argmin())
