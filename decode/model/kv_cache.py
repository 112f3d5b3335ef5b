"""Fixed-shape K/V buffers: where a forward writes, what it may see, and how lengths roll back.

A row owns `size` slots. `base[b]` tokens of row b are committed; whatever lies beyond is stale and invisible, so
rolling back a chain is nothing but a smaller length, and a tree is rolled back by moving its accepted path to
the front. Every layer shares one `Slots` object.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


@dataclass(frozen=True)
class TreeNodes:
    """Which T of a token tree's N nodes a forward computes. A leading [b] or [1] dimension throughout."""

    index: torch.Tensor  # [1|b, T] node numbers; node n lives at slot base + n
    depth: torch.Tensor  # [1|b, N] of every node so far; its position is base + depth
    ancestor_mask: torch.Tensor  # [1|b, T, N] bool: its ancestors and itself

    @property
    def index_depth(self) -> torch.Tensor:
        """[b, T] the depth of the computed nodes."""
        rows = max(len(self.index), len(self.depth))
        return self.depth.expand(rows, -1).gather(1, self.index.expand(rows, -1))


@dataclass(frozen=True)
class SplitKVMetadata:
    """What T tokens of B rows see, for a kernel that reads only that (decode/model/split_kv_attention.py)."""

    first: torch.Tensor  # [B] no slot before it is seen by any of the tokens
    live: torch.Tensor  # [B] nor any from here on
    seen: torch.Tensor  # [B, T] slots before this one are, within the window
    position: torch.Tensor  # [B, T]
    base: torch.Tensor  # [B] slot of a tree's root
    tail: torch.Tensor | None  # [B, T, N] bool: and so are these nodes of the tree, at base + n
    window: int | None


class SlotMapping:
    """Where the T tokens of one forward go and what they see, for ragged rows."""

    def __init__(self, rows: int, size: int, device: torch.device):
        self.size = size
        self.rows = rows
        self.all_rows = torch.arange(rows, device=device)
        self.slot = torch.arange(size, device=device)  # [S]
        self.place(torch.zeros(rows, dtype=torch.long, device=device), 1)

    def place(
        self,
        base: torch.Tensor,
        count: int,
        *,
        row: torch.Tensor | None = None,
        nodes: TreeNodes | None = None,
        fresh: bool = False,
    ) -> None:
        """The next forward puts `count` tokens behind the first `base` [b] slots of rows `row` [b] (None: of all).

        `nodes` says which nodes of a token tree they are; without it they are a chain, whose slots are its
        positions. `fresh` promises that base is 0: keys need not be read back from the buffers.
        """
        self.row, self.fresh, self.nodes, self.base = row, fresh, nodes, base
        index = torch.arange(count, device=base.device) if nodes is None else nodes.index
        # A step that looks back further than its row is long reads the first token several times over.
        self.write = (base[:, None] + index).clamp_min(0)  # [b, T]
        self.position = self.write if nodes is None else base[:, None] + nodes.index_depth
        self.masks: dict[tuple[int | None, int], torch.Tensor] = {}
        self.views: dict[int | None, SplitKVMetadata] = {}

    def view(self, window: int | None) -> SplitKVMetadata:
        """The same as `mask`, in a form that need not touch every slot. Computed once a forward for each window."""
        if window not in self.views:
            rows, count = self.write.shape
            seen, end, tail = self.position + 1, self.base + count, None
            if self.nodes is not None:
                depth = self.nodes.depth.expand(rows, -1)
                seen = self.base[:, None].expand(rows, count)
                end = self.base + depth.shape[1]
                tail = self.nodes.ancestor_mask.expand(rows, -1, -1)
                if window is not None:
                    tail = tail & (self.nodes.index_depth[..., None] - depth[:, None] < window)
                tail = tail.contiguous()
            first = torch.zeros_like(self.base)
            if window is not None:
                first = (self.position.amin(1) - window + 1).clamp_min(0)
            self.views[window] = SplitKVMetadata(
                first=first,
                live=end.clamp(1, self.size),
                seen=seen.contiguous(),
                position=self.position.contiguous(),
                base=self.base,
                tail=tail,
                window=window,
            )
        return self.views[window]

    def mask(self, window: int | None, groups: int) -> torch.Tensor:
        """[b, 1, groups * T, S] bool, True = attend: all committed slots and a node's ancestors, inside `window`.

        The window counts positions, which differ from slots in a tree. The query heads that share a key head are
        packed along T, hence the repetition. Computed once a forward for each window: layers of a kind share it.
        """
        key = (window, groups)
        if key not in self.masks:
            self.masks[key] = self._build_mask(window)[:, None].repeat(1, 1, groups, 1)
        return self.masks[key]

    def _build_mask(self, window: int | None) -> torch.Tensor:
        position = self.position[:, :, None]
        if self.nodes is None:
            distance = position - self.slot  # [b, T, S]
            allow = distance >= 0
        else:
            relative = self.slot - self.base[:, None]  # [b, S]: which node a slot holds
            visible, depth = self.nodes.ancestor_mask, self.nodes.depth  # [b|1, T, N], [b|1, N]
            inside = (relative >= 0) & (relative < depth.shape[-1])
            at = relative.clamp(0, depth.shape[-1] - 1)
            rows, count = self.write.shape
            ancestor = visible.expand(rows, -1, -1).gather(2, at[:, None].expand(-1, count, -1))
            allow = (relative < 0)[:, None] | (inside[:, None] & ancestor)
            held = torch.where(
                inside, self.base[:, None] + depth.expand(rows, -1).gather(1, at), self.slot
            )
            distance = position - held[:, None]
        return allow if window is None else allow & (distance < window)


