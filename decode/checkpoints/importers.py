"""Draft checkpoints of other projects, and of this one, read under the tensor names and settings of our modules.

They are EAGLE-3 by its authors, SpecForge and SGLang (one flat config.json) or by speculators (nested), EAGLE-1, and
Medusa as written by vLLM (to 0.32), FasterDecoding or Model-Optimizer. The tensor names decide which family a file is:
config.json of EAGLE-1 is that of any Llama. Nothing in a file is executed: of pickles only tensors are read.
"""

import pickle
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open

from decode.checkpoints import layouts
from decode.checkpoints.draft_vocab import VOCAB_FILE
from decode.checkpoints.eight_bit import dequantized
from decode.common.disk_errors import disk_error
from decode.common.errors import UserError
from decode.common.files import read_json_object
from decode.model.loading import adapter_folder
from decode.model.names import check_name, load_error

INDEX_FILE = "model.safetensors.index.json"
WEIGHT_FILES = (layouts.WEIGHTS_FILE, "medusa_lm_head.safetensors")
PICKLE_FILES = ("pytorch_model.bin", "medusa_lm_head.pt")
"""Read only where there are no safetensors."""
DOWNLOAD_PATTERNS = (
    "config.json",
    "draftsmith.json",
    VOCAB_FILE,
    INDEX_FILE,
    *WEIGHT_FILES,
    "model-*-of-*.safetensors",
)
"""The files downloaded from a repository on the Hub, and pickles if none of these holds weights."""
SHARD_NAME = re.compile(r"[\w.-]+\.safetensors")
"""File names that are accepted from an index. It comes from others, so it must not name a path."""
FC_NORM_INDEX = {"low": "0", "mid": "1", "high": "2"}
"""`aux_norm_low`, `_mid` and `_high` are older names of `fc_norm.0`, `.1` and `.2`."""
SPECULATORS_OUTER_KEYS = (
    "draft_vocab_size",
    "target_hidden_size",
    *layouts.NORM_FLAGS,
    "eagle_aux_hidden_state_layer_ids",
    "mask_token_id",
    "dtype",
    "torch_dtype",
)
"""Settings of EAGLE-3 that speculators writes outside `transformer_layer_config`."""

MTP_LAYER = re.compile(r"(?:model\.)?layers\.\d+\.eh_proj\.weight")
"""The tensor by which a multi-token prediction layer is known, in DeepSeek's layout."""

NO_LAYER_NAMES = re.compile(
    r"for_?causal_?lm|(p-?)?eagle-?[123]?|dflash|dspark|speculator|draft|model|mtp", re.IGNORECASE
)
"""What names in `architectures` hold besides the kind of a layer."""
LLAMA_LAYERS = ("Eagle3Qwen2_5vlForCausalLM", "Eagle3Qwen3vlForCausalLM")
"""Names of vLLM for EAGLE-3 with Llama's layer, whose targets are others."""

MASK_TOKEN_FIELDS = ("mask_token_id", "pard_token", "ptd_token_id")
"""Where vLLM looks for the mask token of P-EAGLE, in this order."""

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class DraftCheckpoint:
    """A draft's tensors under the names of our modules."""

    family: str
    config: dict[str, Any]
    """The settings that its module is built from, as in the config.json that this project writes."""
    tensors: Tensors
    """Parameters, `d2t` and `t2d`; the embedding and the output matrix only if they are in the files."""
    surplus_layer: int | None = None
    """The last of the layer ids in the files, if there is one more than `fc` reads states: the loss read it."""


def resolve_folder(name: str) -> str:
    """`name` if it is a local path; for a repository on the Hub, the folder that its known files are downloaded to; for
    an adapter the folder with its base merged.

    UserError when they cannot be downloaded.
    """
    local = check_name(name, "draft")
    merged = adapter_folder(name, "draft")
    if merged is not None:
        return merged
    if local or name.endswith(".gguf"):
        return name
    try:
        folder = snapshot_download(name, allow_patterns=list(DOWNLOAD_PATTERNS))
        if not any((Path(folder) / file).is_file() for file in (INDEX_FILE, *WEIGHT_FILES)):
            folder = snapshot_download(name, allow_patterns=[*DOWNLOAD_PATTERNS, *PICKLE_FILES])
        return folder
    except Exception as error:  # any of a dozen kinds, from no network to no such repository
        reason = load_error(name, "model", error)
        raise UserError(f"draft {name!r} cannot be fetched: {reason}") from error


