"""Whether decoding on a GPU runs kernels of ours: each is compared with torch's way when a model is loaded.

`DRAFTSMITH_STEP_ATTENTION` in the environment is `auto` (what passes the comparison), `split_kv` or `sdpa`, and
`DRAFTSMITH_KERNELS` is `auto` or `torch` for norms, RoPE and writes to the K/V buffers.
"""

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from decode.common import damage
from decode.common.errors import UserError, first_line
from decode.model import attention
from decode.model.gpu.cuda_operations import KERNELS, rms_norm_formula, rotate_formula
from decode.model.kv_cache import SlotMapping, TreeNodes

ATTENTION_SETTING, KERNELS_SETTING = "DRAFTSMITH_STEP_ATTENTION", "DRAFTSMITH_KERNELS"
SLOTS, BASES = 600, (570, 40)
"""A check's slots a row, and the tokens that its rows have: parts without any slot are among them."""
OLDEST = 8, 0
"""The compute capability from which on Triton has products of tensor cores."""
REPEATS = 3
"""Launches that must give the same bits: parts are merged in one order, whichever of them ends last."""


@dataclass(frozen=True)
class StepShape:
    """What attention of a layer looks like in a step, but for its tokens."""

    kv_heads: int
    groups: int
    width: int
    value_width: int
    dtype: torch.dtype
    scale: float
    window: int | None
    softcap: float | None
    sink: bool


def step_shape(query: Tensor, key: Tensor, value: Tensor, settings: Mapping[str, Any]) -> StepShape:
    """That of a call of the attention function with these tensors [B, heads, T, D] and keywords."""
    width, scale = query.shape[-1], settings.get("scaling")
    return StepShape(
        kv_heads=key.shape[1],
        groups=query.shape[1] // key.shape[1],
        width=width,
        value_width=value.shape[-1],
        dtype=query.dtype,
        scale=width**-0.5 if scale is None else scale,
        window=settings.get("sliding_window"),
        softcap=settings.get("softcap"),
        sink=settings.get("s_aux") is not None,
    )


VERDICTS: dict[tuple[object, torch.device], str | None] = {}
"""Why a kernel is not used for a shape on a device; None: it is. Kept for the process."""


def choose_kernels(shapes: Collection[StepShape], dtype: torch.dtype, device: torch.device) -> None:
    """Turns kernels of ours on or off for decoding on `device`, for all models of this process, and warns once, in
    one line, where one is off although Triton is here. Nothing is done for a CPU.

    UserError for a value of the settings that is none.
    """
    if device.type != "cuda":
        return
    wanted = setting(ATTENTION_SETTING, ("auto", "split_kv", "sdpa"))
    own = setting(KERNELS_SETTING, ("auto", "torch"))
    if wanted != "auto":
        attention.use_split_kv(wanted == "split_kv")
    elif torch.cuda.get_device_capability(device) < OLDEST:
        attention.use_split_kv(False)  # without its products Triton would spill kilobytes a thread
        damage.warn_once(f"attention of a step is torch's on this old card ({ATTENTION_SETTING})")
    elif attention.HAS_TRITON:
        for shape in sorted(shapes, key=str):
            compare((shape, device), partial(compare_attention, shape, device))
        attention.use_split_kv(
            agree(StepShape, "attention of a step is torch's", ATTENTION_SETTING)
        )
    KERNELS.own = False
    if own == "auto" and attention.HAS_TRITON:
        compare((dtype, device), partial(compare_layer_kernels, dtype, device))
        KERNELS.own = agree(torch.dtype, "norms and RoPE are torch's", KERNELS_SETTING)


def setting(name: str, values: tuple[str, ...]) -> str:
    value = os.environ.get(name, "") or "auto"
    if value not in values:
        raise UserError(f"{name} is {value!r}: choose among {', '.join(values)}")
    return value


def compare(key: tuple[object, torch.device], check: Callable[[], None]) -> None:
    """Keeps what `check` raises, in one line, or None."""
    if key not in VERDICTS:
        try:
            with torch.inference_mode():
                check()
            VERDICTS[key] = None
        except Exception as error:  # Triton, ptxas and the driver raise many kinds
            VERDICTS[key] = first_line(error) or type(error).__name__


