"""What configs and files of other trainers say beside names and sizes: it is computed as said, or named, or refused."""

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from decode.common.errors import UserError
from decode.drafts.eagle_model import llama_config
from decode.drafts.registry import load_draft
from decode.model.modules import ACTIVATIONS
from eval.served.reading import edit_tensors, set_config
from tests.decode.checkpoints.test_importers import (
    TRAINERS,
    alike,
    edited,
    library,
    numbered,
    quietly,
    specforge,
)
from tests.decode.checkpoints.test_importers import write as write_folder
from tests.decode.checkpoints.test_layouts import small_target
from tests.heads import draft_of, fields, net_of
from tests.params import rotated

Tensors = dict[str, torch.Tensor]
FP8 = torch.float8_e4m3fn
DOWN, Q = "midlayer.mlp.down_proj.weight", "midlayer.self_attn.q_proj.weight"


def said_while_loading(path: str) -> list[str]:
    """The warnings of loading the draft, without the one about its tokenizer."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        load_draft(path, small_target())
    lines = [str(one.message) for one in seen if issubclass(one.category, UserWarning)]
    return [line for line in lines if "names no tokenizer" not in line]


def tanh_gelu(x: float) -> float:
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


FORMULAS: dict[str, Callable[[float], float]] = {
    "silu": lambda x: x / (1 + math.exp(-x)),
    "swish": lambda x: x / (1 + math.exp(-x)),
    "relu": lambda x: max(x, 0.0),
    "gelu": lambda x: 0.5 * x * (1 + math.erf(x / math.sqrt(2))),
    "gelu_new": tanh_gelu,
    "gelu_pytorch_tanh": tanh_gelu,
}


def test_each_activation_has_a_formula_here() -> None:
    assert FORMULAS.keys() == ACTIVATIONS.keys()


@pytest.mark.parametrize(
    ("name", "trainer"), rotated(FORMULAS, ["eagle3 of SpecForge", "eagle3 of speculators"])
)
@torch.no_grad()
def test_the_named_activation_is_computed(trainer: str, name: str, tmp_path: Path) -> None:
    """Catches SiLU in place of what config.json names, flat and nested: the layer's MLP against the formula."""
    own = small_target()
    path, net = TRAINERS[trainer](tmp_path, own)
    edited(lambda c: c.get("transformer_layer_config", c).update(hidden_act=name))(tmp_path)
    mlp, given = quietly(path, own).net.layer.mlp, net.layer.mlp  # type: ignore[union-attr]
    x = torch.randn(3, given.gate_proj.in_features, generator=torch.Generator().manual_seed(0))
    gate = (x @ given.gate_proj.weight.T).double()
    active = gate.clone().apply_(FORMULAS[name])
    wanted = (active * (x @ given.up_proj.weight.T)) @ given.down_proj.weight.T.double()
    assert float((mlp(x) - wanted).abs().max()) < 1e-5


def test_a_surplus_layer_is_left_out_and_named(tmp_path: Path) -> None:
    """Catches the last layer, which is for the loss, read as a fourth state, or dropped in silence."""
    own = small_target()
    path, net = library(tmp_path, own)
    edited(lambda c: c["eagle_aux_hidden_state_layer_ids"].append(8))(tmp_path)
    [line] = said_while_loading(path)
    assert "names layer 8 too, which fc does not read" in line
    assert "[1, 4, 6] are read" in line
    draft = quietly(path, own)
    assert draft.reads.aux_layers == net.aux_layers
    alike(draft_of(net, own), draft, own)


@pytest.mark.parametrize("key", ["eagle_config", "flat"])
def test_a_surplus_layer_in_each_numbering(key: str, tmp_path: Path) -> None:
    """Catches SGLang's numbers, of the layer that a state leaves, taken for vLLM's when there is one too many."""
    own = small_target()
    path, net = specforge(tmp_path, own)
    if key == "flat":
        set_config(eagle_aux_hidden_state_layer_ids=[1, 3, 6, 7])(tmp_path)
        edited(lambda c: c.pop("eagle_config"))(tmp_path)
    else:
        edited(lambda c: c["eagle_config"]["eagle_aux_hidden_state_layer_ids"].append(7))(tmp_path)
    [line] = said_while_loading(path)
    assert "[1, 3, 6] are read" in line
    alike(draft_of(net, own), quietly(path, own), own)


