"""What tests of drafts that propose a block in one pass share: settings, and the distance from plain passes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from decode.drafts.base import Draft
from decode.engine.engine import decode
from decode.model.loading import Target
from decode.verification.sampling import SamplingParams
from decode.verification.tree import DynamicTree, TreeShape, tree_from_paths
from tests.tiny import tiny_prompts

K, LENGTH = 3, 16
PROMPTS = tiny_prompts(13, 1, 9, 2)
SHAPES: dict[str, TreeShape] = {
    "chain": None,
    "fixed": tree_from_paths([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]),
    "grown": DynamicTree(2, 5),
}
HOT = SamplingParams(temperature=8.0)
"""At which even random heads are accepted now and then."""
TextLogits = tuple[list[int], Tensor]
"""A text and the logits [K, Vd] of a block behind it."""


@contextmanager
def watch_logits(draft: Any, owner: Any, method: str) -> Iterator[list[TextLogits]]:
    """One element for every row of every pass of the draft; a method of the `owner` returns the logits."""
    seen: list[TextLogits] = []
    propose, logits_of = draft.propose, getattr(owner, method)

    def watch(history: Tensor, length: Tensor, k: int) -> Any:
        def keep(*inputs: Any) -> Tensor:
            logits = logits_of(*inputs)
            for row, n in enumerate(length.tolist()):
                seen.append((history[row, :n].tolist(), logits[row].clone()))
            return logits

        setattr(owner, method, keep)
        proposal = propose(history, length, k)
        delattr(owner, method)
        return proposal

    draft.propose = watch
    yield seen
    del draft.propose


@torch.no_grad()
def decode_and_compare(
    own: Target,
    draft: Draft,
    seen: list[TextLogits],
    wanted: Callable[[list[int], int], Tensor],
    **settings: Any,
) -> tuple[float, set[int]]:
    """(largest difference of what is `seen` from wanted(text, K), accepted lengths that occurred)."""
    outputs = decode(own, draft, PROMPTS, k=K, max_new_tokens=LENGTH, **settings)
    far = [(wanted(text, len(logits)) - logits).abs().max() for text, logits in seen]
    return float(torch.stack(far).max()), {n for output in outputs for _, n in output.rounds}
