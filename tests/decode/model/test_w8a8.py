"""W8A8 and int4: exact products, rows that do not depend on each other, and the text and law of the rounded target."""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from decode.common import damage
from decode.common.errors import UserError
from decode.drafts.base import Draft
from decode.drafts.causal import CausalDraft
from decode.drafts.early_exit import EarlyExitDraft
from decode.drafts.registry import load_draft, pick_draft
from decode.engine.compiled import COMPILE_OPTIONS, compile_function
from decode.engine.engine import SpeculativeEngine, decode
from decode.engine.records import collect_outputs
from decode.model.formats import tied_heads
from decode.model.hidden_states import LMHead
from decode.model.inductor_linear import register_lowerings
from decode.model.loading import Target, load_model, load_target, place_network
from decode.model.quantized import conversion, vnni, w8a8
from decode.model.quantized.conversion import quantize_model, quantize_network
from decode.model.quantized.int4 import Int4Linear, quantize_groups
from decode.model.quantized.layers import QuantizedLinear
from decode.model.quantized.w8a8 import (
    W8A8Linear,
    exact_product,
    int8_product,
    quantize_rows,
)
from decode.model.runner import ModelRunner
from decode.verification.sampling import SamplingParams
from eval.checks.greedy_equivalence import first_difference, measure_pair
from tests import heads, worlds
from tests.decode.engine.test_engine import PROMPTS, texts
from tests.decode.verification import test_exact_distribution as exact
from tests.fake_gpu import fake_gpu
from tests.params import slow_except
from tests.tiny import ARCHITECTURES, FEW, noisy, reference, tiny_model, tiny_prompts, tiny_target

needs_vnni = pytest.mark.skipif(not vnni.is_available(), reason="needs AVX512-VNNI and a compiler")


