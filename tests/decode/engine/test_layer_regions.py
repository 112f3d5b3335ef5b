"""Compiled code holds one layer of each kind, which is traced once, however many layers a model has."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor
from torch._dynamo.utils import compilation_time_metrics
from torch._higher_order_ops.invoke_subgraph import invoke_subgraph

from decode.engine import compiled as engine_compile
from decode.engine import round as rounds
from decode.engine.engine import decode
from decode.model.regions import CAN_SKIP_TRACES, describe_layer
from tests.decode.engine.test_engine import texts
from tests.params import slow_except
from tests.tiny import ARCHITECTURES, tiny_model, tiny_prompts, tiny_target


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For each graph that dynamo makes how many layers' code is not generated, being another layer's.

    No code is generated here. Dynamo inlines a region that is called once.
    """
    made: list[int] = []

    def backend(module: Any, inputs: Any) -> Any:
        calls = [node for node in module.graph.nodes if node.target is invoke_subgraph]
        made.append(len(calls) - len({node.args[0].target for node in calls}))
        return module.forward

    def compile_traced(function: Any, device_type: str) -> Any:
        options = {"guard_filter_fn": engine_compile.filter_guards}
        return torch.compile(
            function, fullgraph=True, dynamic=False, backend=backend, options=options
        )

    torch._dynamo.reset()
    monkeypatch.setattr(rounds, "compile_function", compile_traced)
    return made


def compiled_layers(model: Any, saved: list[int]) -> int:
    """The layers of `model` that one step generates code for, after a comparison of its text with the eager one."""
    target, prompts = tiny_target(model), tiny_prompts(5)
    want = decode(target, None, prompts, max_new_tokens=4)
    got = decode(target, None, prompts, max_new_tokens=4, mode="compiled")
    assert texts(got) == texts(want)
    assert len(saved) == 1
    return model.config.num_hidden_layers - saved[0]


KINDS = {
    "llama": 1,
    "gemma3_text": 2,
    "gpt_oss": 2,
    "gpt2": 1,
    "deepseek_v3": 2,
    "smollm3": 2,
    "gemma4_text": 3,
}
"""Different layers among the three of each model."""


@pytest.mark.parametrize("family", slow_except(list(KINDS), ["gemma3_text"]))
def test_one_region_for_each_kind_of_layer(family: str, saved: list[int]) -> None:
    """Catches a layer whose window or experts are those of another one, and layers that are compiled one by one."""
    assert compiled_layers(tiny_model(family), saved) == KINDS[family]


OTHERS = [family for family in ARCHITECTURES if family not in KINDS]


@pytest.mark.parametrize("family", slow_except(OTHERS, ["qwen3"]))
def test_every_family_says_the_same_through_regions(family: str, saved: list[int]) -> None:
    """Catches a trace of one layer that runs for another one with which it does not agree."""
    if family == "phi3+longrope" and Version(transformers.__version__) < Version("5.23"):
        pytest.skip("older versions of transformers branch on the largest position")
    model = tiny_model(family)
    assert 1 <= compiled_layers(model, saved) <= model.config.num_hidden_layers


def test_thirty_layers_are_one_region(saved: list[int]) -> None:
    """Catches compilation that takes longer with each layer."""
    assert compiled_layers(tiny_model("llama", num_hidden_layers=30), saved) == 1


def test_a_number_of_its_own_in_each_layer_is_found(saved: list[int]) -> None:
    """Planted: each layer computes with its own index, which becomes a constant of its code."""
    model = tiny_model("llama", num_hidden_layers=4)
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(
            lambda mlp, args, out, index=layer.self_attn.layer_idx: out * (1 + index / 8)
        )
    assert compiled_layers(model, saved) == 4


def scale_by_index(module: Any, args: Any, out: Any) -> Any:
    """A hook for all layers, which are the same but for the index that it reads."""
    return out[0] * (1 + module.layer_idx / 8), *out[1:]


class ScaledByIndex(torch.nn.Module):
    """Computes with its index in its own forward."""

    def __init__(self, inner: torch.nn.Module, layer_idx: int):
        super().__init__()
        self.inner, self.layer_idx = inner, layer_idx

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * (1 + self.layer_idx / 8)


