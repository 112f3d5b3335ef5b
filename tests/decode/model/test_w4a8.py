"""W4A8: weights that have four bits already keep them, and rows that do not depend on each other decode as plain."""

from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from decode.common import damage
from decode.common.errors import UserError
from decode.drafts.causal import CausalDraft
from decode.engine.engine import SpeculativeEngine, decode
from decode.engine.records import collect_outputs
from decode.model.loading import load_target
from decode.model.quantized import conversion, vnni
from decode.model.quantized.conversion import quantize_model
from decode.model.quantized.int4 import W4A8Linear, stored_groups
from decode.model.quantized.w8a8 import W8A8Linear
from decode.model.runner import ModelRunner
from decode.verification.tree import DynamicTree
from tests.decode.engine.test_engine import PROMPTS, texts
from tests.decode.model.test_gguf_files import write_gguf
from tests.decode.model.test_w8a8 import needs_vnni, target_of
from tests.tiny import noisy, tiny_model

OF_FOUR_BITS = {"Q4_0": gguf.GGMLQuantizationType.Q4_0, "Q4_1": gguf.GGMLQuantizationType.Q4_1}


def four_bits(outputs: int, inputs: int) -> Tensor:
    """A weight [N, K] as blocks of Q4_K are: numbers 0 … 15 times a step plus an offset of each 32 inputs. Some groups
    leave out the ends, some have one or two numbers alone."""
    groups = torch.randint(0, 16, (outputs, inputs // 32, 32))
    groups[::3] = groups[::3].clamp(3, 9)
    groups[1::5] = groups[1::5].clamp(7, 8)
    groups[2] = 4
    step, offset = torch.rand(outputs, inputs // 32, 1) + 0.1, torch.randn(outputs, inputs // 32, 1)
    return (groups * step + offset).flatten(1)


def as_awq(outputs: int, inputs: int) -> Tensor:
    """As GPTQ and AWQ mean their numbers: a step and a zero point for more than 32 inputs, here 64."""
    groups = torch.randint(0, 16, (outputs, inputs // 64, 64)) - torch.randint(
        0, 16, (outputs, 1, 1)
    )
    return (groups * (torch.rand(outputs, inputs // 64, 1) + 0.1)).flatten(1)


def by_gguf(kind: str, outputs: int, inputs: int) -> Tensor:
    stored = gguf.quantize(np.random.randn(outputs, inputs).astype(np.float32), OF_FOUR_BITS[kind])
    return torch.from_numpy(gguf.dequantize(stored, OF_FOUR_BITS[kind]))


def four_bit_model() -> Any:
    """A tiny model in w4a8 whose layers have weights of four bits, and its LM head not."""
    model = tiny_model("llama", intermediate_size=64)
    for name, part in model.named_modules():
        if isinstance(part, torch.nn.Linear) and name != "lm_head":
            weight = by_gguf("Q4_1", *part.weight.shape)
            part.weight.data = weight * (part.weight.std() / weight.std())
    quantize_model(model, "w4a8", "tiny")
    return model


# ---- the numbers of a weight ----


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("Q4_K", torch.float32),
        ("Q4_0", torch.float32),
        ("Q4_0", torch.bfloat16),
        ("AWQ", torch.float16),
        ("AWQ", torch.bfloat16),
        ("Q4_1", torch.bfloat16),
    ],
)
def test_a_weight_of_four_bits_gives_its_numbers(kind: str, dtype: torch.dtype) -> None:
    """Bug: steps taken from the ends of a group that uses neither 0 nor 15; groups of one number that divide by 0."""
    made = {"Q4_K": four_bits, "AWQ": as_awq}.get(kind, partial(by_gguf, kind))
    weight = made(20, 192)
    found = stored_groups(weight.to(dtype))
    assert found is not None
    numbers, scale, added = found
    assert numbers.max() <= 15
    scale, added = (part.repeat_interleave(32, 1) for part in (scale, added))
    error = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(numbers * scale + added, weight, atol=error, rtol=error)


def test_more_than_four_bits_are_not_taken_for_four() -> None:
    """Bug: one group that does not fit is rounded. 17 numbers, eight bits, one number between two, other widths."""
    weight = four_bits(20, 96)
    assert stored_groups(weight[:, :80]) is None
    assert stored_groups(torch.randint(-127, 128, (20, 96)).float()) is None
    assert stored_groups(torch.arange(17).repeat(6)[:96].expand(2, -1)) is None
    between = weight.clone()
    low, high = between[7, 32:64].aminmax()
    between[7, 40] = low + 0.37 * (high - low)
    assert stored_groups(between) is None


# ---- the layer ----


@needs_vnni
def test_a_layer_multiplies_by_its_own_numbers() -> None:
    """Bug: scales that are rounded to eight bits of mantissa; rows that depend on how many there are."""
    weight, bias, x = four_bits(40, 96), torch.randn(40), torch.randn(20, 96)
    layer = W4A8Linear.from_weight(weight, bias)
    assert type(layer) is W4A8Linear
    torch.testing.assert_close(layer.weight, weight, atol=0.01, rtol=0.001)
    steps = x.unflatten(1, (3, 32)).abs().amax(-1).repeat_interleave(32, 1) / 127
    wanted = ((x / steps).round() * steps) @ layer.weight.T + bias
    out = layer(x)
    torch.testing.assert_close(out, wanted, atol=1e-3, rtol=1e-4)
    for rows in range(1, 20):
        assert torch.equal(layer(x[:rows]), out[:rows])
    assert type(W4A8Linear.from_weight(torch.randn(40, 96), bias)) is W8A8Linear


# ---- models ----


@needs_vnni
@pytest.mark.parametrize("drafts", ["chain", "tree"])
@pytest.mark.parametrize("mode", ["eager", pytest.param("compiled", marks=pytest.mark.slow)])
def test_texts_are_plain_decoding_s(drafts: str, mode: str) -> None:
    """Bug: a verified row, or one of a tree, whose last bits are others: a rounding makes another token of them."""
    torch._dynamo.reset()
    model = four_bit_model()
    kinds = {type(part) for part in model.modules()}
    assert {W4A8Linear, W8A8Linear} <= kinds
    target = target_of(model)
    assert target.runner.cache.slots.own_kernel
    near = noisy(tiny_model("llama"), 0.02)
    quantize_model(near, "int4", "near")
    shape = DynamicTree(2, 6) if drafts == "tree" else None
    draft = CausalDraft(ModelRunner(near), shape=shape)
    plain = texts(decode(target, None, PROMPTS, k=3, max_new_tokens=16))
    engine = SpeculativeEngine(target, draft, k=3, mode=mode)
    records = list(engine.speculate(PROMPTS, max_new_tokens=16))
    assert texts(collect_outputs(PROMPTS, records)) == plain


@needs_vnni
def test_a_gguf_keeps_its_four_bits(tmp_path: Path) -> None:
    """Bug: numbers that are rounded to bf16 on the way, or layers of which only some are looked at."""
    file = write_gguf(tmp_path / "tiny.gguf", kind="Q4_0")
    target = load_target(str(file), "cpu", "w4a8")
    plain = load_target(str(file), "cpu", "float32")
    layers = dict(plain.runner.model.named_modules())
    kept = 0
    for name, part in target.runner.model.named_modules():
        if type(part) is W4A8Linear and name in layers:
            kept += 1
            torch.testing.assert_close(part.weight, layers[name].weight, atol=1e-3, rtol=1e-3)
    assert kept > 0


@needs_vnni
def test_products_with_more_bits_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches layers of a model in w4a8 that become W8A8 without a word."""
    damage.warn_once.cache_clear()
    four_bit_model()
    said = "tiny: 1 of 13 products are w8a8, because their weights have more than four bits"
    assert said in capsys.readouterr().err


def test_what_w4a8_is_not_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(conversion, "what_is_missing", lambda: "this CPU has none")
        said = r"target x: dtype w4a8 needs a CPU with AVX512-VNNI, and a C\+\+ compiler: this CPU has none"
        with pytest.raises(UserError, match=said):
            quantize_model(tiny_model("llama"), "w4a8", "target x")
    if vnni.is_available():
        with pytest.raises(UserError, match=r"target x: its weights have none of four bits"):
            quantize_model(tiny_model("llama"), "w4a8", "target x")