def w8a8_model(arch: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    model = tiny_model(arch, dtype=dtype, **changes)
    quantize_model(model, "w8a8", arch)
    return model


def target_of(model: Any) -> Target:
    """A target of the model itself: its copy would be in floating point."""
    return Target(ModelRunner(model), None, "tiny", None, "fingerprint", frozenset())


# ---- products ----


def sums_by_whole_numbers(numbers: Tensor, values: Tensor) -> Tensor:
    return numbers.long() @ values.long().T


@pytest.mark.parametrize("inputs", [1, 31, 1024, 1025, 9000])
def test_sums_of_extreme_numbers_are_exact(inputs: int) -> None:
    """Bug: pairs of products that saturate in 16 bits, sums that leave fp32's whole numbers, pieces that are lost."""
    numbers = torch.randint(-127, 128, (5, inputs))
    numbers[0], numbers[1], numbers[2] = (
        127,
        -127,
        torch.tensor([127, -127]).repeat(inputs)[:inputs],
    )
    values = torch.randint(-128, 128, (40, inputs), dtype=torch.int8)
    values[0], values[1], values[2] = 127, -128, torch.tensor([127, -127]).repeat(inputs)[:inputs]
    wanted = sums_by_whole_numbers(numbers, values)
    assert torch.equal(exact_product(numbers.float(), values, torch.ones(40)), wanted.float())
    layer = W8A8Linear(values, torch.ones(40), None)
    found = int8_product(numbers.float(), layer.values, layer.scale, layer.offset)
    assert torch.equal(found, wanted.float())


@needs_vnni
@pytest.mark.parametrize("outputs", [1, 16, 31, 48, 200])
def test_the_product_of_eight_bits_is_the_same(
    outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: another zero point, scale or order of the weight, rows or outputs at the edge of a block."""
    values = torch.randint(-128, 128, (outputs, 200), dtype=torch.int8)
    scale, bias = torch.rand(outputs), torch.randn(outputs)
    packed = W8A8Linear(values, scale, bias, block=8)
    with monkeypatch.context() as patch:
        patch.setattr(vnni, "is_available", lambda: False)
        plain = W8A8Linear(values, scale, bias, block=8)
    assert plain.offset is None
    assert packed.offset is not None
    for rows in range(20):
        x = torch.randn(rows, 200)
        assert torch.equal(packed(x), plain(x))
    assert torch.equal(packed.weight, plain.weight)
    torch.testing.assert_close(W8A8Linear(values, scale, bias).weight, values * scale[:, None])


def rotation_by_hand(inputs: int) -> Tensor:
    """[K, K] of signs between inputs of one block, which are K / block apart: that of the i-th and j-th is the parity
    of the ones that both have in binary."""
    block = max(size for size in (1, 2, 4, 8, 16, 32, 64) if inputs % size == 0)
    signs = torch.tensor(
        [[(-1) ** bin(i & j).count("1") for j in range(block)] for i in range(block)]
    )
    return torch.kron(signs, torch.eye(inputs // block, dtype=torch.long))


def computed_by_hand(weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    """What the layer promises, written out: both rotated, each row's and each output's own scale, sums of int64, then
    the bias. For inputs and weights whose rotations are exact in fp32."""
    rotation = rotation_by_hand(weight.shape[1]).double()
    x = (x.double() @ rotation).float()
    weight = (weight.double() @ torch.linalg.inv(rotation)).float()
    scale, steps = weight.abs().amax(1) / 127, x.abs().amax(1) / 127
    numbers = (x / steps[:, None]).round()
    values = (weight / scale[:, None]).round()
    sums = sums_by_whole_numbers(numbers, values)
    return sums.float() * scale * steps[:, None] + bias


def wrong_step(numbers: Tensor, values: Tensor, scale: Tensor, offset: None) -> Tensor:
    """The scales of other outputs."""
    return int8_product(numbers, values, scale.roll(1), offset)


def saturating(numbers: Tensor, values: Tensor, scale: Tensor, offset: None) -> Tensor:
    """Pairs of products in 16 bits, as CPUs without VNNI add them."""
    pairs = (numbers[:, None] + 128) * values
    sums = pairs.unflatten(-1, (-1, 2)).sum(-1).clamp(-(2**15), 2**15 - 1).sum(-1)
    return (sums - 128 * values.sum(1, dtype=torch.int64)) * scale


class BiasFirst(W8A8Linear):
    def product(self, x: Tensor) -> Tensor:
        _, steps = quantize_rows(x)
        return super().product(x) + self.bias * (steps - 1)


class RotatedOnOneSide(W8A8Linear):
    def product(self, x: Tensor) -> Tensor:
        block, self.block = self.block, 1
        out = super().product(x)
        self.block = block
        return out


class StepOfAnotherRow(W8A8Linear):
    def product(self, x: Tensor) -> Tensor:
        _, steps = quantize_rows(x)
        return super().product(x) / steps * steps.roll(1, 0)


def layer_error(kind: type[W8A8Linear] = W8A8Linear, inputs: int = 320) -> float:
    """Largest difference from `computed_by_hand`, with weights whose sums are exact."""
    weight, bias = torch.randint(-2000, 2001, (24, inputs)) / 1024, torch.randn(24)
    x = torch.randint(-2000, 2001, (6, inputs)) / 1024
    x = x * torch.tensor([1.0, 32.0, 2.0**-7, 8.0, 1.0, 2.0**13])[:, None]
    found = kind.from_weight(weight, bias)(x)
    return float((found - computed_by_hand(weight, bias, x)).abs().max())


@pytest.mark.parametrize("inputs", [31, 300, 320])
def test_a_layer_computes_what_it_promises(inputs: int) -> None:
    """Bug: a rotation in blocks of another size, of one side alone, or whose scale is lost. To the bit."""
    assert layer_error(inputs=inputs) == 0


def test_a_large_input_does_not_spoil_the_others() -> None:
    """Bug: one input that is 300 times the rest, as models have them, takes all steps of its row."""
    weight, x = torch.randn(24, 512), torch.randn(6, 512)
    x[:, 77] *= 300
    weight[:, 77] /= 300
    wanted = x @ weight.T
    values, scale = quantize_rows(weight)
    plain = W8A8Linear(values.to(torch.int8), scale[:, 0], None)
    errors = [(layer(x) - wanted).norm() for layer in (W8A8Linear.from_weight(weight, None), plain)]
    assert errors[0] < errors[1] / 3
    assert errors[0] < 0.15 * wanted.norm()


BUGS: dict[str, Callable[[pytest.MonkeyPatch], type[W8A8Linear]]] = {
    "scales of other outputs": lambda patch: patched(patch, wrong_step),
    "saturation": lambda patch: patched(patch, saturating),
    "bias before the scale": lambda patch: BiasFirst,
    "step of another row": lambda patch: StepOfAnotherRow,
    "activations that are not rotated": lambda patch: RotatedOnOneSide,
}


def patched(monkeypatch: pytest.MonkeyPatch, product: Callable[..., Tensor]) -> type[W8A8Linear]:
    monkeypatch.setattr(vnni, "is_available", lambda: False)
    monkeypatch.setattr(w8a8, "int8_product", product)
    return W8A8Linear


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_seen(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert layer_error(BUGS[bug](monkeypatch)) > 0.01


@pytest.mark.parametrize("size", [(48, 32), (33, 1536), (16, 2500)])
def test_a_row_does_not_depend_on_others(size: tuple[int, int]) -> None:
    """Bug: a step of all rows, or sums in another order for more rows. To the bit, alone and among 1 to 64."""
    layer = W8A8Linear.from_weight(torch.randn(size), torch.randn(size[0]))
    x = torch.randn(64, size[1]) * torch.rand(64, 1).mul(8).exp()
    with torch.inference_mode():
        alone = torch.cat([layer(row[None]) for row in x])
        for rows in range(1, 65):
            assert torch.equal(layer(x[:rows]), alone[:rows])
        assert torch.equal(layer(x.view(4, 16, -1)).view(64, -1), alone)
        assert layer(x[:0]).shape == (0, size[0])  # a teacher may be asked for no position


def test_rows_that_hold_no_numbers_stay_apart() -> None:
    """Bug: one row with NaN or infinity spoils others, or becomes finite; a row of zeros becomes NaN."""
    layer = W8A8Linear.from_weight(torch.randn(8, 16), None)
    x = torch.randn(4, 16)
    alone = layer(x[3:])
    x[0, 3], x[1, 2], x[2] = torch.nan, torch.inf, 0
    out = layer(x)
    assert not out[:2].isfinite().any()
    assert not out[2].any()
    assert torch.equal(out[3:], alone)


def test_other_dtypes_and_gradients() -> None:
    """Bug: inputs in bf16 that are rounded in bf16; ties that are judged in float64 and fail; a gradient of zero."""
    layer = W8A8Linear.from_weight(torch.randn(8, 32), torch.randn(8))
    x = torch.randn(3, 32)
    for dtype in (torch.bfloat16, torch.float64):
        found = layer(x.to(dtype))
        assert found.dtype == dtype
        wanted = layer(x.to(dtype).float()).to(dtype)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    asked = x.clone().requires_grad_()
    layer(asked).sum().backward()
    torch.testing.assert_close(asked.grad, layer.weight.sum(0).expand(3, -1))


# ---- four bits ----


@pytest.mark.parametrize("by", ["torch", pytest.param("vnni", marks=needs_vnni)])
@pytest.mark.parametrize("outputs", [16, 33])
def test_four_bits_multiply_by_what_they_stand_for(
    outputs: int, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: nibbles in another order, zero points off by the middle, groups mixed up, outputs of the padding."""
    if by == "torch":
        monkeypatch.setattr(vnni, "is_available", lambda: False)
    weight, bias, x = torch.randn(outputs, 96), torch.randn(outputs), torch.randn(5, 96)
    numbers, *floats = quantize_groups(weight)
    scales, added = (part.repeat_interleave(32, 1) for part in floats)
    plain = numbers * scales + added
    assert ((plain - weight).abs() <= 0.6 * scales).all()
    layer = Int4Linear.from_weight(weight, bias)
    torch.testing.assert_close(layer.weight, plain, atol=0.01, rtol=0.01)
    steps = x.unflatten(1, (3, 32)).abs().amax(-1).repeat_interleave(32, 1) / 127
    rounded = x.bfloat16().float() if by == "torch" else (x / steps).round() * steps
    wanted, error = rounded @ layer.weight.T + bias, {"torch": 0.1, "vnni": 1e-4}[by]
    for rows in (1, 5, 12):
        some = x.repeat(3, 1)[:rows]
        torch.testing.assert_close(layer(some), wanted.repeat(3, 1)[:rows], atol=error, rtol=0.01)


# ---- models ----


def float_linears(model: Any) -> list[str]:
    return [name for name, part in model.named_modules() if type(part) is torch.nn.Linear]


@pytest.mark.parametrize("arch", slow_except(ARCHITECTURES, FEW))
def test_every_architecture_decodes_as_transformers_does(arch: str) -> None:
    """Bug: layers that are called in another way than by their forward, and ones that stay in floating point."""
    model = w8a8_model(arch)
    plain = reference(tiny_model(arch))
    quantize_model(plain, "w8a8", arch)
    assert isinstance(model.get_output_embeddings(), W8A8Linear)
    assert not [name for name in float_linears(model) if "layers" in name]
    wanted = [
        plain.generate(torch.tensor([p]), max_new_tokens=12, do_sample=False)[0, len(p) :].tolist()
        for p in PROMPTS
    ]
    target, draft = target_of(model), CausalDraft(ModelRunner(noisy(tiny_model(arch), 0.01)))
    for own in (None, draft):
        found = texts(decode(target, own, PROMPTS, k=3, max_new_tokens=12))
        assert not [x for x in zip(PROMPTS, found, wanted, strict=True) if not is_tie(plain, *x)]


@pytest.mark.parametrize("arch", slow_except(ARCHITECTURES, FEW))
def test_every_architecture_keeps_most_of_its_law(arch: str) -> None:
    """Bug: weights or inputs that are rotated in one layer alone, as where a layer holds its weight the other way."""
    ids = torch.tensor([PROMPTS[0]])
    plain, rounded = reference(tiny_model(arch)), reference(tiny_model(arch))
    quantize_model(rounded, "w8a8", arch)
    with torch.inference_mode():
        p, q = (model(ids).logits[0].double().softmax(-1) for model in (plain, rounded))
    assert (p - q).abs().sum(-1).mean() / 2 < 0.1


def is_tie(model: Any, prompt: list[int], found: list[int], wanted: list[int]) -> bool:
    """Whether two texts are equal, or differ first where a rounding can swap two tokens: attention that differs in its
    last bit flips one now and then."""
    at = first_difference(wanted, found)
    if at is None:
        return True
    gap, noise = measure_pair(model, prompt, wanted[:at], (wanted[at], found[at]), 3)
    return abs(gap) <= noise < 0.5


@pytest.fixture(params=["llama", "llama tied", "qwen3_moe", "gemma2"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A target, and in `draft` a copy of it that is right now and then."""
    tokenizer = worlds.byte_tokenizer()
    arch, *tied = request.param.split()
    size: dict[str, Any] = {"vocab_size": len(tokenizer), "tie_word_embeddings": bool(tied)}
    model = tiny_model(arch, **size)
    worlds.save(tmp_path / "draft", noisy(model, 0.02), tokenizer)
    return worlds.save(tmp_path / "target", model, tokenizer)


def drafts_of(target: Target, folder: Path) -> dict[str, Draft | None]:
    near = str(folder.parent / "draft")
    return {
        "ngram": pick_draft("ngram", target),
        "causal": load_draft(near, target),
        "causal in w8a8": load_draft(near, target, dtype="w8a8"),
        "causal in int4": load_draft(near, target, dtype="int4"),
        "eagle1": heads.random_draft("eagle1", target),
        "eagle3": heads.random_draft("eagle3", target),
        "early exit": EarlyExitDraft(target, 2, None),
    }


def assert_equal_but_for_ties(
    model: Any, prompts: list[list[int]], found: list[list[int]], wanted: list[list[int]]
) -> None:
    """A last bit of attention, which passes of different widths differ in, flips a rounding where two tokens are near
    each other: the first difference of a text must be one between such tokens."""
    for prompt, one, other in zip(prompts, found, wanted, strict=True):
        at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
        if at is None:
            assert one == other
        else:
            gap, noise = measure_pair(model, prompt, other[:at], (one[at], other[at]), 3)
            assert abs(gap) <= noise, (one, other)


def test_text_with_a_draft_is_the_target_s_own(folder: Path) -> None:
    """Bug: layers that a decoder replaces lose their kind, or drafts read weights that are packed."""
    target = load_target(str(folder), "cpu", "w8a8")
    prompts = tiny_prompts(5, 9, vocab=97)
    settings: dict[str, Any] = {"k": 3, "max_new_tokens": 24}
    plain = texts(decode(target, None, prompts, **settings))
    model = load_model(str(folder), "target", "cpu", "w8a8")
    model.set_attn_implementation(
        "eager"
    )  # Gemma 2's other one has no cap on its scores in transformers 5.17
    for draft in drafts_of(target, folder).values():
        found = texts(decode(target, draft, prompts, **settings))
        assert_equal_but_for_ties(model, prompts, found, plain)
    made = [
        model.generate(torch.tensor([x]), max_new_tokens=24, do_sample=False)[0, len(x) :].tolist()
        for x in prompts
    ]
    assert_equal_but_for_ties(model, prompts, made, plain)
    assert target.describe().rounding == " in w8a8"


def test_the_head_can_be_read(folder: Path) -> None:
    """Bug: drafts that begin with the rows of the LM head get none, or rows of other numbers; ties that are lost."""
    before, after = (
        load_model(str(folder), "target", "cpu", dtype) for dtype in ("float32", "w8a8")
    )
    wanted, head = before.get_output_embeddings().weight, after.get_output_embeddings()
    tied = tied_heads.are_tied(before)
    assert tied_heads.are_tied(after) == tied
    assert (head.weight is after.get_input_embeddings().weight) == tied
    assert ((head.weight - wanted).norm(dim=1) <= (0 if tied else 0.01) * wanted.norm(dim=1)).all()
    ids, states = torch.tensor([0, 5, 90]), torch.randn(4, 32)
    torch.testing.assert_close(head.rows(ids)(states), head(states)[:, ids], atol=1e-5, rtol=1e-5)
    assert torch.equal(LMHead(after).linear.forward(states), head(states))
    other = copy.deepcopy(after)
    assert tied_heads.are_tied(other) == tied
    assert not [part for part in other.modules() if isinstance(part, QuantizedLinear)]


def test_a_draft_of_fewer_tokens_is_in_few_bits(folder: Path) -> None:
    """Bug: rows of the head that are selected become a head in floating point."""
    for dtype, kind in (("w8a8", W8A8Linear), ("int4", Int4Linear)):
        model = load_model(str(folder), "draft", "cpu", dtype)
        ids = torch.arange(0, 96, 3)
        runner = ModelRunner(model, None, ids)
        assert isinstance(runner.model.get_output_embeddings(), kind)
        runner.allocate(1, 8)
        found = runner.step(torch.tensor([[1, 2, 3]]), torch.tensor([0]))
        assert found.isfinite().sum(-1).tolist() == [[len(ids)] * 3]


@pytest.mark.parametrize("family", heads.FAMILIES)
@pytest.mark.parametrize("dtype", ["w8a8", "int4"])
def test_heads_in_few_bits_draft(family: str, dtype: str) -> None:
    """Bug: heads that cannot be in few bits, and ones whose states are in another dtype."""
    target = target_of(w8a8_model("llama"))
    net = place_network(heads.net_of(family, target), "cpu", dtype)
    assert [part for part in net.modules() if isinstance(part, QuantizedLinear)]
    draft = heads.draft_of(net, target)
    settings: dict[str, Any] = {"k": 3, "max_new_tokens": 12}
    plain = texts(decode(target, None, PROMPTS, **settings))
    assert texts(decode(target, draft, PROMPTS, **settings)) == plain


def test_sampled_text_has_the_rounded_target_s_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact: every branch of the text is walked, and compared with plain passes of the same layers."""
    model, sampling = exact.small(), SamplingParams(0.7)
    vocab, k, length, paths = exact.ENUMERATED[1]
    rounded = copy.deepcopy(model)
    quantize_model(rounded, "w8a8", "small")
    law = exact.engine_law(target_of(rounded), exact.partner(model), k, length, sampling, paths)
    away = exact.distance_from_own_law(law, model, length, sampling)

    def plain(model: Any) -> Any:
        own = reference(model)
        quantize_model(own, "w8a8", "small")
        return own

    monkeypatch.setattr(exact, "reference", plain)
    assert exact.distance_from_own_law(law, model, length, sampling) < 1e-6
    assert away > 1e-3  # the law of the target in float64 is another one


def test_float_weights_are_freed(folder: Path) -> None:
    """Bug: the float layers stay alive beside those that replace them."""
    model = load_model(str(folder), "target", "cpu", "w8a8")
    kept = {name for name, p in model.named_parameters() if p.ndim == 2 and ".gate." not in name}
    assert kept == {"model.embed_tokens.weight"}
    layer = model.model.layers[0].self_attn.q_proj.whole
    assert layer.values.element_size() == 1


# ---- compiled code ----


def compiled_layer(kind: str, monkeypatch: pytest.MonkeyPatch) -> QuantizedLinear:
    """A layer that multiplies by torch's operations, or by those of vnni.cpp."""
    if not kind.endswith("by vnni"):
        monkeypatch.setattr(vnni, "is_available", lambda: False)
    if kind.startswith("int4"):
        return Int4Linear.from_weight(torch.randn(48, 64), torch.randn(48))
    values = torch.randint(-63, 64, (48, 64), dtype=torch.int8)
    return W8A8Linear(values, torch.rand(48), torch.randn(48), block=64)


VNNI = [pytest.param(f"{dtype} by vnni", marks=needs_vnni) for dtype in ("w8a8", "int4")]
KERNELS = ["w8a8", "int4", *VNNI]


@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_code_computes_the_same(
    kind: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: an operation that is no part of the graph, or steps that compiled code rounds in another way."""
    torch._dynamo.reset()
    if backend == "inductor":
        register_lowerings()
    layer = compiled_layer(kind, monkeypatch)
    run = torch.compile(layer.forward, fullgraph=True, backend=backend)
    with torch.inference_mode():
        for rows in (1, 5):
            x = torch.randn(1, rows, 64)
            assert torch.equal(run(x), layer(x))


@pytest.mark.slow
def test_compiled_rounds_say_the_same() -> None:
    """Bug: layers in eight bits that no region of compiled code holds. By inductor's own code."""
    torch._dynamo.reset()
    target = target_of(w8a8_model("llama"))
    near = noisy(tiny_model("llama"), 0.02)
    quantize_model(near, "int4", "near")
    draft = CausalDraft(ModelRunner(near))
    wanted = texts(decode(target, draft, PROMPTS, k=3, max_new_tokens=16))
    engine = SpeculativeEngine(target, draft, k=3, mode="compiled")
    records = list(engine.speculate(PROMPTS, max_new_tokens=16))
    assert texts(collect_outputs(PROMPTS, records)) == wanted


@pytest.mark.slow
@pytest.mark.skipif(not vnni.is_available(), reason="known of CPUs with AVX512-VNNI")
@torch.inference_mode()
def test_a_step_s_bits_do_not_depend_on_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a verified row that is another than plain decoding's by a last bit, of which a rounding makes a token:
    sums of one row that compiled code splits over threads. The model is wide enough for inductor to want that."""
    torch._dynamo.reset()
    shape = {"hidden_size": 1536, "intermediate_size": 2048, "num_attention_heads": 12}
    runner = ModelRunner(w8a8_model("llama", std=0.02, num_key_value_heads=2, **shape))
    ids = torch.randint(2, 50, (1, 40))

    def step(runner: ModelRunner, tokens: Tensor, base: Tensor) -> Tensor:
        return runner.step(tokens, base)

    def differs() -> bool:
        compile_function.cache_clear()
        run = compile_function(step, "cpu")
        one = [run(runner, ids[:, i : i + 1], torch.tensor([i])).clone() for i in range(30, 39)]
        found = [run(runner, ids[:, 30 : 30 + n], torch.tensor([30])) for n in (4, 9)]
        return any(not torch.equal(rows, torch.cat(one[: rows.shape[1]], 1)) for rows in found)

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        runner.allocate(1, 512)
        runner.prefill(ids[:, :30], torch.tensor([30]))
        assert not differs()
        monkeypatch.delitem(COMPILE_OPTIONS["cpu"], "cpp.min_chunk_size")
        assert differs()  # else the test is blind
    finally:
        torch.set_num_threads(threads)


# ---- refusals ----


def test_what_w8a8_is_not_for_is_refused(tmp_path: Path) -> None:
    from tests.hybrids import tiny_hybrid
    from tests.seq2seq import tiny_t5

    for model, reason in (
        (tiny_t5(), "an encoder-decoder"),
        (tiny_hybrid("qwen3_next"), "recurrent"),
    ):
        with pytest.raises(UserError, match=f"target 'x': dtype w8a8 .*{reason}"):
            quantize_model(model, "w8a8", "target 'x'")
    folder = worlds.save(tmp_path, tiny_model("llama", vocab_size=268), worlds.byte_tokenizer())
    with pytest.raises(UserError, match="target .* dtype int4 is for drafts"):
        load_target(str(folder), "cpu", "int4")
    with pytest.raises(UserError, match="dtype 'w4a4': choose among .* w8a8, w4a8, int4"):
        load_target(str(folder), "cpu", "w4a4")
    model = w8a8_model("llama")
    with pytest.raises(UserError, match="a model in w8a8 can be neither saved nor trained"):
        model.save_pretrained(tmp_path / "saved")
    with pytest.raises(UserError, match="dtype w8a8 of this draft is for a CPU"):
        quantize_network(torch.nn.Linear(4, 4, device="meta"), "w8a8")


@pytest.mark.parametrize("compiler", ["false", "no-such-compiler"])
def test_without_a_compiler_products_are_slow(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a traceback where the machine has no C++ compiler, or half a library that is loaded next time."""
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: True)
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "kept"))
    assert "C++ compiler" in vnni.what_is_missing.__wrapped__()
    assert not list((tmp_path / "kept").iterdir())


def test_what_stays_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    damage.warn_once.cache_clear()
    for _ in range(2):
        model = w8a8_model("qwen3_moe")
    stacked = sum(p.numel() for name, p in model.named_parameters() if "experts." in name)
    share = stacked / sum(p.numel() for p in tiny_model("qwen3_moe").parameters())
    lines = capsys.readouterr().err.splitlines()
    said = f"qwen3_moe: its experts are stacked tensors .* {share:.0%} of its weights are not w8a8"
    experts = [line for line in lines if re.search(said, line)]
    slow = [line for line in lines if "there are no products of whole numbers" in line]
    assert (len(experts), len(slow)) == (1, 0 if vnni.is_available() else 1)


def test_eight_bits_on_a_gpu_without_the_refusal_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the test below where nothing is refused: the layers are then built on the GPU, by what it has."""
    monkeypatch.setattr(conversion, "ON_CUDA", "")
    built: list[str] = []
    monkeypatch.setattr(conversion, "quantize_network", lambda layer, dtype: built.append(dtype))
    monkeypatch.setattr(conversion, "replace_head", lambda model, kind: None)
    target = tiny_target(tiny_model("llama"))
    with fake_gpu(target):
        quantize_model(target.runner.model, "w8a8", "target 'T'")
    assert built == ["w8a8"] * 3


@pytest.mark.parametrize("dtype", ["w8a8", "w4a8"])
def test_a_gpu_has_no_right_product_of_eight_bits(dtype: str) -> None:
    """Catches torchao's layer, whose sums of few rows are wrong beyond 2^24, and a refusal without its reason."""
    reason = (
        "multiplies 16 rows and fewer in float32" if dtype == "w8a8" else "is not for device cuda"
    )
    target = tiny_target(tiny_model("llama"))
    with fake_gpu(target), pytest.raises(UserError, match=f"^target 'T': dtype {dtype} .*{reason}"):
        quantize_model(target.runner.model, dtype, "target 'T'")


@pytest.mark.parametrize("missing", ["this CPU has no AVX512-VNNI", ""])
@pytest.mark.parametrize("dtype", ["w8a8", "int4"])
@pytest.mark.parametrize("what", ["network", "model"])
def test_slow_products_are_said_once(
    what: str,
    dtype: str,
    missing: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches a head or a draft model in few bits that takes the slow way in silence, or a line for each layer."""
    monkeypatch.setattr(conversion, "what_is_missing", lambda: missing)
    damage.warn_once.cache_clear()
    for _ in range(2):
        if what == "network":
            quantize_network(
                torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 64)), dtype
            )
        else:
            quantize_model(tiny_model("llama", hidden_size=32), dtype, "draft 'x'")
    said = [line for line in capsys.readouterr().err.splitlines() if "no products of whole" in line]
    assert len(said) == bool(missing)
    assert all(missing in line and f"dtype {dtype}" in line for line in said)
