"""Layers that read the same tensor are one product: the same outputs, never of other inputs or of old weights."""

import copy
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

from decode.model import linear
from decode.model.inductor_linear import MergeEqualNodes, register_lowerings
from decode.model.linear import (
    PackedLinear,
    begin_request,
    pack_for_compiled_code,
    patch_linear_layers,
)

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="oneDNN is not part of this torch"
)
NAMES = ("q_proj", "k_proj", "v_proj")
ROWS = 5
MERGED = {"post_grad_custom_pre_pass": MergeEqualNodes()}


class Projections(nn.Module):
    """Three layers of the names of an attention's projections, of which the second alone has a bias."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.q_proj = nn.Linear(24, 16, bias=False, dtype=dtype)
        self.k_proj = nn.Linear(24, 8, dtype=dtype)
        self.v_proj = nn.Linear(24, 8, bias=False, dtype=dtype)

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        return [self.get_submodule(name)(x) for name, x in zip(NAMES, inputs, strict=True)]


def patched(dtype: torch.dtype = torch.float32) -> tuple[Projections, Projections]:
    """(usual layers, the same ones patched)."""
    torch.manual_seed(0)
    usual = Projections(dtype)
    module = copy.deepcopy(usual)
    patch_linear_layers(module)
    return usual, module


def fused_of(module: nn.Module) -> list[bool]:
    layers = [module.get_submodule(name) for name in NAMES]
    assert all(isinstance(layer, PackedLinear) for layer in layers)
    return [layer.fused is not None and layer.fused.is_shared for layer in layers]  # type: ignore[union-attr]


def same(got: list[Tensor], want: list[Tensor], dtype: torch.dtype = torch.float32) -> bool:
    close = 1e-6 if dtype == torch.float32 else 0.03
    return all(torch.allclose(a, b, atol=close) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("rows", [1, 2, ROWS, 70])
def test_outputs_are_those_of_the_layers(rows: int, dtype: torch.dtype) -> None:
    """Catches outputs of another layer, a bias that one layer lacks, and a product of the step before."""
    usual, module = patched(dtype)
    with torch.inference_mode():
        for _ in range(2):
            x = torch.randn(1, rows, 24).to(dtype)
            assert same(module(x, x, x), usual(x, x, x), dtype)
    assert fused_of(module) == [True] * 3
    layer = module.q_proj
    assert isinstance(layer, PackedLinear)
    alone = not layer.can_pack() or (rows <= 2 and dtype == torch.float32)
    assert layer.fused is not None
    assert (layer.packed is None) == alone
    copies = {id(module.get_submodule(name).packed) for name in NAMES}
    assert len(copies) == 1, "one copy of the weights of all three"
    assert layer.fused.held is None, "inputs and outputs are kept no longer than they are needed"


def negated(module: nn.Module) -> Callable[..., tuple[Tensor, ...]]:
    """Outputs that are no views of a product: those of one are not merged where they are results."""
    return lambda *inputs: tuple(-out for out in module(*inputs))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("rows", [ROWS, 70])
def test_compiled_code_has_one_product_of_layers_that_share_it(
    rows: int, dtype: torch.dtype
) -> None:
    """Catches a product for each of the layers, one that is shared by layers of different inputs, and outputs or
    biases of another layer."""
    if dtype == torch.bfloat16 and not linear.PACKED_BFLOAT16:
        pytest.skip("oneDNN has no products of bf16 numbers on this CPU")
    usual, module = patched(dtype)
    x, other = (torch.randn(1, rows, 24).to(dtype) for _ in range(2))
    register_lowerings()
    begin_request()
    pack_for_compiled_code()
    for inputs, products in (((x, x, x), 1), ((x, x, other), 2)):
        torch._dynamo.reset()
        with torch.inference_mode():
            compiled = torch.compile(negated(module), options=MERGED)
            got, code = run_and_get_code(compiled, *inputs)
            assert same(got, negated(usual)(*inputs), dtype)
        calls = re.findall(r"linear_pointwise\S*\(|^ +cpp\w*blocked_linear\w*\(", code[0], re.M)
        assert len(calls) == products, code[0]


@pytest.mark.parametrize("other", [1, 2])
def test_layers_of_different_inputs_multiply_by_themselves(other: int) -> None:
    """Catches a layer that is given the output for another layer's input, as in cross-attention."""
    usual, module = patched()
    with torch.inference_mode():
        for _ in range(2):
            inputs = [torch.randn(1, ROWS, 24)] * 3
            inputs[other] = torch.randn(1, ROWS, 24)
            assert same(module(*inputs), usual(*inputs))
    assert fused_of(module) == [False] * 3


def test_a_layer_that_is_called_first_multiplies_by_itself() -> None:
    """Catches a layer that takes the output of a product that was never computed, or of the step before."""
    usual, module = patched()
    with torch.inference_mode():
        for _ in range(2):
            x = torch.randn(1, ROWS, 24)
            assert torch.allclose(module.k_proj(x), usual.k_proj(x), atol=1e-6)
            assert torch.allclose(module.q_proj(x), usual.q_proj(x), atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("compiled", [False, True])
def test_weights_of_any_layer_that_change_are_packed_again(name: str, compiled: bool) -> None:
    """Catches a product with an old weight: the first layer computes it and does not own the others' weights. Also
    where compiled code has made its own copies in between."""
    usual, module = patched()
    x = torch.randn(1, ROWS, 24)
    with torch.inference_mode():
        module(x, x, x)
    for each in (usual, module):
        each.get_submodule(name).weight.data.mul_(-2)
    begin_request()
    if compiled:
        pack_for_compiled_code()
    with torch.inference_mode():
        assert same(module(x, x, x), usual(x, x, x))


def test_a_copy_multiplies_by_its_own_weights() -> None:
    """Catches a copied model whose layers share the product of the old one."""
    usual, module = patched()
    x = torch.randn(1, ROWS, 24)
    with torch.inference_mode():
        module(x, x, x)
    other = copy.deepcopy(module)
    other.k_proj.weight.data.zero_()
    with torch.inference_mode():
        assert torch.allclose(other(x, x, x)[1], usual.k_proj.bias.expand(1, ROWS, -1))
        assert same(module(x, x, x), usual(x, x, x))


def test_layers_of_two_dtypes_are_not_fused() -> None:
    """Catches weights of one dtype that are packed as another."""
    module = Projections()
    module.k_proj.to(torch.bfloat16)
    patch_linear_layers(module)
    assert fused_of(module) == [False] * 3
