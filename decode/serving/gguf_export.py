"""A language model as a GGUF file, which llama.cpp loads: causal drafts, and targets of the same architectures.

Keys and names of tensors are those of the `gguf` package. Llama's queries and keys are stored in GGUF's order, in which
the two halves of a rotation alternate; those of other architectures stay as transformers has them.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer

from decode.checkpoints.draft_vocab import resize_vocabulary, silence_other_tokens
from decode.common.errors import UserError
from decode.common.ranges import FloatName
from decode.drafts.causal import load_ids
from decode.model.formats.gguf_tokenizers import PRE_TOKENIZERS
from decode.model.loading import end_ids, load_config, load_model, load_tokenizer
from decode.model.vocabularies import disagreement

Array = np.ndarray[Any, Any]
"""What matrices are stored as; vectors are float32 always."""

ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2}
"""GGUF's architecture for each model_type that is written."""
TYPES = {
    "float32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "float16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "bfloat16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
}
"""(of a tensor, of a file)."""
OTHER_CONVERTER = "convert it with llama.cpp's convert_hf_to_gguf.py"


def write_gguf(name: str, out: Path, dtype: FloatName = "float32", target: str = "") -> None:
    """Writes the model in the folder, on the Hub or in the GGUF `name` to the file `out`, matrices as `dtype`. With
    `target` it gets as many logits as that model has. A GGUF has no reduced vocabulary: tokens outside a draft's are
    silenced (`silence_other_tokens`). UserError for an architecture, a RoPE or a tokenizer that is not written here,
    and for one other than the target's."""
    config, tokenizer = load_config(name, "model"), load_tokenizer(name)
    check_architecture(name, config)
    if target:  # either may have tokens beside the shared ones
        own, tokenizer = tokenizer, load_tokenizer(target)
        found = disagreement(own, tokenizer)
        if found is not None:
            raise UserError(
                f"{name!r} and {target!r} disagree on token ids, {found}: llama.cpp takes one pair"
            )
    model = load_model(name, "model", "cpu", "float32")
    # The tensors decide: a head that was trained apart is there, whatever the config says of it.
    tied = torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    model.config.tie_word_embeddings = tied
    if target:
        resize_vocabulary(model, load_config(target, "target").vocab_size)
    ids = load_ids(name, model.config.vocab_size) if Path(name).is_dir() else None
    if ids is not None:
        silence_other_tokens(model, ids)
        tied = False
    if len(tokenizer) > model.config.vocab_size:
        raise UserError(
            f"{name!r} embeds {model.config.vocab_size} of its tokenizer's {len(tokenizer)} tokens: give --target, and "
            "it gets as many as that"
        )
    architecture = ARCHITECTURES[config.model_type]
    names = gguf.get_tensor_name_map(architecture, model.config.num_hidden_layers)
    tensors: dict[str, Array] = {}
    for key, value in model.state_dict().items():
        if tied and key == "lm_head.weight":
            continue  # llama.cpp takes the embedding
        stored = names.get_name(key, try_suffixes=(".weight", ".bias"))
        if stored is None:
            raise UserError(f"{name!r}: {key} has no name in GGUF: {OTHER_CONVERTER}")
        tensors[stored] = in_gguf_order(key, value.float().numpy(), model.config)
    writer = gguf.GGUFWriter(out, gguf.MODEL_ARCH_NAMES[architecture])
    write_tokenizer(writer, name, tokenizer, end_ids(name, config), model.config.vocab_size)
    write_file(writer, Path(name).stem, model.config, tensors, dtype)