def detect_family(names: Iterable[str]) -> str:
    """The family with tensors of these names: a kind of heads, or causal for all others."""
    names = {name.removeprefix("model.") for name in names}
    if any(MTP_LAYER.fullmatch(name) for name in names):
        return "mtp"
    if "mask_hidden" in names:
        return "peagle"
    if "gate_proj.weight" in names:
        return "layerskip"
    if "markov_head.markov_w1.weight" in names:
        return "dspark"
    if "hidden_norm.weight" in names:
        return "dflash"
    if any(re.fullmatch(r"(layers\.0|midlayer)\.hidden_norm\.weight", n) for n in names):
        return "eagle3"
    if any(canonical_medusa_name(name) for name in names):
        return "medusa"
    return "eagle1" if "fc.weight" in names else "causal"


def tensor_files(path: str) -> dict[str, Path]:
    """The file of each tensor in a draft's folder, from the index or the headers of the files where there are any."""
    folder = Path(path)
    index = folder / INDEX_FILE
    if index.is_file() and not (folder / layouts.WEIGHTS_FILE).is_file():
        try:
            listed = read_json_object(index, "an index of shards", ["weight_map"])["weight_map"]
            files = {str(name): str(file) for name, file in listed.items()}
        except (UserError, AttributeError) as error:
            raise UserError(
                f"draft {path!r}: {INDEX_FILE} is damaged: download it again"
            ) from error
        bad = next((file for file in files.values() if not SHARD_NAME.fullmatch(file)), None)
        if bad is not None:
            raise UserError(
                f"draft {path!r}: {INDEX_FILE} names {bad!r}, which is no shard: download it again"
            )
        return {name: folder / file for name, file in files.items()}
    for file in WEIGHT_FILES:
        if (folder / file).is_file():
            try:
                with safe_open(folder / file, "pt") as tensors:
                    return dict.fromkeys(tensors.keys(), folder / file)
            except (OSError, SafetensorError) as error:
                reason = disk_error(error, folder / file) or f"{file} cannot be read: {error}"
                raise UserError(f"draft {path!r}: {reason}") from error
    for file in PICKLE_FILES:
        if (folder / file).is_file():
            return dict.fromkeys(_unpickle(folder / file), folder / file)
    raise UserError(f"draft {path!r}: {layouts.WEIGHTS_FILE} cannot be read: there is no such file")


def raw_tensors(path: str) -> Tensors:
    """The tensors under the names in the files; of a whole model with heads only its Medusa heads or MTP layers."""
    files = tensor_files(path)
    layers = {name.removesuffix("eh_proj.weight") for name in files if MTP_LAYER.fullmatch(name)}
    heads = {name for name in files if name.startswith(("medusa_head", *layers))}
    tensors: Tensors = {}
    for file in sorted(set(files.values())):
        names = [name for name in heads or files if files[name] == file]
        if file.name in PICKLE_FILES:
            content = _unpickle(file)
            tensors |= {name: content[name] for name in names}
            continue
        try:
            with safe_open(file, "pt") as stored:
                tensors |= {name: stored.get_tensor(name) for name in names}
        except (OSError, SafetensorError) as error:
            reason = disk_error(error, file) or f"{file.name} cannot be read: {error}"
            raise UserError(f"draft {path!r}: {reason}") from error
    return tensors


def plain_tensors(path: str) -> Tensors:
    """`raw_tensors` with weights in eight bits or fewer as the numbers that they stand for.

    UserError that names the method for a form that is not read, and for such weights without a scale.
    """
    try:
        return dequantized(raw_tensors(path), layouts.read_config(path))
    except UserError as error:
        if path in str(error):
            raise
        raise UserError(f"draft {path!r}: {error}") from error


def _unpickle(file: Path) -> Tensors:
    """The tensors of a pickle by name. UserError if it holds anything else: nothing in it is executed."""
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, ValueError) as error:
        refused = disk_error(error, file)
        if refused:
            raise UserError(refused) from error
        reason = "holds more than tensors" if "weights_only" in str(error) else "cannot be read"
        raise UserError(f"{file} {reason}: convert it to safetensors where you trust it") from error
    if not isinstance(content, dict) or not all(torch.is_tensor(t) for t in content.values()):
        raise UserError(f"{file} holds more than tensors by name: get the weights alone")
    return {str(name): value.contiguous() for name, value in content.items()}


