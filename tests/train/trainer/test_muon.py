"""Muon moves matrices as torch's does without that one's rounding to bf16, and alike in one process and in two."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed
import torch.multiprocessing
from torch import Tensor

from train.trainer.muon import Muon, assign_owners, orthogonalize, orthogonalize_shared

SHAPES = [(6, 4), (4, 6), (6, 4), (5, 5), (1, 7)]


def matrices(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def test_steps_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: another scale for tall matrices, no Nesterov step, weight decay that is not decoupled, momentum lost."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)  # torch's rounds to it
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    ours = [torch.nn.Parameter(x) for x in matrices(0)]
    theirs = copy.deepcopy(ours)
    optimizers = (Muon(ours, 0.1, 0.2), torch.optim.Muon(theirs, lr=0.1, weight_decay=0.2))
    for step in range(3):
        for parameters, optimizer in zip((ours, theirs), optimizers, strict=True):
            for p, grad in zip(parameters, matrices(step + 1), strict=True):
                p.grad = grad.clone()
            optimizer.step()
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)
    optimizers[0].load_state_dict(optimizers[1].state_dict())  # of checkpoints made before


def test_singular_values_come_close_to_one() -> None:
    """Bug: a matrix of a stack is divided by the norm of the whole stack, or a zero matrix gives NaN."""
    stack = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(1))
    stack[1] *= 1e-3
    values = torch.linalg.svdvals(orthogonalize(stack).float())
    assert bool(((values > 0.5) & (values < 1.5)).all())
    alone = orthogonalize(stack[1:2])
    torch.testing.assert_close(orthogonalize(stack)[1:2], alone)
    assert bool((orthogonalize(torch.zeros(1, 3, 2)) == 0).all())


@pytest.mark.parametrize("has_amx", [False, True])
def test_products_are_of_bf16_where_a_cpu_is_fast_in_it(
    has_amx: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches steps of a large head of which two thirds are products in fp32, and rounding where nothing is gained."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    stack = torch.randn(1, 8, 4, generator=torch.Generator().manual_seed(1))
    assert orthogonalize(stack).dtype == (torch.bfloat16 if has_amx else torch.float32)


def test_a_parameter_without_gradient_stays() -> None:
    """Bug: weight decay or old momentum moves what the loss did not reach."""
    still, moved = (torch.nn.Parameter(x) for x in matrices(0)[:2])
    before = still.detach().clone()
    moved.grad = torch.ones_like(moved)
    Muon([still, moved], 0.1, 0.2).step()
    assert torch.equal(still, before)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_each_matrix_has_an_owner_and_the_work_is_even(world: int) -> None:
    """Bug: one process orthogonalises all the large ones, and the others wait."""
    owners = assign_owners([(64, 16)] * 6 + [(16, 16)] * 12, world)
    assert set(owners) == set(range(world))
    large = [owners[:6].count(rank) for rank in range(world)]
    assert max(large) - min(large) <= 0


def work(rank: int, folder: str) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2
    )
    torch.save(orthogonalize_shared(matrices(0)), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_processes_agree_with_one(tmp_path: Path) -> None:
    """Bug: a process keeps its own share only, or the shares come back in another order."""
    torch.multiprocessing.spawn(work, (str(tmp_path),), nprocs=2)
    alone = orthogonalize_shared(matrices(0))
    for rank in range(2):
        torch.testing.assert_close(torch.load(tmp_path / f"{rank}.pt", weights_only=True), alone)
