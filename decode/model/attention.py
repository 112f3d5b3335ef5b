"""The attention function that every model runs with here, registered with transformers as "draftsmith".

transformers builds no mask for an attention name without a mask function. Masks come from `SlotMapping` instead, which
has the lengths of ragged rows, the window of each layer and, in prefill, plain causality.
"""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from decode.common.errors import UserError
from decode.model.kv_cache import SlotMapping

ATTENTION_NAME = "draftsmith"
BESIDE_NAME = "draftsmith-beside"
"""For a model that runs in a thread of its own while another model runs under ATTENTION_NAME."""
HAS_TRITON = importlib.util.find_spec("triton") is not None


@dataclass
class ForwardContext:
    """What attention needs to know of a forward that is running: `CONTEXT`, and `CONTEXT_BESIDE` for one beside it.

    Keywords of the model's forward could not carry it: some models (stablelm) do not pass unknown ones to their layers.
    An instance, because torch 2.11 cannot compile code that sets attributes of a class.
    """

    slots: SlotMapping | None = None
    mask: "TrainingMask | None" = None
    split_kv: bool = False


LONG_CPU_KEYS = 512
"""Slots of all rows together from which two products of 16-bit numbers are faster than fused attention on a CPU."""

CONTEXT = ForwardContext()
"""decode/engine/compile.py guards `split_kv` by its name."""
CONTEXT_BESIDE = ForwardContext()
"""The context of models under BESIDE_NAME; only its `slots` are used."""


def use_split_kv(on: bool) -> None:
    """Makes decode steps run split_kv_attention.py (Triton) from now on, or, if not `on`, SDPA with a dense mask.

    UserError without Triton. Which one is faster depends on the GPU and on the length of the buffers:
    scripts/benchmarks/gpu_bench.py measures both.
    """
    if on and not HAS_TRITON:
        raise UserError("split_kv needs Triton, which comes with torch for CUDA: leave it off here")
    CONTEXT.split_kv = on


@contextmanager
def forward_context(slots: SlotMapping, beside: bool = False) -> Iterator[None]:
    """While the block runs, attention reads and writes the K/V buffers by `slots`; `beside`: that of BESIDE_NAME."""
    context = CONTEXT_BESIDE if beside else CONTEXT
    context.slots = slots
    try:
        yield
    finally:
        context.slots = None


class TrainingMask(Protocol):
    """Which of the T positions of a training batch attend to which."""

    def mask(self, window: int | None, groups: int) -> torch.Tensor:
        """[B, 1, groups * T, T] bool, True = attend, within a layer's sliding window (None: it has none)."""


class DocumentMask:
    """Masks for texts packed into one line of a training batch: a token attends to earlier ones of its own text."""

    def __init__(self, numbers: torch.Tensor):
        """`numbers` [B, T]: one number per text, the same for all its tokens and different from others in its line."""
        self.numbers = numbers
        self.masks: dict[tuple[int | None, int], torch.Tensor] = {}

    def mask(self, window: int | None, groups: int) -> torch.Tensor:
        """[B, 1, groups * T, T] bool, True = attend. Computed once for all layers with the same arguments."""
        if (window, groups) not in self.masks:
            causal = _causal_mask(self.numbers.shape[1], window, self.numbers.device)
            allow = causal & (self.numbers[:, :, None] == self.numbers[:, None])
            self.masks[window, groups] = allow.repeat(1, groups, 1)[:, None]
        return self.masks[window, groups]


@contextmanager
def packed_documents(numbers: torch.Tensor | None) -> Iterator[None]:
    """While the block runs, attention outside `forward_context` stays within the texts of these `numbers` [B, T].

    None: each line of the batch is one text.
    """
    with masked_by(None if numbers is None else DocumentMask(numbers)):
        yield


@contextmanager
def masked_by(mask: TrainingMask | None) -> Iterator[None]:
    """While the block runs, attention outside `forward_context` is masked by `mask`; None: it is causal."""
    CONTEXT.mask = mask
    try:
        yield
    finally:
        CONTEXT.mask = None


