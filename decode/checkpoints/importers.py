"""Draft checkpoints of other projects, and of this one, read under the tensor names and settings of our modules.

The tensor names decide which layout a file has: config.json of EAGLE-1 is that of any Llama. Nothing in a file is
executed: of pickles only tensors are read.
"""

import os
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open

from decode.checkpoints import layouts
from decode.checkpoints.block_layouts import DFLARE, DFLASH, DFLASH2, DOMINO, DSPARK, XPRESS
from decode.checkpoints.draft_folder import check_target, read_metadata
from decode.checkpoints.draft_vocab import VOCAB_FILE
from decode.checkpoints.eagle_layouts import EAGLE1, EAGLE3, PEAGLE
from decode.checkpoints.head_layouts import EXIT, MEDUSA, MTP
from decode.checkpoints.layouts import VOCAB_MAPS, HeadConfig, Layout, Tensors
from decode.common.errors import UserError, disk_error, first_line
from decode.common.files import read_json_object
from decode.model.formats.packed_weights import METHODS, plain_weights
from decode.model.loading import Target, adapter_folder
from decode.model.names import check_name, load_error

LAYOUTS: dict[str, Layout] = {
    layout.family: layout
    for layout in (
        *(MTP, PEAGLE, EXIT, DSPARK, DFLASH2, XPRESS, DOMINO, DFLARE, DFLASH),
        *(EAGLE3, MEDUSA, EAGLE1),
    )
}
"""By family; of those that know a tensor of a file, the first is the file's."""
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
MTP_NAME = re.compile(r"(^|[._])(mtp|nextn)([._]|$)")
"""What the names of MTP layers hold in layouts other than ours: Qwen3-Next, Qwen3.5, MiMo, ERNIE, LongCat."""
WHOLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool)
"""Dtypes of tensors that are what they say: weights, and buffers."""
SHARD_NAME = re.compile(r"[\w.-]+\.safetensors")
"""File names that are accepted from an index. It comes from others, so it must not name a path."""


@dataclass(frozen=True)
class DraftCheckpoint:
    """A draft's tensors under the names of our modules."""

    family: str
    config: HeadConfig
    """The settings that its module is built from, as in the config.json that this project writes."""
    tensors: Tensors
    """Parameters, `d2t` and `t2d`; the embedding and the output matrix only if they are in the files."""
    surplus_layer: int | None = None
    """The last of the layer ids in the files, if there is one more than `fc` reads states: the loss read it."""


def resolve_folder(name: str) -> str:
    """`name` if it is a local path; for a repository on the Hub, the folder that its known files are downloaded to; for
    an adapter the folder with its base merged. UserError when they cannot be downloaded."""
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
    """The family with tensors of these names: that of a layout, or causal for all others."""
    names = list(names)
    return _family_of(names, trainers_prefix(names))


def trainers_prefix(names: Iterable[str]) -> str:
    """What all names begin with, as `draft_model.` or `_orig_mod.` of a training that was not exported, where a layout
    knows them without it alone; else ""."""
    names = list(names)
    shared = os.path.commonprefix([name.split(".")[:-1] for name in names])
    prefixes = ["", *(".".join(shared[: n + 1]) + "." for n in range(len(shared)))]
    return next((prefix for prefix in prefixes if _family_of(names, prefix) != "causal"), "")


def _family_of(names: Iterable[str], prefix: str) -> str:
    bare = {name.removeprefix(prefix).removeprefix("model.") for name in names}
    for layout in LAYOUTS.values():
        if any(re.fullmatch(layout.known_by, name) for name in bare):
            return layout.family
    return "causal"


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
            with _opened(path, folder / file) as tensors:
                return dict.fromkeys(tensors.keys(), folder / file)
    for file in PICKLE_FILES:
        if (folder / file).is_file():
            return dict.fromkeys(_unpickle(folder / file), folder / file)
    raise UserError(f"draft {path!r}: {layouts.WEIGHTS_FILE} cannot be read: there is no such file")


@contextmanager
def _opened(path: str, file: Path) -> Iterator[Any]:
    """A safetensors file of the draft `path`. UserError if it cannot be read."""
    try:
        with safe_open(file, "pt") as stored:
            yield stored
    except (OSError, SafetensorError) as error:
        reason = disk_error(error, file) or f"{file.name} cannot be read: {error}"
        raise UserError(f"draft {path!r}: {reason}") from error


def raw_tensors(path: str) -> Tensors:
    """The tensors under the names in the files; of a whole model with heads only its Medusa heads or MTP layers."""
    files = tensor_files(path)
    layers = {
        name.removesuffix("eh_proj.weight")
        for name in files
        if re.fullmatch(rf"(model\.)?{MTP.known_by}", name)
    }
    heads = {name for name in files if name.startswith(("medusa_head", *layers))}
    tensors: Tensors = {}
    for file in sorted(set(files.values())):
        names = [name for name in heads or files if files[name] == file]
        if file.name in PICKLE_FILES:
            content = _unpickle(file)
            tensors |= {name: content[name] for name in names}
        else:
            with _opened(path, file) as stored:
                tensors |= {name: stored.get_tensor(name) for name in names}
    return tensors


