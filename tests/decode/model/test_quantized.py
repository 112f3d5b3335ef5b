"""Quantised checkpoints: what is loaded is what their numbers mean, and forms that are not read are refused."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from decode.common.errors import UserError
from decode.drafts.causal import CausalDraft
from decode.engine.engine import decode
from decode.model.formats import packed_weights as formats
from decode.model.formats import quantized as formats_folder
from decode.model.formats.quantized import SOURCE_FILE, quantized_folder
from decode.model.loading import load_target
from decode.model.quantized import vnni
from decode.model.quantized.w8a8 import W8A8Linear
from decode.model.runner import ModelRunner
from decode.serving.running import vllm_client
from tests.quantized import FORMS
from tests.seq2seq import letter_tokenizer
from tests.tiny import noisy, tiny_model, tiny_prompts

VOCAB = 258
WEIGHTS = "model.safetensors"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def quantized(form: str, folder: Path, **changes: Any) -> Any:
    """Writes a tiny Llama whose layers are packed in this form to `folder`; returns the model with the same weights.
    `changes` go into its quantization_config."""
    settings, pack = FORMS[form]
    model = tiny_model("llama", vocab_size=VOCAB, num_hidden_layers=2)
    model.save_pretrained(folder)
    letter_tokenizer().save_pretrained(folder)
    tensors = {name: value.half() for name, value in load_file(folder / WEIGHTS).items()}
    for number, (name, layer) in enumerate(model.named_modules()):
        if isinstance(layer, torch.nn.Linear) and name != "lm_head":
            packed = pack(layer.in_features, layer.out_features, number)
            del tensors[f"{name}.weight"]
            tensors |= {f"{name}.{part}": value for part, value in packed.tensors.items()}
            layer.weight.data = packed.weight
        elif list(layer.parameters(recurse=False)):
            layer.weight.data = layer.weight.data.half().float()
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = settings | changes
    (folder / "config.json").write_text(json.dumps(config))
    return model


@pytest.mark.parametrize("form", FORMS)
def test_a_quantised_target_computes_what_its_numbers_mean(form: str, tmp_path: Path) -> None:
    """Catches numbers in another order, zero points off by one, groups mixed up by act-order, scales of the wrong
    blocks; and drafts that change the text of such a target."""
    model = quantized(form, tmp_path / "model")
    target = load_target(str(tmp_path / "model"), "cpu")
    ids = torch.tensor(tiny_prompts(12, vocab=VOCAB))
    with torch.no_grad():
        torch.testing.assert_close(
            target.runner.model(input_ids=ids).logits, model(input_ids=ids).logits, atol=1e-3, rtol=1e-4
        )  # fmt: skip
    target = dataclasses.replace(target, eos=frozenset())
    draft = CausalDraft(ModelRunner(noisy(model, 0.01)))
    prompts = tiny_prompts(3, 9, vocab=VOCAB)
    plain = [o.output_ids for o in decode(target, None, prompts, max_new_tokens=16)]
    assert [o.output_ids for o in decode(target, draft, prompts, max_new_tokens=16)] == plain


PACKED = Path(__file__).parents[2] / "golden" / "packed_layers.safetensors"
"""Layers that the packers of compressed-tensors 0.20.1, auto-gptq 0.7.1 and autoawq 0.2.9 wrote, by form, with what
their own code makes of them as `expected`; the metadata has the quantization_config of each."""
with safe_open(PACKED, "pt") as file:
    CONFIGS = {name: json.loads(x) for name, x in file.metadata().items() if name != "packers"}


@pytest.mark.parametrize("form", sorted(CONFIGS))
def test_what_the_format_s_own_packer_wrote_is_read(form: str, tmp_path: Path) -> None:
    """Catches a reading that is right for our own packer alone."""
    parts = {name: x for name, x in load_file(PACKED).items() if name.startswith(f"{form}/")}
    layer = {name.partition("/")[2]: x for name, x in parts.items()}
    expected = layer.pop("expected")
    place = {48: "mlp.gate_proj", 32: "self_attn.q_proj"}[len(expected)]
    folder = tmp_path / "model"
    tiny_model("llama", vocab_size=VOCAB, num_hidden_layers=2).save_pretrained(folder)
    letter_tokenizer().save_pretrained(folder)
    tensors = load_file(folder / WEIGHTS)
    for prefix in (f"model.layers.{number}.{place}." for number in range(2)):
        del tensors[prefix + "weight"]
        tensors |= {prefix + name: x.clone() for name, x in layer.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = CONFIGS[form]
    (folder / "config.json").write_text(json.dumps(config))
    model = load_target(str(folder), "cpu").runner.model.model
    for one in model.layers:
        torch.testing.assert_close(one.get_submodule(place).weight, expected, atol=1e-6, rtol=1e-6)


def test_named_chat_templates_are_kept(tmp_path: Path) -> None:
    """Catches templates in a folder of their own, which a copy of single files leaves behind."""
    quantized("awq", tmp_path / "model")
    tokenizer = letter_tokenizer()
    tokenizer.chat_template = {"default": "D", "rag": "R", "tool_use": "T"}
    tokenizer.save_pretrained(tmp_path / "model")
    target = load_target(str(tmp_path / "model"), "cpu")
    assert target.tokenizer.chat_template == tokenizer.chat_template


def test_planted_bugs_change_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a test that cannot fail: GPTQ's two versions exchanged, AWQ's columns in plain order."""
    for form, change in (("gptq4", {"checkpoint_format": "gptq_v2"}), ("awq", {})):
        model = quantized(form, tmp_path / form, **change)
        monkeypatch.setattr(formats, "AWQ_ORDER", range(8))
        layer = load_target(str(tmp_path / form), "cpu").runner.model.model.layers[0]
        own = model.model.layers[0].mlp.up_proj.weight
        assert (layer.mlp.up_proj.weight - own).abs().max() > 0.01


