"""The attention function that every model runs with here, registered with transformers as "draftsmith".

transformers builds no mask for an attention name without a mask function. Masks come from `SlotMapping` instead, which
has the lengths of ragged rows, the window of each layer and, in prefill, plain causality.
"""

import importlib.util
import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from decode.common.errors import UserError
from decode.model.gpu import cuda_operations  # noqa: F401 (registers operations)
from decode.model.kv_cache import SlotMapping
from decode.model.masks import (
    AttentionMask,
    DocumentMask,
    attend_flex,
    attend_in_blocks,
    block_mask,
)
from decode.model.quantized import vnni

ATTENTION_NAME = "draftsmith"
HAS_TRITON = importlib.util.find_spec("triton") is not None
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton's kernels run on a CPU, in tests."""


@dataclass
class ForwardContext:
    """What attention needs to know of a forward that is running.

    Keywords of the model's forward could not carry it: some models (stablelm) do not pass unknown ones to their layers.
    An instance, because torch 2.11 cannot compile code that sets attributes of a class.
    """

    slots: SlotMapping | None = None
    mask: AttentionMask | None = None


class ThreadContext(threading.local):
    """The ForwardContext of the thread that asks: models that run in other threads meanwhile have their own."""

    def __init__(self) -> None:
        self.forward = ForwardContext()


@dataclass
class AttentionSettings:
    """What all forwards of the process have in common."""

    split_kv: bool = False
    method: str = "auto"


LONG_CPU_KEYS = 512
"""Slots of all rows together beyond which two products of 16-bit numbers are faster than fused attention on a CPU."""

CPU_QUERY_BLOCK = 32
CPU_QUERIES = 8 if torch.cpu._is_amx_tile_supported() else 4
"""Queries in a block of torch's fused attention on a CPU, a divisor of the number, and how few of them are multiplied
as many are: up to five of width 128 are not on an Intel Xeon with AMX, up to three on an AMD EPYC."""

OWN_KERNEL_TOKENS = 64
"""Tokens of a step up to which quantized/attention.cpp is faster than torch's fused attention."""

DENSE_VALUES = 1 << 24
"""Values of the largest mask of training that method "auto" has in memory at once."""
METHODS = ("auto", "dense", "blockwise", "flex")
"""How training attends under a mask: with all of it in memory, a block of queries at a time, or by flex_attention."""
OTHER_CACHE = (
    "a model that decodes here has our attention, which reads no other KV cache: decode with `speculate` or `decode` "
    "(decode/engine/engine.py), or load the model again with transformers for its `generate`"
)

SETTINGS = AttentionSettings()
"""decode/engine/compiled.py guards `split_kv` by its name."""
EAGER = ThreadContext()
TRACED = ForwardContext()
"""In place of EAGER in code that is being compiled, which one thread does at a time: torch cannot trace thread-local
objects."""


def current_forward() -> ForwardContext:
    """The context of the forward that runs, or is traced, in this thread."""
    return TRACED if torch.compiler.is_dynamo_compiling() else EAGER.forward


def use_split_kv(on: bool) -> None:
    """Makes decode steps run split_kv_attention.py (Triton) from now on, or, if not `on`, SDPA with a dense mask.

    UserError without Triton. On a GPU decode/model/gpu/kernel_choice.py calls it whenever a model is loaded.
    """
    if on and not HAS_TRITON:
        raise UserError("split_kv needs Triton, which comes with torch for CUDA: leave it off here")
    SETTINGS.split_kv = on


@contextmanager
def forward_context(slots: SlotMapping) -> Iterator[None]:
    """While the block runs, attention of this thread reads and writes the K/V buffers by `slots`."""
    context = current_forward()
    before, context.slots = context.slots, slots
    try:
        yield
    finally:
        context.slots = before


@contextmanager
def packed_documents(numbers: Tensor | None) -> Iterator[None]:
    """While the block runs, attention outside `forward_context` stays within the texts of these `numbers` [B, T].

    None: each line of the batch is one text.
    """
    with masked_by(None if numbers is None else DocumentMask(numbers)):
        yield