class StaticKVLayer(CacheLayerMixin):
    """One layer's K/V, [B, S, Hkv, D]; written by index_put, which compilers keep in place."""

    is_compileable, is_sliding = True, False
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, slots: SlotMapping):
        super().__init__()
        self.state = slots

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        heads = key_states.shape[1]
        shape = (self.state.rows, self.state.size, heads)
        self.keys = key_states.new_zeros(*shape, key_states.shape[-1])  # 0 * garbage could be NaN
        self.values = value_states.new_zeros(*shape, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        state, keys, values = self.state, self.keys, self.values
        row = state.all_rows if state.row is None else state.row
        keys[row[:, None], state.write] = key_states.transpose(1, 2)
        values[row[:, None], state.write] = value_states.transpose(1, 2)
        if state.fresh:
            return key_states, value_states  # attend to the fresh keys, causally
        if state.row is not None:
            keys, values = keys[row], values[row]
        return keys.transpose(1, 2), values.transpose(1, 2)

    def compact_path(self, base: torch.Tensor, path: torch.Tensor) -> None:
        """Slots base + path [B, P] go to base + 0..P-1; gathered before written, since they overlap."""
        row = self.state.all_rows[:, None]
        source = base[:, None] + path
        sink = base[:, None] + torch.arange(path.shape[1], device=path.device)
        for buffer in (self.keys, self.values):
            buffer[row, sink] = buffer[row, source]

    def reserve(self, slots: SlotMapping) -> None:
        """Longer buffers for the longer `slots`; what is held stays."""
        self.state = slots
        if self.is_initialized:
            self.keys, self.values = _enlarged(self.keys, slots), _enlarged(self.values, slots)

    def get_seq_length(self) -> int:
        return 0  # lengths are per row and live in Slots

    def get_max_length(self) -> int:
        return self.state.size

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.state.size, 0


def _enlarged(buffer: torch.Tensor, slots: SlotMapping) -> torch.Tensor:
    longer = buffer.new_zeros(len(buffer), slots.size, *buffer.shape[2:])
    longer[:, : buffer.shape[1]] = buffer
    return longer


class StaticKVCache(Cache):
    """The K/V of all layers of a model over one `Slots`, as transformers wants it."""

    def __init__(self, layers: int, rows: int, size: int, device: torch.device):
        self.slots = SlotMapping(rows, size, device)
        self.kv_layers = [StaticKVLayer(self.slots) for _ in range(layers)]
        super().__init__(layers=list(self.kv_layers))

    def compact_path(self, base: torch.Tensor, path: torch.Tensor) -> None:
        """`StaticLayer.move` in every layer that holds K/V; some use those of a layer below (gemma4)."""
        for layer in self.kv_layers:
            if layer.is_initialized:
                layer.compact_path(base, path)

    def reserve(self, size: int) -> None:
        """Room for `size` slots a row; what is held stays."""
        self.slots = SlotMapping(self.slots.rows, size, self.slots.slot.device)
        for layer in self.kv_layers:
            layer.reserve(self.slots)
