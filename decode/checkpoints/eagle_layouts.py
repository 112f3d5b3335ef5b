"""EAGLE-1, EAGLE-3 and P-EAGLE: config.json and tensors as saved here, as engines require them and as others save them.

EAGLE-3 has the flat layout whose config.json works in all engines, EAGLE-1 the layout of its authors. EAGLE-3 is read
as its authors, SpecForge and SGLang (flat) or speculators (nested) write it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from decode.checkpoints import layouts
from decode.checkpoints.layouts import HeadConfig, Layout, ReadFiles, Shapes, Tensors
from decode.common.errors import UserError
from decode.model.compatibility import rope_configs

NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Norms that variants of EAGLE-3 add, by their names in config.json; EAGLE-3 itself has none of them."""
EAGLE1_FIELDS = {
    # Some engines take the first, others put Eagle before each and then know the second.
    "architectures": ["LlamaForCausalLMEagle", "LlamaForCausalLM"],
    "bias": False,
}
SIZES = ("draft_vocab_size", "target_hidden_size")
OUTER_KEYS = (*SIZES, *NORM_FLAGS, layouts.AUX_LAYERS, "mask_token_id", "dtype", "torch_dtype")
"""Settings of EAGLE-3 that speculators writes outside `transformer_layer_config`."""
MASK_TOKEN_FIELDS = ("mask_token_id", "pard_token", "ptd_token_id")
"""Where engines look for the mask token of P-EAGLE, in this order."""
Q_NORM = "self_attn.q_norm.weight"
"""The tensor by which Qwen3's layers are known."""
NO_LAYER_NAMES = re.compile(
    r"for_?causal_?lm|(p-?)?eagle-?[123]?|dflash-?2?|dspark|xpress|domino|dflare|speculator|draft|model|mtp",
    re.IGNORECASE,
)
"""What names in `architectures` hold besides the kind of a layer."""


# ---- as saved here ----