@contextmanager
def masked_by(mask: AttentionMask | None) -> Iterator[None]:
    """While the block runs, attention outside `forward_context` is masked by `mask`; None: it is causal."""
    context = current_forward()
    before, context.mask = context.mask, mask
    try:
        yield
    finally:
        context.mask = before


@contextmanager
def training_attention(method: str) -> Iterator[None]:
    """While the block runs, training attends by `method`, one of METHODS.

    "auto" is "dense" for masks of up to DENSE_VALUES values and "blockwise" beyond: no GPU has run "flex" yet.
    UserError for another name.
    """
    if method not in METHODS:
        raise UserError(f"no attention {method!r}; there are {', '.join(METHODS)}")
    before, SETTINGS.method = SETTINGS.method, method
    try:
        yield
    finally:
        SETTINGS.method = before


def recompute_layers(model: Any) -> None:
    """Layers of a model of transformers keep their inputs alone in training; backward computes the rest again, under
    the mask that was in force."""
    kwargs = {"use_reentrant": False, "context_fn": _mask_of_the_forward}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)


def recomputes_without_mask(model: Any) -> bool:
    """Whether backward computes layers of `model` again and not as `recompute_layers` says: without a mask."""
    return any(
        vars(module).get("gradient_checkpointing")
        and module._gradient_checkpointing_func.keywords.get("context_fn")
        is not _mask_of_the_forward
        for module in model.modules()
    )


def _mask_of_the_forward() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The contexts of a layer's forward and of its second run in backward."""
    return nullcontext(), masked_by(current_forward().mask)


def _causal_mask(count: int, window: int | None, device: torch.device) -> Tensor:
    """[T, T] bool, True = attend: causal attention among T = `count` tokens, within `window` positions."""
    position = torch.arange(count, device=device)
    distance = position[:, None] - position
    return (distance >= 0) & (distance < (window or count))


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [B, H, T, D], key [B, Hkv, S, D] and value [B, Hkv, S, Dv] -> ([B, T, H, Dv], None).

    Outside `forward_context` (training) attention is causal over the given keys, or as `masked_by` says: no token
    attends to right padding after it.
    UserError for an attention mask: none is built for this attention name, so the model made one of its own, which
    would be ignored; for a position bias, which models compute from one length for the whole batch; and for keys of
    another cache than ours (`generate`), which need not be those of the last tokens.
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
    context = current_forward()
    slots = context.slots
    given = None if slots is not None else context.mask
    rows, heads, count, width = query.shape
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    plain = softcap is None and s_aux is None
    if slots is None and given is None and key.shape[2] != count:
        raise UserError(OTHER_CACHE)
    if slots is not None and not torch.compiler.is_compiling():
        slots.note_window(sliding_window)
    causal = given is None and (slots is None or slots.is_prefill)
    if causal and plain and (sliding_window is None or sliding_window >= count):
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=groups > 1
        )
        return out.transpose(1, 2).contiguous(), None
    if slots is None:
        mask = given or DocumentMask(query.new_zeros(rows, count, dtype=torch.long))
        out = _training_attention(query, key, value, mask, sliding_window, scaling, softcap, s_aux)
        return out.transpose(1, 2).contiguous(), None
    packed = query.reshape(rows, kv_heads, groups * count, width)  # no repeated keys
    if _attends_live_slots(slots, query):
        live = slots.split_kv_metadata(sliding_window)
        scale = width**-0.5 if scaling is None else scaling
        out = torch.ops.draftsmith.split_kv_attention(
            packed, key, value, live.first, live.live, live.seen, live.position, live.base, live.tail,
            live.window, scale, softcap, s_aux,
        )  # fmt: skip
        return out, None
    if plain and _has_own_kernel(slots, packed, value):
        allow = slots.mask(sliding_window, 1)[:, 0]
        scale = width**-0.5 if scaling is None else scaling
        out = torch.ops.draftsmith.few_queries_attention(packed, key, value, allow, scale)
    else:
        if slots.is_prefill:
            allow = _causal_mask(count, sliding_window, query.device).repeat(groups, 1)[None, None]
        else:
            allow = slots.mask(sliding_window, groups).to(query.device)
        out = _masked_attention(packed, key, value, allow, scaling, softcap, s_aux)
    out = out.reshape(rows, heads, count, value.shape[-1])
    return out.transpose(1, 2).contiguous(), None


