"""The weights of drafts in eight bits (FP8, int8) or fewer, as the numbers that they stand for.

The tensors decide, not config.json: trainers copy the target's `quantization_config` into configs of heads that are not
quantised, and write heads in eight bits without any.
"""

from collections.abc import Mapping
from typing import Any

import torch

from decode.checkpoints.layouts import VOCAB_MAPS, Tensors
from decode.common.errors import UserError, first_line
from decode.model.formats.packed_weights import METHODS, UNUSED, plain_weights, scaled_weight

SCALES = (torch.float32, torch.bfloat16, torch.float16)
WHOLE = (*SCALES, torch.float64, torch.int64, torch.bool)
"""Dtypes of tensors that are what they say: weights, and buffers."""


def dequantized(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """The tensors with every weight in float32 that was in eight bits or fewer; the same object where none was.
    UserError that names the method for a form that is not read, and for weights without a scale: their bare numbers
    would be another model."""
    packed = [
        name
        for name, value in tensors.items()
        if name.rpartition(".")[2] not in (*VOCAB_MAPS, "token_map") and value.dtype not in WHOLE
    ]
    if not packed:
        return tensors
    q = config.get("quantization_config") or {}
    method = str(q.get("quant_method") or "")
    try:
        if method in METHODS:
            reason = METHODS[method].refusal(q)
            if reason:
                raise UserError(f"it {reason}: take the draft as it was before it was quantised")
            return dict(plain_weights(tensors, tensors.__getitem__, q))
        return _by_scales(tensors, packed, method)
    except UserError as error:
        by = f"quantised by {method}" if method else "in few bits, and config.json names no method"
        raise UserError(f"its weights are {by}, and cannot be read: {error}") from error
    except Exception as error:  # damaged tensors fail in any of a dozen ways
        raise UserError(
            f"its quantised weights cannot be read ({first_line(error)}): restore its files"
        ) from error


def _by_scales(tensors: Tensors, packed: list[str], method: str) -> Tensors:
    """Eight-bit weights times the scales beside them: `weight_scale`, or `weight_scale_inv` for blocks of 128 × 128."""
    found = dict(tensors)
    for name in packed:
        weight = tensors[name]
        scales = [name + end for end in ("_scale", "_scale_inv") if name + end in tensors]
        eight = weight.itemsize == 1 and weight.dtype not in (torch.uint8, torch.bool)
        if not eight or len(scales) != 1 or tensors[scales[0]].dtype not in SCALES:
            raise UserError(
                f"{name} is {str(weight.dtype).removeprefix('torch.')}, and no scale of it is known"
            )
        scale = found.pop(scales[0])
        found[name] = scaled_weight(weight, scale)
    return {name: value for name, value in found.items() if not name.endswith(UNUSED)}
