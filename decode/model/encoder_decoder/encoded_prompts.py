"""What the encoder made of each row's prompt, as the keys and values that the decoder's cross-attention reads."""

import torch
from transformers import Cache

from decode.model.kv_cache import StaticKVCache

STEP = 16
"""Buffers have a multiple of this many slots, as many as the longest prompt of the batch needs."""


class EncodedPrompts:
    """Cross-attention keys and values [B, H, S, D] of all decoder layers, for prompts of unequal length."""

    def __init__(self, layers: int, rows: int, device: torch.device):
        self.cache = StaticKVCache(layers, rows, STEP, device)
        self.length = torch.ones(rows, dtype=torch.long, device=device)
        """[B] tokens of each row's prompt; 1 in a row that has had none, which attends to zeros."""

    def write(self, row: torch.Tensor, length: torch.Tensor, computed: Cache) -> None:
        """Rows `row` [b] get the keys and values of prompts of `length` [b], padded on the right."""
        width = computed.layers[0].keys.shape[2]
        if width > self.cache.slots.size:
            self.cache.reserve(-(-width // STEP) * STEP)
        self.cache.write_rows(row, computed)
        self.length[row] = length

    def mask(self, dtype: torch.dtype) -> torch.Tensor:
        """[B, 1, 1, S] what is added to attention scores: 0 within a row's prompt, -inf behind it."""
        visible = self.cache.slots.every_slot < self.length[:, None]
        zeros = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
        return zeros.masked_fill(~visible, float("-inf"))[:, None, None]
