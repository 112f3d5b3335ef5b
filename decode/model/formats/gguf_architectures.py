"""The config and the parameters of a transformers model from the keys and tensors of a GGUF.

Everything that a file says of its architecture is used, or the file is refused with the name of what was not: a key or
a tensor that is left out would be another model without a word. Tensors decide what they can: the size of the
vocabulary, whether there are biases, and whether the LM head is the embedding.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from decode.common.errors import UserError
from decode.model.formats.gguf_reader import GgufContent, StoredTensor, Weight

Array = np.ndarray[Any, Any]

ORIGINAL = "take the model's original folder instead"
HARMLESS = ("general.", "tokenizer.", "split.", "quantize.", "imatrix.", "mradermacher.")
"""What keys begin with that describe the file and not its architecture."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "attention.causal": (True,),
    "pooling_type": (0,),
    "nextn_predict_layers": (0,),
    "tensor_data_layout": ("Meta AI original pth",),
    "rope.scaling.finetuned": (True, False),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "rope.scaling.alpha": (0.0,),
}
"""Keys with the values that change nothing."""
SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
"""Keys without which there is no model."""
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
GEMMA_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
ROPE_FREQS, LONG, SHORT = (
    f"rope_{name}.weight" for name in ("freqs", "factors_long", "factors_short")
)


class Keys:
    """The keys of one architecture; each that is read counts as used."""

    def __init__(self, content: GgufContent, file: str) -> None:
        self.architecture = str(content.keys["general.architecture"])
        self.file = file
        begin = f"{self.architecture}."
        self.left = {k.removeprefix(begin): v for k, v in content.keys.items() if k.startswith(begin)}  # fmt: skip

    def take(self, key: str, default: Any = None) -> Any:
        """The value of the key, which then counts as used. UserError for one number per layer."""
        value = self.left.pop(key, default)
        if isinstance(value, list):
            self.refuse(key, value)
        return value

    def need(self, key: str) -> Any:
        """The value of a key without which no model is built."""
        if key not in self.left:
            raise UserError(
                f"{self.file} lacks the key {self.architecture}.{key}, without which its model is unknown: get the "
                "whole file again"
            )
        return self.take(key)

    def refuse(self, key: str, value: Any) -> None:
        raise UserError(
            f"{self.file}: its key {self.architecture}.{key} = {str(value)[:60]} is not followed here: {ORIGINAL}"
        )


@dataclass(frozen=True)
class Architecture:
    """How the model of a GGUF architecture is built."""

    model_type: str
    layer: dict[str, str] = field(default_factory=lambda: LAYER)
    """{tensor of a layer: its parameter}, without `.weight` and `.bias`."""
    more: Callable[[Keys, dict[str, Any]], dict[str, Any]] = lambda keys, sizes: {}
    """Further fields of the config, from further keys and the fields so far."""
    rope_tensors: tuple[str, ...] = ()
    interleaved: bool = False
    """Whether rows of queries and keys alternate between the two halves of a rotation."""
    norm_offset: float = 0.0
    """What the file's norms are larger by than the model's parameters."""
    biases: dict[str, str] = field(default_factory=dict)
    """{flag of the config: the end of a tensor that is there where it is set}."""
    partial_rope: bool = False
    """Whether only the first dimensions of a head may be rotated."""


def _window_layers(keys: Keys, sizes: dict[str, Any], period: int) -> dict[str, Any]:
    """Every `period`-th layer sees all positions, unless the file has another pattern; all do without a window."""
    window = keys.take("attention.sliding_window", 0)
    pattern = keys.left.pop("attention.sliding_window_pattern", period)
    count = sizes["num_hidden_layers"]
    sliding = (
        [bool(one) for one in pattern]
        if isinstance(pattern, list)
        else [(layer + 1) % pattern != 0 for layer in range(count)]
    )
    if len(sliding) != count:
        keys.refuse("attention.sliding_window_pattern", pattern)
    kinds = ["sliding_attention" if window and one else "full_attention" for one in sliding]
    return {"sliding_window": window or None, "layer_types": kinds}


def _query_scalar(sizes: dict[str, Any], largest: int) -> int:
    """The scale of attention scores, which no file has: that of Gemma's 27B, of `largest` layers, is another one."""
    whole = sizes["hidden_size"] // sizes["num_attention_heads"]
    return int(whole if sizes["num_hidden_layers"] == largest else sizes["head_dim"])


