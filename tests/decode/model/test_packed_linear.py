"""Packed linear layers: the same products, only while decoding, never of old weights, and in every decoder."""

import copy
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from decode.model import linear
from decode.model.linear import PackedLinear, begin_request, patch_linear_layers
from decode.model.runner import ModelRunner
from tests.tiny import tiny_model

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="oneDNN is not part of this torch"
)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (2,), (1, 5), (3, 4), (70,)])
def test_products_are_those_of_a_linear_layer(
    shape: tuple[int, ...], bias: bool, dtype: torch.dtype
) -> None:
    """Catches a lost bias, rows in another order, and a shape that the next layer cannot view."""
    torch.manual_seed(0)
    usual = torch.nn.Linear(24, 12, bias=bias, dtype=dtype)
    layer = PackedLinear(usual)
    x = torch.randn(*shape, 24).transpose(0, -1).contiguous().transpose(0, -1)  # rows lie apart
    with torch.inference_mode():
        got = layer(x.to(dtype))
    few_rows = x.numel() <= 2 * 24 and dtype == torch.float32
    assert (layer.packed is None) == (few_rows or not layer.can_pack())
    assert got.is_contiguous()
    assert got.shape == (*shape, 12)
    assert got.dtype == dtype
    wanted = torch.nn.functional.linear(
        x, usual.weight.float(), None if usual.bias is None else usual.bias.float()
    )
    assert torch.allclose(got.float(), wanted, atol=1e-6 if dtype == torch.float32 else 0.03)


