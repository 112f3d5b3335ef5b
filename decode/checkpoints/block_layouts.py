"""DFlash and its kin: config.json and tensors as saved here, as engines require them and as others save them.

DFlash 2, XPress, Domino and DFlare (AngelSlim's) are read alone: the first two as the speculators library writes them,
DFlash 2 also flat, as its authors do, and Domino as SpecForge and Model-Optimizer write it. These two have the settings
of DSpark in `dflash_config`.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from decode.checkpoints import layouts
from decode.checkpoints.eagle_layouts import layer_kind, llama_layer_config
from decode.checkpoints.layouts import HeadConfig, Layout, ReadFiles, Shapes, Tensors
from decode.common.errors import UserError

SELECTED = (
    *("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
    *("input_embedding_scale", "output_multiplier", "final_logit_softcapping"),
)
"""Settings of DFlash 2 that its authors may write in `dflash_config`; the last three are refused."""
MARKOV_HEAD = (
    *("markov_rank", "markov_head_type"),
    *("enable_confidence_head", "confidence_head_with_markov"),
)
"""Settings of DSpark that SpecForge and Model-Optimizer write in `dflash_config`."""
CORRECTED = {"emb_dim": 1, "gru_hidden_dim": 1, "pure_draft_prefix_len": 0}
"""Sizes of Domino's correction in `dflash_config`, with the least that each may be."""
NESTED_OF_DOMINO = (
    *("projector_type", "shift_label", *CORRECTED),
    *("mask_token_id", "target_layer_ids", "block_size", "causal"),
)
"""What of `dflash_config` is read of a Domino."""
OUTER_KEYS = (
    "block_size",
    "markov_rank",
    "sample_from_anchor",
    "sliding_window_non_causal",
    "aux_hidden_state_layer_ids",
    "dflash_config",
)
"""Settings that speculators writes outside `transformer_layer_config`, beside those of EAGLE-3."""