def _gemma2(keys: Keys, sizes: dict[str, Any]) -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": _query_scalar(sizes, 46),
        "attn_logit_softcapping": keys.take("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.take("final_logit_softcapping", 30.0),
        **_window_layers(keys, sizes, 2),
    }


def _gemma3(keys: Keys, sizes: dict[str, Any]) -> dict[str, Any]:
    local = {"rope_type": "default", "rope_theta": keys.take("rope.freq_base_swa", 10000.0)}
    return {
        "query_pre_attn_scalar": _query_scalar(sizes, 62),
        "final_logit_softcapping": keys.take("final_logit_softcapping", 0.0) or None,
        **_window_layers(keys, sizes, 6),
        "rope_parameters": {"full_attention": sizes["rope_parameters"], "sliding_attention": local},
    }


def _phi3(keys: Keys, sizes: dict[str, Any]) -> dict[str, Any]:
    rope = sizes["rope_parameters"]
    original = rope.get("original_max_position_embeddings", sizes["max_position_embeddings"])
    window = keys.take("attention.sliding_window", 0)
    return {"sliding_window": window or None, "original_max_position_embeddings": original}


ARCHITECTURES = {
    "llama": Architecture(
        "llama",
        rope_tensors=(ROPE_FREQS,),
        interleaved=True,
        biases={"attention_bias": ".attn_q.bias", "mlp_bias": ".ffn_gate.bias"},
    ),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3", LAYER | HEAD_NORMS, biases={"attention_bias": ".attn_q.bias"}),
    "gemma2": Architecture("gemma2", LAYER | GEMMA_NORMS, _gemma2, norm_offset=1.0),
    "gemma3": Architecture(
        "gemma3_text", LAYER | GEMMA_NORMS | HEAD_NORMS, _gemma3, norm_offset=1.0
    ),
    "phi3": Architecture(
        "phi3",
        {name: LAYER[name] for name in ("attn_norm", "attn_output", "ffn_norm", "ffn_down")}
        | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        _phi3,
        rope_tensors=(LONG, SHORT),
        partial_rope=True,
    ),
}
"""By `general.architecture`."""


WITHOUT_HEAD_DIM = ("qwen2", "phi3")
"""Model types whose heads are as wide as the model is, together."""