def plain_tensors(path: str) -> Tensors:
    """`raw_tensors` without a trainer's prefix, and with weights in eight bits or fewer as the numbers that they stand
    for. UserError that names the method for a form that is not read, and for such weights without a scale."""
    try:
        tensors = raw_tensors(path)
        prefix = trainers_prefix(tensors)
        bare = {name.removeprefix(prefix): value for name, value in tensors.items()}
        return dequantized(bare, layouts.read_config(path))
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
    """The heads in the folder `path`; MTP layers keep the names in their files. UserError when it is damaged or of no
    supported family."""
    config, tensors = layouts.read_config(path), plain_tensors(path)
    config.pop("quantization_config", None)  # of what was read, none is quantised any more
    family = detect_family(tensors)
    if family not in LAYOUTS:
        raise UserError(f"draft {path!r} holds no heads: its tensors are those of a language model")
    layout = LAYOUTS[family]
    if layout.foreign:
        named = {layout.name(name, layout.foreign): value for name, value in tensors.items()}
        # Buffers that can be computed, and copies that only a loss reads.
        unread = ("rotary_emb.", "verifier_")
        tensors = {k: v for k, v in named.items() if not any(part in k for part in unread)}
    try:
        return _with_read_layers(layout, *layout.read(config, tensors))
    except UserError as error:
        raise UserError(f"draft {path!r}: {error}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"draft {path!r}: config.json or the tensors lack what a draft of family {family} needs "
            f"({error}): download it again"
        ) from error


def read_heads(name: str, target: Target, family: str = "") -> tuple[str, DraftCheckpoint]:
    """(their folder, the heads) of a draft in a folder or on the Hub. UserError for heads that were trained on another
    tokenizer, and for those of another family than `family` (empty: the one in draftsmith.json)."""
    path = resolve_folder(name)
    check_target(path, target)
    found = read_checkpoint(path)
    layouts.check_family(path, found.family, family or read_metadata(path).family or found.family)
    return path, found


def _with_read_layers(layout: Layout, config: HeadConfig, tensors: Tensors) -> DraftCheckpoint:
    """The checkpoint with as many layer ids as `fc` reads states. Speculators also lists the target's last layer, whose
    state the loss alone reads. UserError for any other number."""
    if layout.default_layers is None:
        return DraftCheckpoint(layout.family, config, tensors)
    ids = list(config.get(layouts.AUX_LAYERS) or ())
    width = config["target_hidden_size"]
    fused = tensors.get("layer_fusion_weights")  # of DFlare
    columns = tensors["fc.weight"].shape[1] if fused is None else fused.shape[1] * width
    states, rest = divmod(columns, width)
    if ids and rest == 0 and len(ids) == states + 1 and ids[-1] == max(ids):
        surplus = ids.pop()
        kept = {k: v for k, v in config.items() if k not in layouts.AUX_LAYER_FIELDS}
        fields = layouts.aux_layer_fields(ids) if layout.default_layers else {}
        fields[layouts.AUX_LAYERS] = ids
        return DraftCheckpoint(layout.family, HeadConfig(kept | fields), tensors, surplus)
    count = len(ids) or layout.default_layers
    if not count:
        raise UserError("config.json names no layers of the target whose states it reads: add them")
    if count * width != columns:
        what = f"the layers {ids}" if ids else "no layers, by default 3"
        raise UserError(
            f"config.json names {what}, of states of size {width}, and fc.weight reads {columns} numbers: correct it"
        )
    return DraftCheckpoint(layout.family, config, tensors)


def dequantized(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """The tensors with every weight in float32 that was in eight bits or fewer; the same object where none was.

    The tensors decide, not config.json: trainers copy the target's `quantization_config` into configs of heads that are
    not quantised, and write heads in eight bits without any.
    UserError that names the method for a form that is not read, and for weights without a scale: their bare numbers
    would be another model."""
    maps = {n: v for n, v in tensors.items() if n.rpartition(".")[2] in (*VOCAB_MAPS, "token_map")}
    others = {name: value for name, value in tensors.items() if name not in maps}
    if all(value.dtype in WHOLE for value in others.values()):
        return tensors
    q = config.get("quantization_config") or {}
    method = str(q.get("quant_method") or "")
    if method not in METHODS:
        q = q | {"quant_method": "fp8"}  # scales beside the weights, of which int8 has the same
    try:
        reason = METHODS[q["quant_method"]].refusal(q)
        if reason:
            raise UserError(f"it {reason}: take the draft as it was before it was quantised")
        return maps | dict(plain_weights(others, q))
    except UserError as error:
        by = f"quantised by {method}" if method else "in few bits, and config.json names no method"
        raise UserError(f"its weights are {by}, and cannot be read: {error}") from error
    except Exception as error:  # damaged tensors fail in any of a dozen ways
        raise UserError(
            f"its quantised weights cannot be read ({first_line(error)}): restore its files"
        ) from error
