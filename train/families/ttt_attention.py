"""Attention of EAGLE-3's training-time test: for all slots at once, the keys that a head attends to in decoding.

At step j slot t attends to the keys of step 0 up to position t, which come from the target's hidden states, and to its
own keys of steps 1..j, which come from the head's states (Li et al. 2025, sec. 3.2). The latter add one column per
step, not a square. Only supervised slots have queries; earlier positions of the text have keys and values alone.
"""

from functools import partial

import torch
from torch import Tensor

from decode.drafts.eagle_model import AttendFn
from decode.model.attention import SETTINGS
from decode.model.masks import (
    SlotMask,
    add_own_keys,
    attend_flex,
    block_mask,
    key_index,
    recomputed,
    take_keys,
)

BLOCK = 512
"""Slots whose attention scores are in memory at once, but for method "dense" (decode/model/attention.py)."""


class TestTimeAttention:
    """The attention of each step of a batch, given the keys and values of step 0."""

    def __init__(self, keys: Tensor, values: Tensor, slots: Tensor, numbers: Tensor | None = None):
        """Keys and values [B, Hkv, T, D] of step 0 at every position; `slots` [B, M] are the positions of the queries.

        `numbers` [B, T] are those of the texts of packed lines (DocumentMask); None: a line is one text.
        """
        self.keys, self.values = keys, values
        self.mask = SlotMask(slots, keys.shape[2], numbers)
        self.later: list[tuple[Tensor, Tensor]] = []  # of steps 1, 2, …

    def step(self, j: int) -> AttendFn:
        """The attention of step j: q [B, H, M, D] and k, v [B, Hkv, M, D] of the M slots -> [B, M, H, D].

        It may be called again by a backward pass that computes the step a second time.
        """
        return partial(self._attend, j)

    def _attend(self, j: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if j > 0:  # at step 0 a slot's own key is among `keys`
            self.later[j - 1 :] = [(k, v)]
        own = [x for pair in self.later[:j] for x in pair]
        if SETTINGS.method == "flex":
            return _flex(q, self.keys, self.values, self.mask, own).transpose(1, 2)
        count, groups = q.shape[2], q.shape[1] // k.shape[1]
        q = q.unflatten(1, (-1, groups)) * q.shape[-1] ** -0.5
        whole = SETTINGS.method == "dense" or (SETTINGS.method == "auto" and count <= BLOCK)
        pieces = []
        for start in range(0, count, count if whole else BLOCK):
            some = slice(start, start + (count if whole else BLOCK))
            ranges = self.mask.key_ranges(some.start, some.stop, None)
            inputs = [q[:, :, :, some], self.keys, self.values, *(x[:, :, some] for x in own)]
            if whole:
                pieces.append(_block(self.mask, start, ranges, *inputs))
            else:
                pieces.append(recomputed(_block, self.mask, start, ranges, *inputs))
        return torch.cat(pieces, 3).flatten(1, 2).transpose(1, 2)


def _block(
    mask: SlotMask,
    start: int,
    ranges: list[tuple[int, int]],
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    *own: Tensor,
) -> Tensor:
    """[B, Hkv, G, m, D] of the slots from `start` on, with q of that shape, scaled, over the keys of `ranges`.

    `own` are k and v [B, Hkv, m, D] of each step from 1 on.
    """
    shape, device = q.shape, q.device
    keys, values = take_keys(keys, ranges), take_keys(values, ranges)
    slots = torch.arange(start, start + shape[3], device=device)
    visible = mask.at(slots, key_index(ranges, device), None)  # [B, m, T]
    count = keys.shape[2]
    scores = (q.flatten(2, 3) @ keys.transpose(-1, -2)).unflatten(
        2, shape[2:4]
    )  # [B, Hkv, G, m, T]
    scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
    columns = [(q * k[:, :, None]).sum(-1, keepdim=True) for k in own[::2]]
    weights = torch.cat([scores, *columns], -1).softmax(-1, dtype=torch.float32).to(values.dtype)
    out = (weights[..., :count].flatten(2, 3) @ values).unflatten(2, shape[2:4])
    for j, v in enumerate(own[1::2]):
        out = out + weights[..., count + j, None] * v[:, :, None]
    return out


def _flex(q: Tensor, keys: Tensor, values: Tensor, mask: SlotMask, own: list[Tensor]) -> Tensor:
    """[B, H, M, D] of q [B, H, M, D]: flex_attention over the keys of step 0, and the slots' `own` keys beside it."""
    out, lse = attend_flex(q, keys, values, block_mask(mask, None), None)
    if not own:
        return out
    groups = q.shape[1] // keys.shape[1]
    own = [x.repeat_interleave(groups, 1) for x in own]
    scores = torch.stack([(q * k).sum(-1) for k in own[::2]], -1) * q.shape[-1] ** -0.5
    out, weights = add_own_keys(out, lse, scores)
    for j, v in enumerate(own[1::2]):
        out = out + weights[..., j, None] * v
    return out
