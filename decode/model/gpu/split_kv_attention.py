"""Attention over long K/V buffers on a GPU: the live keys are read in parts, in parallel (flash decoding).

With a dense mask every forward reads the whole buffer, stale slots included, with one group of threads per head. Here
the live slots of each row are split into parts that are computed in parallel, and their results are merged by their
log-sum-exp. Lengths stay on the device, so one captured CUDA graph works for every length, and the number of parts does
not depend on the size of the buffers, so that longer ones compile nothing. Queries are computed TILE at a time; which
nodes of a tree each of them sees are bits of 64-bit words, W for each query.

CHECKED IN TRITON'S INTERPRETER ON A CPU; NO GPU HAS RUN IT YET. Whether it runs is chosen by kernel_choice.py.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from decode.model.gpu.step_blocks import pick_blocks, shared_memory

TARGET_PROGRAMS = 264
"""Number of programs to launch at least: two for each of the 132 multiprocessors of an H100 or H200."""


@cache
def counters(device: torch.device, count: int) -> Tensor:
    """[count] int32 zeros: every launch leaves zeros. Launches follow each other, and graphs hold the address."""
    return torch.zeros(count, dtype=torch.int32, device=device)


@triton.jit
def _attend_kernel(
    query, keys, values, first, live, seen, position, tail, base, sink, out, part_out, lse, arrived, scale, softcap,
    key_row, key_slot, key_head, value_row, value_slot, value_head,
    HEADS: tl.constexpr, T: tl.constexpr, M: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, W: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, SINK: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
    BM: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr
):  # fmt: skip
    """Attention of BM of the M = groups * T queries of one K/V head of one row over one part of its keys. The program
    that ends last merges the parts, weighted by their sums; a sink is in the softmax but has no value."""
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
    wide = real[:, None] & (dv < DV)[None]
    at = (program * PARTS + part) * M + m
    tl.store(lse + at, sums, mask=real)
    tl.store(part_out + at[:, None] * DV + dv[None], mean, mask=wide)
    tl.debug_barrier()  # all threads have stored before one of them says so
    count = arrived + program * tl.num_programs(2) + tl.program_id(2)
    if tl.atomic_add(count, 1, sem="acq_rel") == PARTS - 1:
        tl.debug_barrier()
        tl.store(count, 0)  # for the next launch
        best = tl.full([BM], float("-inf"), tl.float32)
        whole = tl.zeros([BM], tl.float32)
        if SINK:
            head = (program % HEADS) * (M // T) + m // T
            best = tl.load(sink + head, mask=real, other=0.0).to(tl.float32)
            whole += 1.0
        mixed = tl.zeros([BM, BDV], tl.float32)
        for other in range(PARTS):
            from_part = (program * PARTS + other) * M + m
            # Not from the first cache, which may hold what was there before
            sum_of = tl.load(lse + from_part, mask=real, other=0.0, cache_modifier=".cg")
            mean_of = tl.load(
                part_out + from_part[:, None] * DV + dv[None],
                mask=wide,
                other=0.0,
                cache_modifier=".cg",
            )
            above = tl.maximum(best, sum_of)
            zero = tl.where(above == float("-inf"), 0.0, above)
            old, new = tl.exp(best - zero), tl.exp(sum_of - zero)
            mixed = mixed * old[:, None] + mean_of * new[:, None]
            whole = whole * old + new
            best = above
        mixed = mixed / tl.where(real, whole, 1.0)[:, None]
        place = ((b * T + t) * HEADS + h) * (M // T) + m // T  # by token, as the next product reads
        tl.store(out + place[:, None] * DV + dv[None], mixed.to(out.dtype.element_ty), mask=wide)


def split_kv_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    first: Tensor,
    live: Tensor,
    seen: Tensor,
    position: Tensor,
    base: Tensor,
    tail: Tensor | None,
    window: int | None,
    scale: float,
    softcap: float | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """query [B, Hkv, groups * T, D] over keys, values [B, Hkv, S, D] (last stride 1) -> [B, T, H, Dv].

    `first` to `window` are those of SplitKVMetadata: the slots that each of the T tokens attends to; `sink` [H] is
    gpt-oss's extra logit per head.
    """
    rows, heads, queries, width = query.shape
    out_width = values.shape[3]
    count = seen.shape[1]
    words = 0 if tail is None else tail.shape[2]
    limit = shared_memory(query.device)
    blocks = pick_blocks(queries, width, out_width, query.element_size(), limit)
    tiles = -(-queries // blocks.queries)
    parts = max(1, -(-TARGET_PROGRAMS // (rows * heads * tiles)))
    part = query.new_empty(rows, heads, parts, queries, out_width, dtype=torch.float32)
    lse = query.new_empty(rows, heads, parts, queries, dtype=torch.float32)
    out = query.new_empty(rows, count, heads * (queries // count), out_width)
    arrived = counters(query.device, triton.next_power_of_2(rows * heads * tiles))
    bits = seen if tail is None else tail  # never read without nodes
    _attend_kernel[(rows * heads, parts, tiles)](
        query.contiguous(), keys, values, first, live, seen, position,
        bits, base, query if sink is None else sink, out, part, lse, arrived, scale, softcap or 1.0,
        keys.stride(0), keys.stride(2), keys.stride(1), values.stride(0), values.stride(2), values.stride(1),
        HEADS=heads, T=count, M=queries, D=width, DV=out_width, W=words, WINDOW=window or 0,
        CAPPED=softcap is not None, SINK=sink is not None, PARTS=parts, BLOCK=blocks.keys, BM=blocks.queries,
        BD=max(16, triton.next_power_of_2(width)), BDV=max(16, triton.next_power_of_2(out_width)),
        num_stages=blocks.stages,
    )  # fmt: skip
    return out
