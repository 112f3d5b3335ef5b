"""Fixed-shape K/V buffers: which slots a forward writes, which it attends to, and how rejected tokens are removed.

Each row (sequence of the batch) has `size` slots. The first `base[b]` slots of row b hold committed tokens; the slots
after them are stale and masked. So a chain is rolled back by a smaller length alone, and a tree by moving its accepted
path to the front. All layers share one `SlotMapping`.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from decode.model.gpu.cuda_operations import KERNELS


@dataclass(frozen=True)
class TreeNodes:
    """The T of a token tree's N nodes that a forward computes. All tensors have a leading dimension b, or 1 for all."""

    index: Tensor  # [1|b, T] node numbers; node n is in slot base + n
    depth: Tensor  # [1|b, N] of every node so far; the position of a node is base + depth
    ancestor_mask: Tensor  # [1|b, T, N] bool: the ancestors of each computed node, and itself

    @property
    def index_depth(self) -> Tensor:
        """[b, T] the depths of the computed nodes."""
        rows = max(len(self.index), len(self.depth))
        return self.depth.expand(rows, -1).gather(1, self.index.expand(rows, -1))


@dataclass(frozen=True)
class SplitKVMetadata:
    """The slots that T tokens of B rows attend to, for a kernel that reads no others (split_kv_attention.py)."""

    first: Tensor  # [B] the first slot that any token of the row attends to
    live: Tensor  # [B] one behind the last such slot
    seen: Tensor  # [B, T] each token attends to the slots before this one, within the window
    position: Tensor  # [B, T]
    base: Tensor  # [B] the slot of a tree's root
    tail: Tensor | None
    """[B, T, W] int64, 64 tree nodes a word: bit n % 64 of word n // 64 says that it attends to node n as well, which
    is in slot base + n."""
    window: int | None


def bit_words(bits: Tensor) -> Tensor:
    """[..., ceil(N / 64)] int64 of bits [..., N]: bit n % 64 of word n // 64 is that of n."""
    words = F.pad(bits, (0, -bits.shape[-1] % 64)).unflatten(-1, (-1, 64)).long()
    return (words << torch.arange(64, device=bits.device)).sum(-1)  # bit 63 is the sign


