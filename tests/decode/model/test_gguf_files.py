"""GGUF models: what is loaded is what the file holds, and a file that cannot be converted gets one line."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from huggingface_hub import constants
from transformers import AutoTokenizer

from decode.common.errors import UserError
from decode.model import gguf_files
from decode.model.gguf_files import PRE_TOKENIZERS, SOURCE_FILE, gguf_folder
from decode.model.loading import load_target
from tests.tiny import tiny_model

ASSETS = Path(__file__).resolve().parents[3] / "assets" / "target"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
ENDING = 1
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def llama() -> Any:
    """A tiny Llama with the bundled tokenizer's vocabulary; widths are multiples of 32, the block of Q4_1 and Q8_0."""
    return tiny_model(
        "llama",
        vocab_size=4096,
        hidden_size=64,
        intermediate_size=96,
        head_dim=16,
        num_hidden_layers=2,
    )


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection in GGUF's order, in which the two halves of a rotation alternate."""
    return weight.reshape(heads, 2, -1, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path, model: Any, kind: str = "F32", pre: str = "gpt-2", skip: str = "", **changes: Any
) -> Path:
    """`model` as a GGUF with the bundled tokenizer; matrices quantised as `kind`, tensors named `skip` left out."""
    config, tokenizer = model.config, json.loads((ASSETS / "tokenizer.json").read_text())["model"]
    writer = gguf.GGUFWriter(path, changes.get("architecture", "llama"))
    writer.add_license("apache-2.0")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    tokens = sorted(tokenizer["vocab"], key=tokenizer["vocab"].get)
    tokens += [f"[PAD{i}]" for i in range(len(tokens), config.vocab_size)]
    special = [3 if token.startswith("<|") or token.startswith("[PAD") else 1 for token in tokens]
    writer.add_token_list(tokens)
    writer.add_token_types(special)
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(ENDING)
    writer.add_chat_template(TEMPLATE)
    for name, value in model.state_dict().items():
        array = value.float().numpy()
        part = name.removeprefix("model.").removesuffix(".weight")
        if part.startswith("layers."):
            _, layer, inner = part.split(".", 2)
            if inner in ("self_attn.q_proj", "self_attn.k_proj"):
                heads = config.num_attention_heads if "q_" in inner else config.num_key_value_heads
                array = interleaved(array, heads)
            part = f"blk.{layer}.{NAMES[inner]}"
        else:
            part = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}[part]
        if part == skip:
            continue
        if array.ndim == 2 and kind != "F32":
            quantised = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(
                f"{part}.weight", gguf.quantize(array, quantised), raw_dtype=quantised
            )
        else:
            writer.add_tensor(f"{part}.weight", array.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_an_unquantised_file_gives_the_model_itself(tmp_path: Path) -> None:
    model = llama()
    target = load_target(str(write_gguf(tmp_path / "tiny.gguf", model)), "cpu")
    loaded = target.decoder.model.state_dict()
    assert set(loaded) == set(model.state_dict())
    for name, value in model.state_dict().items():
        assert torch.equal(loaded[name], value), name
    assert target.eos == {ENDING}
    assert target.tokenizer.chat_template == TEMPLATE


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "F16"])
def test_quantised_weights_are_those_that_the_quantisation_defines(
    tmp_path: Path, kind: str
) -> None:
    model = llama()
    target = load_target(str(write_gguf(tmp_path / "tiny.gguf", model, kind)), "cpu")
    quantised = gguf.GGMLQuantizationType[kind]
    weight = model.model.layers[0].mlp.up_proj.weight.detach().numpy()
    wanted = gguf.dequantize(gguf.quantize(weight, quantised), quantised)
    got = target.decoder.model.model.layers[0].mlp.up_proj.weight.detach()
    assert got.dtype == torch.float32
    assert np.allclose(got.numpy(), wanted, rtol=1e-6, atol=1e-7)
    assert not np.array_equal(got.numpy(), weight)


