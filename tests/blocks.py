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
    own: Target, draft: Draft, seen: list[TextLogits], wanted: Callable[[list[int], int], Tensor],
    **settings: Any,
) -> tuple[float, set[int]]:  # fmt: skip
    """(largest difference of what is `seen` from wanted(text, K), accepted lengths that occurred)."""
    outputs = decode(own, draft, PROMPTS, k=K, max_new_tokens=LENGTH, **settings)
    far = [(wanted(text, len(logits)) - logits).abs().max() for text, logits in seen]
    return float(torch.stack(far).max()), {n for output in outputs for _, n in output.rounds}


@torch.no_grad()
def chain_drift(
    draft: Any, owner: Any, method: str, own: Target,
    wanted: Callable[[list[int], list[int]], Tensor], **settings: Any,
) -> tuple[float, set[int]]:  # fmt: skip
    """(largest difference of what chains are drafted from, accepted lengths that occurred).

    A method of the `owner` returns logits [B, T, V], of which the last T count; wanted(text, drafted tokens) is [n +
    1, V] after the text and each of n drafted tokens."""
    seen: list[tuple[list[int], list[int], Tensor]] = []
    propose, logits_of = draft.propose, getattr(owner, method)

    def watch(history: Tensor, length: Tensor, k: int) -> Any:
        found: list[Tensor] = []

        def keep(*inputs: Any) -> Tensor:
            logits: Tensor = logits_of(*inputs)
            found.append(logits[:, -1].clone())
            return logits

        setattr(owner, method, keep)
        proposal = propose(history, length, k)
        for row, n in enumerate(length.tolist()):
            drafted = proposal.tokens[row].tolist()[: len(found) - 1]
            laws = torch.stack([logits[row] for logits in found])
            seen.append((history[row, :n].tolist(), drafted, laws))
        return proposal

    draft.propose = watch
    outputs = decode(own, draft, PROMPTS[:3], k=K, max_new_tokens=12, **settings)
    assert len(seen) > 3
    far = [(wanted(text, drafted) - laws).abs().max() for text, drafted, laws in seen]
    return float(torch.stack(far).max()), {n for output in outputs for _, n in output.rounds}
