"""Attention of EAGLE-3's training-time test: for all slots at once, the keys that a head attends to in decoding.

At step j slot t attends to the keys of step 0 up to position t, which come from the target's hidden states, and to its
own keys of steps 1..j, which come from the head's states (Li et al. 2025, sec. 3.2). The latter add one column per
step, not a square. Only supervised slots have queries; earlier positions of the text have keys and values alone.
"""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

BLOCK = 512
"""Slots whose attention scores are in memory at once."""


class TestTimeAttention:
    """Called once per step with q [B, H, M, D] and k, v [B, Hkv, M, D] of M slots; returns [B, M, H, D]."""

    def __init__(self, keys: Tensor, values: Tensor, slots: Tensor, same: Tensor | None = None):
        """Keys and values [B, Hkv, T, D] of step 0 at every position; `slots` [B, M] are the positions of the queries.

        `same` [B, M, T] bool: positions in the document of each slot; None: all.
        """
        self.keys, self.values = keys, values
        visible = torch.arange(keys.shape[2], device=keys.device) <= slots[..., None]
        self.visible = visible if same is None else visible & same  # [B, M, T]
        self.step_keys_values: list[tuple[Tensor, Tensor]] | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.step_keys_values is None:
            self.step_keys_values = []  # at step 0 a slot's own key is among `keys`
        else:
            self.step_keys_values.append((k, v))
        rows, heads, count, size = q.shape
        groups = heads // k.shape[1]
        q = q.reshape(rows, k.shape[1], groups, count, size) * size**-0.5
        pieces = []
        for start in range(0, count, BLOCK):
            some = slice(start, start + BLOCK)
            own = [x[:, :, some] for pair in self.step_keys_values for x in pair]
            inputs = (q[:, :, :, some], self.keys, self.values, self.visible[:, some], *own)
            alone = count <= BLOCK or not torch.is_grad_enabled()
            pieces.append(
                _block(*inputs) if alone else checkpoint(_block, *inputs, use_reentrant=False)
            )
        return torch.cat(pieces, 3).flatten(1, 2).transpose(1, 2)


def _block(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor, *own: Tensor) -> Tensor:
    """[B, Hkv, G, m, D] of q of that shape; `own` are k and v [B, Hkv, m, D] of each step from 1 on."""
    shape = q.shape
    count = keys.shape[2]
    scores = (q.flatten(2, 3) @ keys.transpose(-1, -2)).unflatten(
        2, shape[2:4]
    )  # [B, Hkv, G, m, T]
    scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
    columns = [(q * k[:, :, None]).sum(-1, keepdim=True) for k in own[::2]]
    weights = torch.cat([scores, *columns], -1).softmax(-1, dtype=torch.float32).to(values.dtype)
    out = (weights[..., :count].flatten(2, 3) @ values).unflatten(2, shape[2:4])
    for j, v in enumerate(own[1::2]):
        out = out + weights[..., count + j, None] * v[:, :, None]
    return out
