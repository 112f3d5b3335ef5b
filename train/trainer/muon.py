"""Muon: momentum whose matrices are orthogonalised (https://kellerjordan.github.io/posts/muon/), faster than torch's.

torch.optim.Muon orthogonalises one matrix after the other, all of them in every process, and in bf16, which many CPUs
multiply slowly. Here each process orthogonalises its share of them, equal shapes in one product, on a CPU in fp32.
"""

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed
from torch import Tensor

COEFFICIENTS = (3.4445, -4.775, 2.0315)
"""Of the quintic Newton-Schulz step, whose slope at 0 is as large as it can be."""
ITERATIONS = 5
MOMENTUM = 0.95
SMALLEST_NORM = 1e-7


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum and decoupled weight decay for 2-D parameters, which every process holds whole.

    A matrix [m, n] moves by lr * sqrt(max(1, m / n)) times an orthogonal matrix, as in torch.optim.Muon, whose state it
    shares. All processes end a step with the same parameters.
    """

    def __init__(self, matrices: Sequence[Tensor], lr: float, weight_decay: float):
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step with the gradients at hand; parameters without a gradient stay."""
        for group in self.param_groups:
            moved = [p for p in group["params"] if p.grad is not None]
            directions = orthogonalize_shared([self._nesterov(p) for p in moved])
            for p, direction in zip(moved, directions, strict=True):
                p.mul_(1 - group["lr"] * group["weight_decay"])
                scale = math.sqrt(max(1.0, p.shape[0] / p.shape[1]))
                p.add_(direction.to(p.dtype), alpha=-group["lr"] * scale)

    def _nesterov(self, p: Tensor) -> Tensor:
        """[m, n] the momentum of the gradient, one step ahead."""
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
        momentum = state["momentum_buffer"]
        assert p.grad is not None
        momentum.lerp_(p.grad, 1 - MOMENTUM)
        return p.grad.lerp(momentum, MOMENTUM)


def orthogonalize_shared(matrices: Sequence[Tensor]) -> list[Tensor]:
    """`orthogonalize` of each matrix; every process computes a share and gives it to the others."""
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if several else 0
    world = torch.distributed.get_world_size() if several else 1
    owners = assign_owners([tuple(matrix.shape) for matrix in matrices], world)
    own: dict[torch.Size, list[int]] = defaultdict(list)
    for number, (matrix, owner) in enumerate(zip(matrices, owners, strict=True)):
        if owner == rank:
            own[matrix.shape].append(number)
    results = [torch.zeros_like(matrix) for matrix in matrices]
    for numbers in own.values():
        stacked = orthogonalize(torch.stack([matrices[number] for number in numbers]))
        for number, result in zip(numbers, stacked, strict=True):
            results[number].copy_(result)
    if world > 1 and results:
        flat = torch.cat([result.flatten() for result in results])
        torch.distributed.all_reduce(flat)  # all others contribute zeros
        pieces = flat.split([result.numel() for result in results])
        results = [piece.view_as(one) for piece, one in zip(pieces, results, strict=True)]
    return results


def assign_owners(shapes: Sequence[tuple[int, ...]], world: int) -> list[int]:
    """The process that orthogonalises each matrix: the costliest first, each to the process with the least work."""
    work, owners = [0] * world, [0] * len(shapes)
    costs = [max(shape) * min(shape) ** 2 for shape in shapes]
    for number in sorted(range(len(shapes)), key=lambda i: (-costs[i], i)):
        owners[number] = work.index(min(work))
        work[owners[number]] += costs[number]
    return owners


def orthogonalize(matrices: Tensor) -> Tensor:
    """[N, m, n] near-orthogonal matrices with the singular vectors of `matrices` [N, m, n], by Newton-Schulz steps.

    Their singular values are between 0.5 and 1.5 or so. Computed in bf16 on a GPU and on a CPU with matrix units (AMX),
    where products of that take a third of the time, else in fp32.
    """
    wide = matrices.shape[1] <= matrices.shape[2]
    x = matrices if wide else matrices.mT
    fast = x.device.type == "cuda" or torch.cpu._is_amx_tile_supported()
    x = x.to(torch.bfloat16 if fast else torch.float32)
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=SMALLEST_NORM)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.mT
