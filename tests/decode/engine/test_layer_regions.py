"""Compiled code holds one layer of each kind, however many layers a model has."""

from typing import Any

import pytest
import torch
from torch._higher_order_ops.invoke_subgraph import invoke_subgraph

from decode.engine import compile as engine_compile
from decode.engine import round as rounds
from decode.engine.engine import decode
from tests.decode.engine.test_engine import texts
from tests.params import slow_except
from tests.tiny import tiny_model, tiny_prompts, tiny_target


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