def read_checkpoint(path: str) -> DraftCheckpoint:
    """The heads in the folder `path`; MTP layers keep the names in their files.

    UserError when it is damaged or of no supported family.
    """
    config = layouts.read_config(path)
    tensors = plain_tensors(path)
    config.pop("quantization_config", None)  # of what was read, none is quantised any more
    family = detect_family(tensors)
    try:
        if family == "mtp":
            return DraftCheckpoint(family, config, tensors)
        if family == "layerskip":
            return DraftCheckpoint(family, _exit_config(config), tensors)
        if family == "medusa":
            return DraftCheckpoint(family, *_canonical_medusa(config, tensors))
        if family in ("dflash", "dspark"):
            renamed = _canonical_dflash_tensors(tensors)
            return _with_read_layers(family, _dflash_config(config), renamed)
        if family == "eagle1":
            return DraftCheckpoint(
                family, _eagle1_config(config), _canonical_eagle_tensors(tensors)
            )
        if family in ("eagle3", "peagle"):
            renamed = _canonical_eagle_tensors(tensors)
            return _with_read_layers(family, _eagle3_config(config, renamed, family), renamed)
    except UserError as error:
        raise UserError(f"draft {path!r}: {error}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"draft {path!r}: config.json or the tensors lack what a draft of family {family} needs "
            f"({error}): download it again"
        ) from error
    raise UserError(f"draft {path!r} holds no heads: its tensors are those of a language model")


def _with_read_layers(family: str, config: dict[str, Any], tensors: Tensors) -> DraftCheckpoint:
    """The checkpoint with as many layer ids as `fc` reads states.

    Speculators also lists the target's last layer, whose state the loss alone reads. UserError for any other number.
    """
    ids = list(config.get("eagle_aux_hidden_state_layer_ids") or ())
    columns, width = tensors["fc.weight"].shape[1], config["target_hidden_size"]
    states, rest = divmod(columns, width)
    if ids and rest == 0 and len(ids) == states + 1 and ids[-1] == max(ids):
        surplus = ids.pop()
        rest_of = {k: v for k, v in config.items() if k not in layouts.AUX_LAYER_FIELDS}
        fields = layouts.aux_layer_fields(ids) if family in ("eagle3", "peagle") else {}
        fields["eagle_aux_hidden_state_layer_ids"] = ids
        return DraftCheckpoint(family, {**rest_of, **fields}, tensors, surplus)
    named = ids or [None] * 3 if family in ("eagle3", "peagle") else ids  # None: EAGLE-3's default
    if not named:
        raise UserError("config.json names no layers of the target whose states it reads: add them")
    if len(named) * width != columns:
        what = f"the layers {ids}" if ids else "no layers, by default 3"
        raise UserError(
            f"config.json names {what}, of states of size {width}, and fc.weight reads {columns} numbers: correct it"
        )
    return DraftCheckpoint(family, config, tensors)


# ---- EAGLE ----


def _canonical_eagle_tensors(tensors: Tensors) -> Tensors:
    """The tensors with `layers.0.` for `midlayer.`, without buffers that can be computed and copies of the target."""
    renamed: Tensors = {}
    for name, value in tensors.items():
        name = name.removeprefix("model.").replace("midlayer.", "layers.0.", 1)
        name = re.sub(
            r"^aux_norm_(low|mid|high)\.", lambda m: f"fc_norm.{FC_NORM_INDEX[m[1]]}.", name
        )
        if "rotary_emb." not in name and not name.startswith("verifier_"):
            renamed[name] = value
    return renamed


def _eagle1_config(config: Mapping[str, Any]) -> dict[str, Any]:
    if "transformer_layer_config" in config:
        raise UserError("EAGLE-1 in the nested config of speculators is not read: save it flat")
    _check_single_layer(config)
    names = ["LlamaForCausalLMEagle", "LlamaForCausalLM"]
    return {**config, "architectures": names, "bias": False}


