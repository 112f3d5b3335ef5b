"""The cache of a model with recurrent layers: K/V buffers for attention, and the states of recurrent layers by row."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from decode.model.kv_cache import SlotMapping, StaticKVCache, StaticKVLayer

States = dict[tuple[int, str, int], torch.Tensor]
"""States [B, ...] of all recurrent layers, by (number of the layer, "conv" or "recurrent", number within the layer)."""
KNOWN_ATTENTION = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)
"""The cache layers of transformers for the kinds of attention that are supported, by their exact class."""


def has_recurrent_layers(config: Any) -> bool:
    """Whether transformers' own cache for this text `config` has recurrent layers. False for layer types that it does
    not know."""
    try:
        layers = own_layers(config)
    except KeyError:
        return False
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)


def count_attention_layers(config: Any) -> int:
    """How many layers of transformers' own cache for this text `config` hold keys and values."""
    return sum(isinstance(layer, CacheLayerMixin) for layer in own_layers(config))


def unknown_attention(config: Any) -> list[str]:
    """The classes of transformers' cache layers for this text `config` that hold keys and values in an unknown way."""
    held = [layer for layer in own_layers(config) if isinstance(layer, CacheLayerMixin)]
    return sorted({type(x).__name__ for x in held if type(x) not in KNOWN_ATTENTION})


def own_layers(config: Any) -> list[Any]:
    """The layers, all empty, of the cache that transformers makes for this text `config`."""
    layers: list[Any] = DynamicCache(config=config).layers
    return layers


class RecurrentAttentionLayer(LinearAttentionLayer, StaticKVLayer):
    """The cache of a layer that has both, side by side (Falcon-H1) or one after the other (Zamba)."""

    def __init__(self, slots: SlotMapping, number_of_states: int):
        StaticKVLayer.__init__(self, slots)
        LinearAttentionLayer.__init__(self, number_of_states)

    def lazy_initialization(self, *key_and_value: torch.Tensor, **states: Any) -> None:
        """Allocates the K/V buffers if it is given a key and a value, else the states."""
        if key_and_value:
            StaticKVLayer.lazy_initialization(self, *key_and_value)
        else:
            LinearAttentionLayer.lazy_initialization(self, **states)


class HybridCache(StaticKVCache):
    """K/V buffers as in StaticKVCache for layers with attention; one state a row in recurrent layers, which have
    transformers' own cache layers. These allocate their states in the first forward, of all rows."""

    def __init__(self, config: Any, rows: int, size: int, device: torch.device):
        self.slots = SlotMapping(rows, size, device)
        layers = [self._layer(own) for own in own_layers(config)]
        self.kv_layers = [layer for layer in layers if isinstance(layer, StaticKVLayer)]
        self.recurrent = [x for x in layers if isinstance(x, LinearAttentionCacheLayerMixin)]
        Cache.__init__(self, layers=layers)

    def _layer(self, own: Any) -> Any:
        """What stands in the place of transformers' layer `own`: it itself where nothing or only a state is cached."""
        if not isinstance(own, CacheLayerMixin):
            return own
        if isinstance(own, LinearAttentionCacheLayerMixin):
            return RecurrentAttentionLayer(self.slots, own.number_of_states)
        return StaticKVLayer(self.slots)

    def states(self) -> States:
        """The states of all rows, not copied: a forward changes them in place."""
        found: States = {}
        for number, layer in enumerate(self.recurrent):
            for kind, held in (("conv", layer.conv_states), ("recurrent", layer.recurrent_states)):
                found |= {(number, kind, i): x for i, x in held.items() if x is not None}
        return found

    def set_states(self, states: States) -> None:
        """Makes later forwards read and change these states."""
        for (number, kind, i), state in states.items():
            layer = self.recurrent[number]
            held = layer.conv_states if kind == "conv" else layer.recurrent_states
            held[i] = state

    @contextmanager
    def only_rows(self, row: torch.Tensor) -> Iterator[None]:
        """In the block forwards are of rows `row` [b] alone; the states of the others stay as they are."""
        every = self.states()
        self.set_states(rows_of(every, row))
        try:
            yield
        finally:
            set_rows(every, row, self.states())
            self.set_states(every)


def copy_states(states: States) -> States:
    """A copy that no forward changes."""
    return {key: state.clone() for key, state in states.items()}


def rows_of(states: States, row: torch.Tensor) -> States:
    """A copy of rows `row` [b]."""
    return {key: state[row] for key, state in states.items()}


def set_rows(states: States, row: torch.Tensor, given: States) -> None:
    """Writes states `given` of b rows to rows `row` [b] of `states`."""
    for key, state in states.items():
        state[row] = given[key]


def clear_rows(states: States, row: torch.Tensor) -> None:
    """Sets rows `row` [b] to what they are before the first token: zeros."""
    for state in states.values():
        state[row] = 0
