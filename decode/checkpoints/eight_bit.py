"""The weights of drafts in eight bits (FP8, int8) or fewer, as the numbers that they stand for.

The tensors decide, not config.json: trainers copy the target's `quantization_config` into configs of heads that are not
quantised, and write heads in eight bits without any.
"""

from collections.abc import Mapping
from typing import Any

import torch

from decode.checkpoints.layouts import VOCAB_MAPS, Tensors
from decode.common.errors import UserError, first_line
from decode.model.formats.packed_weights import METHODS, plain_weights

WHOLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool)
"""Dtypes of tensors that are what they say: weights, and buffers."""


def dequantized(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """The tensors with every weight in float32 that was in eight bits or fewer; the same object where none was.
    UserError that names the method for a form that is not read, and for weights without a scale: their bare numbers
    would be another model."""
    maps = {n: v for n, v in tensors.items() if n.rpartition(".")[2] in (*VOCAB_MAPS, "token_map")}
    others = {name: value for name, value in tensors.items() if name not in maps}
    if all(value.dtype in WHOLE for value in others.values()):
        return tensors
    q = config.get("quantization_config") or {}
    method = str(q.get("quant_method") or "")
    if method not in METHODS:
        q = q | {"quant_method": "fp8"}  # scales beside the weights, of which int8 has the same
    try:
        reason = METHODS[q["quant_method"]].refusal(q)
        if reason:
            raise UserError(f"it {reason}: take the draft as it was before it was quantised")
        return maps | dict(plain_weights(others, q))
    except UserError as error:
        by = f"quantised by {method}" if method else "in few bits, and config.json names no method"
        raise UserError(f"its weights are {by}, and cannot be read: {error}") from error
    except Exception as error:  # damaged tensors fail in any of a dozen ways
        raise UserError(
            f"its quantised weights cannot be read ({first_line(error)}): restore its files"
        ) from error