def _causal_mask(count: int, window: int | None, device: torch.device) -> torch.Tensor:
    """[T, T] bool, True = attend: causal attention among T = `count` tokens, within `window` positions."""
    position = torch.arange(count, device=device)
    distance = position[:, None] - position
    return (distance >= 0) & (distance < (window or count))


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    beside: bool = False,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query [B, H, T, D], key [B, Hkv, S, D] and value [B, Hkv, S, Dv] -> ([B, T, H, Dv], None).

    Outside `forward_context` (training) attention is causal over the given keys, or as `masked_by` says: no token
    attends to right padding after it. `beside` reads CONTEXT_BESIDE.
    UserError for an attention mask: none is built for this attention name, so the model made one of its own, which
    would be ignored; and for a position bias, which models compute from one length for the whole batch.
    """
    if position_bias is not None:
        raise UserError(
            f"{type(module).__name__} adds a bias by position to its attention, and rows of unequal length would get "
            "that of one row"
        )
    if attention_mask is not None:
        raise UserError(
            f"{type(module).__name__} masks its attention by itself, and that mask would be lost"
        )
    slots = CONTEXT_BESIDE.slots if beside else CONTEXT.slots
    given = None if slots is not None else CONTEXT.mask
    rows, heads, count, width = query.shape
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    plain = softcap is None and s_aux is None
    causal = given is None and (slots is None or slots.is_prefill)
    if causal and plain and (sliding_window is None or sliding_window >= count):
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=groups > 1
        )
        return out.transpose(1, 2).contiguous(), None
    packed = query.reshape(rows, kv_heads, groups * count, width)  # no repeated keys
    if CONTEXT.split_kv and slots is not None and slots.row is None and not slots.is_prefill:
        from decode.model import split_kv_attention  # imports Triton

        metadata = slots.split_kv_metadata(sliding_window)
        scale = width**-0.5 if scaling is None else scaling
        out = split_kv_attention.split_kv_attention(
            packed, key, value, metadata, scale, softcap, s_aux
        )
    else:
        if given is not None:
            mask = given.mask(sliding_window, groups).to(query.device)
        elif slots is None or slots.is_prefill:
            mask = _causal_mask(count, sliding_window, query.device).repeat(groups, 1)[None, None]
        else:
            mask = slots.mask(sliding_window, groups).to(query.device)
        out = _masked_attention(packed, key, value, mask, scaling, softcap, s_aux)
    out = out.reshape(rows, heads, count, value.shape[-1])
    return out.transpose(1, 2).contiguous(), None


def _masked_attention(
    packed: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scaling: float | None,
    softcap: float | None,
    s_aux: torch.Tensor | None,
) -> torch.Tensor:
    """packed [B, Hkv, groups * T, D] over key and value [B, Hkv, S, D] where `mask` -> [B, Hkv, groups * T, Dv]."""
    if softcap is None and s_aux is None and not _products_are_faster(key):
        return F.scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scaling)
    rows, kv_heads, queries, width = packed.shape
    scores = (packed @ key.transpose(-1, -2)) * (scaling if scaling is not None else width**-0.5)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.float().masked_fill(~mask, float("-inf"))
    if s_aux is not None:  # gpt-oss: one more logit per head in the softmax, with no value
        sink = s_aux.float().reshape(1, kv_heads, -1, 1)
        count = queries // sink.shape[2]
        sink = sink.repeat_interleave(count, 2).expand(rows, -1, -1, -1)
        scores = torch.cat([scores, sink], -1)
    return torch.softmax(scores, -1)[..., : key.shape[2]].to(value.dtype) @ value


def _products_are_faster(key: torch.Tensor) -> bool:
    """Whether two matrix products beat torch's fused attention over `key` [B, Hkv, S, D].

    On a CPU that kernel multiplies 16-bit numbers slowly: one query a row over 32 rows of 384 slots takes it three
    times as long (docs/log.md). One row of few slots is faster fused.
    """
    return (
        key.device.type == "cpu"
        and key.dtype in (torch.bfloat16, torch.float16)
        and key.shape[0] * key.shape[2] >= LONG_CPU_KEYS
    )


AttentionInterface.register(ATTENTION_NAME, attention_forward)
AttentionInterface.register(BESIDE_NAME, partial(attention_forward, beside=True))