def _training_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttentionMask,
    window: int | None,
    scaling: float | None,
    softcap: float | None,
    s_aux: Tensor | None,
) -> Tensor:
    """query [B, H, T, D] over key and value [B, Hkv, S, D] under `mask`, by SETTINGS.method -> [B, H, T, Dv].

    flex_attention has no soft cap and no sinks here: layers with them attend a block of queries at a time.
    """
    rows, heads, count, _ = query.shape
    groups = heads // key.shape[1]
    grouped = query.unflatten(1, (key.shape[1], groups))  # no repeated keys
    attend = partial(_masked_attention, scaling=scaling, softcap=softcap, s_aux=s_aux)
    method = SETTINGS.method
    if method == "auto":
        method = "dense" if rows * groups * count * key.shape[2] <= DENSE_VALUES else "blockwise"
    if method == "dense":
        out = attend(grouped.flatten(2, 3), key, value, mask.dense(window, groups).to(query.device))
        return out.reshape(rows, heads, count, value.shape[-1])
    if method == "flex" and softcap is None and s_aux is None:
        return attend_flex(query, key, value, block_mask(mask, window), scaling)[0]
    return attend_in_blocks(attend, grouped, key, value, mask, window).flatten(1, 2)


def _masked_attention(
    packed: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float | None,
    softcap: float | None,
    s_aux: Tensor | None,
) -> Tensor:
    """packed [B, Hkv, groups * T, D] over key and value [B, Hkv, S, D] where `mask` -> [B, Hkv, groups * T, Dv]."""
    if _products_are_faster(key):
        # Of a part of the buffers' slots the product takes up to 8 times as long.
        key = key.contiguous()
    elif softcap is None and s_aux is None:
        return _fused_attention(packed, key, value, mask, scaling)
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


def _fused_attention(
    packed: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None
) -> Tensor:
    """torch's fused attention. On a CPU a query's result is the same bits however many queries there are.

    Its kernel takes queries in blocks, and the last block's products are other ones if it has fewer than CPU_QUERIES:
    W8A8 makes a rounding of another value of such a bit, and a text another one than that of plain decoding.
    """
    queries = packed.shape[2]
    over = queries % CPU_QUERY_BLOCK
    if key.device.type in ("cpu", "meta") and 0 < over < CPU_QUERIES:
        # The last query again: inductor writes no code that compiles for a mask that is padded.
        every = torch.arange(queries + CPU_QUERIES - over).clamp_max(queries - 1)
        packed, mask = packed[:, :, every], mask[:, :, every]
    out = F.scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scaling)
    return out[:, :, :queries]


def _attends_live_slots(slots: SlotMapping, query: Tensor) -> bool:
    """Whether the split-KV kernel attends: in steps, on the GPU that the slots are on."""
    if not SETTINGS.split_kv or slots.row is not None or slots.is_prefill:
        return False
    return query.device == slots.base.device and (query.is_cuda or IS_INTERPRETED)


def _has_own_kernel(slots: SlotMapping, packed: Tensor, value: Tensor) -> bool:
    """Whether quantized/attention.cpp attends for the queries `packed` [B, Hkv, groups * T, D]."""
    width = packed.shape[-1]
    return (
        slots.own_kernel
        and not slots.is_prefill
        and slots.write_slots.shape[1] <= OWN_KERNEL_TOKENS
        and packed.dtype == value.dtype == torch.float32
        and value.shape[-1] == width
        and width % vnni.LANES == 0
    )


def _products_are_faster(key: Tensor) -> bool:
    """Whether two matrix products beat torch's fused attention over `key` [B, Hkv, S, D].

    On a CPU that kernel multiplies 16-bit numbers slowly: one query a row over 32 rows of 384 slots takes it three
    times as long (docs/log). One row of few slots is faster fused.
    """
    return (
        key.device.type == "cpu"
        and key.dtype in (torch.bfloat16, torch.float16)
        and key.shape[0] * key.shape[2] > LONG_CPU_KEYS
    )


AttentionInterface.register(ATTENTION_NAME, attention_forward)
