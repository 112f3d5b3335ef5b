"""Triton's kernels for what a layer does beside products and attention: RMSNorm, RoPE, writes to the K/V buffers.

They round where the models of transformers round, so that only the order of sums may differ from those. CHECKED IN
TRITON'S INTERPRETER ON A CPU; NO GPU HAS RUN THEM YET.
"""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rms_norm_kernel(
    x, weight, out, token_stride, head_stride, eps,
    H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, ROUNDING: tl.constexpr
):  # fmt: skip
    """The norm of the D numbers of one head of one token."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BD)
    inside = d < D
    given = tl.load(
        x + (row // H) * token_stride + (row % H) * head_stride + d, mask=inside, other=0.0
    )
    w = tl.load(weight + d, mask=inside, other=0.0)
    wide = given.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / D + eps)
    if ROUNDING == 0:
        wide = wide.to(given.dtype).to(tl.float32) * w.to(tl.float32)
    else:
        wide = wide * (w.to(tl.float32) + (ROUNDING - 1))
    tl.store(out + row * D + d, wide.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, rounding: int) -> Tensor:
    """x [..., H, D] -> the same shape, contiguous; x may be a part of the columns of a larger product."""
    *outer, heads, width = x.shape
    tokens = x.reshape(-1, heads, width)
    out = x.new_empty(*outer, heads, width)
    size = triton.next_power_of_2(width)
    _rms_norm_kernel[(tokens.shape[0] * heads,)](
        tokens, weight, out, tokens.stride(0), tokens.stride(1), eps,
        H=heads, D=width, BD=size, ROUNDING=rounding, num_warps=min(8, max(1, size // 256)),
    )  # fmt: skip
    return out


@triton.jit
def _rotate_kernel(
    query, key, cos, sin, query_out, key_out,
    query_row, query_head, query_token, key_row, key_head, key_token, angle_row, angle_token,
    H: tl.constexpr, HKV: tl.constexpr, T: tl.constexpr, HALF: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    """RoPE of one head of one token: heads from H on are those of the keys."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, t = token // T, token % T
    d = tl.arange(0, BD)
    inside = d < HALF
    c = tl.load(cos + b * angle_row + t * angle_token + d, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + b * angle_row + t * angle_token + d, mask=inside, other=0.0).to(tl.float32)
    if head < H:
        source = query + b * query_row + head * query_head + t * query_token + d
        sink = query_out + ((b * H + head) * T + t) * (2 * HALF) + d
    else:
        source = key + b * key_row + (head - H) * key_head + t * key_token + d
        sink = key_out + ((b * HKV + head - H) * T + t) * (2 * HALF) + d
    kind = query.dtype.element_ty
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    # Each product is rounded, as those of torch's operations are
    one = (first * c).to(kind).to(tl.float32) - (second * s).to(kind).to(tl.float32)
    two = (second * c).to(kind).to(tl.float32) + (first * s).to(kind).to(tl.float32)
    tl.store(sink, one.to(kind), mask=inside)
    tl.store(sink + HALF, two.to(kind), mask=inside)


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """query [B, H, T, D] and key [B, Hkv, T, D] after RoPE, both contiguous; cos, sin [1 or B, T, D / 2 or D]."""
    rows, heads, count, width = query.shape
    query, key = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key))
    cos, sin = cos.expand(rows, -1, -1), sin.expand(rows, -1, -1)
    outs = query.new_empty(query.shape), key.new_empty(key.shape)
    _rotate_kernel[(rows * count, heads + key.shape[1])](
        query, key, cos, sin, *outs, *query.stride()[:3], *key.stride()[:3], *cos.stride()[:2],
        H=heads, HKV=key.shape[1], T=count, HALF=width // 2,
        BD=triton.next_power_of_2(width // 2), num_warps=1,
    )  # fmt: skip
    return outs


@triton.jit
def _write_kv_kernel(
    keys, values, key, value, slot,
    keys_row, keys_head, keys_slot, values_row, values_head, values_slot,
    key_row, key_head, key_token, value_row, value_head, value_token,
    T: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr
):  # fmt: skip
    """The key and the value of one head of one token."""
    token, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, t = token // T, token % T
    at = tl.load(slot + token)
    d, dv = tl.arange(0, BD), tl.arange(0, BDV)
    one = tl.load(key + b * key_row + h * key_head + t * key_token + d, mask=d < D)
    tl.store(keys + b * keys_row + h * keys_head + at * keys_slot + d, one, mask=d < D)
    two = tl.load(value + b * value_row + h * value_head + t * value_token + dv, mask=dv < DV)
    tl.store(values + b * values_row + h * values_head + at * values_slot + dv, two, mask=dv < DV)


def write_kv(keys: Tensor, values: Tensor, key: Tensor, value: Tensor, slot: Tensor) -> None:
    """As the operation of that name says."""
    rows, heads, count, width = key.shape
    key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (key, value))
    _write_kv_kernel[(rows * count, heads)](
        keys, values, key, value, slot.contiguous(), *keys.stride()[:3], *values.stride()[:3],
        *key.stride()[:3], *value.stride()[:3],
        T=count, D=width, DV=value.shape[-1], BD=triton.next_power_of_2(width),
        BDV=triton.next_power_of_2(value.shape[-1]), num_warps=1,
    )  # fmt: skip
