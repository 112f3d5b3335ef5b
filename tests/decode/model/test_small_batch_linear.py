"""Linear layers for few rows: the same products, only while decoding, and in every decoder."""

import copy

import pytest
import torch

from decode.model import small_batch_linear
from decode.model.attention import forward_context
from decode.model.kv_cache import SlotMapping
from decode.model.runner import ModelRunner
from decode.model.small_batch_linear import MAX_ROWS, SmallBatchLinear
from tests.tiny import tiny_model

SLOTS = SlotMapping(1, 8, torch.device("cpu"))


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(
    "shape", [(), (1,), (1, 1), (2,), (1, 5), (3, 4), (MAX_ROWS,), (MAX_ROWS + 1,)]
)
def test_products_are_those_of_a_linear_layer(shape: tuple[int, ...], bias: bool) -> None:
    """Catches a lost bias, rows in another order, and a shape that the next layer cannot view."""
    torch.manual_seed(0)
    usual = torch.nn.Linear(24, 12, bias=bias)
    layer = SmallBatchLinear(usual)
    x = torch.randn(*shape, 24).transpose(0, -1).contiguous().transpose(0, -1)  # rows lie apart
    with forward_context(SLOTS), torch.inference_mode():
        got = layer(x)
    assert got.is_contiguous()
    assert got.shape == (*shape, 12)
    assert torch.allclose(got, usual(x), atol=1e-6)


def test_every_linear_layer_of_a_decoder_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches layers left out, and one that decodes but never takes the other way."""
    decoder = ModelRunner(tiny_model("llama"))
    kinds = {type(m) for m in decoder.model.modules() if isinstance(m, torch.nn.Linear)}
    assert kinds == {SmallBatchLinear}
    decoder.allocate(2, 16)
    tokens, base = torch.tensor([[3, 1, 4], [1, 5, 9]]), torch.tensor([0, 0])
    product, taken = torch.mm, []

    def counted(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        taken.append(a.shape)
        return product(a, b)

    monkeypatch.setattr(torch, "mm", counted)
    with torch.inference_mode():
        fast = decoder.step(tokens, base)
        layers = sum(isinstance(m, SmallBatchLinear) for m in decoder.model.modules())
        assert len(taken) == layers
        monkeypatch.setattr(small_batch_linear, "MAX_ROWS", 0)
        usual = decoder.step(tokens, base)
    assert torch.allclose(fast, usual, atol=1e-5)


def test_training_does_not_see_it() -> None:
    """Catches a run whose numbers depend on whether it decoded before: resumed would not equal straight."""
    torch.manual_seed(0)
    usual = torch.nn.Linear(64, 48)
    layer = SmallBatchLinear(copy.deepcopy(usual))
    x = torch.randn(7, 64)
    for net in (usual, layer):
        net(x).square().sum().backward()
    assert torch.equal(usual(x), layer(x))
    assert torch.equal(usual.weight.grad, layer.weight.grad)  # type: ignore[arg-type]


def test_a_patched_layer_takes_the_place_of_the_old_one() -> None:
    """Catches copied weights, a tie that is cut, names or hooks that are lost: whoever holds the old layer sees it."""
    model = tiny_model("gpt2")  # LM head tied to the embedding
    head = model.lm_head
    calls: list[int] = []
    head.register_forward_pre_hook(lambda module, args: calls.append(1))
    names = [name for name, _ in model.named_parameters()]
    small_batch_linear.patch_linear_layers(model)
    assert [name for name, _ in model.named_parameters()] == names
    assert isinstance(model.lm_head, SmallBatchLinear)
    assert model.lm_head.weight is model.get_input_embeddings().weight is head.weight
    head.weight = torch.nn.Parameter(torch.zeros_like(head.weight))  # as wrappers swap weights
    assert model.lm_head.weight is head.weight
    model.eval()(torch.tensor([[1, 2]]))
    assert calls == [1]


def test_half_precision_keeps_its_own() -> None:
    """Catches bf16 weights, whose few rows the library does well, being sent the other way."""
    model = tiny_model("llama").bfloat16()
    small_batch_linear.patch_linear_layers(model)
    assert SmallBatchLinear not in {type(m) for m in model.modules()}
