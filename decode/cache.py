"""Fixed-shape K/V buffers: where a forward writes, what it may see, and how lengths roll back.

A row owns `slots` places. `length[b]` tokens of row b are committed; whatever lies beyond is stale and
invisible, so rolling back is nothing but a smaller length. Every layer shares one `Slots` object.
"""

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


class Slots:
    """Where the T tokens of one forward go and what they see, for `rows` ragged rows."""

    def __init__(self, rows: int, slots: int, device: torch.device):
        self.slots = slots
        self.row = torch.arange(rows, device=device)[:, None]  # [B, 1]
        self.slot = torch.arange(slots, device=device)  # [S]
        self.length = torch.zeros(rows, dtype=torch.long, device=device)  # [B]
        self.prefill = False
        self.write = self.row  # [B, T] slots of this forward's tokens
        self.masks: dict[tuple[int | None, int], torch.Tensor] = {}

    def place(self, length: torch.Tensor, count: int, prefill: bool = False) -> None:
        """The next forward puts `count` tokens a row behind `length` [B]; a chain's slot is its position."""
        self.length, self.prefill = length, prefill
        self.write = length[:, None] + torch.arange(count, device=length.device)
        self.masks = {}

    def mask(self, window: int | None, groups: int) -> torch.Tensor:
        """[B, 1, groups * T, S] bool, True = attend: every slot up to the token itself, inside `window`.

        The query heads that share a key head are packed along T, hence the repetition. Computed once
        a forward for each window: layers of one kind share it.
        """
        key = (window, groups)
        if key not in self.masks:
            distance = self.write[:, :, None] - self.slot  # [B, T, S]
            allow = distance >= 0
            if window is not None:
                allow &= distance < window
            self.masks[key] = allow[:, None].repeat(1, 1, groups, 1)
        return self.masks[key]


class StaticLayer(CacheLayerMixin):
    """One layer's K/V, [B, S, Hkv, D]; written by index_put, which compilers keep in place."""

    is_compileable, is_sliding = True, False
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, slots: Slots):
        super().__init__()
        self.state = slots

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        rows, heads, _, width = key_states.shape
        shape = (rows, self.state.slots, heads)
        self.keys = key_states.new_zeros(*shape, width)  # zeros: 0 * garbage could be NaN
        self.values = value_states.new_zeros(*shape, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        state, keys, values = self.state, self.keys, self.values
        keys[state.row, state.write] = key_states.transpose(1, 2)
        values[state.row, state.write] = value_states.transpose(1, 2)
        if state.prefill:
            return key_states, value_states  # attend to the fresh keys, causally
        return keys.transpose(1, 2), values.transpose(1, 2)

    def get_seq_length(self) -> int:
        return 0  # lengths are per row and live in Slots

    def get_max_length(self) -> int:
        return self.state.slots

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.state.slots, 0


def new_cache(layers: int, slots: Slots) -> Cache:
    return Cache(layers=[StaticLayer(slots) for _ in range(layers)])