def build_config(content: GgufContent, file: str) -> Any:
    """The config of the model. UserError for an unknown architecture, and for a key that is missing or not followed."""
    name = content.keys.get("general.architecture")
    if content.keys.get("general.type", "model") != "model":
        raise UserError(f"{file} is a GGUF of the kind {content.keys['general.type']!r}, no model")
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UserError(f"{file} is a GGUF of the architecture {name!r}; {known} are read: {ORIGINAL}")  # fmt: skip
    known_prefixes = (*HARMLESS, f"{name}.")
    foreign = [key for key in content.keys if not key.startswith(known_prefixes)]
    if foreign:
        raise UserError(
            f"{file}: its key {foreign[0]} belongs to no {name} model that is read here: {ORIGINAL}"
        )
    keys, architecture = Keys(content, file), ARCHITECTURES[name]
    fields = {target: keys.need(key) for key, target in SIZES.items()}
    fields["num_key_value_heads"] = keys.take("attention.head_count_kv", fields["num_attention_heads"])  # fmt: skip
    fields["head_dim"] = _head_dim(keys, fields, architecture)
    tensors = content.tensors
    if "token_embd.weight" not in tensors:
        raise UserError(f"{file} lacks the tensor token_embd.weight: get the whole file again")
    fields["vocab_size"] = tensors["token_embd.weight"].shape[0]
    said = keys.take("vocab_size", fields["vocab_size"])
    if said != fields["vocab_size"]:
        keys.refuse("vocab_size", f"{said}, with an embedding of {fields['vocab_size']} tokens,")
    fields["tie_word_embeddings"] = "output.weight" not in tensors
    for flag, tensor in architecture.biases.items():
        fields[flag] = any(held.endswith(tensor) for held in tensors)
    fields["rope_parameters"] = _rope(keys, fields, tensors, architecture)
    fields |= architecture.more(keys, fields)
    if architecture.model_type in WITHOUT_HEAD_DIM:
        del fields["head_dim"]
    for key, value in keys.left.items():
        if value not in NEUTRAL.get(key, ()):
            keys.refuse(key, value)
    ids = {
        role: content.keys.get(f"tokenizer.ggml.{key}_token_id")
        for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    fields |= {f"{role}_token_id": number for role, number in ids.items()}
    config = AutoConfig.for_model(architecture.model_type, **fields)
    config.architectures = [type(_empty_model(config)).__name__]
    return config


def _empty_model(config: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def _head_dim(keys: Keys, fields: dict[str, Any], architecture: Architecture) -> int:
    whole = fields["hidden_size"] // fields["num_attention_heads"]
    size = int(keys.take("attention.key_length", whole))
    values = keys.take("attention.value_length", size)
    if values != size:
        keys.refuse("attention.value_length", values)
    if size != whole and architecture.model_type in WITHOUT_HEAD_DIM:
        keys.refuse("attention.key_length", size)
    return size


def _rope(
    keys: Keys, fields: dict[str, Any], tensors: dict[str, StoredTensor], architecture: Architecture
) -> dict[str, Any]:
    """The RoPE of the file, as transformers has it. UserError for what is not followed."""
    rope = {"rope_type": "default", "rope_theta": keys.take("rope.freq_base", 10000.0)}
    held = {n: tensors[n].rows(0, 1)[0] for n in architecture.rope_tensors if n in tensors}
    rotated = keys.take("rope.dimension_count", fields["head_dim"])
    for name, values in held.items():
        if len(values) != rotated // 2:
            raise UserError(
                f"{keys.file}: its tensor {name} is [{len(values)}], where its keys mean [{rotated // 2}]: {ORIGINAL}"
            )
    if rotated != fields["head_dim"]:
        if not architecture.partial_rope:
            keys.refuse("rope.dimension_count", rotated)
        rope["partial_rotary_factor"] = rotated / fields["head_dim"]
    kind = keys.take("rope.scaling.type", "linear")  # what a factor alone means
    old = keys.take("rope.scale_linear", 0.0)
    factor = keys.take("rope.scaling.factor", old) or 1.0
    original = keys.take("rope.scaling.original_context_length")
    scale = keys.take("rope.scaling.attn_factor", 1.0)
    scaled = factor != 1.0 and kind != "none"
    if len(held) == 2:
        return rope | {
            "rope_type": "longrope",
            "long_factor": [float(x) for x in held[LONG]],
            "short_factor": [float(x) for x in held[SHORT]],
            "attention_factor": scale,
            "original_max_position_embeddings": original or fields["max_position_embeddings"],
        }
    if kind == "yarn" and scaled:
        return rope | _yarn(keys, factor, scale, original or fields["max_position_embeddings"])
    if scale != 1.0:
        keys.refuse("rope.scaling.attn_factor", scale)
    if kind not in ("linear", "none", "yarn"):
        keys.refuse("rope.scaling.type", kind)
    if ROPE_FREQS in held and scaled:
        keys.refuse("rope.scaling.factor", f"{factor}, beside the tensor {ROPE_FREQS},")
    if scaled:
        return rope | {"rope_type": "linear", "factor": factor}
    if ROPE_FREQS in held and (held[ROPE_FREQS] != 1.0).any():
        return rope | _divided(held[ROPE_FREQS], rope["rope_theta"], fields)
    return rope


def _yarn(keys: Keys, factor: float, scale: float, original: int) -> dict[str, Any]:
    """YaRN as the keys describe it. Cosines and sines are multiplied by 0.1 ln(factor) + 1, unless the file says
    otherwise: by its own factor, by a logarithm's multiplier in the denominator, or by `scale` besides."""
    rope = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        **{
            name: keys.left.pop(f"rope.scaling.yarn_{name}")
            for name in ("beta_fast", "beta_slow")
            if f"rope.scaling.yarn_{name}" in keys.left
        },
    }
    logarithm = 0.1 * math.log(factor) if factor > 1.0 else 0.0
    multiplier = keys.take("rope.scaling.yarn_log_multiplier", 0.0)
    own = keys.take("rope.scaling.yarn_attn_factor")
    if own is not None:
        return rope | {"attention_factor": own * scale}
    if multiplier == 0.0 and scale == 1.0:
        return rope
    return rope | {"attention_factor": (1 + logarithm) / (1 + multiplier * logarithm) * scale}


def _divided(divisors: Array, theta: float, fields: dict[str, Any]) -> dict[str, Any]:
    """Frequencies that the file divides by `divisors` [head_dim / 2]: llama3's where its formula gives just these.

    For others there is longrope with the same factors below and beyond its limit, which is the model's context.
    """
    frequencies = theta ** -(np.arange(0, fields["head_dim"], 2) / fields["head_dim"])
    waves = 2 * math.pi / frequencies
    factor = round(float(divisors.max()), 4)
    smooth = [(1 / d - 1 / factor) / (1 - 1 / factor) for d in divisors] if factor != 1 else []
    # Between its two limits smooth = (context / wave - 1) / 3; without a frequency there any limits that fit will do.
    between = [round(w * (3 * s + 1)) for w, s in zip(waves, smooth, strict=False) if 0.001 < s < 0.999]  # fmt: skip
    for context in [*between, *(2**power for power in range(3, 21))]:
        llama3 = {
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": context,
        }
        if np.allclose(_llama3_divisors(waves, factor, context), divisors, rtol=1e-5):
            return {"rope_type": "llama3", **llama3}
    return {
        "rope_type": "longrope",
        "long_factor": [float(x) for x in divisors],
        "short_factor": [float(x) for x in divisors],
        "attention_factor": 1.0,
        "factor": 1.0,
        "original_max_position_embeddings": fields["max_position_embeddings"],
    }


def _llama3_divisors(waves: Array, factor: float, context: int) -> Array:
    """What llama3 divides frequencies of these wavelengths by, with the limits 1 and 4 of all published models."""
    smooth = np.clip((context / waves - 1) / 3, 0, 1)
    return np.asarray(1 / ((1 - smooth) / factor + smooth))


def list_weights(content: GgufContent, config: Any, file: str) -> list[Weight]:
    """The parameters of the model with what they are made from; an LM head that is the embedding is none.

    UserError for a tensor that the model lacks or has too many of, and for one of another shape.
    """
    architecture = ARCHITECTURES[content.keys["general.architecture"]]
    wanted = _empty_model(config).state_dict()
    if config.tie_word_embeddings:
        del wanted["lm_head.weight"]
    used = {}
    for name, tensor in content.tensors.items():
        parameter = _parameter(name, architecture)
        if name in architecture.rope_tensors:
            continue  # part of the config
        if parameter not in wanted:
            raise UserError(
                f"{file}: its tensor {name} is no part of the model as it is read here: {ORIGINAL}"
            )
        shape = tuple(wanted[parameter].shape)
        if tensor.shape != shape:
            raise UserError(
                f"{file}: its tensor {name} is {list(tensor.shape)}, where its keys mean {list(shape)}: {ORIGINAL}"
            )
        used[parameter] = Weight(parameter, tensor, *_change(parameter, config, architecture))
    absent = [name for name in wanted if name not in used]
    if absent:
        raise UserError(
            f"{file} lacks {len(absent)} weights ({absent[0]}, …): get the whole file again, or {ORIGINAL}"
        )
    return [used[name] for name in wanted]


def _parameter(tensor: str, architecture: Architecture) -> str:
    """The name of the parameter that a tensor is; "" where there is none."""
    stem, _, kind = tensor.rpartition(".")
    if stem.startswith("blk."):
        _, layer, part = stem.split(".", 2)
        inner = architecture.layer.get(part)
        return f"model.layers.{layer}.{inner}.{kind}" if inner else ""
    return f"{OUTER[stem]}.{kind}" if stem in OUTER else ""


def _change(
    parameter: str, config: Any, architecture: Architecture
) -> tuple[Callable[[Array], Array] | None, int]:
    """What is done to rows of the parameter, and what their number has to divide by."""
    if architecture.interleaved and (".q_proj." in parameter or ".k_proj." in parameter):
        return partial(_halves, head_dim=config.head_dim), config.head_dim
    if architecture.norm_offset and parameter.endswith("norm.weight"):
        return lambda values: values - np.float32(architecture.norm_offset), 1
    return None, 1


def _halves(rows: Array, head_dim: int) -> Array:
    """Rows of heads, or one row of biases, in transformers' order: first halves of all rotations, then second ones."""
    columns = 1 if len(rows) == 1 else rows.shape[-1]
    return rows.reshape(-1, head_dim // 2, 2, columns).swapaxes(1, 2).reshape(rows.shape)