def write_file(
    writer: gguf.GGUFWriter, name: str, config: Any, tensors: Mapping[str, Array], dtype: FloatName
) -> None:
    """Writes the file, with what `writer` was given before: matrices as `dtype`, vectors in float32, whole numbers as
    they are."""
    writer.add_name(name)
    writer.add_file_type(TYPES[dtype][1])
    write_sizes(writer, config)
    for stored, array in tensors.items():
        if array.dtype == np.int64:
            writer.add_tensor(stored, array)
        else:
            kind, _ = TYPES[dtype if array.ndim > 1 else "float32"]
            writer.add_tensor(stored, gguf.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def check_architecture(name: str, config: Any) -> None:
    """UserError unless a GGUF of a known architecture computes what this model does."""
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    biases = [vars(config).get(key) for key in ("attention_bias", "mlp_bias")]
    reasons = {
        f"is a {config.model_type} (known are {', '.join(ARCHITECTURES)})": (
            config.model_type not in ARCHITECTURES
        ),
        f"has RoPE of type {rope}": rope != "default",
        "has a sliding window": layers != {"full_attention"},
        "has biases": any(biases),
    }
    found = [reason for reason, applies in reasons.items() if applies]
    if found:
        raise UserError(
            f"{name!r} {found[0]}, which is not written as GGUF here: {OTHER_CONVERTER}"
        )


def in_gguf_order(key: str, array: Array, config: Any) -> Array:
    """A weight in GGUF's order of rows, which is another for Llama's query and key projections alone."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    count = heads.get(key.split(".")[-2])
    if config.model_type != "llama" or count is None:
        return array
    return array.reshape(count, 2, -1, array.shape[-1]).swapaxes(1, 2).reshape(array.shape)


def write_sizes(writer: gguf.GGUFWriter, config: Any) -> None:
    """The keys that describe the model's shape."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for add, value in (
        (writer.add_block_count, config.num_hidden_layers),
        (writer.add_context_length, config.max_position_embeddings),
        (writer.add_embedding_length, config.hidden_size),
        (writer.add_feed_forward_length, config.intermediate_size),
        (writer.add_head_count, config.num_attention_heads),
        (writer.add_head_count_kv, config.num_key_value_heads),
        (writer.add_key_length, head),
        (writer.add_value_length, head),
        (writer.add_layer_norm_rms_eps, config.rms_norm_eps),
        (writer.add_rope_dimension_count, head),
        (writer.add_rope_freq_base, config.rope_parameters["rope_theta"]),
        (writer.add_vocab_size, config.vocab_size),
    ):
        add(value)


def byte_level_bpe(name: str, tokenizer: Any) -> tuple[str, list[str]]:
    """(GGUF's name for how it cuts texts, its merges). UserError for a tokenizer of another kind."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    saved = json.loads(backend.to_str()) if isinstance(backend, Tokenizer) else {}
    model = saved.get("model", {})
    found = [] if saved.get("pre_tokenizer") is None else [
        known
        for known, make in PRE_TOKENIZERS.items()
        if _cuts(json.loads(make().__getstate__())) == _cuts(saved["pre_tokenizer"])
    ]  # fmt: skip
    if model.get("type") != "BPE" or model.get("byte_fallback") or not found:
        raise UserError(
            f"the tokenizer of {name!r} is no byte-level BPE that cuts texts as one of {', '.join(PRE_TOKENIZERS)}: "
            f"{OTHER_CONVERTER}"
        )
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return found[0], merges


def _cuts(pre_tokenizer: dict[str, Any]) -> Any:
    """The steps of a pre-tokenizer, without offsets, which do not change how it cuts."""
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    return [{key: x for key, x in step.items() if key != "trim_offsets"} for step in steps]


def write_tokenizer(
    writer: gguf.GGUFWriter, name: str, tokenizer: Any, ends: list[int], rows: int
) -> None:
    """The keys of the vocabulary, the chat template and special ids; `ends` end a text. Ids behind the tokenizer's, up
    to `rows`, are unused tokens. UserError that names the model `name` for a tokenizer of another kind."""
    split, merges = byte_level_bpe(name, tokenizer)
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    kinds = [gguf.TokenType.NORMAL] * len(tokens)
    for number, token in tokenizer.added_tokens_decoder.items():
        kinds[number] = gguf.TokenType.CONTROL if token.special else gguf.TokenType.USER_DEFINED
    unused = range(len(tokens), rows)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list([*tokens, *(f"[PAD{number}]" for number in unused)])
    writer.add_token_types([*kinds, *(gguf.TokenType.UNUSED for _ in unused)])
    writer.add_token_merges(merges)
    writer.add_add_space_prefix(False)
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = [{"name": name, "template": text} for name, text in template.items()]
    if template:
        writer.add_chat_template(template)

    # A GGUF has three names for ids that end a text; further ones are left out.
    ends = sorted(ends, key=lambda number: number != tokenizer.eos_token_id)
    special = {
        **dict(zip(("eos", "eot", "eom"), ends, strict=False)),
        "bos": tokenizer.bos_token_id,
        "unknown": tokenizer.unk_token_id,
        "padding": tokenizer.pad_token_id,
    }
    for role, number in special.items():
        if number is not None:
            writer.add_uint32(f"tokenizer.ggml.{role}_token_id", number)
    writer.add_add_bos_token(tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id])