def test_the_cached_folder_is_used_again(tmp_path: Path, cache: Path) -> None:
    """Catches weights that are dequantised in every process, and old ones that are taken for new files."""
    quantized("awq", tmp_path / "model")
    first = quantized_folder(str(tmp_path / "model"))
    assert first is not None
    assert (Path(first) / SOURCE_FILE).is_file()
    assert quantized_folder(str(tmp_path / "model")) == first
    assert quantized_folder(first) is None
    quantized("gptq4", tmp_path / "model")
    assert quantized_folder(str(tmp_path / "model")) != first
    assert not [one for one in (cache / "draftsmith" / "quantized").iterdir() if one.suffix]


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "three bits": ("gptq4", {"bits": 3}, "GPTQ weights of 3 bits"),
    "marlin": ("gptq4", {"checkpoint_format": "marlin"}, "in the form 'marlin'"),
    "gemv": ("awq", {"version": "gemv"}, "other than those of version gemm"),
    "sparse": ("int8-channels", {"format": "sparse-bitmask"}, "in the form 'sparse-bitmask'"),
    "other bits than stated": ("gptq8", {"bits": 4}, "has numbers of 8 bits, and config.json says 4"),
    "NVFP4 of ModelOpt": ("modelopt-tensor", {"quant_algo": "NVFP4"}, "ModelOpt weights in the form 'NVFP4'"),
    "NVFP4": ("int4-words", {"format": "nvfp4-pack-quantized"}, "in the form 'nvfp4-pack-quantized'"),
    "one group in four-bit floats": (
        "fp8-channels",
        {"config_groups": {"a": {"format": "mxfp4-pack-quantized"}, "b": {}}},
        "in the form 'mxfp4-pack-quantized'",
    ),
    "2:4 sparse": (
        "fp8-channels",
        {"sparsity_config": {"format": "sparse-24-bitmask", "sparsity_structure": "2:4"}},
        "in the form 'sparse-24-bitmask'",
    ),
    "rotated while it runs": (
        "int4-words",
        {"transform_config": {"config_groups": {"R4": {"type": "hadamard", "apply": [{"location": "input"}]}}}},
        "activations that are rotated while it runs",
    ),
    "other bits than its words": (
        "int4-words", {"config_groups": {"a": {"weights": {"num_bits": 3}}}}, "of \\[3\\] bits",
    ),
    "a form of another case": ("modelopt-tensor", {"quant_algo": "w4a8_awq"}, "in the form 'w4a8_awq'"),
    "unknown method": ("fp8-tensor", {"quant_method": "mine"}, "quantised by 'mine', which is not read"),
    "no method": ("fp8-tensor", {"quant_method": ""}, "quantised by '', which is not read"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("form", "change"),
    [
        ("fp8-channels", {"sparsity_config": {"format": "dense", "sparsity_structure": "2:4"}}),
        ("int4-words", {"transform_config": {"config_groups": {"R1": {"apply": [{"location": "weight_input"}]}}}}),
        ("int4-words", {"sparsity_config": {}, "config_groups": {"a": {"weights": {"num_bits": 4}}}}),
        ("modelopt-tensor", {"quant_algo": "fp8"}),
    ],
)  # fmt: skip
def test_what_changes_no_number_is_read(form: str, change: dict[str, Any], tmp_path: Path) -> None:
    """Catches a refusal of weights that are rotated once and for all, of zeros that are stored, of ModelOpt's names in
    small letters."""
    model = quantized(form, tmp_path, **change)
    got = load_target(str(tmp_path), "cpu").runner.model.state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(got[name], value, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("values", "kept"), [([0, 1, 1], True), ([0, 0, 0], True), ([3, 16, 255], False)]
)
def test_bytes_beside_the_layers_are_masks_or_refused(
    values: list[int], kept: bool, tmp_path: Path
) -> None:
    """Catches stacked weights of two numbers a byte that pass for a buffer by their name, and refused masks."""
    quantized("awq", tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    tensors["model.layers.0.some_blocks"] = torch.tensor(values, dtype=torch.uint8)
    q = FORMS["awq"][0]
    if kept:
        got = dict(formats.plain_weights(tensors, q))
        assert torch.equal(got["model.layers.0.some_blocks"], tensors["model.layers.0.some_blocks"])
    else:
        with pytest.raises(UserError, match="some_blocks is uint8, and no scale of it is known"):
            dict(formats.plain_weights(tensors, q))


def test_a_method_of_a_file_of_its_own_is_found(tmp_path: Path) -> None:
    """Catches FP8 of older ModelOpt exports, whose config.json names no method, taken for damaged files."""
    model = quantized("modelopt-tensor", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="config.json has no quantization_config"):
        load_target(str(tmp_path), "cpu")
    note = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(note))
    got = load_target(str(tmp_path), "cpu").runner.model.state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(got[name], value)


