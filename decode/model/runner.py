"""A causal LM of transformers with its own K/V cache: prefill and decode steps in fixed shapes."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.utils import logging

from decode.common.errors import UserError
from decode.common.lock import RUNNING, claim
from decode.model import attention, compatibility
from decode.model.gpu.cuda_layers import patch_layers
from decode.model.hidden_states import HiddenStateHooks, HiddenStateSpec
from decode.model.kv_cache import StaticKVCache, TreeNodes
from decode.model.layer_stack import (
    check_exit,
    decoder_config,
    with_final_norm,
    with_head_rows,
    with_layers,
)
from decode.model.linear import begin_request, patch_linear_layers
from decode.model.quantized.layers import has_vnni_layers
from decode.model.regions import mark_regions

logging.disable_progress_bar()  # transformers' bars, one per shard, hide the command's own

PREFILL_CHUNK = 1024
"""Prompt tokens in one forward: a limit on the memory that long prompts need."""
FORWARD_TOKENS = 32
"""Tokens whose computation takes about as long on a CPU as what a forward costs whatever it computes: reading the
weights and starting its operations."""


class ModelRunner:
    """One causal LM with its own fixed-shape K/V cache, for rows of unequal length.

    `vocab_size` is the number of its logits, None: as many as the model has. Models of one tokenizer are padded to
    different sizes: columns that the model lacks are -inf, surplus ones are left out, and a token without a row in its
    embedding is read as the last row. With `ids` [Vd] only the logits of these tokens are computed, by a copy of their
    rows of the LM head that is made here; all others are -inf. UserError for a model that cannot be decoded with
    drafts (decode/model/compatibility.py).
    """

    can_compile = True
    """Its steps can be compiled: all buffers have fixed shapes."""
    takes_trees = True
    """A step may be of a tree's nodes."""
    takes_images = False
    """`prefill` reads images too (decode/model/vision)."""

    def __init__(self, model: Any, vocab_size: int | None = None, ids: Tensor | None = None):
        self.model = model.eval()
        self.cache_name = compatibility.cache_name(model)
        self.prepare_model()
        columns: int = model.get_output_embeddings().out_features
        self.ids = None if ids is None else ids.to(model.device)
        if self.ids is not None:
            self.model = with_head_rows(model, self.ids)
        self.config = decoder_config(model)
        self.device: torch.device = model.device
        self.context: int = compatibility.context_length(self.config)
        self.vocab_size = columns if vocab_size is None else vocab_size
        self.missing_columns = self.vocab_size - columns  # below 0: surplus ones
        self.left_out: Tensor | None = None
        self.embedding_rows: int = model.get_input_embeddings().weight.shape[0]
        # Gemma 4 leaves out tokens in its last layers as well when it gives fewer logits.
        self.can_skip_logits = not self.config.to_dict().get("num_kv_shared_layers")
        self.cache = self.make_cache(0, 0)
        self.aux_layers: HiddenStateSpec | None = None
        self.hidden_state_hooks: HiddenStateHooks | None = None
        self.features: Tensor
        """[B, T, F] the captured hidden states of the last prefill or step."""
        if self.device.type != "meta":  # there are no numbers to look at
            self.try_model()
        patch_layers(self.model)
        model.register_forward_pre_hook(check_plain_pass, with_kwargs=True)
        self.can_grow = self.can_compile and mark_regions(self.model)
        """One compiled step runs for any number of slots."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows of the K/V buffers and slots a row; (0, 0) until `allocate`."""
        return self.cache.shape

    def prepare_model(self) -> None:
        """Makes the model run with our attention and caches. UserError if its properties do not allow that."""
        compatibility.check_supported(self.model)
        self.set_attention(attention.ATTENTION_NAME)
        compatibility.use_grouped_experts(self.model)

    def set_attention(self, name: str) -> None:
        self.model.set_attn_implementation(name)

    def try_model(self) -> None:
        """UserError unless a trial pass shows what no property does."""
        compatibility.check_trial_pass(self.model, self.config.num_hidden_layers)

    def make_cache(self, rows: int, size: int) -> StaticKVCache:
        layers = self.config.num_hidden_layers
        return StaticKVCache(layers, rows, size, self.device, has_vnni_layers(self.model))

    def allocate(self, rows: int, size: int) -> None:
        """Provides K/V buffers for `rows` sequences of up to `size` tokens each; their contents are stale.

        Buffers of the same shape are used again: compiled code and captured graphs know them by their addresses.
        UserError for a model that was loaded without its layers, or that a generator uses which has not ended.
        """
        claim(self, f"this {self.config.model_type} model")
        if self.model.config.get_text_config(decoder=True).num_hidden_layers == 0:
            raise UserError("this target was loaded without its layers, and cannot decode")
        if (rows, size) != self.shape:
            self.cache = self.make_cache(rows, size)

    def cache_of_a_token(self) -> StaticKVCache:
        """A cache apart, of one row, in which one token was read: what it holds is the model's to say."""
        trial = copy.copy(self)
        trial.cache = trial.make_cache(0, 0)
        trial.allocate(1, 1)
        one = torch.ones(1, dtype=torch.long, device=self.device)
        trial.prefill(one[:, None] - 1, one)
        return trial.cache

    def capture_hidden_states(self, aux_layers: HiddenStateSpec | None) -> None:
        """Makes every later prefill and step store these hidden states in `features`; None: none are stored."""
        if aux_layers != self.aux_layers:
            if self.hidden_state_hooks is not None:
                self.hidden_state_hooks.remove()
            self.hidden_state_hooks = self.aux_layers = None
            if aux_layers is not None:  # which may raise
                self.hidden_state_hooks = HiddenStateHooks(self.model, aux_layers)
            self.aux_layers = aux_layers

    def reserve(self, size: int) -> None:
        """Enlarges the K/V buffers to `size` tokens per row, where they have fewer, and keeps their contents."""
        self.cache.reserve(size)

    @torch.inference_mode()
    def prefill(self, tokens: Tensor, length: Tensor, row: Tensor | None = None) -> Tensor:
        """Logits [b, V] of each row's last prompt token, for tokens [b, W] right-padded and length [b].

        `row` [b] are the rows of the K/V buffers that are filled (None: all); the others stay as they are. On a CPU
        prompts of similar length are computed together, the others apart, so that little of it is padding.
        """
        groups = [list(range(len(tokens)))]
        if self.device.type == "cpu":
            groups = prefill_groups(length.tolist())
        if len(groups) == 1:
            return self._prefill_together(tokens, length, row)
        row = self.cache.slots.all_rows if row is None else row
        logits, features = [], []
        for group in groups:
            own = tokens[group, : int(length[group].max())]
            logits.append(self._prefill_together(own, length[group], row[group]))
            if self.hidden_state_hooks is not None:
                padding = tokens.shape[1] - own.shape[1]
                features.append(F.pad(self.features, (0, 0, 0, padding)))
        place = torch.tensor([number for group in groups for number in group]).argsort()
        if self.hidden_state_hooks is not None:
            self.features = torch.cat(features)[place]
        return torch.cat(logits)[place]

    def _prefill_together(self, tokens: Tensor, length: Tensor, row: Tensor | None) -> Tensor:
        """`prefill` in forwards of PREFILL_CHUNK positions of all rows."""
        rows, width = tokens.shape
        logits = torch.zeros(rows, self.vocab_size, device=self.device, dtype=self.model.dtype)
        all_rows = torch.arange(rows, device=self.device)
        features = []
        for start in range(0, width, PREFILL_CHUNK):
            chunk = tokens[:, start : start + PREFILL_CHUNK]
            count = chunk.shape[1]
            self.cache.slots.set_positions(
                torch.full_like(length, start), count, row=row, is_prefill=start == 0
            )
            last = length - 1 - start
            column = last.clamp(0, count - 1)
            with logits_only_at(self.model, partial(_select_positions, all_rows, column)):
                chunk_logits = self._forward(chunk)[:, 0]
            inside = (last >= 0) & (last < count)
            logits = torch.where(inside[:, None], chunk_logits, logits)
            if self.hidden_state_hooks is not None:
                features.append(self.features)
        if self.hidden_state_hooks is not None:
            self.features = torch.cat(features, 1)
        return logits

    def step(
        self, tokens: Tensor, base: Tensor, nodes: TreeNodes | None = None, last: int = 0
    ) -> Tensor:
        """Logits [B, T, V] of tokens [B, T] that come after the first `base` [B] slots of each row.

        The tokens are a chain, or the given nodes of a token tree. With `last` only as many tokens at the end get
        logits.
        """
        self.cache.slots.set_positions(base, tokens.shape[1], nodes=nodes)
        return self._forward(tokens, last)[:, -last:]

    def compact_kv_cache(self, base: Tensor, path: Tensor) -> None:
        """Moves the K/V of the accepted nodes `path` [B, P] of a tree with its root at slot `base` [B] to its front."""
        self.cache.compact_path(base, path)

    def first_layers(
        self, count: int, norm: torch.nn.Module | None = None, ids: Tensor | None = None
    ) -> "ModelRunner":
        """A runner of the first `count` layers with the same LM head and K/V cache: a draft without own memory.

        With `norm` it has that module in place of the final norm. With `ids` [Vd] its logits are [..., Vd], of these
        tokens alone; their rows of the LM head are copied here. Verification overwrites what it writes into the shared
        cache for drafted tokens. UserError unless it has fewer layers than this one.
        """
        check_exit(count, self.config.num_hidden_layers)
        model = self.model if norm is None else with_final_norm(self.model, norm)
        if ids is not None:
            model = with_head_rows(model, ids)
            patch_linear_layers(model, recurse=False)  # layers are the target's
        return self.with_model(with_layers(model, range(count)))

    def with_model(self, model: Any) -> "ModelRunner":
        """A runner of `model`, a copy of this one's model that lacks or replaces some modules."""
        changed = copy.copy(self)
        changed.hidden_state_hooks = changed.aux_layers = None
        changed.model = model
        return changed

    def share_kv_cache(self, owner: "ModelRunner") -> None:
        """Makes this runner, which `first_layers` or `with_model` of `owner` made, use the buffers of `owner`."""
        self.cache = owner.cache

    def positions(self) -> Tensor:
        """[b, T] positions of the tokens that the next forward reads.

        Drafted tokens beyond the context get its last position; whether they are accepted is never used.
        """
        return self.cache.slots.position.clamp_max(self.context - 1)

    def _forward(self, tokens: Tensor, last: int = 0) -> Tensor:
        if self.vocab_size > self.embedding_rows:
            tokens = tokens.clamp_max(self.embedding_rows - 1)
        with attention.forward_context(self.cache.slots):
            logits = self.model(
                input_ids=tokens,
                use_cache=True,
                **self.model_arguments(self.positions()),
                **({"logits_to_keep": last} if last and self.can_skip_logits else {}),
            ).logits
        if self.hidden_state_hooks is not None:
            self.features = self.hidden_state_hooks.states()
        return self.widen_logits(logits)

    def model_arguments(self, position: Tensor) -> dict[str, Any]:
        """How the model's forward takes the positions [B, T] and the cache."""
        return {"position_ids": position, self.cache_name: self.cache}

    def leave_out(self, ids: list[int]) -> None:
        """From now on the logits of these tokens are -inf, as those of tokens that the model lacks."""
        self.left_out = torch.tensor(ids, device=self.device) if ids else None

    def widen_logits(self, logits: Tensor) -> Tensor:
        """[..., V] from the model's own logits: -inf for tokens that it does not have, without surplus columns."""
        if self.ids is not None:
            logits = spread_logits(logits, self.ids, self.vocab_size)
        elif self.missing_columns != 0:
            logits = F.pad(logits, (0, self.missing_columns), value=float("-inf"))
        if self.left_out is not None:
            logits = logits.index_fill(-1, self.left_out, float("-inf"))
        return logits