def _eagle3_config(config: Mapping[str, Any], tensors: Tensors, family: str) -> dict[str, Any]:
    """A flat config with explicit flags and sizes; that of P-EAGLE names the mask token."""
    kind = config.get("speculators_model_type")
    if kind not in (None, family):
        raise UserError(f"speculators draft of type {kind!r}: its tensors are those of {family}")
    flat = dict(config)
    if "transformer_layer_config" in config:
        outer = {k: config[k] for k in SPECULATORS_OUTER_KEYS if config.get(k) is not None}
        # When it is absent it is true in speculators' config, but false in a flat one.
        flat = {"norm_before_residual": True, **config["transformer_layer_config"], **outer}
    _check_single_layer(flat)
    nested = flat.pop("eagle_config", None) or {}
    if nested.get("use_aux_hidden_state") is False:
        raise UserError("EAGLE-3 that reads the last hidden state alone is not supported")
    layers = flat.pop("eagle_aux_hidden_state_layer_ids", None)
    outputs = nested.get("eagle_aux_hidden_state_layer_ids")
    if not layers and outputs:
        layers = layouts.output_to_capture(outputs)
    flat |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "target_hidden_size": flat.get("target_hidden_size") or flat["hidden_size"],
        "draft_vocab_size": flat.get("draft_vocab_size") or flat["vocab_size"],
    }
    for flag in layouts.NORM_FLAGS:
        flat[flag] = bool(nested.get(flag, flat.get(flag, False)))
    if family == "peagle":
        named = [flat[name] for name in MASK_TOKEN_FIELDS if flat.get(name) is not None]
        if not named:
            raise UserError(
                f"P-EAGLE without a mask token: add {MASK_TOKEN_FIELDS[0]} to config.json"
            )
        flat["mask_token_id"] = int(named[0])
    flat["fc_norm"] = flat["fc_norm"] or "fc_norm.0.weight" in tensors
    return flat | layouts.aux_layer_fields(layers)


def _check_single_layer(config: Mapping[str, Any]) -> None:
    """UserError for EAGLE drafts that our modules cannot represent."""
    layers = config.get("num_hidden_layers", 1)
    if layers != 1:
        raise UserError(f"EAGLE of {layers} layers: only drafts with one layer are supported")
    biased = config.get("attention_bias") or config.get("mlp_bias")
    if biased:
        raise UserError("EAGLE with biases in its layer: such drafts are not supported")
    kind = _layer_kind(config)
    if "auto_map" in config and config.get("model_type") not in (None, "llama", "mistral", "eagle"):
        kind = str(
            config["model_type"]
        )  # its own code says what the layer computes, and is not run
    if kind not in ("llama", "mistral", "eagle", ""):  # Mistral's is Llama's with a window
        raise UserError(f"EAGLE with a layer of type {kind!r}: only Llama's is supported")


def _layer_kind(config: Mapping[str, Any]) -> str:
    """Whose layer the draft has: by `architectures` where a name says it, else by `model_type`; "" if neither does.

    Trainers copy `model_type` from the target's config, whatever the draft's layer is.
    """
    names = [str(name) for name in config.get("architectures") or ()]
    bare = [re.sub(NO_LAYER_NAMES, "", name).lower() for name in names if name not in LLAMA_LAYERS]
    kinds = {kind for kind in bare if kind}
    if len(bare) < len(names) or "llama" in kinds:
        return "llama"
    return min(kinds, default=str(config.get("model_type") or ""))


# ---- DFlash ----


