"""Compact storage of hidden states and distributions: the tensors of a row, packing and unpacking.

Hidden states are fp8 with a scale for each token and tap. A distribution is its K likeliest tokens, their
probabilities, and the sum of all other probabilities.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from decode.model.hidden_states import HiddenStateSpec

FINAL_STATES = "final"
FP8_MAX = 448.0
"""The largest value of torch.float8_e4m3fn."""
MIN_PROBABILITY = 1e-10
"""Replaces probabilities that round to 0 in fp16, so that no logit is -inf."""


@dataclass(frozen=True)
class FeatureSchema:
    """The tensors of one kind of feature, with a row for each token or for each supervised position."""

    name: str
    """Also the name of its folder."""
    supervised: bool
    """True: a row for each supervised position only."""
    fields: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    """{tensor: dtype and shape of one row}."""

    @property
    def row_bytes(self) -> int:
        return sum(dtype.itemsize * math.prod(shape) for dtype, shape in self.fields.values())


def hidden_state_schema(taps: HiddenStateSpec, hidden: int) -> FeatureSchema:
    """The schema of the hidden states at `taps`: those of the tapped layers if there are any, else the final ones."""
    count = len(taps.layers) or 1
    return FeatureSchema(
        "-".join(["taps", *map(str, taps.layers)]) if taps.layers else FINAL_STATES,
        False,
        {
            "states": (torch.float8_e4m3fn, (count, hidden)),
            "scale": (torch.bfloat16, (count,)),  # the range of fp32 in the bytes of fp16
        },
    )


def distribution_schema(top: int, vocab: int) -> FeatureSchema:
    """The schema of the `top` likeliest tokens in falling order and their probabilities, the sum of the others last.

    That sum is stored because it could not be recovered from probabilities that are rounded to fp16.
    """
    ids = torch.uint16 if vocab <= 2**16 else torch.int32
    return FeatureSchema(
        f"top-{top}", True, {"ids": (ids, (top,)), "probabilities": (torch.float16, (top + 1,))}
    )


def pack_hidden_states(states: Tensor) -> dict[str, Tensor]:
    """Packs states [N, taps, H] as fp8 values, which keep 3 bits of mantissa, and one scale per token and tap."""
    states = states.float()
    scale = (states.abs().amax(-1) / FP8_MAX).to(torch.bfloat16)
    scale = scale.masked_fill(scale == 0, 1.0)
    values = (states / scale.float()[..., None]).clamp(-FP8_MAX, FP8_MAX)
    return {"states": values.to(torch.float8_e4m3fn), "scale": scale}


def unpack_hidden_states(states: Tensor, scale: Tensor) -> Tensor:
    """Hidden states [..., taps, H] fp32 from the tensors of `pack_hidden_states`."""
    bits = states.view(torch.int8).to(torch.int16)
    # fp8's bits are those of an fp16 that is 2^8 times smaller; torch's own conversion is five times slower on a CPU.
    half = ((bits & 0x7F) << 7 | bits & -0x8000).view(torch.float16)
    return half.float().mul_(256.0 * scale.float()[..., None])


def pack_distribution(logits: Tensor, top: int) -> dict[str, Tensor]:
    """Packs the distributions of logits [N, V]; top <= V."""
    p = logits.float().softmax(-1)
    best, ids = p.topk(top, dim=-1)
    rest = (1 - best.sum(-1, keepdim=True)).clamp_min(0)
    kind = distribution_schema(top, logits.shape[-1])
    return {
        "ids": ids.int().cpu().to(kind.fields["ids"][0]),
        "probabilities": torch.cat([best, rest], -1).half(),
    }


def unpack_log_probs(payload: Tensor, top: int, vocab: int) -> Tensor:
    """Log-probabilities [N, V] from payload [N, 2 top + 1]: ids and probabilities of `top` tokens, and the others' sum.

    The sum is spread evenly over the other tokens. Each row sums to 1, and no value is -inf.
    """
    ids, p = payload[:, :top].long(), payload[:, top:].clamp_min(MIN_PROBABILITY)
    if top == vocab:
        p = p[:, :-1]
    logs = (p / p.sum(-1, keepdim=True)).log()
    rest = logs[:, -1:] - math.log(max(1, vocab - top))
    return rest.expand(-1, vocab).scatter(1, ids, logs[:, :top])
