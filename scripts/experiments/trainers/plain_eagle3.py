"""EAGLE-3's training-time test as public trainers compute it, at every position of a batch (arXiv 2503.01840).

The target runs in transformers' code. Each step attends to the keys of the first step below the diagonal and to those
of later steps on it. The target's logits of all positions, over its whole vocabulary, stay in memory.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from decode.drafts.eagle_model import Eagle3Model
from train.losses import divergences

DECAY = 0.8
"""Weight of each step relative to the one before."""


class DiagonalAttention:
    """Attention of training-time test over the keys and values of all steps so far, which it keeps (an AttendFn)."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups, length, scale = q.shape[1] // k.shape[1], q.shape[2], q.shape[-1] ** -0.5
        self.keys.append(k.repeat_interleave(groups, 1))
        self.values.append(v.repeat_interleave(groups, 1))
        causal = torch.full((length, length), float("-inf"), device=q.device).triu(1)
        scores = [q @ self.keys[0].transpose(-1, -2) * scale + causal]
        scores += [(q * later).sum(-1, keepdim=True) * scale for later in self.keys[1:]]
        weights = torch.cat(scores, -1).float().softmax(-1).to(q.dtype)
        out = weights[..., :length] @ self.values[0]
        for step, later in enumerate(self.values[1:]):
            out = out + weights[..., length + step, None] * later
        return out.transpose(1, 2)


class PlainEagle3(nn.Module):
    """The loss of the head `net` on the frozen model `target`, over `steps` steps."""

    def __init__(self, net: Eagle3Model, target: Any, steps: int):
        super().__init__()
        self.net, self.steps = net, steps
        self.frozen = [target]  # in a list, so that it is not a part of this module

    def forward(self, input_ids: Tensor, attention_mask: Tensor, reply: Tensor) -> Tensor:
        """The sum of soft cross-entropies; `reply` [B, T] is True at tokens of a reply, which lie in one piece."""
        net, (target,) = self.net, self.frozen
        with torch.no_grad():
            out = target(
                input_ids=input_ids,
                attention_mask=attention_mask,
                output_hidden_states=True,
                use_cache=False,
            )
            states = torch.cat([out.hidden_states[layer] for layer in net.taps.layers], -1)
            states = states.to(net.fc.weight.dtype)
            logits = shifted(out.logits, 1)
            counted = divergences.argmax_in_vocabulary(logits, net.ids)
            p = (logits if net.ids is None else logits[..., net.ids]).float().softmax(-1)
        embedding = target.get_input_embeddings().weight.detach().to(states.dtype)
        position = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        attend, total = DiagonalAttention(), torch.zeros((), device=input_ids.device)
        state = net.init_state(states)
        for step in range(self.steps):
            embeds = net.embed(shifted(input_ids, 1 + step), embedding)
            state = net.step(state, embeds, position + step, attend)
            log_q = net.logits(state).float().log_softmax(-1)
            valid = reply & shifted(reply, 2 + step) & shifted(counted, step)
            cross_entropy = -(shifted(p, step) * log_q).sum(-1)
            total = total + DECAY**step * (cross_entropy * valid).sum()
        return total


def shifted(values: Tensor, by: int) -> Tensor:
    """[B, T, ...]: at position t what `values` have at t + by, and zeros beyond the end."""
    rest = values[:, by:]
    return pad(rest, (0, 0) * (values.dim() - 2) + (0, values.shape[1] - rest.shape[1]))


def plain_loss(model: PlainEagle3, inputs: Mapping[str, Tensor]) -> Tensor:
    """The mean over all positions of a batch of `pad_rows`."""
    texts = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    return model(**texts, reply=inputs["labels"] != -100) / inputs["input_ids"].numel()
