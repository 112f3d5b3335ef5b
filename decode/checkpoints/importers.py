"""Draft checkpoints as anybody published them, read as our nets name and set them.

EAGLE-3 by its authors, SpecForge and SGLang (one flat config.json) or by speculators (nested), EAGLE-1, and Medusa as
vLLM (to 0.32), FasterDecoding or Model-Optimizer write it. Ours are one case of these. What a file is, its tensors
say: config.json of EAGLE-1 is that of any Llama. Nothing is executed: safetensors, and pickles for tensors only.
"""

import json
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
from decode.common.errors import UserError, first_line

INDEX_FILE = "model.safetensors.index.json"
WEIGHT_FILES = (layouts.WEIGHTS_FILE, "medusa_lm_head.safetensors")
PICKLE_FILES = ("pytorch_model.bin", "medusa_lm_head.pt")
"""Read only where there are no safetensors."""
DOWNLOAD_PATTERNS = (
    "config.json",
    "draftsmith.json",
    INDEX_FILE,
    *WEIGHT_FILES,
    "model-*-of-*.safetensors",
)
"""All that is asked for of a repository on the Hub, and pickles if these hold no weights."""
SHARD_NAME = re.compile(r"[\w.-]+\.safetensors")
"""Names that an index may give: it is data from elsewhere, and no path."""
FC_NORM_INDEX = {"low": "0", "mid": "1", "high": "2"}
"""`aux_norm_low` and so on, older names of `fc_norm.0` and so on."""
SPECULATORS_OUTER_KEYS = (
    "draft_vocab_size",
    "target_hidden_size",
    *layouts.NORM_FLAGS,
    "eagle_aux_hidden_state_layer_ids",
    "dtype",
    "torch_dtype",
)
"""Settings of EAGLE-3 that speculators keeps outside `transformer_layer_config`."""

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class DraftCheckpoint:
    """A draft under the names of our nets; `config` is what its net is built from."""

    family: str
    config: dict[str, Any]
    tensors: Tensors
    """Those of the net, `d2t` and `t2d`; the embedding and the output matrix only if the files hold them."""


def resolve_folder(name: str) -> str:
    """A folder as it is; of a repository on the Hub, the folder that its files of known names were fetched to."""
    if Path(name).exists() or name.count("/") != 1 or name.startswith((".", "/", "~")):
        return name
    try:
        folder = snapshot_download(name, allow_patterns=list(DOWNLOAD_PATTERNS))
        if not any((Path(folder) / file).is_file() for file in (INDEX_FILE, *WEIGHT_FILES)):
            folder = snapshot_download(name, allow_patterns=[*DOWNLOAD_PATTERNS, *PICKLE_FILES])
        return folder
    except Exception as error:  # any of a dozen kinds, from no network to no such repository
        reason = first_line(error)
        raise UserError(f"draft {name!r} cannot be fetched: {reason}") from error


def detect_family(names: Iterable[str]) -> str:
    """Which family has tensors of these names: medusa, eagle1, eagle3, or causal for anything else.

    UserError for families of heads that are not known here.
    """
    names = set(names)
    if "mask_hidden" in names or "hidden_norm.weight" in names:
        raise UserError("the tensors are those of P-EAGLE or DFlash, which are not known here")
    if any(re.fullmatch(r"(model\.)?(layers\.0|midlayer)\.hidden_norm\.weight", n) for n in names):
        return "eagle3"
    if any(canonical_medusa_name(name) for name in names):
        return "medusa"
    return "eagle1" if names & {"fc.weight", "model.fc.weight"} else "causal"


