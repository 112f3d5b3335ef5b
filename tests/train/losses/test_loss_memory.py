"""Losses in chunks: equal to one call, and what they hold at their peak over a real vocabulary.

Memory is counted on tensors without data, so 1.2 GB cost neither memory nor time.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.params import slow_except
from train.losses.chunked_sums import max_chunk_rows, sums_in_chunks
from train.losses.divergences import LOSSES, acceptance, forward_kl, log_probs, top1
from train.losses.objective import Criterion
from train.settings.training import DivergenceConfig

V, N, H = 151_936, 2048, 64  # Qwen's vocabulary
WHOLE = 4 * N * V  # bytes of one fp32 tensor over all positions: 1.2 GB


class Live(TorchDispatchMode):
    """Counts the bytes of all storages alive after each operation, in forward and in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[StorageWeakRef, int] = {}
        self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.storages[StorageWeakRef(storage)] = storage.nbytes()
        self.peak = max(self.peak, self.now())
        return out

    def now(self) -> int:
        self.storages = {ref: size for ref, size in self.storages.items() if not ref.expired()}
        return sum(self.storages.values())


@contextmanager
def counted() -> Iterator[Live]:
    with FakeTensorMode(), Live() as live:
        yield live


def train_once(
    live: Live, loss: str, rows: int, dtype: torch.dtype, vd: int = V
) -> tuple[int, int]:
    """Bytes that forward leaves behind, and the peak of forward + backward, both beyond the weights."""
    teacher, hidden = torch.randn(2, N, H, dtype=dtype)
    target_head = torch.randn(H, V, dtype=dtype)
    head = torch.randn(H, vd, dtype=dtype, requires_grad=True)
    ids = None if vd == V else torch.arange(vd)
    before = live.now()

    def sums(teacher: Tensor, hidden: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            p_logits = teacher @ target_head
        q_logits = hidden @ head
        pair = log_probs(p_logits, q_logits, ids)
        values = LOSSES[loss].of(pair)
        with torch.no_grad():
            overlap, best = acceptance.of(pair), top1(p_logits, q_logits, ids)
        return {"loss": values.sum(), "overlap": overlap.sum(), "top1": best.sum()}

    total = sums_in_chunks(sums, [teacher, hidden], rows) if rows else sums(teacher, hidden)
    left = live.now() - before
    total["loss"].backward()
    assert head.grad is not None
    return left, live.peak - before


@pytest.mark.parametrize(
    ("loss", "dtype"),
    [
        ("forward_kl", torch.bfloat16),
        *(pytest.param(name, torch.float32, marks=pytest.mark.slow) for name in LOSSES),
    ],
)
def test_chunks_bound_the_peak(loss: str, dtype: torch.dtype) -> None:
    """Bug: a piece's logits live until backward, or a temporary spans all positions: out of memory."""
    rows = max_chunk_rows(V, 2**25)
    piece = 4 * rows * V
    with counted() as live:
        left, peak = train_once(live, loss, rows, dtype)
    gradient = 4 * H * V  # the head's
    assert left < gradient + piece / 100
    # 11 is what max_chunk_rows promises; the chunk's gradient of the head is added to that of those before.
    assert peak < 11 * piece + 2 * gradient
    assert peak < WHOLE / 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("lk_lambda", DivergenceConfig(temperature=2.0, top=64)),
        ("forward_kl", DivergenceConfig(temperature=2.0, mix={"hard_ce": 0.1, "tv": 0.3})),
        ("jsd", DivergenceConfig(temperature=2.0, top=64, mix={"hard_ce": 0.1, "top_k": 1.0})),
    ],
)
def test_what_is_compared_and_mixed_stays_within_the_peak(name: str, how: DivergenceConfig) -> None:
    """Bug: a term, a temperature or the tail costs tensors as wide as the vocabulary beyond max_chunk_rows' word."""
    rows = max_chunk_rows(V, 2**25)
    with counted() as live:
        teacher, hidden = torch.randn(2, N, H)
        target_head, head = torch.randn(H, V), torch.randn(H, V, requires_grad=True)
        before, criterion = live.now(), Criterion(name, how)

        def sums(teacher: Tensor, hidden: Tensor) -> dict[str, Tensor]:
            with torch.no_grad():
                law = criterion.target_distribution(teacher @ target_head)
            return {"loss": criterion.position_losses(law, hidden @ head).sum()}

        sums_in_chunks(sums, [teacher, hidden], rows)["loss"].backward()
    assert live.peak - before < 11 * 4 * rows * V + 2 * 4 * H * V


def test_reduced_vocabulary_costs_less() -> None:
    """Bug: the draft's side is spread over the target's vocabulary, [N, V] instead of [N, Vd]."""
    rows = max_chunk_rows(V, 2**25)
    with counted() as live:
        _, peak = train_once(live, "forward_kl", rows, torch.float32, vd=32_000)
    assert peak < 4 * 4 * rows * V


