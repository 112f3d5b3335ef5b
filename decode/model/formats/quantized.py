"""Checkpoints with weights of few bits (packed_weights.py), and torchao's linear layers.

A checkpoint is dequantised once into a cached folder of safetensors, which is then loaded like any other. The folder
holds the weights in float32, exactly as the checkpoint's numbers define them, the tokenizer's files, and
`quantized.json`, which says what they were made from. No kernels are needed, and none of their memory is saved.
"""

import hashlib
import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download, snapshot_download
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

from decode.common import damage
from decode.common.errors import UserError, disk_error, first_line
from decode.common.files import read_json_object, write_atomically
from decode.model.formats.made_folders import copy_files, files_named, made_folder
from decode.model.formats.packed_weights import (
    METHODS,
    Config,
    is_act_order,
    is_few_bits,
    plain_weights,
    quantised_layers,
)

# ---- checkpoints ----

SOURCE_FILE = "quantized.json"
"""Written last into a folder, so that a folder with it is whole."""
SCALES_FILE = "w8a8_scales"
"""Of a checkpoint in W8A8: safetensors with the scales [out] of each layer, whose weight is whole numbers times them.
Its name keeps it out of the weights that transformers reads."""
FORM = 3
"""Changes with what is written into the folder."""
SHARD_BYTES = 4 << 30
KEPT = ("*.json", "*.jinja", "*.txt", "*.model", "additional_chat_templates/*.jinja")
"""Patterns of the files beside the weights that are copied."""
MODELOPT_FILE = "hf_quant_config.json"
"""Where older exports of ModelOpt say what config.json says in newer ones."""


def quantized_folder(name: str, revision: str | None = None) -> str | None:
    """The cached folder with the plain weights of `name`, a folder or Hub name; None where they are not quantised, or
    by a method that transformers loads itself (it names the packages that it needs).

    UserError for other methods, for a form that is not read, and for files that are damaged.
    """
    q = stated_quantization(name, revision)
    if q is None:
        return None
    method = q["quant_method"]
    if method in METHODS:
        reason = METHODS[method].refusal(q)
    elif method in AUTO_QUANTIZER_MAPPING or method == "bitsandbytes":
        return None
    else:  # transformers would drop the config with a warning
        reason = f"has weights that are quantised by {method!r}, which is not read"
    if reason:
        raise UserError(
            f"{name!r} {reason}: take the model's original folder, or one in a form that docs/families.md lists"
        )
    folder = Path(name)
    if not folder.is_dir():
        wanted = ["*.safetensors", *KEPT]
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=wanted))
    try:
        return str(dequantize_folder(folder, q, name))
    except UserError as error:
        if str(error).startswith(repr(name)):
            raise
        raise UserError(f"{name!r} ({q['quant_method']}): {error}") from error
    except Exception as error:  # damaged tensors fail in any of a dozen ways
        refused, reason = disk_error(error, folder), first_line(error)
        broken = f"the quantised weights of {name!r} cannot be read ({reason}): restore its files"
        raise UserError(f"{name!r}: {refused}" if refused else broken) from error


def stated_quantization(name: str, revision: str | None = None) -> Config | None:
    """How a folder or Hub name says that its weights are quantised, with a quant_method; None where it does not say."""
    config_file = _stored_file(name, revision, "config.json")
    if config_file is None:
        return None
    try:
        q = read_json_object(config_file, "a config.json").get("quantization_config")
        if not q:
            look = _stored_file if Path(name).exists() else _asked_once
            file = look(name, revision, MODELOPT_FILE)
            q = read_json_object(file, "of ModelOpt").get("quantization") if file else None
            q = {"quant_method": "modelopt"} | q if isinstance(q, dict) else None
    except UserError:  # loading it will say what is wrong
        return None
    if not isinstance(q, dict):
        return None
    q |= q.get("quantization") or {}  # some exports of ModelOpt
    if "quant_method" not in q and not {"load_in_4bit", "load_in_8bit"} & q.keys():
        q = {"quant_method": "unknown"} | q
    return {"quant_method": "bitsandbytes"} | q


