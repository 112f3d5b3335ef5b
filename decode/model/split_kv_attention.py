"""Attention over long K/V buffers on a GPU: the live keys are read in parts, in parallel (flash decoding).

With a dense mask every forward reads the whole buffer, stale slots included, with one group of threads per head. Here
the live slots of each row are split into parts that are computed in parallel, and their results are merged by their
log-sum-exp. Lengths stay on the device, so one captured CUDA graph works for every length, and the number of parts does
not depend on the size of the buffers, so that longer ones compile nothing. Queries are computed TILE at a time; which
nodes of a tree each of them sees are bits of 64-bit words, W for each query.

CHECKED IN TRITON'S INTERPRETER ON A CPU; NO GPU HAS RUN IT YET. Off unless `attention.use_split_kv` turns it on.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from decode.model.kv_cache import SplitKVMetadata

BLOCK = 64
"""Keys that a program loads at once."""
TILE = 64
"""Queries of one program at most, for heads of up to 128 numbers: more do not fit into shared memory."""
TARGET_PROGRAMS = 264
"""Number of programs to launch at least: two for each of the 132 multiprocessors of an H100 or H200."""


@triton.jit
def _attend_part_kernel(
    query, keys, values, first, live, seen, position, tail, base, out, lse, scale, softcap,
    key_row, key_slot, key_head, value_row, value_slot, value_head,
    HEADS: tl.constexpr, T: tl.constexpr, M: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, W: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
    BM: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr
):  # fmt: skip
    """Attention of BM of the M = groups * T queries of one K/V head of one row over one part of its keys."""
    program, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, h = program // HEADS, program % HEADS  # 64 bits: products with strides of buffers exceed 32
    begin, end = tl.load(first + b), tl.load(live + b)
    span = tl.cdiv(tl.cdiv(end - begin, PARTS), BLOCK) * BLOCK
    low = begin + part * span
    high = tl.minimum(low + span, end)
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    d, dv = tl.arange(0, BD), tl.arange(0, BDV)
    t, real = m % T, m < M
    at = (program * M + m)[:, None]
    q = tl.load(query + at * D + d[None], mask=real[:, None] & (d < D)[None], other=0.0)
    until = tl.load(seen + b * T + t)
    where = tl.load(position + b * T + t)
    top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    mean = tl.zeros([BM, BDV], tl.float32)
    for start in range(low, high, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        inside = slot < high
        key = tl.load(
            keys + b * key_row + h * key_head + slot[None] * key_slot + d[:, None],
            mask=inside[None] & (d < D)[:, None],
            other=0.0,
        )
        scores = tl.dot(q, key, input_precision="ieee") * scale
        if CAPPED:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        allow = slot[None] < until[:, None]
        if WINDOW > 0:
            allow = allow & (where[:, None] - slot[None] < WINDOW)
        if W > 0:
            node = slot - tl.load(base + b)
            for number in tl.static_range(W):
                word = tl.load(tail + (b * T + t) * W + number)
                bit = node - 64 * number
                known = (bit >= 0) & (bit < 64)
                shift = tl.minimum(tl.maximum(bit, 0), 63).to(tl.int64)
                allow = allow | (known[None] & (((word[:, None] >> shift[None]) & 1) != 0))
        scores = tl.where(allow & inside[None], scores, float("-inf"))
        highest = tl.maximum(top, tl.max(scores, 1))
        anchor = tl.where(highest == float("-inf"), 0.0, highest)
        weight = tl.exp(scores - anchor[:, None])
        shrink = tl.exp(top - anchor)
        value = tl.load(
            values + b * value_row + h * value_head + slot[:, None] * value_slot + dv[None],
            mask=inside[:, None] & (dv < DV)[None],
            other=0.0,
        )
        total = total * shrink + tl.sum(weight, 1)
        mean = mean * shrink[:, None]
        mean += tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        top = highest
    some = total > 0
    mean = mean / tl.where(some, total, 1.0)[:, None]
    sums = tl.where(some, top + tl.log(tl.where(some, total, 1.0)), float("-inf"))
    at = (program * PARTS + part) * M + m
    tl.store(lse + at, sums, mask=real)
    tl.store(out + at[:, None] * DV + dv[None], mean, mask=real[:, None] & (dv < DV)[None])


@triton.jit
def _merge_parts_kernel(
    part, lse, sink, out,
    HEADS: tl.constexpr, T: tl.constexpr, M: tl.constexpr, DV: tl.constexpr, SINK: tl.constexpr,
    PARTS: tl.constexpr, BP: tl.constexpr, BDV: tl.constexpr
):  # fmt: skip
    """Merges the parts of one query, weighted by their sums; a sink is in the softmax but has no value."""
    program, m = tl.program_id(0).to(tl.int64), tl.program_id(1)
    p, dv = tl.arange(0, BP), tl.arange(0, BDV)
    at = (program * PARTS + p) * M + m
    sums = tl.load(lse + at, mask=p < PARTS, other=float("-inf"))
    top = tl.max(sums, 0)
    if SINK:
        logit = tl.load(sink + (program % HEADS) * (M // T) + m // T).to(tl.float32)
        top = tl.maximum(top, logit)
    weight = tl.exp(sums - top)
    total = tl.sum(weight, 0)
    if SINK:
        total += tl.exp(logit - top)
    values = tl.load(
        part + at[:, None] * DV + dv[None], mask=(p < PARTS)[:, None] & (dv < DV)[None], other=0.0
    )
    mixed = tl.sum(values * weight[:, None], 0) / total
    place = (program * M + m) * DV + dv
    tl.store(out + place, mixed.to(out.dtype.element_ty), mask=dv < DV)


def split_kv_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    metadata: SplitKVMetadata,
    scale: float,
    softcap: float | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """query [B, Hkv, groups * T, D] over keys, values [B, Hkv, S, D] (last stride 1) -> [B, Hkv, groups * T, Dv].

    `metadata` has the slots that each of the T tokens attends to; `sink` [H] is gpt-oss's extra logit per head.
    """
    rows, heads, queries, width = query.shape
    out_width = values.shape[3]
    count = metadata.seen.shape[1]
    words = 0 if metadata.tail is None else metadata.tail.shape[2]
    largest = max(16, TILE * 128 // max(128, triton.next_power_of_2(width)))
    tile = min(largest, max(16, triton.next_power_of_2(queries)))
    tiles = -(-queries // tile)
    parts = max(1, -(-TARGET_PROGRAMS // (rows * heads * tiles)))
    part = query.new_empty(rows, heads, parts, queries, out_width, dtype=torch.float32)
    lse = query.new_empty(rows, heads, parts, queries, dtype=torch.float32)
    out = query.new_empty(rows, heads, queries, out_width)
    # Never read without nodes
    tail: Any = metadata.seen if metadata.tail is None else metadata.tail
    _attend_part_kernel[(rows * heads, parts, tiles)](
        query.contiguous(), keys, values, metadata.first, metadata.live, metadata.seen, metadata.position,
        tail, metadata.base, part, lse, scale, softcap or 1.0,
        keys.stride(0), keys.stride(2), keys.stride(1), values.stride(0), values.stride(2), values.stride(1),
        HEADS=heads, T=count, M=queries, D=width, DV=out_width, W=words, WINDOW=metadata.window or 0,
        CAPPED=softcap is not None, PARTS=parts, BLOCK=BLOCK, BM=tile,
        BD=max(16, triton.next_power_of_2(width)), BDV=max(16, triton.next_power_of_2(out_width)),
    )  # fmt: skip
    _merge_parts_kernel[(rows * heads, queries)](
        part, lse, query if sink is None else sink, out,
        HEADS=heads, T=count, M=queries, DV=out_width, SINK=sink is not None, PARTS=parts,
        BP=triton.next_power_of_2(parts), BDV=max(16, triton.next_power_of_2(out_width)),
    )  # fmt: skip
    return out
