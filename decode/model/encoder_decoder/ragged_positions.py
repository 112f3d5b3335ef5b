"""Relative position bias for rows that have unequal lengths, and for token trees.

transformers computes the bias of a decoder's self-attention from one number of cached tokens for the whole batch. Here
hooks replace it by that of each row's own positions, taken from the model's own table of distances.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from decode.common.errors import UserError
from decode.model.kv_cache import SlotMapping


class RaggedPositionBias:
    """The relative position bias of a decoder's self-attention (T5, mT5). UserError for a decoder that has none."""

    def __init__(self, decoder: Any):
        self.modules = [m for m in decoder.modules() if "relative_attention_bias" in m._modules]
        if not self.modules:
            raise UserError(
                f"this {decoder.config.model_type} model cannot be decoded: its decoder has no relative position bias, "
                "so that rows of unequal length cannot be told apart; T5 and its kin (Flan-T5, mT5) can be"
            )
        self.tables: list[torch.Tensor] = []

    @torch.inference_mode()
    def compute_tables(self, size: int) -> None:
        """Computes the bias [size, H] by distance from the present weights, for buffers of `size` slots."""
        last_rows = [m.compute_bias(1, size, past_seen_tokens=size - 1) for m in self.modules]
        self.tables = [row[0, :, 0].flip(1).T.contiguous() for row in last_rows]

    @contextmanager
    def for_slots(self, slots: SlotMapping) -> Iterator[None]:
        """While the block runs, the decoder's tokens have the positions of `slots` and see what these show."""
        distance, visible = slots.distances()  # [b, T, S]
        near = distance.clamp_min(0)

        def replace(
            table: torch.Tensor, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            bias = table[near].permute(0, 3, 1, 2)  # [b, H, T, S]
            bias = bias.masked_fill(~visible[:, None], float("-inf"))
            return args, {**kwargs, "position_bias": bias}

        handles = [
            module.register_forward_pre_hook(partial(replace, table), with_kwargs=True)
            for module, table in zip(self.modules, self.tables, strict=True)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
