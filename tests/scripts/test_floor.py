"""scripts/lab/floor.py: kernels multiply what the decoder multiplies, and shares come from the right floors."""

import json

import pytest
import torch
from torch import nn

from decode.common.errors import UserError
from decode.model.quantized.int4 import Int4Linear
from decode.model.quantized.vnni import ZERO_POINT, is_available
from decode.model.quantized.w8a8 import W8A8Linear
from eval.settings.evaluation import Task
from scripts.lab import floor, floor_work
from scripts.lab.settings import FloorConfig
from tests.tiny import tiny_model


@pytest.mark.parametrize("rows", [1, 3, 32])
@pytest.mark.parametrize("name", ["linear", "packed"])
@torch.inference_mode()
def test_every_kernel_computes_the_layer(name: str, rows: int) -> None:
    """Catches a kernel that is fast because it computes something else."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 96, bias=False)
    x = torch.randn(rows, 64)
    wanted = x @ layer.weight.T
    found = floor_work.kernels(layer)[name](layer)(x)
    assert found.shape == (rows, 96)
    assert (found - wanted).norm() / wanted.norm() < 1e-5


@pytest.mark.skipif(not is_available(), reason="this CPU has no products of eight bits")
@torch.inference_mode()
def test_whole_numbers_are_multiplied_by_the_layer() -> None:
    """Catches another zero point, and bytes of float weights."""
    layer = W8A8Linear.from_weight(torch.randn(96, 64), None)
    multiply = floor_work.kernels(layer)["few bits"](layer)
    assert not multiply(torch.full((3, 64), ZERO_POINT, dtype=torch.uint8)).any()
    assert floor_work.bytes_of(layer) == 96 * 64
    few = Int4Linear.from_weight(torch.randn(96, 64), None)
    x = torch.randn(3, 64)
    assert torch.equal(floor_work.kernels(few)["few bits"](few)(x), few(x))
    assert floor_work.bytes_of(few) == 96 * 64 * 5 // 8


def test_layers_are_the_models_own() -> None:
    """Catches a floor without the LM head, or with layers counted twice."""
    model = tiny_model("llama")
    counted = sum(layer.weight.numel() for layer in floor_work.linear_layers(model))
    config = model.config
    assert model.get_output_embeddings() in floor_work.linear_layers(model)
    norms = (2 * config.num_hidden_layers + 1) * config.hidden_size
    embedding = model.get_input_embeddings().weight.numel()
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert counted == sum(p.numel() for p in model.parameters()) - norms - embedding * (not tied)
    with pytest.raises(UserError, match="linear"):
        floor_work.linear_layers(nn.LayerNorm(3))


def test_the_roofline_is_the_slower_of_reading_and_computing() -> None:
    """Catches a peak of one kernel alone, and shares the wrong way round."""
    products = {"linear": [4.0, 9.0], "packed": [5.0, 8.0]}
    engine = [(8.0, 1.5), (16.0, 0.5)]
    one, many = floor_work.summarize([1, 100], 1000, 4000, 2e6, products, engine)
    # 4,000 B at 2 MB/s; then the peak itself
    assert (one.roofline, one.product, one.kernel) == (2.0, 4.0, "linear")
    assert (many.roofline, many.product, many.kernel) == (8.0, 8.0, "packed")
    assert (one.of_roofline, one.of_product, many.of_product) == (0.25, 0.5, 0.5)
    assert (one.first_request_s, many.first_request_s) == (1.5, 0.5)


def test_the_command_measures_each_number_of_rows(capsys: pytest.CaptureFixture[str]) -> None:
    tasks = [Task("code", limit=2)]
    floor.main(FloorConfig(rows=[1, 3, 17], max_new_tokens=3, repeats=1, tasks=tasks))
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [x["rows"] for x in facts["steps"]] == [1, 3, 17]
    assert set(facts["products"]) == {"linear", "packed"}
    for x in facts["steps"]:
        assert min(x["roofline"], x["product"], x["engine"], x["first_request_s"]) > 0
        assert x["of_product"] == pytest.approx(x["product"] / x["engine"])