def test_the_folder_is_made_once_and_says_where_it_comes_from(tmp_path: Path, cache: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", llama())
    folder = gguf_folder(str(file))
    assert folder is not None
    note = json.loads((Path(folder) / SOURCE_FILE).read_text())
    assert note["file"] == "tiny.gguf"
    assert note["licence"] == "apache-2.0"
    assert Path(folder).name == f"{note['sha256'][:16]}-v{gguf_files.FORMAT}"
    assert not list(Path(folder).glob("*.safetensors"))  # asked for config and tokenizer alone
    whole = Path(gguf_folder(str(file), dtype=torch.bfloat16) or "")
    made = (whole / "model.safetensors").stat().st_mtime_ns
    assert gguf_folder(str(tmp_path), dtype=torch.bfloat16) == str(
        whole
    )  # its folder means the same
    assert (whole / "model.safetensors").stat().st_mtime_ns == made
    assert {p.name for p in whole.parent.iterdir()} == {Path(folder).name, whole.name}
    assert gguf_folder(str(file), dtype=torch.float32) != str(whole)


def test_texts_are_cut_as_the_vocabulary_was_made(tmp_path: Path) -> None:
    text = "x = 12\n\n1. two  3"
    plain = load_target(str(write_gguf(tmp_path / "a.gguf", llama())), "cpu").tokenizer
    digits = load_target(str(write_gguf(tmp_path / "b.gguf", llama(), pre="smollm")), "cpu")
    bundled = AutoTokenizer.from_pretrained(ASSETS)
    assert digits.tokenizer(text).input_ids == bundled(text).input_ids
    cut = [piece for piece, _ in plain.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    alone = digits.tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert "Ġ12" in cut
    assert {"1", "2", "3"} <= {piece for piece, _ in alone}


@pytest.mark.parametrize(
    ("text", "pre", "pieces"),
    [
        ("a 1234", "qwen2", ["a", "Ġ", "1", "2", "3", "4"]),
        ("a 1234", "llama-bpe", ["a", "Ġ", "123", "4"]),
        ("a 12 b", "gpt-2", ["a", "Ġ12", "Ġb"]),
        ("a\n\n1", "smollm", ["a", "ĊĊ", "1"]),
        ("a\n\n1", "gpt-2", ["a", "Ċ", "Ċ", "1"]),
    ],
)
def test_pre_tokenizers(text: str, pre: str, pieces: list[str]) -> None:
    assert [piece for piece, _ in PRE_TOKENIZERS[pre]().pre_tokenize_str(text)] == pieces


def test_files_that_cannot_be_converted_get_one_line(tmp_path: Path, cache: Path) -> None:
    model = llama()
    whole = write_gguf(tmp_path / "whole.gguf", model).read_bytes()
    damaged = {
        "truncated": whole[: len(whole) // 2],
        "no header": b"GGUF" + bytes(40),
        "another format": b"PK\x03\x04" + bytes(100),
        "empty": b"",
    }
    for name, content in damaged.items():
        file = tmp_path / f"{name}.gguf"
        file.write_bytes(content)
        with pytest.raises(UserError, match="cannot be converted") as error:
            gguf_folder(str(file))
        assert "\n" not in str(error.value)
    write_gguf(tmp_path / "unknown.gguf", model, architecture="no-such")
    with pytest.raises(UserError, match="cannot be converted"):
        gguf_folder(str(tmp_path / "unknown.gguf"))
    write_gguf(tmp_path / "cut.gguf", model, pre="no-such")
    with pytest.raises(UserError, match="no-such.*original folder"):
        gguf_folder(str(tmp_path / "cut.gguf"))
    write_gguf(tmp_path / "less.gguf", model, skip="blk.1.ffn_up")
    with pytest.raises(UserError, match=r"lacks 1 weights \(model.layers.1.mlp.up_proj"):
        gguf_folder(str(tmp_path / "less.gguf"))
    with pytest.raises(UserError, match=r"one .gguf file, or name one"):
        gguf_folder(str(tmp_path))
    with pytest.raises(UserError, match="does not exist"):
        gguf_folder(str(tmp_path / "absent.gguf"))
    assert not list(cache.rglob("*.safetensors"))  # nothing half made stays


def test_a_model_folder_and_a_hub_name_are_no_gguf(tmp_path: Path) -> None:
    assert gguf_folder(str(ASSETS)) is None
    assert gguf_folder("owner/model") is None
