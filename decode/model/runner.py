"""A Hugging Face causal LM behind fixed-shape steps, and the identity of its tokenizer."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from transformers.utils import logging

from decode.common.errors import UserError
from decode.model import attention, small_batch_linear
from decode.model.compatibility import check_supported, context_length, use_grouped_experts
from decode.model.hidden_states import HiddenStateHooks, HiddenStateSpec
from decode.model.kv_cache import StaticKVCache, TreeNodes

logging.disable_progress_bar()  # a bar a shard hides the one bar of the command


PREFILL_CHUNK = 1024
"""Prompt tokens in one forward: bounds the memory that long prompts take."""


class ModelRunner:
    """One causal LM with its own fixed-shape K/V store, for ragged rows. UserError for one that cannot be decoded."""

    def __init__(self, model: Any):
        check_supported(model)
        self.model = model.eval()
        self.model.set_attn_implementation(attention.ATTENTION_NAME)
        use_grouped_experts(self.model)
        small_batch_linear.patch_linear_layers(self.model)
        self.config = model.config.get_text_config(decoder=True)
        self.device: torch.device = model.device
        self.context: int = context_length(self.config)
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self.shape = 0, 0  # rows and slots of the buffers
        self.taps: HiddenStateSpec | None = None
        self.hidden_state_hooks: HiddenStateHooks | None = None
        self.features: torch.Tensor
        """[B, T, F] tapped states of the last prefill or step."""

    def allocate(self, rows: int, size: int) -> None:
        """Buffers for `rows` sequences of up to `size` tokens each; what they held is stale.

        Equal shapes are used again: compiled code and captured graphs know the buffers by their addresses.
        """
        layers = self.config.num_hidden_layers
        if (rows, size) != self.shape:
            self.cache = StaticKVCache(layers, rows, size, self.device)
            self.shape = rows, size

    def capture_hidden_states(self, taps: HiddenStateSpec | None) -> None:
        """From now on `features` hold these states; None: nothing is kept."""
        if taps != self.taps:
            if self.hidden_state_hooks is not None:
                self.hidden_state_hooks.remove()
            self.hidden_state_hooks = self.taps = None  # and so it stays if these taps are refused
            self.hidden_state_hooks = None if taps is None else HiddenStateHooks(self.model, taps)
            self.taps = taps

    def reserve(self, size: int) -> None:
        """Room for `size` tokens a row from now on; what the rows hold stays."""
        rows, held = self.shape
        if held < size:
            self.cache.reserve(size)
            self.shape = rows, size

    @torch.inference_mode()
    def prefill(
        self, tokens: torch.Tensor, length: torch.Tensor, row: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits [b, V] of each row's last prompt token; tokens [b, W] right-padded, length [b].

        `row` [b] says which rows are filled (None: all of them); the others stay as they are.
        """
        rows, width = tokens.shape
        logits = torch.zeros(rows, self.vocab_size, device=self.device, dtype=self.model.dtype)
        each = torch.arange(rows, device=self.device)
        features = []
        for start in range(0, width, PREFILL_CHUNK):
            piece = tokens[:, start : start + PREFILL_CHUNK]
            count = piece.shape[1]
            self.cache.slots.place(torch.full_like(length, start), count, row=row, fresh=start == 0)
            last = length - 1 - start
            at = last.clamp(0, count - 1)
            with logits_only_at(self.model, partial(_select_positions, each, at)):
                here = self._forward(piece)[:, 0]
            inside = (last >= 0) & (last < count)
            logits = torch.where(inside[:, None], here, logits)
            if self.hidden_state_hooks is not None:
                features.append(self.features)
        if self.hidden_state_hooks is not None:
            self.features = torch.cat(features, 1)
        return logits

    def step(
        self, tokens: torch.Tensor, base: torch.Tensor, nodes: TreeNodes | None = None
    ) -> torch.Tensor:
        """Logits [B, T, V] of tokens [B, T] put behind the first `base` [B] slots of each row.

        They are a chain, or the given nodes of a token tree.
        """
        self.cache.slots.place(base, tokens.shape[1], nodes=nodes)
        return self._forward(tokens)

    def keep(self, base: torch.Tensor, path: torch.Tensor) -> None:
        """Moves the accepted nodes `path` [B, P] of a tree, rooted at slot `base` [B], into chain order."""
        self.cache.compact_path(base, path)

    def first_layers(self, count: int) -> "ModelRunner":
        """The first `count` layers with the same norm, head and K/V store: a draft at no cost in memory.

        What it writes into the shared store for drafted tokens, verification overwrites.
        """
        layers = self.config.num_hidden_layers
        if not 0 < count < layers:
            raise UserError(
                f"early exit needs 1 to {layers - 1} layers of this target, not {count}"
            )
        shorter = copy.copy(self)
        shorter.hidden_state_hooks = shorter.taps = None
        shorter.model = _truncate_layers(self.model, layers, count)
        return shorter

    def _forward(self, tokens: torch.Tensor) -> torch.Tensor:
        # Drafts near the end of the context get a position that exists; their verdict is never used.
        position = self.cache.slots.position.clamp_max(self.context - 1)
        with attention.forward_context(self.cache.slots):
            logits = self.model(
                input_ids=tokens,
                position_ids=position,
                past_key_values=self.cache,
                use_cache=True,
            ).logits
        if self.hidden_state_hooks is not None:
            self.features = self.hidden_state_hooks.states()
        return logits


def _select_positions(
    row: torch.Tensor, column: torch.Tensor, hidden: torch.Tensor
) -> torch.Tensor:
    return hidden[row, column][:, None]


def _truncate_layers(module: Any, layers: int, count: int) -> Any:
    """A copy of `module` that shares all weights and ends after its first `count` of `layers` blocks.

    Blocks are those of the one ModuleList of that length. A prefix keeps every index, which models look their
    layer types up by.
    """
    cut = copy.copy(module)
    cut._modules = dict(module._modules)
    for name, child in module._modules.items():
        if isinstance(child, torch.nn.ModuleList) and len(child) == layers:
            cut._modules[name] = torch.nn.ModuleList(child[:count])
        elif child is not None and any(isinstance(m, torch.nn.ModuleList) for m in child.modules()):
            cut._modules[name] = _truncate_layers(child, layers, count)
    return cut


@contextmanager
def logits_only_at(model: Any, select: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Within it, `model` projects `select(hidden [B, T, H])` to the vocabulary instead of every position.

    A hook on the output projection, because `logits_to_keep` takes one position a row only in newer versions
    of transformers and silently means something else in older ones.
    """
    handle = model.get_output_embeddings().register_forward_pre_hook(
        lambda module, args: (select(args[0]), *args[1:])
    )
    try:
        yield
    finally:
        handle.remove()
