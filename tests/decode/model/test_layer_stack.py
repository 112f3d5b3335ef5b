"""The layers of a model, and models of some of them."""

import pytest
import torch
from torch import nn

from decode.common.errors import UserError
from decode.model.layer_stack import layer_stack, layer_stack_name, with_layers
from tests.tiny import ARCHITECTURES, tiny_model


def test_two_candidates_are_refused() -> None:
    """Catches the first of two lists of equal length taken for the layers."""
    model = tiny_model("llama")
    model.other = nn.ModuleList(nn.Linear(1, 1) for _ in range(3))
    with pytest.raises(
        UserError, match="cannot tell which modules of this llama model .* 3 layers"
    ):
        layer_stack(model)


def test_lists_inside_a_layer_do_not_count() -> None:
    """Catches a mixture of as many experts as layers that is refused, or whose experts are cut."""
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.mlp.experts = nn.ModuleList(nn.Linear(1, 1) for _ in range(3))
    assert layer_stack_name(model) == "model.layers"
    shorter = with_layers(model, [0])
    assert len(shorter.model.layers) == 1
    assert len(shorter.model.layers[0].mlp.experts) == 3


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_model_of_some_layers_shares_the_rest(arch: str) -> None:
    """Catches a model that loses its own layers, weights that are copied, and layers in another order."""
    model = tiny_model(arch)
    before = list(layer_stack(model))
    stack_name, weights = layer_stack_name(model), {id(p) for p in model.parameters()}
    shorter = with_layers(model, [0, 2])
    assert list(layer_stack(model)) == before
    assert list(shorter.get_submodule(stack_name)) == [before[0], before[2]]
    assert {id(p) for p in shorter.parameters()} < weights
    assert shorter.get_output_embeddings() is model.get_output_embeddings()
    assert isinstance(shorter, torch.nn.Module)
    assert shorter.config is model.config