class SlotMapping:
    """The slots that the T tokens of one forward are written to and attend to, for rows of unequal length."""

    def __init__(self, rows: int, size: int, device: torch.device, own_kernel: bool = False):
        self.size = size
        self.rows = rows
        self.own_kernel = own_kernel
        """Steps of few tokens attend by decode/model/quantized/attention.cpp."""
        self.all_rows = torch.arange(rows, device=device)
        self.every_slot = torch.arange(size, device=device)
        self.slot = self.every_slot  # [S] those that forwards attend to
        self.is_dynamic = False  # compiled code is of any number of slots
        self.windows: tuple[int | None, ...] = ()
        """Those of the layers that have attended over these slots."""
        self.set_positions(torch.zeros(rows, dtype=torch.long, device=device), 1)

    def limit_to(self, count: int) -> None:
        """Later forwards attend to the first `count` slots alone, beyond which no row may reach.

        Attention reads each of these slots, whether or not a row has a token there.
        """
        self.slot = self.every_slot if count >= self.size else self.every_slot[:count]

    def set_positions(
        self,
        base: Tensor,
        count: int,
        *,
        row: Tensor | None = None,
        nodes: TreeNodes | None = None,
        is_prefill: bool = False,
    ) -> None:
        """Prepares a forward of `count` tokens that come after the first `base` [b] slots of rows `row` [b].

        `row` None means all rows. `nodes` are the nodes of a token tree that the tokens are; None: they are a chain,
        whose positions are its slots. `is_prefill` is for base 0 only: the tokens attend to each other alone, so their
        keys are not read back from the buffers.
        """
        self.row, self.is_prefill, self.nodes, self.base = row, is_prefill, nodes, base
        index = torch.arange(count, device=base.device) if nodes is None else nodes.index
        # A step that starts before a row's first token repeats that token.
        self.write_slots = (base[:, None] + index).clamp_min(0)  # [b, T]
        self.position = self.write_slots if nodes is None else base[:, None] + nodes.index_depth
        self.masks: dict[tuple[int | None, int], Tensor] = {}
        self.metadata: dict[int | None, SplitKVMetadata] = {}

    def tensors(self) -> list[Tensor | None]:
        """Everything that a forward reads of this object, in the same order in every forward."""
        tensors = [self.all_rows, self.row, self.slot, self.write_slots, self.position, self.base]
        if self.nodes is not None:
            tensors += [self.nodes.index, self.nodes.depth, self.nodes.ancestor_mask]
        return tensors

    def note_window(self, window: int | None) -> None:
        """Remembers the window of a layer, for `live_slots`."""
        if window not in self.windows:
            self.windows += (window,)

    def live_slots(self) -> list[Tensor]:
        """The tensors of `split_kv_metadata` for every window that is known, which layers then do not compute."""
        tensors: list[Tensor] = []
        for window in self.windows:
            if window not in self.metadata:
                self.metadata[window] = self._build_split_kv_metadata(window)
            live = self.metadata[window]
            tensors += [live.first, live.live, live.seen, live.position]
            tensors += [] if live.tail is None else [live.tail]
        return tensors

    def split_kv_metadata(self, window: int | None) -> SplitKVMetadata:
        """The same information as `mask`, without a value for every slot. Computed once a forward for each window."""
        if window in self.metadata:
            return self.metadata[window]
        live = self._build_split_kv_metadata(window)
        if (
            not torch.compiler.is_compiling()
        ):  # a region leaves nothing for the next (`mark_regions`)
            self.metadata[window] = live
        return live

    def _build_split_kv_metadata(self, window: int | None) -> SplitKVMetadata:
        rows, count = self.write_slots.shape
        seen, end, tail = self.position + 1, self.base + count, None
        if self.nodes is not None:
            depth = self.nodes.depth.expand(rows, -1)
            seen = self.base[:, None].repeat(
                1, count
            )  # a copy: a region reads no two views of one tensor
            end = self.base + depth.shape[1]
            tail = self.nodes.ancestor_mask.expand(rows, -1, -1)
            if window is not None:
                tail = tail & (self.nodes.index_depth[..., None] - depth[:, None] < window)
            tail = bit_words(tail)
        first = torch.zeros_like(self.base)
        if window is not None:
            first = (self.position.amin(1) - window + 1).clamp_min(0)
        return SplitKVMetadata(
            first=first,
            live=end.clamp(1, self.size),
            seen=seen,
            position=self.position,
            base=self.base,
            tail=tail,
            window=window,
        )

    def mask(self, window: int | None, groups: int) -> Tensor:
        """[b, 1, groups * T, S] bool, True = attend: committed slots and a node's ancestors, within `window` positions.

        Positions differ from slots in a tree. The `groups` query heads that share a key head are packed along T, so
        the mask is repeated for each. Computed once a forward for each window: layers of the same type share it.
        """
        if torch.compiler.is_compiling():  # a region leaves nothing for the next (`mark_regions`)
            return self._build_mask(window)[:, None].repeat(1, 1, groups, 1)
        key = (window, groups)
        if key not in self.masks:
            self.masks[key] = self._build_mask(window)[:, None].repeat(1, 1, groups, 1)
        return self.masks[key]

    def _build_mask(self, window: int | None) -> Tensor:
        distance, allow = self.distances()
        return allow if window is None else allow & (distance < window)

    def distances(self) -> tuple[Tensor, Tensor]:
        """([b, T, S] positions from each slot to the token, bool [b, T, S]: the slot is committed, or an ancestor's).

        Distances to slots that are not visible mean nothing.
        """
        position = self.position[:, :, None]
        if self.nodes is None:
            distance = position - self.slot
            return distance, distance >= 0
        relative = self.slot - self.base[:, None]  # [b, S]: the node in each slot
        visible, depth = self.nodes.ancestor_mask, self.nodes.depth  # [b|1, T, N], [b|1, N]
        inside = (relative >= 0) & (relative < depth.shape[-1])
        at = relative.clamp(0, depth.shape[-1] - 1)
        rows, count = self.write_slots.shape
        ancestor = visible.expand(rows, -1, -1).gather(2, at[:, None].expand(-1, count, -1))
        allow = (relative < 0)[:, None] | (inside[:, None] & ancestor)
        slot_position = torch.where(
            inside, self.base[:, None] + depth.expand(rows, -1).gather(1, at), self.slot
        )
        return position - slot_position[:, None], allow


