"""The last sum of a layer, computed in the next region: the same numbers, and no sum at the end of a region."""

import operator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager

from decode.model.gpu import region_sums
from decode.model.gpu.region_sums import INVOKE, hand_on_terms
from decode.model.hidden_states import HiddenStateSpec
from decode.model.runner import ModelRunner
from tests.tiny import tiny_model

LAYERS = 4
TOKENS, BASE = torch.tensor([[3, 5, 7], [2, 4, 6]]), torch.tensor([0, 0])


def compiled_step(arch: str) -> tuple[list[Tensor], list[Tensor], list[int]]:
    """Logits and captured states of a step, eager and compiled, and how many results each call of a region has."""
    kinds = (
        {"layer_types": ["sliding_attention", "full_attention"] * 2}
        if arch == "gemma3_text"
        else {}
    )
    runner = ModelRunner(tiny_model(arch, num_hidden_layers=LAYERS, **kinds))
    runner.capture_hidden_states(HiddenStateSpec((0, 1, 2)))
    results: list[int] = []

    def backend(module: Any, inputs: Any) -> Any:
        hand_on_terms(module.graph)
        module.recompile()
        for call in module.graph.find_nodes(op="call_function", target=INVOKE):
            results.append(len({user.args[1] for user in call.users}))
            region = module.get_submodule(call.args[0].target)
            [given] = region.graph.output_node().args
            assert len(given) == 2
        return aot_eager(module, inputs)

    def step() -> list[Tensor]:
        return [runner.step(TOKENS, BASE), runner.features]

    torch._dynamo.reset()
    with torch.inference_mode():
        runner.allocate(2, 16)
        eager = [x.clone() for x in step()]
        found = torch.compile(step, backend=backend, fullgraph=True, dynamic=False)()
    return eager, found, results


@pytest.mark.parametrize("arch", ["llama", pytest.param("gemma3_text", marks=pytest.mark.slow)])
def test_states_and_logits_stay(arch: str) -> None:
    """Catches a term that is lost, added twice or given to the wrong argument, and states that hooks read."""
    eager, found, results = compiled_step(arch)
    assert results == [2] * LAYERS
    assert all(map(torch.equal, found, eager))


def test_a_lost_term_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: regions take the first term alone."""
    take_two = region_sums.take_two

    def first_alone(graph: Any, at: int) -> None:
        take_two(graph, at)
        given = graph.find_nodes(op="placeholder")[at]
        [total] = [user for user in given.users if user.target is operator.add]
        total.replace_all_uses_with(given)

    monkeypatch.setattr(region_sums, "take_two", first_alone)
    eager, found, _ = compiled_step("llama")
    assert not torch.allclose(found[0], eager[0])