def agree(kind: type, otherwise: str, name: str) -> bool:
    """Whether all verdicts about keys of this kind are good; if not, one line says so."""
    bad = [reason for (what, _), reason in VERDICTS.items() if reason and isinstance(what, kind)]
    if bad:
        damage.warn_once(f"{otherwise}: our kernel does not pass its check here ({bad[0]}; {name})")
    return not bad


def compare_attention(shape: StepShape, device: torch.device) -> None:
    """AssertionError where the split-KV kernel and torch's attention of fp32 numbers differ, for a chain and a tree."""
    random = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=random, device=device).to(shape.dtype)

    rows = len(BASES)
    slots = SlotMapping(rows, SLOTS, device)
    keys = normal(rows, shape.kv_heads, SLOTS, shape.width)
    values = normal(rows, shape.kv_heads, SLOTS, shape.value_width)
    sink = normal(shape.kv_heads * shape.groups) if shape.sink else None
    for nodes in (None, small_tree(device)):
        count = 5 if nodes is None else nodes.index.shape[1]
        slots.set_positions(torch.tensor(BASES, device=device), count, nodes=nodes)
        query = normal(rows, shape.kv_heads, shape.groups * count, shape.width)
        allow = slots.mask(shape.window, shape.groups)
        wide = query.float(), keys.float(), values.float()
        right = attention._masked_attention(*wide, allow, shape.scale, shape.softcap, sink)
        live = slots.split_kv_metadata(shape.window)
        found = [
            torch.ops.draftsmith.split_kv_attention(
                query, keys, values, live.first, live.live, live.seen, live.position, live.base, live.tail,
                live.window, shape.scale, shape.softcap, sink,
            )
            for _ in range(REPEATS)
        ]  # fmt: skip
        right = right.reshape(rows, -1, count, shape.value_width).transpose(1, 2)
        check_close(found[0], right, "attention")
        assert all(torch.equal(found[0], again) for again in found[1:]), "two runs differ"


def small_tree(device: torch.device) -> TreeNodes:
    """Nine nodes: node n hangs on node (n - 1) // 2."""
    ancestors = torch.eye(9, dtype=torch.bool)
    for node in range(1, 9):
        ancestors[node] |= ancestors[(node - 1) // 2]
    depth = ancestors.sum(1)[None] - 1
    return TreeNodes(*(x.to(device) for x in (torch.arange(9)[None], depth, ancestors[None])))


def compare_layer_kernels(dtype: torch.dtype, device: torch.device) -> None:
    """AssertionError where norm, RoPE or the write to the buffers differ from torch's operations."""
    random = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=random, device=device).to(dtype)

    ops = torch.ops.draftsmith
    for x in (normal(3, 4, 1, 2048), normal(3, 4, 3 * 128)[..., :256].unflatten(-1, (2, 128))):
        weight = normal(x.shape[-1])
        for rounding in range(3):
            right = rms_norm_formula(x, weight, 1e-6, rounding)
            check_close(ops.rms_norm(x, weight, 1e-6, rounding), right, "a norm")
    query, key = (normal(2, 5, heads, 64).transpose(1, 2) for heads in (6, 2))
    angles = normal(2, 5, 64)
    found = ops.rotate(query, key, angles.cos(), angles.sin())
    for out, given in zip(found, (query, key), strict=True):
        check_close(out, rotate_formula(given, angles.cos(), angles.sin()), "RoPE")
    slot = torch.tensor([[7, 8, 9, 10, 11], [0, 1, 2, 3, 4]], device=device)
    keys, values = normal(2, 2, 16, 64), normal(2, 2, 16, 32)
    value = normal(2, 5, 2, 32).transpose(1, 2)
    right_keys, right_values = keys.clone(), values.clone()
    row = torch.arange(2, device=device)[:, None]
    right_keys[row, :, slot], right_values[row, :, slot] = (
        key.transpose(1, 2),
        value.transpose(1, 2),
    )
    ops.write_kv(keys, values, key, value, slot)
    assert torch.equal(keys, right_keys), "writes of keys differ"
    assert torch.equal(values, right_values), "writes of values differ"


def check_close(found: Tensor, right: Tensor, what: str) -> None:
    """AssertionError beyond what the dtype of `found` rounds away of numbers of about 1."""
    apart = float(
        (found.float() - right.float()).abs().max() / right.float().abs().max().clamp_min(1)
    )
    limit = max(4 * torch.finfo(found.dtype).eps, 1e-4)
    assert apart <= limit, f"{what} differs by {apart:.1e} where {limit:.1e} is rounding"