def check_plain_pass(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A hook for passes that no runner makes, such as `target.runner.model(ids)`: their weights may have changed since
    the last request. UserError for a mask of padding in front of a text, which our attention would not see."""
    if torch.compiler.is_dynamo_compiling() or RUNNING.request is not None:
        return
    if attention.current_forward().slots is not None:
        return
    begin_request()
    mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
    if (
        isinstance(mask, Tensor)
        and mask.ndim == 2
        and model.config._attn_implementation == attention.ATTENTION_NAME
        and bool((mask[:, 1:] > mask[:, :-1]).any())
    ):
        raise UserError(
            "a model that decodes here has our attention, which reads no mask of padding: pad on the right, or load "
            "the model again with transformers"
        )


def prefill_groups(lengths: list[int]) -> list[list[int]]:
    """The prompts of these `lengths`, by number, in groups that take the least time: each is padded to its longest
    prompt, and costs FORWARD_TOKENS besides. Prompts of one length are in one group."""
    order = sorted(range(len(lengths)), key=lambda number: lengths[number])
    ends = [n for n in range(1, len(order)) if lengths[order[n - 1]] < lengths[order[n]]]
    best = {0: (0, 0)}  # cost of the first n prompts in order, and where their last group begins
    for end in [*ends, len(order)]:
        width = lengths[order[end - 1]]
        best[end] = min(
            (cost + (end - at) * width + FORWARD_TOKENS, at) for at, (cost, _) in best.items()
        )
    groups, end = [], len(order)
    while end > 0:
        groups.append(order[best[end][1] : end])
        end = best[end][1]
    return groups


def spread_logits(logits: Tensor, ids: Tensor, vocab_size: int) -> Tensor:
    """[..., V] from logits [..., Vd] of the tokens `ids` [Vd]: -inf for all others."""
    full = logits.new_full((*logits.shape[:-1], vocab_size), float("-inf"))
    full[..., ids] = logits
    return full


def _select_positions(row: Tensor, column: Tensor, hidden: Tensor) -> Tensor:
    """[b, 1, H] one position of each row."""
    return hidden[row, column][:, None]


@contextmanager
def logits_only_at(model: Any, select: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """While the block runs, `model` computes logits of `select(hidden [B, T, H])` instead of every position.

    It is a hook on the output projection, because `logits_to_keep` takes one position per row only in newer versions
    of transformers and silently has another meaning in older ones.
    """
    handle = model.get_output_embeddings().register_forward_pre_hook(
        lambda module, args: (select(args[0]), *args[1:])
    )
    try:
        yield
    finally:
        handle.remove()