@pytest.mark.parametrize("kind", ["parts", "weight", "packed"])
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_few_rows_are_the_same_by_every_product(
    kind: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a lost bias, rows in another order, and a product that nobody asked for, by each way that may be fastest
    on a machine."""
    monkeypatch.setattr(linear, "product_of_few_rows", lambda threads: kind)
    torch.manual_seed(0)
    usual = torch.nn.Linear(512, 513, bias=True)  # of more than TIMED_FROM bytes
    layer, x = PackedLinear(usual), torch.randn(rows, 512)
    with torch.inference_mode():
        got = layer(x)
        assert torch.allclose(got, usual(x), atol=1e-5)
    assert (layer.packed is None) == (kind != "packed" and rows < 3)
    assert (layer.parts is None) == (kind != "parts")


@pytest.mark.parametrize("fast", ["parts", "weight", "packed"])
def test_the_fastest_product_is_taken(fast: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches plain decoding that takes twice as long as it must, by parts on one CPU, by packed weights on another."""

    def late(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*args: Any) -> Tensor:
            time.sleep(0.1)
            return product(*args)

        return run

    places = {
        "parts": (linear, "multiply_parts"),
        "weight": (linear.F, "linear"),
        "packed": (torch.ops.mkldnn, "_linear_pointwise"),
    }
    for name in {*places} - {fast}:
        monkeypatch.setattr(*places[name], late(getattr(*places[name])))
    linear.product_of_few_rows.cache_clear()
    try:
        assert linear.product_of_few_rows(1) == fast  # the only one that is not late
    finally:
        linear.product_of_few_rows.cache_clear()


def test_bf16_is_not_packed_where_the_cpu_has_no_products_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches an error of oneDNN in the first request of a bf16 model on a CPU with AVX2 alone."""
    monkeypatch.setattr(linear, "PACKED_BFLOAT16", False)
    usual = torch.nn.Linear(24, 12, dtype=torch.bfloat16)
    layer = PackedLinear(usual)
    x = torch.randn(5, 24, dtype=torch.bfloat16)
    with torch.inference_mode():
        assert torch.equal(layer(x), usual(x))
    linear.pack_for_compiled_code()
    assert layer.packed is None


def train(layer: torch.nn.Linear, new: Tensor) -> None:
    layer.weight.grad = layer.weight.detach() - new
    torch.optim.SGD(layer.parameters(), lr=1.0).step()


CHANGES: dict[str, Callable[[torch.nn.Linear, Tensor], Any]] = {
    "written": lambda layer, new: layer.weight.detach().copy_(new),
    "data written": lambda layer, new: layer.weight.data.copy_(new),
    "data replaced": lambda layer, new: setattr(layer.weight, "data", new),
    "parameter replaced": lambda layer, new: setattr(layer, "weight", torch.nn.Parameter(new)),
    "loaded": lambda layer, new: layer.load_state_dict({"weight": new}),
    "trained": train,
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_are_packed_again(change: str) -> None:
    """Catches a draft that is trained on and decodes with the weights of its first measurement."""
    torch.manual_seed(0)
    layer = PackedLinear(torch.nn.Linear(24, 12, bias=False))
    x, new = torch.randn(3, 24), torch.randn(12, 24)
    with torch.inference_mode():
        layer(x)
    CHANGES[change](layer, new)
    begin_request()
    with torch.inference_mode():
        assert torch.allclose(layer(x), x @ new.t(), atol=1e-5)
        first = layer.packed
        begin_request()
        layer(x)
    assert layer.packed is first, "unchanged weights are packed once"


def swap(layer: torch.nn.Linear) -> None:
    layer.weight.data[[0, 1]] = layer.weight.data[[1, 0]]


PARTS: dict[str, Callable[[torch.nn.Linear], Any]] = {
    "a row": lambda layer: layer.weight.data[3].fill_(0.9),
    "a column": lambda layer: layer.weight.data[:, 5].fill_(0.9),
    "one number": lambda layer: layer.weight.data[7, 11].add_(1.0),
    "two rows exchanged": swap,
    "a mask": lambda layer: layer.weight.data.masked_fill_(layer.weight.data.abs() < 0.01, 1.0),
    "its bias": lambda layer: layer.bias.data[2].add_(1.0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("part", PARTS)
def test_parts_that_are_set_through_data_are_seen(part: str, dtype: torch.dtype) -> None:
    """Catches an ablation that decodes on with old weights: writes through `.data` raise no version, and none of them
    need hit the numbers that a sample would compare."""
    torch.manual_seed(0)
    layer = PackedLinear(torch.nn.Linear(300, 40).to(dtype))
    x = torch.randn(5, 300, dtype=dtype)
    with torch.inference_mode():
        layer(x)
    before = torch.nn.functional.linear(x, layer.weight, layer.bias)
    PARTS[part](layer)
    begin_request()
    with torch.inference_mode():
        got = layer(x)
    right = torch.nn.functional.linear(x, layer.weight, layer.bias)
    assert (right - before).abs().max() > 0.05
    torch.testing.assert_close(got, right)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_every_part_of_a_weight_is_hashed(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a number that lies in no thread's part, where threads do not divide the weight, and rows that exchange
    their places."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(linear, "THREADS_FROM", 64)
    weight = torch.arange(11 * 13, dtype=torch.float32).view(11, 13)
    before = linear.digest(weight)
    assert len(before) == threads
    assert linear.digest(weight.clone()) == before
    for place in range(weight.numel()):
        changed = weight.clone()
        changed.view(-1)[place] += 1
        assert linear.digest(changed) != before
    assert linear.digest(weight.flip(0)) != before


def test_a_wider_dtype_takes_the_usual_way() -> None:
    """Catches float64, in which ties are judged and which oneDNN lacks."""
    layer = PackedLinear(torch.nn.Linear(24, 12).double())
    x = torch.randn(2, 24, dtype=torch.float64)
    with torch.inference_mode():
        assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))


def test_every_linear_layer_of_a_decoder_is_one() -> None:
    """Catches layers left out, and one that decodes but never takes the other way."""
    runner = ModelRunner(tiny_model("llama"))
    layers = [m for m in runner.model.modules() if isinstance(m, torch.nn.Linear)]
    runner.allocate(2, 16)
    tokens, base = torch.tensor([[3, 1, 4], [1, 5, 9]]), torch.tensor([0, 0])
    with torch.no_grad():
        usual = runner.step(tokens, base)
    with torch.inference_mode():
        fast = runner.step(tokens, base)
    assert all(isinstance(m, PackedLinear) for m in layers)
    assert all(m.packed is not None for m in layers)
    assert torch.allclose(fast, usual, atol=1e-5)


def test_training_does_not_see_it() -> None:
    """Catches a run whose numbers depend on whether it decoded before: resumed would not equal straight."""
    torch.manual_seed(0)
    usual = torch.nn.Linear(64, 48)
    layer = PackedLinear(copy.deepcopy(usual))
    x = torch.randn(7, 64)
    with torch.inference_mode():
        layer(x)
    for net in (usual, layer):
        net(x).square().sum().backward()
    assert torch.equal(usual(x), layer(x))
    assert torch.equal(usual.weight.grad, layer.weight.grad)  # type: ignore[arg-type]


def test_layers_that_are_sharded_for_training_are_left_alone(tmp_path: Path) -> None:
    """Catches compiled decoding that fails because another model of this process is in training on several devices."""
    file = f"file://{tmp_path / 'group'}"
    torch.distributed.init_process_group("gloo", init_method=file, rank=0, world_size=1)
    try:
        layer = PackedLinear(torch.nn.Linear(64, 48))
        fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
        linear.pack_for_compiled_code()
        assert layer.packed is None
    finally:
        torch.distributed.destroy_process_group()


def test_a_patched_layer_takes_the_place_of_the_old_one() -> None:
    """Catches copied weights, a tie that is cut, names or hooks that are lost: whoever holds the old layer sees it."""
    model = tiny_model("gpt2")  # LM head tied to the embedding
    head = model.lm_head
    calls: list[int] = []
    head.register_forward_pre_hook(lambda module, args: calls.append(1))
    names = [name for name, _ in model.named_parameters()]
    patch_linear_layers(model)
    with torch.inference_mode():
        model.eval()(torch.tensor([[1, 2]]))
    assert [name for name, _ in model.named_parameters()] == names
    assert names == list(dict.fromkeys(k for k in model.state_dict() if k in names))
    assert isinstance(model.lm_head, PackedLinear)
    assert model.lm_head.weight is model.get_input_embeddings().weight is head.weight
    head.weight = torch.nn.Parameter(torch.zeros_like(head.weight))  # as wrappers swap weights
    assert model.lm_head.weight is head.weight
    assert calls == [1]


@pytest.mark.parametrize("free", [1, 10**12])
def test_copies_need_room(free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a target that fits into memory once and not twice."""
    memory = namedtuple("memory", "available")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory(free))
    model = tiny_model("llama")
    patch_linear_layers(model)
    kinds = {type(m) for m in model.modules() if isinstance(m, torch.nn.Linear)}
    assert kinds == ({PackedLinear} if free > 1 else {torch.nn.Linear})
