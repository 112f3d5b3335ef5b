"""The states of the target that a head reads next, for ragged rows."""

import torch


class Recent:
    """Tapped states of the last `count` tokens of each row that have one, which all have but the newest.

    [B, count, F], the latest last. Rows with fewer tokens hold their first state several times over.
    """

    def __init__(self, rows: int, count: int, width: int, device: torch.device, dtype: torch.dtype):
        self.states = torch.zeros(rows, count, width, device=device, dtype=dtype)
        self.place = torch.arange(count, device=device)

    def seat(self, row: torch.Tensor, features: torch.Tensor, length: torch.Tensor) -> None:
        """Rows `row` [b] begin with prompts of `length` [b] whose states are features [b, W, F]."""
        at = (length[:, None] - len(self.place) + self.place).clamp_min(0)
        self.states[row] = _at(features, at).to(self.states.dtype)

    def absorb(self, features: torch.Tensor, count: torch.Tensor) -> None:
        """The first `count` [B] of features [B, P, F] are those of the next tokens of each row."""
        both = torch.cat([self.states, features.to(self.states.dtype)], 1)
        self.states.copy_(_at(both, count[:, None] + self.place))


def _at(states: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return states.gather(1, index[..., None].expand(-1, -1, states.shape[-1]))
