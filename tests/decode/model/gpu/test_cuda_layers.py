"""Layers in fewer kernels: the same numbers as the layers that they replace, and the operations that are left."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from decode.model import linear
from decode.model.gpu import cuda_layers
from decode.model.gpu.cuda_layers import JoinedLinear, find_rounding, join, rotates_as_llama
from decode.model.linear import begin_request, layers_of_one_input
from tests.decode.model.test_fused_products import NAMES, Projections
from tests.fake_gpu import NOT_HERE
from tests.gpu_counts import per_layer

MOST = {"llama": 13, "qwen3": 15, "gemma3_text": 17, "gpt_oss": 37}
"""Operations of a layer in a captured round: 40, 56, 84 and 77 with torch's kernels alone."""


def joined(dtype: torch.dtype = torch.float32) -> tuple[Projections, Projections]:
    """(usual layers, the same ones as one product)."""
    torch.manual_seed(0)
    usual = Projections(dtype)
    one = copy.deepcopy(usual)
    for layers in layers_of_one_input(one, nn.Linear):
        join(one, layers)
    return usual, one


@torch.inference_mode()
def outputs(layers: Projections, x: Tensor) -> list[Tensor]:
    begin_request()
    return layers(x, x, x)


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_a_joined_product_gives_each_layers_outputs(rows: int) -> None:
    """Catches outputs of another layer, a bias lost or given to a layer without one."""
    usual, one = joined()
    x = torch.randn(2, rows, 24)
    # Some CPUs' products of other widths have other last bits.
    torch.testing.assert_close(outputs(one, x), outputs(usual, x), rtol=1e-6, atol=1e-6)


def test_joined_layers_are_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches layers that each multiply by the whole weight."""
    _, one = joined()
    calls = []
    product = JoinedLinear.product
    monkeypatch.setattr(
        JoinedLinear, "product", lambda self, x: (calls.append(self), product(self, x))[1]
    )
    outputs(one, torch.randn(1, 3, 24))
    assert len(calls) == 1


def test_weights_are_there_once_and_stay_those_of_the_product() -> None:
    """Catches a second copy of the weights, an old weight in the product, and state dicts that have changed."""
    usual, one = joined()
    layers: list[Any] = [one.get_submodule(name) for name in NAMES]
    assert len({layer.weight.untyped_storage().data_ptr() for layer in layers}) == 1
    assert one.state_dict().keys() == usual.state_dict().keys()
    x = torch.randn(1, 3, 24)
    with torch.no_grad():
        for module in (usual, one):
            module.k_proj.weight.mul_(2)
            module.k_proj.bias.add_(1)
    assert all(map(torch.equal, outputs(one, x), outputs(usual, x)))


def test_a_replaced_weight_is_used() -> None:
    """Catches products with the weights of before: after `to`, and where a parameter is another one."""
    usual, one = joined()
    x = torch.randn(1, 3, 24)
    outputs(one, x)
    new = nn.Parameter(torch.randn(8, 24))
    usual.v_proj.weight = one.v_proj.weight = new
    assert all(map(torch.allclose, outputs(one, x), outputs(usual, x)))
    wide = x.double()
    assert all(map(torch.allclose, outputs(one.double(), wide), outputs(usual.double(), wide)))


def test_a_copy_has_weights_of_its_own() -> None:
    """Catches a copy that multiplies by the weights of its original, or keeps them in memory."""
    usual, one = joined()
    x = torch.randn(1, 3, 24)
    copied = copy.deepcopy(one)
    with torch.no_grad():
        copied.q_proj.weight.zero_()
    assert all(map(torch.equal, outputs(one, x), outputs(usual, x)))
    assert not outputs(copied, x)[0].any()
    assert copied.get_submodule("q_proj").whole is None


def test_layers_learn_as_before() -> None:
    """Catches gradients that do not reach the parameters of joined layers."""
    usual, one = joined()
    x = torch.randn(1, 3, 24)
    for layers in (usual, one):
        torch.stack([y.square().sum() for y in layers(x, x, x)]).sum().backward()
    assert all(
        torch.equal(a.grad, b.grad)
        for a, b in zip(usual.parameters(), one.parameters(), strict=True)
        if a.grad is not None and b.grad is not None
    )
    assert all(p.grad is not None for p in one.parameters())


class CenteredNorm(LlamaRMSNorm):
    """Takes the mean away, as a layer norm does."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states - hidden_states.mean(-1, keepdim=True))


@pytest.mark.parametrize(
    ("kind", "eps", "rounding"),
    [
        (LlamaRMSNorm, "variance_epsilon", 0),
        (GptOssRMSNorm, "variance_epsilon", 1),
        (Gemma3RMSNorm, "eps", 2),
        (CenteredNorm, "variance_epsilon", None),
        (nn.LayerNorm, "eps", None),
    ],
)
def test_norms_are_told_by_what_they_compute(kind: Any, eps: str, rounding: int | None) -> None:
    """Catches a norm that is replaced by one that rounds elsewhere, or that is none of ours."""
    assert find_rounding(kind, eps, torch.bfloat16) == rounding


def test_rotations_are_told_by_what_they_compute() -> None:
    """Catches RoPE of pairs of neighbours taken for RoPE of halves; angles may be given for half of the width."""

    def neighbours(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        def turn(x: Tensor) -> Tensor:
            turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
            return x * cos[:, None] + turned * sin[:, None]

        return turn(q), turn(k)

    given = modeling_llama.apply_rotary_pos_emb, modeling_gpt_oss.apply_rotary_pos_emb
    assert all(rotates_as_llama(getattr(one, "__wrapped__", one)) for one in given)
    assert not rotates_as_llama(neighbours)


@pytest.mark.skipif(NOT_HERE is not None, reason=str(NOT_HERE))
@pytest.mark.parametrize(
    "arch", ["qwen3", *(pytest.param(x, marks=pytest.mark.slow) for x in MOST if x != "qwen3")]
)
def test_a_layer_is_few_operations(arch: str) -> None:
    """Catches a norm, RoPE, a write or a product that is several operations again."""
    layer, _ = per_layer(arch, None, 0, True)
    assert layer.total() <= MOST[arch], layer


@pytest.mark.slow
@pytest.mark.skipif(NOT_HERE is not None, reason=str(NOT_HERE))
def test_norms_of_many_operations_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: norms stay as they are in transformers, and products are not joined."""
    monkeypatch.setattr(cuda_layers, "find_rounding", lambda *args: None)
    monkeypatch.setattr(linear, "SAME_INPUT", ())
    layer, _ = per_layer("qwen3", None, 0, True)
    assert layer.total() == MOST["qwen3"] + 4 * 7 + 3
