"""What attends to what in training, as a function of a row, a query and a key.

Nothing of size queries x keys is kept unless `dense` is asked for. Blocks of queries evaluate the function on the keys
that `key_ranges` names (blocks.py), and flex_attention inside its kernel (flex.py).
"""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad


class AttentionMask:
    """Which of S keys each of Q queries attends to, in each of B rows."""

    def __init__(self, rows: int, queries: int, keys: int, device: torch.device):
        self.shape = rows, queries, keys
        self.device = device
        self.dense_masks: dict[tuple[int | None, int], Tensor] = {}  # by window and groups
        self.block_masks: dict[int | None, Any] = {}  # those of flex_attention, by window

    def visible(self, row: Tensor, query: Tensor, key: Tensor, window: int | None) -> Tensor:
        """Bool of the shape to which the three int64 index tensors broadcast: whether the query attends to the key.

        `window` is that of a layer with sliding attention: distances in the text are below it.
        """
        raise NotImplementedError

    def key_ranges(self, start: int, stop: int, window: int | None) -> list[tuple[int, int]]:
        """Rising, disjoint ranges [first, end) of keys: queries start … stop - 1 attend to no others, in any row."""
        raise NotImplementedError

    def at(self, queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
        """[B, n, m] bool for queries [n] and keys [m], the same in all rows."""
        row = torch.arange(self.shape[0], device=self.device)[:, None, None]
        found = self.visible(row, queries[None, :, None], keys[None, None], window)
        return found.expand(len(row), len(queries), len(keys))

    def dense(self, window: int | None, groups: int) -> Tensor:
        """[B, 1, groups * Q, S] bool, True = attend. Computed once for all layers with the same arguments."""
        if (window, groups) not in self.dense_masks:
            queries, keys = (torch.arange(n, device=self.device) for n in self.shape[1:])
            found = self.at(queries, keys, window)
            self.dense_masks[window, groups] = found.repeat(1, groups, 1)[:, None]
        return self.dense_masks[window, groups]


class DocumentMask(AttentionMask):
    """Causal attention: each token attends to itself and to earlier tokens of its own text."""

    def __init__(self, numbers: Tensor):
        """`numbers` [B, T]: one number per text, the same for all its tokens and different from others in its line."""
        rows, length = numbers.shape
        super().__init__(rows, length, length, numbers.device)
        self.numbers = numbers

    @cached_property
    def earliest(self) -> list[int]:
        """[T]: the first token that any row's token t may attend to; read on the host."""
        found: list[int] = first_tokens(self.numbers).amin(0).tolist()
        return found

    def visible(self, row: Tensor, query: Tensor, key: Tensor, window: int | None) -> Tensor:
        same = self.numbers[row, query] == self.numbers[row, key]
        found = same & (key <= query)
        return found if window is None else found & (query - key < window)

    def key_ranges(self, start: int, stop: int, window: int | None) -> list[tuple[int, int]]:
        first = min(self.earliest[start:stop])
        return [(first if window is None else max(first, start - window + 1), stop)]


class SlotMask(AttentionMask):
    """Slots of a head, each at a token: it attends to the keys of tokens up to its own, and to its own later keys.

    Keys are those of T tokens, and after them `later` times one of each of M slots, which is seen by that slot alone:
    the keys of the later steps of a training-time test (Li et al. 2503.01840, section 3.2).
    """

    def __init__(self, slots: Tensor, length: int, numbers: Tensor | None = None, later: int = 0):
        """`slots` [B, M]: the token of each slot, of T = `length`; `numbers` [B, T] as of a DocumentMask, or None."""
        rows, count = slots.shape
        super().__init__(rows, count, length + later * count, slots.device)
        self.slots, self.length, self.numbers, self.later = slots, length, numbers, later
        self.first = None if numbers is None else first_tokens(numbers)

    def visible(self, row: Tensor, query: Tensor, key: Tensor, window: int | None) -> Tensor:
        slot, count = self.slots[row, query], self.shape[1]
        token = key.clamp_max(self.length - 1)
        found = key <= slot
        if self.numbers is not None:
            found = found & (self.numbers[row, slot] == self.numbers[row, token])
        if window is not None:
            found = found & (slot + self.later - key < window)
        if self.later == 0:
            return found
        own = (key - self.length) % count == query
        if window is not None:
            own = own & (self.later - 1 - (key - self.length) // count < window)
        return torch.where(key < self.length, found, own)

    def key_ranges(self, start: int, stop: int, window: int | None) -> list[tuple[int, int]]:
        some = self.slots[:, start:stop]
        first = 0 if self.first is None else int(self.first.gather(1, some).min())
        if window is not None:
            first = max(first, int(some.min()) + self.later - window + 1)
        end, count = int(some.max()) + 1, self.shape[1]
        own = [self.length + i * count for i in range(self.later)]
        return [(min(first, end), end), *((at + start, at + stop) for at in own)]


def first_tokens(numbers: Tensor) -> Tensor:
    """[B, T]: the index of the first token of each token's text, for the numbers [B, T] of the texts."""
    begins = pad(numbers[:, 1:] != numbers[:, :-1], (1, 0), value=True)
    index = torch.arange(numbers.shape[1], device=numbers.device)
    return torch.where(begins, index, 0).cummax(1).values


def key_index(ranges: list[tuple[int, int]], device: torch.device) -> Tensor:
    """[m] int64: all keys of these ranges."""
    return torch.cat([torch.arange(first, end, device=device) for first, end in ranges])


def take_keys(values: Tensor, ranges: list[tuple[int, int]]) -> Tensor:
    """[B, H, m, D] of values [B, H, S, D]: the keys of these ranges; a view if there is one range."""
    pieces = [values[:, :, first:end] for first, end in ranges]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 2)