class StaticKVLayer(CacheLayerMixin):
    """The K/V buffers of one layer, each [B, Hkv, S, D]: a head's slots lie one after the other, as products want them.

    They are written by index_put, which compilers do in place. They are on the device of the layer's states, which may
    be another than that of the slots if a target's layers are on several.
    """

    is_compileable, is_sliding = True, False
    keys: Tensor
    values: Tensor

    def __init__(self, slots: SlotMapping):
        super().__init__()
        self.slots = slots

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates the buffers in the dtype and with the heads of the first states."""
        shape = self.slots.rows, key_states.shape[1], self.slots.size
        # zeros, because 0 * garbage in masked slots could be NaN
        self.keys = key_states.new_zeros(*shape, key_states.shape[-1])
        self.values = value_states.new_zeros(*shape, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes states [b, Hkv, T, D] to their slots; returns the keys and values [b, Hkv, S, D] to attend to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        slots, keys, values = self.slots, self.keys, self.values
        row = (slots.all_rows if slots.row is None else slots.row).to(keys.device)
        write_slots = slots.write_slots.to(keys.device)
        if KERNELS.own and keys.is_cuda and slots.row is None and not torch.compiler.is_compiling():
            torch.ops.draftsmith.write_kv(keys, values, key_states, value_states, write_slots)
        else:
            keys[row[:, None], :, write_slots] = key_states.transpose(1, 2)
            values[row[:, None], :, write_slots] = value_states.transpose(1, 2)
        if slots.is_prefill:
            return key_states, value_states  # causal attention among them
        keys, values = keys[:, :, : len(slots.slot)], values[:, :, : len(slots.slot)]
        return (keys, values) if slots.row is None else (keys[row], values[row])

    def compact_path(self, base: Tensor, path: Tensor) -> None:
        """Moves slots base + path [B, P] to base + 0..P-1. They overlap, so all are gathered before any is written."""
        base, path = base.to(self.keys.device), path.to(self.keys.device)
        row = self.slots.all_rows.to(self.keys.device)[:, None]
        source = base[:, None] + path
        sink = base[:, None] + torch.arange(path.shape[1], device=path.device)
        for buffer in (self.keys, self.values):
            buffer[row, :, sink] = buffer[row, :, source]

    def reserve(self, slots: SlotMapping) -> None:
        """Enlarges the buffers for the longer `slots` and keeps their contents."""
        self.slots = slots
        if self.is_initialized:
            self.keys, self.values = _enlarged(self.keys, slots), _enlarged(self.values, slots)

    def get_seq_length(self) -> int:
        return 0  # lengths are per row, in SlotMapping

    def get_max_length(self) -> int:
        return self.slots.size

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.slots.size, 0


def _enlarged(buffer: Tensor, slots: SlotMapping) -> Tensor:
    rows, heads, size, width = buffer.shape
    longer = buffer.new_zeros(rows, heads, slots.size, width)
    longer[:, :, :size] = buffer
    return longer


class StaticKVCache(Cache):
    """The K/V buffers of all layers of a model over one `SlotMapping`, as a Cache of transformers."""

    def __init__(
        self, layers: int, rows: int, size: int, device: torch.device, own_kernel: bool = False
    ):
        self.slots = SlotMapping(rows, size, device, own_kernel)
        self.kv_layers = [StaticKVLayer(self.slots) for _ in range(layers)]
        super().__init__(layers=list(self.kv_layers))

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and slots a row."""
        return self.slots.rows, self.slots.size

    def row_bytes(self, slots: int) -> int:
        """Bytes of a row of `slots` slots, in the layers that have written some."""
        buffers = [x for y in self.kv_layers if y.is_initialized for x in (y.keys, y.values)]
        return slots * sum(x.element_size() * x.shape[1] * x.shape[3] for x in buffers)

    def compact_path(self, base: Tensor, path: Tensor) -> None:
        """Calls `StaticKVLayer.compact_path` in every layer with K/V of its own; some use another layer's (gemma4)."""
        for layer in self.kv_layers:
            if layer.is_initialized:
                layer.compact_path(base, path)

    def write_rows(self, row: Tensor, computed: Cache) -> None:
        """Writes the K/V of transformers' cache `computed`, of b rows, to the first slots of rows `row` [b].

        Layers of `computed` without any (gemma4's last ones use another layer's) are left out.
        """
        filled = [
            (own, layer)
            for own, layer in zip(self.kv_layers, computed.layers, strict=False)
            if layer.is_initialized
        ]
        width = filled[0][1].keys.shape[2]
        self.slots.set_positions(torch.zeros_like(row), width, row=row, is_prefill=True)
        for own, layer in filled:
            own.update(layer.keys, layer.values)

    def mark_dynamic(self) -> None:
        """Makes later compilations be of any number of slots, for buffers that grow."""
        if not self.slots.is_dynamic:
            self.slots.is_dynamic = True
            torch._dynamo.maybe_mark_dynamic(self.slots.every_slot, 0)
            for layer in self.kv_layers:
                if layer.is_initialized:
                    torch._dynamo.maybe_mark_dynamic(layer.keys, 2)
                    torch._dynamo.maybe_mark_dynamic(layer.values, 2)

    def copy_row(self, row: int, size: int) -> "StaticKVCache":
        """A cache of one row of `size` slots with the contents of row `row`."""
        slots = self.slots
        copied = StaticKVCache(len(self.kv_layers), 1, size, slots.slot.device, slots.own_kernel)
        for own, layer in zip(copied.kv_layers, self.kv_layers, strict=True):
            if layer.is_initialized:
                own.keys = layer.keys[row : row + 1, :, :size].clone()
                own.values = layer.values[row : row + 1, :, :size].clone()
                own.is_initialized = True
        return copied

    def reserve(self, size: int) -> None:
        """Enlarges the buffers to `size` slots per row, where they have fewer, and keeps their contents."""
        slots = self.slots
        if size <= slots.size:
            return
        longer = SlotMapping(slots.rows, size, slots.slot.device, slots.own_kernel)
        longer.windows = slots.windows
        self.slots = SlotMapping(
            0, 0, slots.slot.device
        )  # if this fails, not all layers are enlarged
        for layer in self.kv_layers:
            layer.reserve(longer)
        self.slots = longer


class LayerCache(StaticKVCache):
    """What the layer `index` of `layers` sees of a cache: its own K/V buffers `keys` and `values` alone."""

    def __init__(self, slots: SlotMapping, keys: Tensor, values: Tensor, index: int, layers: int):
        layer = StaticKVLayer(slots)
        layer.keys, layer.values, layer.is_initialized = keys, values, True
        self.slots, self.kv_layers = slots, [layer]
        Cache.__init__(self, layers=[layer if n == index else None for n in range(layers)])