def _dflash_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A flat config with sizes, capture ids and the mask token where our module looks for them."""
    flat = dict(config)
    if "transformer_layer_config" in config:
        flat = {**config, **config["transformer_layer_config"]}
        flat["draft_vocab_size"] = config.get("draft_vocab_size")
    nested = dict(flat.get("dflash_config") or {})
    if nested.get("causal") or flat.get("is_causal"):
        raise UserError(
            "a DFlash draft with causal blocks (JetSpec): only bidirectional ones are supported"
        )
    if "sliding_attention" in (flat.get("layer_types") or []):
        raise UserError("a DFlash draft with sliding layers: only full attention is supported")
    if flat.get("markov_rank") and flat.get("markov_head_type", "vanilla") != "vanilla":
        raise UserError(
            f"DSpark with a corrector of type {flat['markov_head_type']!r}: only vanilla is supported"
        )
    kind = _layer_kind({**flat, "architectures": config.get("architectures")})
    if kind not in ("qwen3", "llama", "dflash", "dspark", ""):
        raise UserError(f"DFlash with layers of type {kind!r}: only Qwen3's are supported")
    outputs = nested.get("target_layer_ids") or flat.get("target_layer_ids") or ()
    layers = flat.get("eagle_aux_hidden_state_layer_ids") or flat.get("aux_hidden_state_layer_ids")
    if "mask_token_id" not in nested:
        nested["mask_token_id"] = flat["mask_token_id"]
    anchor = flat.get("sample_from_anchor", nested.get("sample_from_anchor"))
    if anchor is None:  # flat files of DSpark mean true, and those of speculators false
        anchor = bool(flat.get("markov_rank")) and "transformer_layer_config" not in config
    return flat | {
        "sample_from_anchor": anchor,
        "dflash_config": nested,
        "block_size": int(flat.get("block_size") or nested["block_size"]),
        "eagle_aux_hidden_state_layer_ids": list(layers or layouts.output_to_capture(outputs)),
        "draft_vocab_size": flat.get("draft_vocab_size") or flat["vocab_size"],
        "target_hidden_size": flat.get("target_hidden_size") or flat["hidden_size"],
    }


def _canonical_dflash_tensors(tensors: Tensors) -> Tensors:
    """The tensors without copies that only the loss reads and buffers that can be computed."""
    renamed = {name.removeprefix("model."): value for name, value in tensors.items()}
    return {
        name: value
        for name, value in renamed.items()
        if "rotary_emb." not in name and not name.startswith("verifier_")
    }


# ---- early exit ----


def _exit_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with its sizes as integers."""
    sizes = ("hidden_size", "vocab_size", "draft_vocab_size", "exit_layer", "exit_width")
    return {**config, **{name: int(config[name]) for name in sizes}}


# ---- Medusa ----


def canonical_medusa_name(name: str) -> str | None:
    """vLLM's name for a Medusa tensor with a name of any known layout; None for other tensors."""
    name = re.sub(r"^medusa_heads?\.", "", name)
    if re.fullmatch(r"blocks\.\d+\.layers\.\d+\.(weight|bias)|lm_heads\.\d+\.weight", name):
        return name
    block = re.fullmatch(r"(\d+)\.(\d+)\.linear\.(weight|bias)", name)
    if block:
        return f"blocks.{block[1]}.layers.{block[2]}.{block[3]}"
    head = re.fullmatch(r"(\d+)\.(\d+)\.weight", name)
    return f"lm_heads.{head[1]}.weight" if head else None


def _canonical_medusa(
    config: Mapping[str, Any], tensors: Tensors
) -> tuple[dict[str, Any], Tensors]:
    """Config and tensors as vLLM names them.

    Except in vLLM's own layout all counts and sizes come from the tensors, because published configs have wrong ones.
    """
    if "token_map" in tensors:
        raise UserError("Medusa over a reduced vocabulary (token_map) is not supported")
    activation = config.get("hidden_act") if config.get("model_type") == "medusa" else None
    if activation not in (None, "silu", "swish"):
        raise UserError(f"Medusa with the activation {activation!r}: its blocks compute SiLU")
    if "lm_head.weight" in tensors:
        tensors = {"lm_heads.0.weight": tensors["lm_head.weight"]} | tensors
        tensors.pop("lm_head.weight")
    names = {name: canonical_medusa_name(name) or name for name in tensors}
    renamed = {names[name]: value for name, value in tensors.items()}
    matches = [re.match(r"blocks\.(\d+)\.layers\.(\d+)\.weight", name) for name in renamed]
    blocks = [(int(m[1]), int(m[2])) for m in matches if m]
    first = renamed["blocks.0.layers.0.weight"]
    fields: dict[str, Any] = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": first.shape[1],
        "num_heads": 1 + max(head for head, _ in blocks),
        "num_hidden_layers": 1 + max(layer for _, layer in blocks),
        "medusa_fc_bias": "blocks.0.layers.0.bias" in renamed,
        "original_lm_head": "lm_heads.1.weight" not in renamed,
        "max_paths": 64,
        "topk": 10,
    }
    if "lm_heads.0.weight" in renamed:
        size = renamed["lm_heads.0.weight"].shape[0]
        fields |= {"vocab_size": size, "truncated_vocab_size": size}
        fields["original_lm_head"] = fields["original_lm_head"] and fields["num_heads"] > 1
    if set(names.values()) == set(names):  # vLLM's own layout, whose config is right
        fields |= {
            key: value for key, value in config.items() if key not in ("medusa_num_heads", "medusa_num_layers")
        }  # fmt: skip
    else:
        fields |= {key: config[key] for key in ("dtype", "torch_dtype") if key in config}
    return fields, renamed