def few_bit_tensors(folder: Path) -> dict[str, tuple[str, Path]]:
    """{name: (safetensors' name of its dtype, file)} of the tensors in eight bits or fewer in a folder."""
    found: dict[str, tuple[str, Path]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as stored:
                kinds = {key: stored.get_slice(key).get_dtype() for key in stored.keys()}  # noqa: SIM118
        except Exception:  # damaged: loading it will say so
            continue
        found |= {key: (kind, file) for key, kind in kinds.items() if is_few_bits(kind)}
    return found


def check_whole_numbers(folder: Path, name: str) -> None:
    """UserError for weights in eight bits or fewer in a folder whose config.json names no method: bare numbers would be
    read as weights, since nothing says what they are to be multiplied by."""
    for key, (kind, _) in few_bit_tensors(folder).items():
        if kind.startswith("F") or key.endswith(".weight"):
            raise UserError(
                f"{name!r}: {key} is {kind}, and config.json has no quantization_config that says what its numbers "
                "mean: restore its config.json"
            )


def check_bare_numbers(model: Any, folder: Path, what: str) -> None:
    """UserError if a weight of the loaded `model` is the bare numbers in eight bits or fewer of a tensor in the files.

    Whoever loaded it, and whatever its config says: a weight has to be such numbers times a scale.
    """
    stored = few_bit_tensors(folder)
    if not stored:
        return
    weights = {
        n: p for n, p in model.named_parameters() if p.is_floating_point() and p.itemsize > 1
    }
    for key, (kind, file) in stored.items():
        # transformers adds the name of the base model where files lack it, and takes it away
        for name in (key, *(w for w in weights if w.endswith(f".{key}") or key.endswith(f".{w}"))):
            if name not in weights or weights[name].is_meta:
                continue
            with safe_open(file, framework="pt") as tensors:
                bare = tensors.get_tensor(key).to(weights[name].dtype)
            if bare.any() and bare.equal(weights[name].detach().cpu()):
                q = vars(model.config).get("quantization_config") or {}
                method = (q if isinstance(q, dict) else vars(q)).get("quant_method")
                by = f"quantised by {str(method)!r}" if q else "named by no config"
                raise UserError(
                    f"{what}: {key} is {kind}, {by}, and its bare numbers would be the weights: take the model's "
                    "original folder"
                )


def _stored_file(name: str, revision: str | None, file: str) -> Path | None:
    """A file of a folder or on the Hub; None if there is none to be had, which transformers will tell."""
    if Path(name).exists():
        path = Path(name) / file
        return path if path.is_file() else None
    try:
        return Path(hf_hub_download(name, file, revision=revision))
    except Exception:  # no such name, no network: loading it will give the reason
        return None


_asked_once = cache(
    _stored_file
)  # few repositories have the file, and a name is resolved many times


def dequantize_folder(folder: Path, q: Config, source: str) -> Path:
    """The cached folder with the plain weights of `folder`; made now unless it is there. `source` is noted in it."""
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise UserError("there are no safetensors: take a folder that has them")
    stats = [(file.name, *damage.file_state(file)) for file in weights]
    texts = {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in _kept_files(folder)
    }
    content = [FORM, str(folder.resolve()), stats, texts]
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    save = partial(_save_plain, folder, weights, q, source)
    return made_folder("quantized", digest[:16], SOURCE_FILE, f"{source!r}", save)


def _kept_files(folder: Path) -> list[Path]:
    """The files beside the weights that a folder with plain weights has as well."""
    return [file for file in files_named(folder, KEPT) if not file.name.endswith(".index.json")]


def _save_plain(folder: Path, weights: list[Path], q: Config, source: str, made: Path) -> None:
    copy_files(_kept_files(folder), folder, made)
    (made / MODELOPT_FILE).unlink(missing_ok=True)
    config = read_json_object(folder / "config.json", "a config.json")
    config.pop("quantization_config", None)
    write_atomically(made / "config.json", json.dumps(config, indent=2) + "\n")
    tensors = StoredTensors(weights)
    layers = quantised_layers(tensors, q)
    if not layers:
        raise UserError(
            f"config.json says that the weights are quantised ({q['quant_method']}), and no layer's are: restore its "
            "files"
        )
    _save_shards(plain_weights(tensors, q), made)
    note: Config = {"source": source, "quant_method": q["quant_method"]}
    note["act_order"] = any(is_act_order(layer, tensors.get) for layer in layers)
    activations = activation_refusal(q)
    if activations == "":
        save_file(w8a8_scales(tensors), made / SCALES_FILE)
    elif activations is not None:
        note["activations"] = activations
    write_atomically(made / SOURCE_FILE, json.dumps(note, indent=2) + "\n")


class StoredTensors(Mapping[str, Tensor]):
    """All tensors of safetensors files by name, each read when it is asked for."""

    def __init__(self, files: list[Path]):
        opened = [safe_open(file, framework="pt") for file in files]
        self.place = {name: file for file in opened for name in file.keys()}  # noqa: SIM118 (not a dict)

    def __getitem__(self, name: str) -> Tensor:
        return self.place[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.place)

    def __len__(self) -> int:
        return len(self.place)


def is_scattered(folder: str) -> bool:
    """Whether the inputs of a group do not follow each other in the checkpoint that a cached folder was made from."""
    return bool(_note(folder).get("act_order"))


def _note(folder: str) -> Config:
    note = Path(folder) / SOURCE_FILE
    return read_json_object(note, "a note") if note.is_file() else {}


# ---- activations in eight bits ----


def activation_refusal(q: Config) -> str | None:
    """What of the activations that a checkpoint rounds is not computed here; "" if dtype w8a8 computes it as it is, and
    None for one that rounds none."""
    groups = (q.get("config_groups") or {}).values()
    inputs = [group["input_activations"] for group in groups if group.get("input_activations")]
    if not inputs:
        return None
    if q.get("kv_cache_scheme"):
        return "a KV cache in eight bits"
    if len(inputs) < len(groups) or any(group.get("output_activations") for group in groups):
        return "layers of several kinds"
    weights = [group.get("weights") or {} for group in groups]
    for name, parts, strategies in (
        ("weights", weights, ("channel", "tensor")),
        ("activations", inputs, ("token",)),
    ):
        for part in parts:
            if part.get("num_bits") != 8 or part.get("type", "int") != "int":
                return f"{name} that are not whole numbers of eight bits"
            if part.get("symmetric") is False:
                return f"asymmetric {name}"
            if part.get("strategy") not in strategies:
                return f"{name} with a scale for each {part.get('strategy')}"
    return "" if all(part.get("dynamic") is True for part in inputs) else "static activations"


def w8a8_scales(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """{layer: scales [out] in float32} of the layers in int8."""
    end = ".weight_scale"
    found = {name.removesuffix(end): tensors[name] for name in tensors if name.endswith(end)}
    return {name: scale.float().flatten().contiguous() for name, scale in found.items()}


def stored_scales(folder: str, name: str) -> dict[str, Tensor]:
    """`w8a8_scales` of the checkpoint `name` that a cached folder was made from; {} where it was not in W8A8.

    UserError for one that rounds its activations in another way.
    """
    refused = _note(folder).get("activations")
    if refused:
        raise UserError(
            f"{name!r} has {refused}, which dtype w8a8 does not compute: it is dynamic for each token and symmetric; "
            "choose float32 or bfloat16, which leave activations as they are"
        )
    file = Path(folder) / SCALES_FILE
    return load_file(file) if file.is_file() else {}


def _save_shards(tensors: Iterator[tuple[str, Tensor]], folder: Path) -> None:
    """Writes the tensors in files of about SHARD_BYTES, and their index."""
    index: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    size, total, number = 0, 0, 0

    def flush() -> None:
        file = f"model-{number:05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        index.update(dict.fromkeys(shard, file))
        shard.clear()

    for name, tensor in tensors:
        shard[name] = tensor.contiguous()
        size += tensor.nbytes
        total += tensor.nbytes
        if size >= SHARD_BYTES:
            flush()
            size, number = 0, number + 1
    if shard:
        flush()
    content = {"metadata": {"total_size": total}, "weight_map": index}
    write_atomically(folder / "model.safetensors.index.json", json.dumps(content) + "\n")


# ---- torchao ----


def quantize_linear_layers(model: Any, dtype: str) -> None:
    """Turns the weights of the linear layers into int8 with one scale for each row; the LM head keeps its dtype.

    `dtype` is what settings call that.

    The LM head is left because drafts copy rows of it, and it often is the embedding too. Experts that a model holds
    as stacked tensors are no linear layers and stay as they are. UserError without torchao.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Torchao reports each kernel of other devices that it cannot load
        logging.disable(logging.WARNING)
        try:
            from torchao import quantization
        except ImportError as error:
            raise UserError(
                f"dtype {dtype} needs torchao here: pip install torchao, or choose another dtype"
            ) from error
        finally:
            logging.disable(logging.NOTSET)
        head = model.get_output_embeddings()
        quantization.quantize_(
            model,
            quantization.Int8WeightOnlyConfig(),
            filter_fn=lambda module, _: isinstance(module, torch.nn.Linear) and module is not head,
        )
