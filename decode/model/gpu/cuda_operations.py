"""Steps of a layer that are one kernel each on a GPU, as operations of torch; their kernels are in Triton.

A graph of fake tensors and inductor's code see one operation with a shape, so that Triton is imported only where one
runs. NO GPU HAS RUN THEM YET (docs/gpu_checks.md): they
are checked in Triton's interpreter, and at load (decode/model/gpu/cuda_layers.py).
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class KernelSettings:
    """What decoding on a GPU runs: `KERNELS`, the only instance."""

    own: bool = False
    """Norms, RoPE and writes to the K/V buffers of eager and captured rounds are the operations below."""


KERNELS = KernelSettings()

# ---- attention ----


@torch.library.custom_op("draftsmith::split_kv_attention", mutates_args=())
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
    softcap: float | None,
    sink: Tensor | None,
) -> Tensor:
    """Attention over live slots alone, as the function of this name in split_kv_attention.py."""
    from decode.model.gpu import split_kv_attention as kernel

    given = query, keys, values, first, live, seen, position, base, tail, window, scale
    with torch.cuda.device_of(query):  # Triton runs on the current one
        return kernel.split_kv_attention(*given, softcap, sink)


@split_kv_attention.register_fake
def _(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    first: Tensor,
    live: Tensor,
    seen: Tensor,
    *rest: object,
) -> Tensor:
    rows, kv_heads, queries, _ = query.shape
    count = seen.shape[1]
    return query.new_empty(rows, count, kv_heads * (queries // count), values.shape[-1])


# ---- norm, rotation, writes to the K/V buffers ----

ROUNDINGS = ("before the weight", "behind the weight", "behind one plus the weight")
"""Where an RMSNorm of fp32 sums rounds to the dtype of its input: as in Llama, gpt-oss and Gemma."""


def rms_norm_formula(x: Tensor, weight: Tensor, eps: float, rounding: int) -> Tensor:
    """The RMSNorm of x [..., D], as the models of transformers compute it; `rounding` is one of ROUNDINGS by number."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if rounding == 0:
        return weight * wide.to(x.dtype)
    return (wide * (weight.float() + (rounding - 1))).to(x.dtype)


def rotate_formula(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, H, T, D] after RoPE by cos, sin [B, T, D / 2 or D], of which the first halves are read."""
    half = x.shape[-1] // 2
    cos, sin = cos[:, None, :, :half], sin[:, None, :, :half]
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


@torch.library.custom_op("draftsmith::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, eps: float, rounding: int) -> Tensor:
    """`rms_norm_formula` in one kernel."""
    from decode.model.gpu import layer_kernels

    with torch.cuda.device_of(x):
        return layer_kernels.rms_norm(x, weight, eps, rounding)


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float, rounding: int) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("draftsmith::rotate", mutates_args=())
def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`rotate_formula` of both in one kernel."""
    from decode.model.gpu import layer_kernels

    with torch.cuda.device_of(query):
        return layer_kernels.rotate(query, key, cos, sin)


@rotate.register_fake
def _(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape)


@torch.library.custom_op("draftsmith::write_kv", mutates_args=("keys", "values"))
def write_kv(keys: Tensor, values: Tensor, key: Tensor, value: Tensor, slot: Tensor) -> None:
    """Writes key [B, H, T, D] and value [B, H, T, Dv] to the slots [B, T] of all rows of the buffers [B, H, S, …]."""
    from decode.model.gpu import layer_kernels

    with torch.cuda.device_of(keys):
        layer_kernels.write_kv(keys, values, key, value, slot)


@write_kv.register_fake
def _(keys: Tensor, values: Tensor, key: Tensor, value: Tensor, slot: Tensor) -> None:
    pass
