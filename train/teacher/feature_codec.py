"""States and laws of the target in few bytes: what a row of each kind consists of, packed and unpacked.

States are fp8 with a scale for each token and tap. A law is its likeliest tokens, their probabilities and the sum of
all others.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from decode.model.hidden_states import HiddenStateSpec

FINAL_STATES = "final"
FP8_MAX = 448.0
"""Of torch.float8_e4m3fn."""
MIN_PROBABILITY = 1e-10
"""For a probability that fp16 takes for 0, so that no logit is -inf."""


@dataclass(frozen=True)
class FeatureSchema:
    """One kind of content: tensors that have a row for each token, or for each supervised position."""

    name: str
    supervised: bool
    fields: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    """Type and shape of a row of each tensor."""

    @property
    def row_bytes(self) -> int:
        return sum(dtype.itemsize * math.prod(shape) for dtype, shape in self.fields.values())


def hidden_state_schema(taps: HiddenStateSpec, hidden: int) -> FeatureSchema:
    """The states that a draft with these taps reads: tapped layers if there are any, else the final one."""
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
    """The target's `top` likeliest tokens, falling, and their probabilities with that of all others behind them.

    The rest is stored and not implied: behind probabilities rounded to fp16 it would be lost in their rounding.
    """
    ids = torch.uint16 if vocab <= 2**16 else torch.int32
    return FeatureSchema(
        f"top-{top}", True, {"ids": (ids, (top,)), "probabilities": (torch.float16, (top + 1,))}
    )


def pack_hidden_states(states: Tensor) -> dict[str, Tensor]:
    """Of states [N, taps, H]; each value keeps 3 bits behind its first."""
    states = states.float()
    scale = (states.abs().amax(-1) / FP8_MAX).to(torch.bfloat16)
    scale = scale.masked_fill(scale == 0, 1.0)
    values = (states / scale.float()[..., None]).clamp(-FP8_MAX, FP8_MAX)
    return {"states": values.to(torch.float8_e4m3fn), "scale": scale}


def unpack_hidden_states(states: Tensor, scale: Tensor) -> Tensor:
    """[..., taps, H] fp32 of what `packed_states` gave."""
    bits = states.view(torch.int8).to(torch.int16)
    # fp8's bits are those of an fp16 that is 2^8 times smaller; torch's own conversion is five times slower on a CPU.
    half = ((bits & 0x7F) << 7 | bits & -0x8000).view(torch.float16)
    return half.float().mul_(256.0 * scale.float()[..., None])


def pack_distribution(logits: Tensor, top: int) -> dict[str, Tensor]:
    """Of logits [N, V], top <= V."""
    p = logits.float().softmax(-1)
    best, ids = p.topk(top, dim=-1)
    rest = (1 - best.sum(-1, keepdim=True)).clamp_min(0)
    kind = distribution_schema(top, logits.shape[-1])
    return {
        "ids": ids.int().cpu().to(kind.fields["ids"][0]),
        "probabilities": torch.cat([best, rest], -1).half(),
    }


def unpack_log_probs(payload: Tensor, top: int, vocab: int) -> Tensor:
    """Log-probabilities [N, V] of payload [N, 2 top + 1]: ids and probabilities of `top` tokens, and of all others.

    These share what is left evenly. Each row sums to 1, and none of it is -inf.
    """
    ids, p = payload[:, :top].long(), payload[:, top:].clamp_min(MIN_PROBABILITY)
    if top == vocab:
        p = p[:, :-1]
    logs = (p / p.sum(-1, keepdim=True)).log()
    rest = logs[:, -1:] - math.log(max(1, vocab - top))
    return rest.expand(-1, vocab).scatter(1, ids, logs[:, :top])