def tensor_files(path: str) -> dict[str, Path]:
    """The file of each tensor in a draft's folder, read from headers where there are any."""
    folder = Path(path)
    index = folder / INDEX_FILE
    if index.is_file() and not (folder / layouts.WEIGHTS_FILE).is_file():
        try:
            listed = json.loads(index.read_text())["weight_map"]
            where = {str(name): str(file) for name, file in listed.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"draft {path!r}: {INDEX_FILE} is damaged: get it anew") from error
        strange = next((file for file in where.values() if not SHARD_NAME.fullmatch(file)), None)
        if strange is not None:
            raise UserError(f"draft {path!r}: {INDEX_FILE} names {strange!r}, which is no shard: get it anew")  # fmt: skip
        return {name: folder / file for name, file in where.items()}
    for file in WEIGHT_FILES:
        if (folder / file).is_file():
            try:
                with safe_open(folder / file, "pt") as tensors:
                    return dict.fromkeys(tensors.keys(), folder / file)
            except (OSError, SafetensorError) as error:
                raise UserError(f"draft {path!r}: {file} cannot be read: {error}") from error
    for file in PICKLE_FILES:
        if (folder / file).is_file():
            return dict.fromkeys(_unpickle(folder / file), folder / file)
    raise UserError(f"draft {path!r}: {layouts.WEIGHTS_FILE} cannot be read: there is no such file")


def raw_tensors(path: str) -> Tensors:
    """The tensors as the files name them. Of a whole model with Medusa heads in it, the heads alone."""
    files = tensor_files(path)
    heads = {name for name in files if name.startswith("medusa_head")}
    found: Tensors = {}
    for file in sorted(set(files.values())):
        names = [name for name in heads or files if files[name] == file]
        if file.name in PICKLE_FILES:
            held = _unpickle(file)
            found |= {name: held[name] for name in names}
            continue
        try:
            with safe_open(file, "pt") as tensors:
                found |= {name: tensors.get_tensor(name) for name in names}
        except (OSError, SafetensorError) as error:
            raise UserError(f"draft {path!r}: {file.name} cannot be read: {error}") from error
    return found


def _unpickle(file: Path) -> Tensors:
    """UserError for a pickle that holds anything but tensors by name: nothing of it is executed."""
    try:
        held = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, ValueError) as error:
        reason = "holds more than tensors" if "weights_only" in str(error) else "cannot be read"
        raise UserError(f"{file} {reason}: convert it to safetensors where you trust it") from error
    if not isinstance(held, dict) or not all(torch.is_tensor(value) for value in held.values()):
        raise UserError(f"{file} holds more than tensors by name: get the weights alone")
    return {str(name): value.contiguous() for name, value in held.items()}


def read_checkpoint(path: str) -> DraftCheckpoint:
    """The heads in a folder. UserError for what is no draft that is known here, or is damaged."""
    config = layouts.read_config(path)
    tensors = raw_tensors(path)
    family = detect_family(tensors)
    try:
        if family == "medusa":
            return DraftCheckpoint(family, *_canonical_medusa(config, tensors))
        if family == "eagle1":
            return DraftCheckpoint(
                family, _eagle1_config(config), _canonical_eagle_tensors(tensors)
            )
        if family == "eagle3":
            names = _canonical_eagle_tensors(tensors)
            return DraftCheckpoint(family, _eagle3_config(config, names), names)
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"draft {path!r}: config.json or the tensors lack what heads of family {family} need "
            f"({error}): get it anew"
        ) from error
    raise UserError(f"draft {path!r} holds no heads: its tensors are those of a language model")


# ---- EAGLE ----


def _canonical_eagle_tensors(tensors: Tensors) -> Tensors:
    """Layer 0 has two names; buffers that can be computed and copies of the target that trainers leave are left out."""
    found: Tensors = {}
    for name, value in tensors.items():
        name = name.removeprefix("model.").replace("midlayer.", "layers.0.", 1)
        name = re.sub(
            r"^aux_norm_(low|mid|high)\.", lambda m: f"fc_norm.{FC_NORM_INDEX[m[1]]}.", name
        )
        if "rotary_emb." not in name and not name.startswith("verifier_"):
            found[name] = value
    return found


