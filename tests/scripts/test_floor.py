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
from tests.tiny import tiny_model, tiny_target


@pytest.mark.parametrize("rows", [1, 3, 32])
@pytest.mark.parametrize("name", ["linear", "packed", "int8"])
@torch.inference_mode()
def test_every_kernel_computes_the_layer(name: str, rows: int) -> None:
    """Catches a kernel that is fast because it computes something else."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 96, bias=False)
    dtype = torch.bfloat16 if name == "int8" else torch.float32
    x = torch.randn(rows, 64, dtype=dtype)
    wanted = x.float() @ layer.weight.T
    found = floor_work.kernels(layer)[name](layer)(x).float()
    assert found.shape == (rows, 96)
    error = (found - wanted).norm() / wanted.norm()
    assert error < (0.02 if name == "int8" else 1e-5)


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
    body = floor_work.body_layers(model)  # a pass of features does not multiply by the vocabulary
    assert model.get_output_embeddings() not in body
    assert len(body) == len(floor_work.linear_layers(model)) - 1


def test_the_roofline_is_the_slower_of_reading_and_computing() -> None:
    """Catches a peak taken from the rounded kernel, whose products are another precision's."""
    products = {"linear": [4.0, 9.0], "packed": [5.0, 8.0], "int8": [1.0, 1.0]}
    engine = [(8.0, 1.5), (16.0, 0.5)]
    one, many = floor_work.summarize([1, 100], 1000, 4000, 2e6, products, engine)
    # 4,000 B at 2 MB/s; then the peak itself
    assert (one.roofline, one.product, one.kernel) == (2.0, 4.0, "linear")
    assert (many.roofline, many.product, many.kernel) == (8.0, 8.0, "packed")
    assert (one.of_roofline, one.of_product, many.of_product) == (0.25, 0.5, 0.5)
    assert (one.int8, many.int8, one.first_request_s) == (1.0, 1.0, 1.5)


def test_the_command_measures_each_number_of_rows(capsys: pytest.CaptureFixture[str]) -> None:
    tasks = [Task("code", limit=2)]
    sizes = {"sampled_rows": [3], "samples": 2, "sample_tokens": 24}
    floor.main(FloorConfig(rows=[1, 3, 17], max_new_tokens=3, repeats=1, tasks=tasks, **sizes))
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [x["rows"] for x in facts["steps"]] == [1, 3, 17]
    assert set(facts["products"]) == {"linear", "packed", "int8"}
    for x in facts["steps"]:
        assert min(x["roofline"], x["product"], x["engine"], x["first_request_s"]) > 0
        assert x["of_product"] == pytest.approx(x["product"] / x["engine"])
    work = {x["work"]: x for x in facts["batches"]}
    sizes = {"sampling": 3, "features": 48, "training": 48}
    assert {name: x["tokens"] for name, x in work.items()} == sizes
    for x in work.values():
        assert x["of_floor"] == pytest.approx(x["floor"] / x["took"])
    assert 0 < work["sampling"]["vocabulary"] < work["sampling"]["took"]


def test_the_floor_of_training_counts_the_head_and_the_live_target() -> None:
    """Catches a floor without backward or without the target, which would flatter nothing but be wrong."""
    target = tiny_target(tiny_model("llama"))
    rows = floor_work.sample_rows([[1, 2, 3]], 2, 24)
    assert [row["input_ids"][:4] for row in rows] == [[1, 2, 3, 1]] * 2
    body = sum(layer.weight.numel() for layer in floor_work.body_layers(target.runner.model))
    one, two = (floor_work.training_flops(target, rows[:n]) for n in (1, 2))
    assert two == pytest.approx(2 * one)
    assert one > 2 * 24 * body