@pytest.mark.parametrize("loss", slow_except(LOSSES, ["forward_kl"]))
def test_without_chunks_the_count_is_high(loss: str) -> None:
    """Bug: a counter that sees nothing (of what autograd saved, or of backward) passes everything."""
    with counted() as live:
        left, peak = train_once(live, loss, 0, torch.float32)
    assert left > WHOLE
    assert peak > 5 * WHOLE


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("rows", [1, 5, 64, 1000])
def test_chunks_equal_one_call(loss: str, rows: int) -> None:
    """Bug: a last piece lost, means added up, or a head without gradient since it is closed over."""
    ids = torch.randperm(50)[:15]
    teacher, hidden, weight = torch.randn(64, 8), torch.randn(64, 8), torch.rand(64)
    head, target = torch.nn.Linear(8, 15), torch.nn.Linear(8, 50)

    def sums(teacher: Tensor, hidden: Tensor, weight: Tensor) -> dict[str, Tensor]:
        p_logits, q_logits = target(teacher), head(hidden)
        values = LOSSES[loss](p_logits, q_logits, ids)
        return {"loss": (weight * values).sum(), "top1": top1(p_logits, q_logits, ids).sum()}

    found = []
    for chunked in (False, True):
        inputs = [teacher, hidden.clone().requires_grad_(), weight]
        total = sums_in_chunks(sums, inputs, rows) if chunked else sums(*inputs)
        gradients = torch.autograd.grad(total["loss"], [inputs[1], *head.parameters()])
        found.append((total["loss"], total["top1"], *gradients))
    for plain, chunked in zip(*found, strict=True):
        torch.testing.assert_close(chunked, plain, atol=1e-4, rtol=1e-5)
    with torch.no_grad():  # evaluation: nothing to recompute
        torch.testing.assert_close(
            sums_in_chunks(sums, inputs, rows)["loss"], total["loss"].detach()
        )


@pytest.mark.parametrize("loss", LOSSES)
def test_chunks_of_nothing_still_reach_the_head(loss: str) -> None:
    """Bug: a rank without supervised positions has no gradient, and the others wait for ever."""
    hidden, head = torch.zeros(0, 8, requires_grad=True), torch.nn.Linear(8, 50)

    def sums(hidden: Tensor) -> dict[str, Tensor]:
        return {"loss": LOSSES[loss](head(hidden).detach(), head(hidden)).sum()}

    total = sums_in_chunks(sums, [hidden], 4)["loss"]
    total.backward()
    assert total == 0
    assert all(p.grad is not None and not p.grad.any() for p in (hidden, *head.parameters()))


def test_chunks_refuse_unequal_rows_and_are_computed_once() -> None:
    """Bug: chunks paired wrongly without an error; a chunk's logits computed again in backward."""
    with pytest.raises(ValueError, match="zip"):
        sums_in_chunks(lambda a, b: {"loss": a.sum()}, [torch.zeros(9, 1), torch.zeros(4, 1)], 4)
    begun, head = [], torch.nn.Linear(8, 50)

    def sums(x: Tensor) -> dict[str, Tensor]:
        begun.append(len(x))
        return {"loss": forward_kl(x, head(x[:, :8])).sum()}

    sums_in_chunks(sums, [torch.randn(10, 50)], 4)["loss"].backward()
    assert begun == [4, 4, 2]


def gradients(way: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Those of a head, a bias used twice, and states, for a loss that is scaled and needs the head elsewhere as well,
    with rows of the head's weight selected outside the chunks."""
    torch.manual_seed(0)
    states = torch.randn(20, 8, requires_grad=True)
    head = torch.nn.Linear(8, 50)
    other = torch.nn.Parameter(torch.randn(15))
    kept, teacher = torch.randperm(50)[:15], torch.randn(20, 15)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        rows = head.weight.index_select(0, kept)

        def sums(teacher: Tensor, states: Tensor, given: Tensor = rows) -> dict[str, Tensor]:
            q_logits = states @ given.T + other + head(states)[:, :15]
            return {"loss": forward_kl(teacher, q_logits + other).sum()}

        inputs = [teacher, states * 1.5]
        if way == "one call":
            loss = sums(*inputs)["loss"]
        else:
            shared = [rows] if way == "chunks" else []
            loss = sums_in_chunks(sums, inputs, 3, shared)["loss"]
        total = 0.25 * loss + head(states).pow(2).mean()
    return list(torch.autograd.grad(total, [states, other, *head.parameters()]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_pass_through_what_the_chunks_share(dtype: torch.dtype) -> None:
    """Bug: a gradient that is not scaled, is taken twice, or replaces the one from elsewhere; weights cast once by
    autocast and kept for all chunks."""
    tolerance = (
        {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.1, "rtol": 0.03}
    )
    for plain, chunked in zip(
        gradients("one call", dtype), gradients("chunks", dtype), strict=True
    ):
        torch.testing.assert_close(chunked, plain, **tolerance)


def test_a_tensor_that_is_shared_in_silence_is_an_error() -> None:
    """Planted: rows selected outside the chunks that are not named lose no gradient without a word."""
    with pytest.raises(RuntimeError, match="second time"):
        gradients("chunks, not named")


def test_backward_runs_once() -> None:
    """Bug: gradients scaled in place by the first backward are scaled again by the second."""
    weight = torch.randn(8, 5, requires_grad=True)
    loss = sums_in_chunks(lambda x: {"loss": (x @ weight).sum()}, [torch.randn(9, 8)], 4)["loss"]
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="gradients"):
        loss.backward()


def test_rows_for() -> None:
    """Bug: a vocabulary larger than the budget gives 0 rows, which is no progress."""
    assert max_chunk_rows(151_936) == 441
    assert max_chunk_rows(1000, 8000) == 2
    assert max_chunk_rows(10**9) == 1