def hook_on_attention(layer: Any) -> None:
    layer.self_attn.register_forward_hook(scale_by_index)


def copied_hook(layer: Any) -> None:
    """As deep copies of a layer have it: under the same number."""
    layer.self_attn._forward_hooks[0] = scale_by_index


def index_in_mlp(layer: Any) -> None:
    layer.mlp = ScaledByIndex(layer.mlp, layer.self_attn.layer_idx)


def forward_of_mlp(layer: Any) -> None:
    forward, factor = layer.mlp.forward, 1 + layer.self_attn.layer_idx / 8
    layer.mlp.forward = lambda x: forward(x) * factor


def number_in_attention(layer: Any) -> None:
    layer.self_attn.scaling *= 1 + layer.self_attn.layer_idx / 8


PLANTED = [hook_on_attention, copied_hook, index_in_mlp, forward_of_mlp, number_in_attention]


@pytest.mark.parametrize("plant", PLANTED)
def test_an_index_that_changes_what_layers_compute_is_found(
    plant: Callable[[Any], None], saved: list[int]
) -> None:
    """Planted: layers whose weights alone would not tell them apart; one trace must not serve all."""
    model = tiny_model("llama", num_hidden_layers=4)
    for layer in model.model.layers:
        plant(layer)
    assert compiled_layers(model, saved) == 4


def test_weights_that_layers_share_are_not_mixed_up(saved: list[int]) -> None:
    """Planted: of three layers that are alike the first has the norm of the layer before, which is another; the others
    have their own, which a copy of the first one's trace would not read."""
    model = tiny_model("llama", num_hidden_layers=4)
    number_in_attention(model.model.layers[1])
    layers = [model.model.layers[number] for number in (1, 0, 2, 3)]
    with torch.no_grad():
        for number, layer in enumerate(layers):
            layer.input_layernorm.weight *= 1 - 2 * number
            layer.self_attn.layer_idx = number
    layers[1].input_layernorm.weight = layers[0].input_layernorm.weight
    model.model.layers = torch.nn.ModuleList(layers)
    compiled_layers(model, saved)


def test_a_norm_that_is_another_one_of_its_layer_is_found(saved: list[int]) -> None:
    """Planted: the first layer has one weight for two norms, and so one input less than the others."""
    model = tiny_model("llama", num_hidden_layers=4)
    tie_norms(model.model.layers[0])
    assert compiled_layers(model, saved) == 2


def tie_norms(layer: Any) -> None:
    layer.input_layernorm.weight = layer.post_attention_layernorm.weight


@pytest.mark.parametrize("plant", [*PLANTED, tie_norms])
def test_layers_that_differ_are_described_differently(plant: Callable[[Any], None]) -> None:
    layers = tiny_target(tiny_model("llama")).runner.model.model.layers
    same = [describe_layer(layer, index) for index, layer in enumerate(layers)]
    assert same[0] == same[1] == same[2]
    for layer in layers[1:]:
        plant(layer)
    one, other, another = [describe_layer(layer, index) for index, layer in enumerate(layers)]
    assert one == same[0] != other
    assert (other == another) == (plant is tie_norms)


@pytest.mark.skipif(not CAN_SKIP_TRACES, reason="torch traces every layer before 2.13")
@pytest.mark.parametrize(
    "family", slow_except(["llama", "gemma3_text", "gemma", "olmo2"], ["llama"])
)
def test_layers_that_are_alike_are_traced_once(family: str, saved: list[int]) -> None:
    """Catches a process that takes longer with each layer to begin from compiled code on disk."""
    compilation_time_metrics.clear()
    kinds = KINDS.get(family, 1)
    types = {"layer_types": ["sliding_attention", "full_attention"] * 3} if kinds == 2 else {}
    assert compiled_layers(tiny_model(family, num_hidden_layers=6, **types), saved) == kinds
    assert len(compilation_time_metrics["invoke_subgraph_trace"]) == kinds