def test_a_surplus_layer_that_is_not_the_last_is_refused(tmp_path: Path) -> None:
    """Catches a list from which any one might be the surplus one."""
    own = small_target()
    path, _ = specforge(tmp_path, own)
    set_config("eagle_config", eagle_aux_hidden_state_layer_ids=[0, 1, 3, 5])(tmp_path)
    with pytest.raises(UserError, match=r"6 is not the last of the target's 8"):
        quietly(path, own)


def test_assumed_layers_are_named_once(tmp_path: Path) -> None:
    """Catches the default layers taken without a word, and a warning about a head that names its layers."""
    own = small_target()
    [line] = said_while_loading(TRAINERS["eagle3 of its authors"](tmp_path / "a", own)[0])
    assert "names no layers whose states it reads: [2, 4, 5] are taken" in line
    assert said_while_loading(specforge(tmp_path / "b", own)[0]) == []


WANTED_THETA = [
    {"rope_theta": 5e5},
    {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default"}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    {"rope_theta": 5e5, "rope_scaling": {"type": "default"}},
    {"rope_parameters": {"rope_theta": 5e5}, "rope_scaling": None},
]


@pytest.mark.parametrize("rope", WANTED_THETA)
def test_the_base_of_rope_is_read_wherever_it_stands(rope: dict[str, Any]) -> None:
    """Catches 10,000 in place of a base that stands outside `rope_parameters`."""
    own = small_target()
    config = fields("eagle3", own)
    bare = {k: v for k, v in config.items() if not k.startswith("rope_")}
    assert llama_config(bare | rope).rope_parameters["rope_theta"] == 5e5


def test_linear_scaling_by_its_old_name_divides_positions() -> None:
    own = small_target()
    plain: Any = net_of("eagle3", own, rope_parameters=None, rope_theta=1e4, rope_scaling=None)
    scaled: Any = net_of(
        "eagle3", own, rope_parameters=None, rope_theta=1e4, rope_scaling={"type": "linear", "factor": 4.0}
    )  # fmt: skip
    x, at = torch.zeros(1, 5, 16), torch.arange(5)[None]
    for a, b in zip(scaled.rotary(x, 4 * at), plain.rotary(x, at), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def fp8(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (weight / scale).to(FP8)


Quantised = tuple[Tensors, torch.Tensor]
"""(a weight and its scales by the ends of their names, what they stand for)."""


def whole(weight: torch.Tensor) -> Quantised:
    """One scale for all."""
    q = fp8(weight, torch.tensor(0.01))
    return {"": q, "_scale": torch.tensor(0.01)}, q.float() * 0.01


def rows(weight: torch.Tensor) -> Quantised:
    """A scale for each output."""
    scale = torch.linspace(0.01, 0.02, len(weight))[:, None]
    q = fp8(weight, scale)
    return {"": q, "_scale": scale.bfloat16()}, q.float() * scale.bfloat16().float()


def flat_rows(weight: torch.Tensor) -> Quantised:
    found, wanted = rows(weight)
    return found | {"_scale": found["_scale"][:, 0]}, wanted


def whole_numbers(weight: torch.Tensor) -> Quantised:
    """int8 with a scale for each output, and what activations are multiplied by."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    q = (weight / scale).round().to(torch.int8)
    return {"": q, "_scale": scale}, q.float() * scale


def blocks(size: int) -> Callable[[torch.Tensor], Quantised]:
    def make(weight: torch.Tensor) -> Quantised:
        height, width = (-(-n // size) for n in weight.shape)
        scale = 0.01 + 0.001 * torch.arange(height * width).view(height, width).float()
        own = scale.repeat_interleave(size, 0).repeat_interleave(size, 1)
        own = own[: weight.shape[0], : weight.shape[1]]
        q = fp8(weight, own)
        return {"": q, "_scale_inv": scale}, q.float() * own

    return make


COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized"}
INT8 = {"quant_method": "compressed-tensors", "format": "int-quantized"}
FORMS: dict[str, tuple[Callable[[torch.Tensor], Quantised], Any]] = {
    "one scale, no method named": (whole, None),
    "a scale a row": (rows, None),
    "a flat scale a row": (flat_rows, None),
    "int8": (whole_numbers, None),
    "blocks of 128, no method named": (blocks(128), None),
    "compressed-tensors": (rows, COMPRESSED),
    "compressed-tensors of int8": (whole_numbers, INT8),
    "blocks of 8": (blocks(8), {"quant_method": "fp8", "weight_block_size": [8, 8]}),
    "modelopt": (whole, {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "fbgemm": (rows, {"quant_method": "fbgemm_fp8"}),
}


@pytest.mark.parametrize("form", FORMS)
def test_weights_in_eight_bits_are_what_their_scales_make_of_them(
    form: str, tmp_path: Path
) -> None:
    """Catches numbers read without their scale, or with that of another row or block: the draft proposes as one with
    the weights written out."""
    own, (make, method) = small_target(), FORMS[form]
    path, net = specforge(tmp_path, own)
    tensors = load_file(tmp_path / "model.safetensors")
    module: Any = net
    for name in (DOWN, Q):
        parts, wanted = make(tensors.pop(name))
        tensors |= {name + end: value for end, value in parts.items()}
        tensors[f"{name.removesuffix('weight')}input_scale"] = torch.tensor(0.5)
        module.get_parameter(name.replace("midlayer.", "layers.0.")).data.copy_(wanted)
    save_file({k: v.contiguous() for k, v in tensors.items()}, tmp_path / "model.safetensors")
    if method is not None:
        set_config(quantization_config=method)(tmp_path)
    draft = quietly(path, own)
    assert torch.equal(draft.net.layer.mlp.down_proj.weight, module.layer.mlp.down_proj.weight)
    alike(draft_of(net, own), draft, own)


def test_a_copied_quantization_config_changes_nothing(tmp_path: Path) -> None:
    """Catches a head refused because its trainer copied the target's config, which is quantised."""
    own = small_target()
    path, net = specforge(tmp_path, own)
    set_config(quantization_config=COMPRESSED)(tmp_path)
    alike(draft_of(net, own), quietly(path, own), own)


def test_medusa_in_eight_bits(tmp_path: Path) -> None:
    own = small_target()
    net: Any = net_of("medusa", own)
    tensors = numbered(net)
    parts, wanted = whole(tensors["1.0.linear.weight"])
    tensors |= {f"1.0.linear.weight{end}": value for end, value in parts.items()}
    path = write_folder(tmp_path, {"medusa_num_heads": 3}, tensors, "medusa_lm_head.safetensors")
    net.blocks[1].layers[0].weight.data.copy_(wanted)
    alike(draft_of(net, own), quietly(path, own), own)


WRONG: dict[str, tuple[Tensors, Any, str]] = {
    "without a scale": ({"": torch.ones(16, 48).to(FP8)}, None, f"{DOWN} is float8_e4m3fn, and no scale"),
    "a scale of another shape": (
        {"": torch.ones(16, 48).to(FP8), "_scale": torch.ones(5)}, None, "is not one for each row",
    ),
    "a grid of another block": (
        {"": torch.ones(16, 48).to(FP8), "_scale_inv": torch.ones(2, 6)}, None, "is not one for each block",
    ),
    "two numbers a byte": (
        {"": torch.ones(16, 24, dtype=torch.uint8), "_scale": torch.ones(16, 1)},
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        "quantised by modelopt",
    ),
    "scales that are scaled": (
        {"": torch.ones(16, 48).to(FP8), "_scale": torch.ones(16, 1).to(FP8)}, None, "no scale of it is known",
    ),
    "a form of the method": (
        {"": torch.ones(16, 48).to(FP8), "_scale": torch.ones(16, 1)},
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
        "nvfp4-pack-quantized",
    ),
    "bitsandbytes": (
        {"": torch.ones(16, 48, dtype=torch.int8)}, {"quant_method": "bitsandbytes"}, "quantised by bitsandbytes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
def test_weights_in_few_bits_that_are_not_read_are_refused(kind: str, tmp_path: Path) -> None:
    """Catches bare numbers taken for weights; the line names the method or the tensor."""
    own, (parts, method, words) = small_target(), WRONG[kind]
    path, _ = specforge(tmp_path, own)
    named = {DOWN + end: value for end, value in parts.items()}
    edit_tensors(lambda t: (t.pop(DOWN), t.update(named)))(tmp_path)
    if method is not None:
        set_config(quantization_config=method)(tmp_path)
    with pytest.raises(UserError) as error:
        quietly(path, own)
    assert words in str(error.value)
    assert "\n" not in str(error.value)