@pytest.mark.parametrize(
    "changed", ["chat_template.jinja", "generation_config.json", "tokenizer_config.json"]
)
def test_a_made_folder_follows_what_lies_beside_the_weights(changed: str, tmp_path: Path) -> None:
    """Catches an old chat template or generation_config that a folder made before goes on giving."""
    quantized("awq", tmp_path)
    file = tmp_path / changed
    times = file.stat() if file.exists() else None
    first = Path(quantized_folder(str(tmp_path)) or "")
    old = json.loads(file.read_text()) if changed.endswith(".json") else {}
    text = json.dumps(old | {"eos_token_id": [7]}) if old else "A {{ messages }}"
    file.write_text(text)
    if times is not None:  # as rsync and cp -p leave them
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    second = Path(quantized_folder(str(tmp_path)) or "")
    assert second != first
    assert (second / changed).read_text() == text


def test_weights_of_equal_size_and_time_are_other_weights(tmp_path: Path) -> None:
    """Catches a replaced file that kept its size and its time of change, which names the old folder."""
    quantized("awq", tmp_path)
    first, times = quantized_folder(str(tmp_path)), (tmp_path / WEIGHTS).stat()
    content = (tmp_path / WEIGHTS).read_bytes()
    (tmp_path / WEIGHTS).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    os.utime(tmp_path / WEIGHTS, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert quantized_folder(str(tmp_path)) != first


def test_bare_numbers_are_found_in_a_loaded_model(tmp_path: Path) -> None:
    """Catches a loader that takes codes for weights whatever config.json says, as transformers does with a method that
    it does not know; and a check that takes real weights for codes."""
    model = quantized("fp8-tensor", tmp_path)
    formats_folder.check_bare_numbers(model, tmp_path, "target x")
    name = "model.layers.1.mlp.up_proj"
    stored = load_file(tmp_path / WEIGHTS)[f"{name}.weight"]
    model.get_submodule(name).weight.data = stored.float()
    with pytest.raises(UserError, match=rf"target x: {name}.weight is F8_E4M3, named by no config"):
        formats_folder.check_bare_numbers(model, tmp_path, "target x")


EIGHT = {"bits": 8, "group_size": 12}
DYNAMIC: dict[str, tuple[dict[str, Any], str]] = {
    "with a sign": ({"+:.*mlp.down_proj": EIGHT}, ""),
    "without a sign": ({".*down_proj": EIGHT}, ""),
    "the first that matches": ({".*down_proj": EIGHT, ".*mlp.*": {"bits": 4}}, ""),
    "what is excluded is elsewhere": ({"-:lm_head": {}, ".*layers.[01].mlp.down": EIGHT}, ""),
    "the middle of a name": ({"down_proj": EIGHT}, "it has numbers of 8 bits, and config.json says 4"),
    "other bits": ({".*down_proj": {"bits": 2}}, "it has numbers of 8 bits, and config.json says 2"),
}  # fmt: skip


@pytest.mark.parametrize("case", DYNAMIC)
def test_layers_have_the_bits_that_a_pattern_gives_them(case: str, tmp_path: Path) -> None:
    """Catches GPTQModel's patterns that are searched for anywhere, or of which the last counts; eight bits that are
    read as four."""
    dynamic, reason = DYNAMIC[case]
    model = quantized("gptq-dynamic", tmp_path, dynamic=dynamic)
    if reason:
        with pytest.raises(UserError, match=f"down_proj: {reason}"):
            load_target(str(tmp_path), "cpu")
        return
    got = load_target(str(tmp_path), "cpu").runner.model.state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(got[name], value, atol=1e-6, rtol=1e-6)


def test_a_layer_that_a_pattern_leaves_out_is_plain(tmp_path: Path) -> None:
    """Catches a layer without packed numbers, as `-:` leaves it, that is taken for a damaged one."""
    model = quantized("gptq4", tmp_path, dynamic={"-:.*down_proj": {}})
    tensors, name = load_file(tmp_path / WEIGHTS), "model.layers.0.mlp.down_proj"
    tensors = {key: value for key, value in tensors.items() if not key.startswith(f"{name}.")}
    plain = torch.randn(model.get_submodule(name).weight.shape)
    save_file(tensors | {f"{name}.weight": plain}, tmp_path / WEIGHTS, metadata={"format": "pt"})
    got = load_target(str(tmp_path), "cpu").runner.model.state_dict()
    assert torch.equal(got[f"{name}.weight"], plain)
    other = name.replace("0", "1")
    torch.testing.assert_close(got[f"{other}.weight"], model.get_submodule(other).weight)


@pytest.mark.skipif(not vnni.is_available(), reason="needs AVX512-VNNI")
@pytest.mark.parametrize(
    "form", ["gptq4-act-order", "gptq4-v2", "gptq4-borrow", "int4-words-act-order"]
)
def test_w4a8_says_why_it_keeps_no_four_bits(form: str, tmp_path: Path) -> None:
    """Catches a checkpoint in act-order that "has no weight of four bits"."""
    quantized(form, tmp_path / "order")
    with pytest.raises(UserError, match="act-order: their groups are scattered"):
        load_target(str(tmp_path / "order"), "cpu", "w4a8")


def test_what_vllm_serves_is_not_dequantised(tmp_path: Path, cache: Path) -> None:
    """Catches gigabytes of float32 that are written before another engine is given a folder in eight bits."""
    quantized("int8-channels", tmp_path)
    assert vllm_client.language_model_path(str(tmp_path)) == str(tmp_path)
    assert not cache.exists()


@pytest.mark.parametrize("case", REFUSED)
def test_forms_that_are_not_read_are_refused(case: str, tmp_path: Path) -> None:
    """Catches weights that are read as if they had another form."""
    form, change, reason = REFUSED[case]
    quantized(form, tmp_path, **change)
    with pytest.raises(UserError, match=reason):
        load_target(str(tmp_path), "cpu")


def test_a_checkpoint_without_a_tensor_is_refused(tmp_path: Path) -> None:
    """Catches layers that stay random, and eight-bit numbers that are taken for weights."""
    for form, part, reason in (
        ("awq", "qzeros", "lacks some"),
        ("fp8", "weight_scale_inv", "no scale"),
        ("fp8-tensor", "weight_scale", "no scale"),
        ("modelopt-tensor", "weight_scale", "no scale"),
        ("int8-groups", "weight_scale", "lacks some"),
    ):
        quantized(form, tmp_path / form)
        tensors = load_file(tmp_path / form / WEIGHTS)
        del tensors[f"model.layers.0.mlp.up_proj.{part}"]
        save_file(tensors, tmp_path / form / WEIGHTS, metadata={"format": "pt"})
        with pytest.raises(UserError, match=reason):
            load_target(str(tmp_path / form), "cpu")
    (tmp_path / "awq" / WEIGHTS).write_bytes(b"damaged")
    with pytest.raises(UserError, match="restore its files"):
        load_target(str(tmp_path / "awq"), "cpu")


# ---- activations in eight bits ----

TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
CHANNEL = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
W8A8 = {
    "config_groups": {
        "group_0": {"weights": CHANNEL, "input_activations": TOKEN, "targets": ["Linear"]}
    }
}
REFUSED_ACTIVATIONS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "static": ({}, {"dynamic": False}, "static activations"),
    "static by tensor": (
        {},
        {"dynamic": False, "strategy": "tensor"},
        "activations with a scale for each tensor",
    ),
    "asymmetric": ({}, {"symmetric": False}, "asymmetric activations"),
    "asymmetric weights": ({"symmetric": False}, {}, "asymmetric weights"),
    "kv": ({}, {}, "a KV cache in eight bits"),
    "grouped": ({"strategy": "group", "group_size": 32}, {}, "weights with a scale for each group"),
    "four bits": ({}, {"num_bits": 4}, "activations that are not whole numbers of eight bits"),
}