def llama_layer_config(target: Any, vocab: int, width: int = 0) -> HeadConfig:
    """The part of config.json that EAGLE and DFlash share: a Llama layer with the heads, norms and RoPE of its target.
    `width` is the draft's hidden size (0: the target's). In a narrower draft attention heads keep their size and there
    are fewer of them."""
    fields, hidden = target.to_dict(), target.hidden_size
    width = width or hidden
    size = fields.get("head_dim") or hidden // target.num_attention_heads
    ratio = target.num_attention_heads // (
        fields.get("num_key_value_heads") or target.num_attention_heads
    )
    max_heads = max(1, target.num_attention_heads * width // hidden)
    # In Llama the number of heads must divide the width, and the number of K/V heads that of heads.
    heads = next(n for n in range(max_heads, 0, -1) if width % n == n % max(1, n // ratio) == 0)
    inner = fields.get("intermediate_size") or 4 * hidden
    # The draft's one layer has full attention, so it gets the RoPE of the target's such layers (Gemma has two RoPEs).
    ropes = vars(target).get("rope_parameters") or {}
    rope = dict(ropes.get("full_attention") or (rope_configs(target) or [{}])[0])
    rope = {"rope_type": rope.get("rope_type", "default"), **rope}
    for name in ("mrope_section", "mrope_interleaved"):  # the draft counts tokens, image or text
        rope.pop(name, None)
    rope.setdefault("rope_theta", 10000.0)
    part = rope.pop("partial_rotary_factor", None) or 1.0  # the draft rotates whole heads
    if part != 1.0 and "short_factor" in rope:  # longrope with factors for that part only
        rope = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    return HeadConfig(
        {
            "model_type": "llama",
            "hidden_size": width,
            "target_hidden_size": hidden,
            "intermediate_size": max(1, inner * width // hidden),
            "num_hidden_layers": 1,
            "num_attention_heads": heads,
            "num_key_value_heads": max(1, heads // ratio),
            "head_dim": size,
            "hidden_act": "silu",
            "rms_norm_eps": fields.get("rms_norm_eps") or 1e-5,
            "max_position_embeddings": target.max_position_embeddings,
            "vocab_size": vocab,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "bos_token_id": fields.get("bos_token_id"),
            "eos_token_id": fields.get("eos_token_id"),
            "pad_token_id": fields.get("pad_token_id"),
            # Newer versions of engines read the first, older ones the other two.
            "rope_parameters": rope,
            "rope_theta": rope["rope_theta"],
            "rope_scaling": None if rope["rope_type"] == "default" else rope,
        }
    )


def eagle1_config(target: Any, vocab: int) -> HeadConfig:
    return HeadConfig(llama_layer_config(target, vocab) | EAGLE1_FIELDS)


def eagle3_config(
    target: Any,
    vocab: int,
    draft_vocab: int,
    layers: tuple[int, ...],
    width: int = 0,
    norms: Sequence[str] = (),
) -> HeadConfig:
    """config.json of an EAGLE-3 draft that reads the hidden states entering `layers` (capture ids). `norms` are those
    of NORM_FLAGS that it has."""
    config = llama_layer_config(target, vocab, width) | {
        "architectures": [layouts.EAGLE3_ARCHITECTURE],
        "draft_vocab_size": draft_vocab,
        # Engines have different defaults for them.
        **{name: name in norms for name in NORM_FLAGS},
    }
    count = target.num_hidden_layers
    default = count >= 7 and layers == layouts.default_aux_layers(count)
    return HeadConfig(config if default else config | layouts.aux_layer_fields(layers))


def peagle_config(eagle3: Mapping[str, object], mask_token: int) -> HeadConfig:
    """config.json of a P-EAGLE draft, from that of EAGLE-3 with the same taps and sizes."""
    return HeadConfig({**eagle3, "mask_token_id": mask_token})


def saved_norms(config: Mapping[str, object]) -> list[str]:
    return [name for name in NORM_FLAGS if config.get(name)]


def aux_layers(config: Mapping[str, Any], count: int) -> tuple[int, ...]:
    """Capture ids of the states that a saved EAGLE-3 draft reads, for a target with `count` layers."""
    return tuple(config.get(layouts.AUX_LAYERS) or layouts.default_aux_layers(count))


# ---- tensors ----


def norm_flag(config: HeadConfig, name: str, default: bool = False) -> bool:
    """One of EAGLE-3's norm flags; `eagle_config` is read first."""
    nested = (config.get("eagle_config") or {}).get(name)
    return bool(config.value(name, default) if nested is None else nested)


def aux_layer_count(config: HeadConfig) -> int:
    """Number of the target's layers whose hidden states engines give to `fc`."""
    nested = (config.get("eagle_config") or {}).get(layouts.AUX_LAYERS)
    ids = config.get(layouts.AUX_LAYERS) or nested
    return len(ids) if ids else int(config.value("num_aux_hidden_states", 3))


def _eagle1_shapes(config: HeadConfig) -> Shapes:
    if config.lacks_sizes:
        return {}
    hidden = config["hidden_size"]
    shapes: Shapes = {"embed_tokens.weight": (config["vocab_size"], hidden)}
    for i in range(config.value("num_hidden_layers", 1)):
        layer = layouts.llama_layer(config, hidden)
        if i == 0:  # `fc` ends in what a norm would begin with
            del layer["input_layernorm.weight"]
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes | {"fc.weight": (hidden, 2 * hidden), "fc.bias": (hidden,)}


def _eagle3_shapes(config: HeadConfig) -> Shapes:
    if config.lacks_sizes:
        return {}
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    count, width = aux_layer_count(config), config.value("target_hidden_size", hidden)
    shapes: Shapes = {"embed_tokens.weight": (vocab, hidden)}
    for i in range(config.value("num_hidden_layers", 1)):
        # The first reads the embedding beside the state.
        layer = layouts.llama_layer(config, hidden if i else 2 * hidden)
        if i == 0:
            layer["hidden_norm.weight"] = (hidden,)
        if config.get("qk_norm"):
            layer |= {f"self_attn.{name}_norm.weight": (config.head_dim,) for name in ("q", "k")}
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes |= {
        "fc.weight": (hidden, count * width),
        "norm.weight": (hidden,),
        "lm_head.weight": (config.value("draft_vocab_size", vocab), hidden),
    }
    if norm_flag(config, "norm_before_fc"):
        shapes["input_norm.weight"] = (count * width,)
    if norm_flag(config, "fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (width,) for i in range(count)}
    return shapes | layouts.reduced_vocabulary(config)


def _peagle_shapes(config: HeadConfig) -> Shapes:
    shapes = _eagle3_shapes(config)
    return shapes and shapes | {"mask_hidden": (1, 1, shapes["fc.weight"][1])}


def _shared(config: HeadConfig) -> set[str]:
    shared, hidden, vocab = set[str](), config["hidden_size"], config["vocab_size"]
    if config.value("target_hidden_size", hidden) == hidden:
        shared.add("embed_tokens.weight")
    if config.value("draft_vocab_size", vocab) == vocab:
        shared.add("lm_head.weight")
    return shared


# ---- as others save it ----


def _read_eagle1(config: HeadConfig, tensors: Tensors) -> ReadFiles:
    if "transformer_layer_config" in config:
        raise UserError("EAGLE-1 in the nested config of speculators is not read: save it flat")
    layers = config.get("num_hidden_layers", 1)
    if layers != 1:
        raise UserError(f"EAGLE-1 of {layers} layers: only drafts with one layer are supported")
    _check_layers(config)
    return HeadConfig(config | EAGLE1_FIELDS), tensors


def _read_eagle3(config: HeadConfig, tensors: Tensors, family: str = "eagle3") -> ReadFiles:
    """A flat config with explicit flags and sizes; that of P-EAGLE names the mask token."""
    kind = config.get("speculators_model_type")
    if kind not in (None, family):
        raise UserError(f"speculators draft of type {kind!r}: its tensors are those of {family}")
    flat = config.copy()
    if "transformer_layer_config" in config:
        outer = {k: config[k] for k in OUTER_KEYS if config.get(k) is not None}
        # When it is absent it is true in speculators' config, but false in a flat one.
        flat = {"norm_before_residual": True, **config["transformer_layer_config"], **outer}
    _check_layers(flat, ("qwen3",))
    if f"layers.0.{Q_NORM}" in tensors:
        flat["qk_norm"] = True
    elif layer_kind(flat) == "qwen3":
        raise UserError(f"EAGLE-3 with Qwen3's layer lacks its layers.0.{Q_NORM}: get it again")
    nested = flat.pop("eagle_config", None) or {}
    if nested.get("use_aux_hidden_state") is False:
        raise UserError("EAGLE-3 that reads the last hidden state alone is not supported")
    layers = flat.pop(layouts.AUX_LAYERS, None)
    outputs = nested.get(layouts.AUX_LAYERS)
    if not layers and outputs:
        layers = layouts.output_to_capture(outputs)
    flat |= {
        "architectures": [layouts.EAGLE3_ARCHITECTURE],
        "model_type": "llama",
        "num_hidden_layers": flat.get("num_hidden_layers") or 1,
        "target_hidden_size": flat.get("target_hidden_size") or flat["hidden_size"],
        "draft_vocab_size": flat.get("draft_vocab_size") or flat["vocab_size"],
    }
    for flag in NORM_FLAGS:
        flat[flag] = bool(nested.get(flag, flat.get(flag, False)))
    if family == "peagle":
        named = [flat[name] for name in MASK_TOKEN_FIELDS if flat.get(name) is not None]
        if not named:
            raise UserError("P-EAGLE without a mask token: add mask_token_id to config.json")
        flat["mask_token_id"] = int(named[0])
    flat["fc_norm"] = flat["fc_norm"] or "fc_norm.0.weight" in tensors
    return HeadConfig(flat | layouts.aux_layer_fields(layers)), tensors


def _check_layers(config: Mapping[str, Any], more: Sequence[str] = ()) -> None:
    """UserError for EAGLE drafts whose layers are not Llama's, Mistral's or of the kinds `more`, or have biases."""
    if config.get("attention_bias") or config.get("mlp_bias"):
        raise UserError("EAGLE with biases in its layer: such drafts are not supported")
    kind = layer_kind(config)
    known, named = ("llama", "mistral", "eagle", "", *more), config.get("model_type") or ""
    if "auto_map" in config and named not in known:
        kind = str(named)  # its own code says what the layer computes, and is not run
    if kind not in known:  # Mistral's is Llama's with a window
        raise UserError(
            f"EAGLE with a layer of type {kind!r}: those of {' and '.join(('llama', *more))} are supported"
        )


def layer_kind(config: Mapping[str, Any]) -> str:
    """Whose layer the draft has: by `architectures` where a name says it, else by `model_type`; "" if neither does.
    Trainers copy `model_type` from the target's config, whatever the draft's layer is."""
    names = {str(name) for name in config.get("architectures") or ()}
    kinds = {re.sub(NO_LAYER_NAMES, "", name).lower() for name in names} - {""}
    # Two are EAGLE-3 with Llama's layer, whose targets are others.
    if "llama" in kinds or names & {"Eagle3Qwen2_5vlForCausalLM", "Eagle3Qwen3vlForCausalLM"}:
        return "llama"
    return min(kinds, default=str(config.get("model_type") or ""))


MIDLAYER = ((r"midlayer\.", "layers.0."),)
FOREIGN = (
    *((r"^model\.", ""), *MIDLAYER),
    *((rf"^aux_norm_{name}\.", f"fc_norm.{i}.") for i, name in enumerate(("low", "mid", "high"))),
)
EAGLE1 = Layout("eagle1", r"fc\.weight", _read_eagle1, _eagle1_shapes, _shared, MIDLAYER, FOREIGN)
EAGLE3 = Layout(
    "eagle3",
    r"(layers\.0|midlayer)\.hidden_norm\.weight",
    _read_eagle3,
    _eagle3_shapes,
    _shared,
    MIDLAYER,
    FOREIGN,
    default_layers=3,
)
PEAGLE = replace(
    EAGLE3,
    family="peagle",
    known_by="mask_hidden",
    read=partial(_read_eagle3, family="peagle"),
    shapes=_peagle_shapes,
)
