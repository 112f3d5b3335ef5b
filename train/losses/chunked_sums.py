"""Losses over a vocabulary, a few rows at a time, so that no tensor [N, V] of all N positions exists."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Sums = dict[str, Tensor]


def max_chunk_rows(vocab_size: int, budget_bytes: int = 2**28) -> int:
    """How many rows an fp32 tensor [rows, V] may have to fit into `budget_bytes`, at least 1.

    Logits, loss and backward together hold up to 11 of them at once: about 3 GiB by default.
    """
    return max(1, budget_bytes // (4 * vocab_size))


def sums_in_chunks(
    function: Callable[..., Sums],
    tensors: Sequence[Tensor],
    rows: int,
    shared: Sequence[Tensor] = (),
) -> Sums:
    """The scalars of `function(*tensors, *shared)`, added up over chunks of at most `rows` rows of `tensors`.

    For sums over rows the values are those of one call. So are the gradients of "loss", the only value that has any: of
    `tensors`, `shared` and the parameters that `function` closes over. What is computed from parameters must be in
    `shared`. Each chunk's gradients are taken right after it, so that its logits are neither kept nor computed twice;
    backward only scales them, and can run once. With 0 rows `function` runs once on empty tensors: its zero loss still
    depends on every parameter, and no rank of a distributed run waits for gradients.
    """
    if len(tensors[0]) <= rows:
        return function(*tensors, *shared)
    gradients = ChunkGradients(tensors, shared)
    total: Sums = {}
    for chunk in zip(*(tensor.detach().split(rows) for tensor in tensors), strict=True):
        part = gradients.differentiate(function, chunk)
        total = {name: total[name] + part[name] if total else part[name] for name in part}
    return {**total, "loss": gradients.attach(total["loss"])}


def without_autocast(tensor: Tensor) -> torch.autocast:
    """A block without autocast on the device of `tensor`; "meta", which has none, stands for a CPU."""
    device = tensor.device.type
    return torch.autocast("cpu" if device == "meta" else device, enabled=False)


class ChunkGradients:
    """The gradients of a loss that is computed and differentiated chunk by chunk; none where autograd is off."""

    def __init__(self, tensors: Sequence[Tensor], shared: Sequence[Tensor]):
        """Those of `tensors`, which come in chunks, of `shared`, and of parameters that the loss turns out to use."""
        grad = torch.is_grad_enabled()
        self.split = {i: x for i, x in enumerate(tensors) if grad and x.requires_grad}
        self.pieces: list[list[Tensor]] = [[] for _ in self.split]
        self.shared = {x.detach().requires_grad_(grad and x.requires_grad): x for x in shared}
        self.sums: dict[Tensor, Tensor] = {}

    def differentiate(self, function: Callable[..., Sums], chunk: Sequence[Tensor]) -> Sums:
        """The values of the function for this chunk, detached, once the gradients of its "loss" are added to those
        here."""
        inputs = [chunk[i].requires_grad_() for i in self.split]
        part = function(*chunk, *self.shared)
        if part["loss"].requires_grad:
            own = set(inputs)
            others = [leaf for leaf in _leaves(part["loss"]) if leaf not in own]
            with without_autocast(part["loss"]):
                found = torch.autograd.grad(
                    part["loss"], [*inputs, *others], materialize_grads=True
                )
            for pieces, gradient in zip(self.pieces, found, strict=False):
                pieces.append(gradient)
            for leaf, gradient in zip(others, found[len(inputs) :], strict=True):
                # Not the first gradient itself: it may be that of another leaf as well.
                if leaf not in self.sums:
                    self.sums[leaf] = torch.zeros_like(leaf)
                self.sums[leaf] += gradient
        return {name: value.detach() for name, value in part.items()}

    def attach(self, loss: Tensor) -> Tensor:
        """`loss`, a detached value, with these gradients."""
        if not any(self.pieces) and not self.sums:
            return loss
        gradients = [*map(torch.cat, self.pieces), *self.sums.values()]
        sources = [*self.split.values(), *(self.shared.get(leaf, leaf) for leaf in self.sums)]
        attached: Tensor = _WithGradients.apply(loss, gradients, *sources)
        return attached


class _WithGradients(torch.autograd.Function):
    """A loss whose gradients are known already."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor], *sources: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, []
        return None, None, *(gradient.mul_(scale) for gradient in gradients)


def _leaves(loss: Tensor) -> list[Tensor]:
    """The tensors with gradients that `loss` was computed from and that were not computed themselves."""
    found, seen, todo = [], set(), [loss.grad_fn]
    while todo:
        node: Any = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name().endswith("AccumulateGrad"):
            found.append(node.variable)
        todo += [before for before, _ in node.next_functions]
    return found