def dflash_config(
    target: Any,
    vocab: int,
    draft_vocab: int,
    layers: Sequence[int],
    depth: int,
    block_size: int,
    mask_token: int,
    markov_rank: int = 0,
) -> HeadConfig:
    """config.json of a DFlash draft of `depth` layers that reads the states entering `layers` (capture ids). With
    `markov_rank` it is DSpark. Causality is written out: engines take layers for causal where a config is silent."""
    config = llama_layer_config(target, vocab) | {
        "architectures": ["DSparkDraftModel" if markov_rank else "DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": depth,
        "num_target_layers": target.num_hidden_layers,
        "draft_vocab_size": draft_vocab,
        "block_size": block_size,
        "dflash_config": {
            "mask_token_id": mask_token,
            "target_layer_ids": list(layouts.capture_to_output(layers)),
            "causal": False,
        },
        layouts.AUX_LAYERS: list(layers),
    }
    if markov_rank:
        config |= {
            "markov_rank": markov_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
            "sample_from_anchor": True,
        }
    return HeadConfig(config)


def aux_layers(config: HeadConfig) -> tuple[int, ...]:
    """Capture ids of the states that engines read: by the key of such ids, else the layers' outputs plus one."""
    own = config.get(layouts.AUX_LAYERS) or config.get("aux_hidden_state_layer_ids")
    nested = config.value("dflash_config", {}).get("target_layer_ids")
    outputs = nested or config.get("target_layer_ids") or ()
    return tuple(own or (i + 1 for i in outputs))


def _dflash_shapes(config: HeadConfig) -> Shapes:
    count = len(aux_layers(config))
    if config.lacks_sizes or not count:
        return {}
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes: Shapes = {
        "fc.weight": (hidden, count * config.value("target_hidden_size", hidden)),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        "embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (config.value("draft_vocab_size", vocab), hidden),
    }
    for i in range(config.value("num_hidden_layers", 1)):
        layer = layouts.llama_layer(config, hidden)
        layer |= {f"self_attn.{name}_norm.weight": (config.head_dim,) for name in ("q", "k")}
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes | layouts.reduced_vocabulary(config)


def _dspark_shapes(config: HeadConfig) -> Shapes:
    shapes, rank = _dflash_shapes(config), config.value("markov_rank", 0)
    if not shapes:
        return {}
    size, hidden = shapes["lm_head.weight"]
    shapes |= {
        "markov_head.markov_w1.weight": (config["vocab_size"], rank),
        "markov_head.markov_w2.weight": (size, rank),
    }
    if not config.value("enable_confidence_head", True):
        return shapes
    return shapes | {
        "confidence_head.proj.weight": (1, hidden + rank),
        "confidence_head.proj.bias": (1,),
    }


def _shared(config: HeadConfig) -> set[str]:
    vocab = config["vocab_size"]
    whole = config.value("draft_vocab_size", vocab) == vocab
    return {"embed_tokens.weight", *(("lm_head.weight",) if whole else ())}


def _read(
    config: HeadConfig, tensors: Tensors, families: Sequence[str] = ("dflash", "dspark")
) -> ReadFiles:
    """A flat config with sizes, capture ids and the mask token where our module looks for them. The tensors are those
    of one of `families`: DSpark without its heads is DFlash."""
    kind = config.get("speculators_model_type")
    if kind not in (None, *families):
        what = " or ".join(families)
        raise UserError(f"speculators draft of type {kind!r}: its tensors are those of {what}")
    flat = dict(config)
    if "transformer_layer_config" in config:
        flat = {**config, **config["transformer_layer_config"]}
        flat["draft_vocab_size"] = config.get("draft_vocab_size")
    nested = dict(flat.get("dflash_config") or {})
    if nested.get("projector_type") == "domino" and "domino" not in families:
        raise UserError("a draft of type 'domino' without its correction: get its files again")
    if nested.get("causal") or flat.get("is_causal"):
        raise UserError(
            "a DFlash draft with causal blocks (JetSpec): only bidirectional ones are supported"
        )
    flat |= {key: nested[key] for key in (*SELECTED, *MARKOV_HEAD) if key in nested}
    if flat.get("markov_rank"):
        flat.setdefault("enable_confidence_head", "confidence_head.proj.weight" in tensors)
        alone = flat.get("confidence_head_with_markov") is False
        if flat["enable_confidence_head"] and alone:
            raise UserError(
                "DSpark with confidence_head_with_markov false: a confidence of the state alone is not read"
            )
    if nested.get("use_swa"):  # Model-Optimizer's layers all slide, whatever layer_types says
        flat["layer_types"] = ["sliding_attention"] * flat["num_hidden_layers"]
        flat["sliding_window"] = nested.get("swa_window_size") or flat.get("sliding_window")
        flat["sliding_window_non_causal"] = True
    kinds = set(flat.get("layer_types") or ()) - {"full_attention"}
    if kinds - {"sliding_attention"} or (kinds and not flat.get("sliding_window")):
        raise UserError(
            f"a DFlash draft with layer_types {sorted(kinds)}: full_attention, or sliding_attention with a number "
            "sliding_window, are supported"
        )
    if flat.get("markov_rank") and flat.get("markov_head_type", "vanilla") != "vanilla":
        raise UserError(
            f"DSpark with a corrector of type {flat['markov_head_type']!r}: only vanilla is supported"
        )
    kind = layer_kind({**flat, "architectures": config.get("architectures")})
    if kind not in ("qwen3", "qwen", "llama", "dflash", "dspark", ""):  # "qwen" is AngelSlim's name
        raise UserError(f"DFlash with layers of type {kind!r}: only Qwen3's are supported")
    if "mask_token_id" not in nested:
        nested["mask_token_id"] = flat["mask_token_id"]
    if "dflash2" in families:
        _check_dflash2(flat)
    if "dflare" in families:
        flat["layer_fusion"] = True
    anchor = flat.get("sample_from_anchor", nested.get("sample_from_anchor"))
    if anchor is None:  # flat files of DSpark mean true, and those of speculators false
        anchor = bool(flat.get("markov_rank")) and "transformer_layer_config" not in config
    fields = {
        "sample_from_anchor": anchor,
        "use_sliding_window": bool(kinds),
        # speculators trains all slots of a block with the anchor's window, others each with its own
        "window_from_anchor": "transformer_layer_config" in config,
        "dflash_config": nested,
        "block_size": int(flat.get("block_size") or nested["block_size"]),
        layouts.AUX_LAYERS: list(aux_layers(HeadConfig(flat))),
        "draft_vocab_size": flat.get("draft_vocab_size") or flat["vocab_size"],
        "target_hidden_size": flat.get("target_hidden_size") or flat["hidden_size"],
    }
    return HeadConfig(flat | fields), tensors


def _read_domino(config: HeadConfig, tensors: Tensors) -> ReadFiles:
    """As `_read`. UserError by name for settings that nothing here follows."""
    nested: dict[str, Any] = config.value("dflash_config", {})
    kind, shifted = nested.get("projector_type", "domino"), nested.get("shift_label", False)
    sizes = {"pure_draft_prefix_len": 0} | {key: nested[key] for key in CORRECTED if key in nested}
    vocab = config["vocab_size"]
    wrong = [f"{key} {nested[key]!r}" for key in sorted(nested.keys() - set(NESTED_OF_DOMINO))]
    wrong += [] if kind == "domino" else [f"projector_type {kind!r}"]
    wrong += [] if isinstance(shifted, bool) else [f"shift_label {shifted!r}"]
    wrong += [
        f"{key} {sizes.get(key)!r}"
        for key, least in CORRECTED.items()
        if type(sizes.get(key)) is not int or sizes[key] < least
    ]
    wrong += [
        f"{key} {config[key]!r} outside dflash_config"
        for key in CORRECTED
        if config.value(key, sizes.get(key)) != sizes.get(key)
    ]
    if config.value("draft_vocab_size", vocab) != vocab:
        wrong.append(f"draft_vocab_size {config['draft_vocab_size']!r}, a reduced vocabulary")
    if config.get("use_sliding_window") and not config.get("layer_types"):
        wrong.append("use_sliding_window without layer_types")
    if wrong:
        raise UserError(f"a Domino draft with {', '.join(wrong)}: this is not read")
    flat = HeadConfig(config | sizes | {"sample_from_anchor": shifted})
    return _read(flat, tensors, ("domino",))


def _check_dflash2(config: dict[str, Any]) -> None:
    """UserError for a DFlash 2 whose candidates or groups are none."""
    vocab, hidden, group = (config[key] for key in ("vocab_size", "hidden_size", "conv_group_size"))
    if (config.get("draft_vocab_size") or vocab) != vocab:
        raise UserError("DFlash 2 with a reduced vocabulary: only the target's whole one is read")
    if group < 1 or hidden % group or not 0 < config["selector_top_k"] <= vocab:
        raise UserError(
            f"DFlash 2 with groups of {group} of {hidden} numbers and {config['selector_top_k']} candidates of {vocab} "
            "tokens: correct config.json"
        )


PREFIX = ((r"^model\.", ""),)
DFLASH = Layout(
    "dflash",
    r"hidden_norm\.weight",
    _read,
    _dflash_shapes,
    _shared,
    PREFIX,
    PREFIX,
    default_layers=0,
)
DSPARK = replace(
    DFLASH,
    family="dspark",
    known_by=r"(markov_head\.)?markov_w1\.weight",
    shapes=_dspark_shapes,
    foreign=(
        *PREFIX,
        (r"^markov_w", "markov_head.markov_w"),  # these two are Model-Optimizer's
        (r"^confidence_proj\.", "confidence_head.proj."),
    ),
)
DFLASH2 = replace(
    DFLASH,
    family="dflash2",
    known_by=r"candidate_selector\.predecessor_codebook",
    read=partial(_read, families=("dflash2",)),
    shapes=None,
)
XPRESS = replace(
    DFLASH2,
    family="xpress",
    known_by=r"refiner_head\.token_embed\.weight",
    read=partial(_read, families=("xpress",)),
)
DFLARE = replace(
    DFLASH2,
    family="dflare",
    known_by="layer_fusion_weights",
    read=partial(_read, families=("dflare",)),
)
DOMINO = replace(
    DFLASH2,
    family="domino",
    known_by=r"(logit_head\.)?prefix_gru\.weight_ih_l0",
    read=_read_domino,
    foreign=(*PREFIX, (r"^logit_head\.", "")),  # where its older versions have the correction
)