def test_a_checkpoint_in_w8a8_is_taken_as_it_is(tmp_path: Path) -> None:
    """Bug: its numbers are rounded again, its scales lost, or layers that it leaves out are rounded."""
    quantized("int8-channels", tmp_path / "model", **W8A8)
    stored = load_file(tmp_path / "model" / WEIGHTS)
    model = load_target(str(tmp_path / "model"), "cpu", "w8a8").runner.model
    found = 0
    for name, layer in model.named_modules():
        if isinstance(layer, W8A8Linear):
            scale = stored[f"{name}.weight_scale"].float()
            assert torch.equal(layer.scale, scale.flatten())
            assert torch.equal(layer.dequantized(), stored[f"{name}.weight"].float() * scale)
            found += 1
    assert found == 14
    assert isinstance(model.get_output_embeddings(), torch.nn.Linear)
    plain = load_target(str(tmp_path / "model"), "cpu").runner.model
    assert not [layer for layer in plain.modules() if isinstance(layer, W8A8Linear)]


@pytest.mark.parametrize("case", REFUSED_ACTIVATIONS)
def test_other_activations_are_refused(case: str, tmp_path: Path) -> None:
    """Bug: activations that are rounded in another way than the checkpoint says."""
    weights, inputs, reason = REFUSED_ACTIVATIONS[case]
    group = {"weights": CHANNEL | weights, "input_activations": TOKEN | inputs}
    kv = {"kv_cache_scheme": {"num_bits": 8}} if case == "kv" else {}
    quantized("int8-channels", tmp_path, config_groups={"group_0": group}, **kv)
    with pytest.raises(UserError, match=f"has {reason}, which dtype w8a8 does not compute"):
        load_target(str(tmp_path), "cpu", "w8a8")
    load_target(str(tmp_path), "cpu")


def test_a_checkpoint_of_rounded_weights_alone_is_rounded_as_others(tmp_path: Path) -> None:
    quantized("int8-channels", tmp_path)
    model = load_target(str(tmp_path), "cpu", "w8a8").runner.model
    assert isinstance(model.get_output_embeddings(), W8A8Linear)
