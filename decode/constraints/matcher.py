"""The place of one text in its grammar: what decoding needs to know of any grammar, however it is written."""

from collections.abc import Sequence

import torch


class Matcher:
    """Knows the tokens of one text so far and which ones its grammar allows next.

    EOS is allowed where the text may end, and only there. It is never given to `advance`: the text ends with it.
    """

    def copy(self) -> "Matcher":
        """Another matcher at the same place, which later changes of this one do not move."""
        raise NotImplementedError

    def allowed(self) -> torch.Tensor:
        """[V] bool on the CPU: the tokens that may come next; none where no token of the vocabulary fits."""
        raise NotImplementedError

    def advance(self, tokens: Sequence[int]) -> int:
        """Moves behind the leading tokens that the grammar allows and returns how many they are."""
        raise NotImplementedError

    def rollback(self, count: int) -> None:
        """Moves back by `count` tokens."""
        raise NotImplementedError
