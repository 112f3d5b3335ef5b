"""What attends to what in training, as a function of a row, a query and a key, and attention under such a mask.

Nothing of size queries x keys is kept unless `dense` is asked for. Blocks of queries evaluate the function on the keys
that `key_ranges` names, in memory linear in the length of a text. torch's flex_attention evaluates it inside its
kernel; NO GPU HAS RUN THAT YET. On CUDA its kernel and its search for empty blocks are compiled. Elsewhere both run as
torch's own reference, which keeps all scores and has no gradient: the tests compare it with dense masks.
"""

from collections.abc import Callable
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

# ---- masks ----


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


# ---- a block of queries at a time ----

BLOCK = 512
"""Queries whose mask and scores are in memory at once."""
Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(query [B, Hkv, G * n, D], key [B, Hkv, m, D], value [B, Hkv, m, Dv], mask [B, 1, G * n, m]) ->
[B, Hkv, G * n, Dv]."""


def attend_in_blocks(
    attend: Attend,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttentionMask,
    window: int | None,
) -> Tensor:
    """[B, Hkv, G, Q, Dv] of query [B, Hkv, G, Q, D] over key and value [B, Hkv, S, D] where `mask` allows it.

    Only keys that a block may see are read. Backward computes each block again, so that neither its mask nor its
    scores are kept: at any time memory holds those of one block, BLOCK x S values.
    """
    pieces = []
    for start in range(0, query.shape[3], BLOCK):
        some = query[:, :, :, start : start + BLOCK]
        ranges = mask.key_ranges(start, start + some.shape[3], window)
        pieces.append(recomputed(_block, attend, some, key, value, mask, window, start, ranges))
    return torch.cat(pieces, 3)


def recomputed(function: Callable[..., Any], *inputs: Any) -> Any:
    """`function(*inputs)`, of which backward keeps the inputs alone: it computes the rest again."""
    if not torch.is_grad_enabled():
        return function(*inputs)
    return checkpoint(function, *inputs, use_reentrant=False)


def run_now(function: Callable[..., Any], *inputs: Any) -> Any:
    """`function(*inputs)`, which keeps for backward what it needs: the other choice beside `recomputed`."""
    return function(*inputs)


def _block(
    attend: Attend,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttentionMask,
    window: int | None,
    start: int,
    ranges: list[tuple[int, int]],
) -> Tensor:
    """[B, Hkv, G, n, Dv] of the n queries from `start` on."""
    groups, count = query.shape[2:4]
    queries = torch.arange(start, start + count, device=query.device)
    allow = mask.at(queries, key_index(ranges, query.device), window)
    packed = query.flatten(2, 3)
    out = attend(
        packed,
        take_keys(key, ranges),
        take_keys(value, ranges),
        allow.repeat(1, groups, 1)[:, None],
    )
    return out.unflatten(2, (groups, count))


# ---- flex_attention ----


@cache
def compiled(function: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    """`function` compiled for shapes that change on CUDA, as it is elsewhere."""
    return torch.compile(function, dynamic=True) if device_type == "cuda" else function


def block_mask(mask: AttentionMask, window: int | None) -> BlockMask:
    """The mask as flex_attention takes it: its function, and the blocks of 128 x 128 in which anything is seen.

    Made once for all layers with the same window.
    """

    def mask_mod(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return mask.visible(row, query, key, window)

    if window not in mask.block_masks:
        rows, queries, keys = mask.shape
        create = compiled(create_block_mask, mask.device.type)
        mask.block_masks[window] = create(mask_mod, rows, None, queries, keys, device=mask.device)
    found: BlockMask = mask.block_masks[window]
    return found


def attend_flex(
    query: Tensor, key: Tensor, value: Tensor, blocks: BlockMask, scale: float | None
) -> tuple[Tensor, Tensor]:
    """(out [B, H, Q, Dv], log-sum-exp of the scores [B, H, Q]) of query [B, H, Q, D] over key, value [B, Hkv, S, D].

    H is a multiple of Hkv. Gradients flow through both. Scores of a query that sees nothing have -inf.
    """
    attend = compiled(flex_attention, query.device.type)
    out, aux = attend(
        query, key, value, block_mask=blocks, scale=scale, enable_gqa=True,
        return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    return out, aux.lse


def add_own_keys(out: Tensor, lse: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """The softmax over more keys: out [B, H, Q, Dv] in its share of it, and the weights [B, H, Q, U] of the new keys.

    `lse` [B, H, Q] is the log-sum-exp of the scores behind `out`; `scores` [B, H, Q, U] are those of the new keys.
    """
    total = torch.cat([lse[..., None], scores.to(lse.dtype)], -1).logsumexp(-1, keepdim=True)
    return out * (lse[..., None] - total).exp().to(out.dtype), (scores - total).exp().to(out.dtype)