def _eagle1_config(config: Mapping[str, Any]) -> dict[str, Any]:
    _check_single_layer(config)
    names = ["LlamaForCausalLMEagle", "LlamaForCausalLM"]
    return {**config, "architectures": names, "bias": False}


def _eagle3_config(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """One flat config, with every flag and size said."""
    kind = config.get("speculators_model_type")
    if kind not in (None, "eagle3"):
        raise UserError(f"speculators draft of type {kind!r}: only eagle3 is known here")
    has = dict(config)
    if "transformer_layer_config" in config:
        outer = {k: config[k] for k in SPECULATORS_OUTER_KEYS if config.get(k) is not None}
        # There its absence means true, in a flat config false.
        has = {"norm_before_residual": True, **config["transformer_layer_config"], **outer}
    _check_single_layer(has)
    nested = has.pop("eagle_config", None) or {}
    layers = has.pop("eagle_aux_hidden_state_layer_ids", None)
    outputs = nested.get("eagle_aux_hidden_state_layer_ids")
    if not layers and outputs:
        layers = layouts.output_to_capture(outputs)
    found = has | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "target_hidden_size": has.get("target_hidden_size") or has["hidden_size"],
        "draft_vocab_size": has.get("draft_vocab_size") or has["vocab_size"],
    }
    for flag in layouts.NORM_FLAGS:
        found[flag] = bool(nested.get(flag, has.get(flag, False)))
    found["fc_norm"] = found["fc_norm"] or "fc_norm.0.weight" in tensors
    return found | layouts.aux_layer_fields(layers)


def _check_single_layer(config: Mapping[str, Any]) -> None:
    layers = config.get("num_hidden_layers", 1)
    if layers != 1:
        raise UserError(f"EAGLE of {layers} layers: heads of one layer are all that is known here")
    biased = config.get("attention_bias") or config.get("mlp_bias")
    if biased:
        raise UserError("EAGLE with biases in its layer: such heads are not known here")
    if config.get("model_type") not in (None, "llama", "eagle"):
        raise UserError(
            f"EAGLE with a layer of type {config['model_type']!r}: Llama's is the only one known here"
        )


# ---- Medusa ----


def canonical_medusa_name(name: str) -> str | None:
    """vLLM's name of a Medusa tensor under any of its names; None for others."""
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
    """Where the tensors are numbered, they say how many there are: published configs are known to err."""
    if "token_map" in tensors:
        raise UserError("Medusa over a reduced vocabulary (token_map): not known here")
    if "lm_head.weight" in tensors:
        tensors = {"lm_heads.0.weight": tensors["lm_head.weight"]} | tensors
        tensors.pop("lm_head.weight")
    named = {name: canonical_medusa_name(name) or name for name in tensors}
    found = {named[name]: value for name, value in tensors.items()}
    counts = [re.match(r"blocks\.(\d+)\.layers\.(\d+)\.weight", name) for name in found]
    blocks = [(int(m[1]), int(m[2])) for m in counts if m]
    first = found["blocks.0.layers.0.weight"]
    has: dict[str, Any] = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": first.shape[1],
        "num_heads": 1 + max(head for head, _ in blocks),
        "num_hidden_layers": 1 + max(layer for _, layer in blocks),
        "medusa_fc_bias": "blocks.0.layers.0.bias" in found,
        "original_lm_head": "lm_heads.1.weight" not in found,
        "max_paths": 64,
        "topk": 10,
    }
    if "lm_heads.0.weight" in found:
        size = found["lm_heads.0.weight"].shape[0]
        has |= {"vocab_size": size, "truncated_vocab_size": size}
        has["original_lm_head"] = has["original_lm_head"] and has["num_heads"] > 1
    if set(named.values()) == set(named):  # vLLM's own layout, whose config is to be believed
        has |= {
            key: value for key, value in config.items() if key not in ("medusa_num_heads", "medusa_num_layers")
        }  # fmt: skip
    else:
        has |= {key: config[key] for key in ("dtype", "torch_dtype") if key in config}
    return has, found
