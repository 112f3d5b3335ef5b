"""Weights of fewer bits: checkpoints in GPTQ, AWQ, FP8 and compressed-tensors, and torchao's linear layers.

A checkpoint is dequantised once into a cached folder of safetensors, which is then loaded like any other. The folder
holds the weights in float32, exactly as the checkpoint's numbers define them, the tokenizer's files, and
`quantized.json`, which says what they were made from. No kernels are needed, and none of their memory is saved.
GPTQ: Frantar et al., arXiv 2210.17323. AWQ: Lin et al., arXiv 2306.00978.
"""

import hashlib
import json
import logging
import shutil
import warnings
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download, snapshot_download
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from decode.common.errors import UserError, disk_error, first_line
from decode.common.files import read_json_object, write_atomically
from decode.model.formats.made_folders import made_folder

# ---- arithmetic of the forms ----

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column, of eight, whose number is in each four bits of an AWQ word, from the lowest bits up."""


def unpack(words: Tensor, bits: int) -> Tensor:
    """[..., W * 32 / bits] the numbers in int32 `words` [..., W], from the lowest bits up, each 0 … 2**bits - 1."""
    shifts = torch.arange(0, 32, bits, device=words.device)
    numbers = (words.long()[..., None] >> shifts) & (2**bits - 1)
    return numbers.flatten(-2)


def _in_order(columns: Tensor) -> Tensor:
    """The columns [N, out] of unpacked AWQ words, each at its own place."""
    at = torch.tensor(AWQ_ORDER, device=columns.device).argsort()
    return columns.unflatten(-1, (-1, 8))[..., at].flatten(-2)


def scaled_weight(weight: Tensor, scale: Tensor) -> Tensor:
    """weight [out, in] in eight bits times a `scale` of one number, or [out, 1], or [out, G] for groups of inputs.

    ValueError for a scale of another shape.
    """
    if scale.numel() == 1:
        return weight.float() * scale.float().reshape(1, 1)
    if len(scale) != len(weight):
        raise ValueError(f"a scale of shape {list(scale.shape)} is not one for each row")
    scale = scale.float().reshape(len(weight), -1)
    return weight.float() * scale.repeat_interleave(weight.shape[1] // scale.shape[1], 1)


def block_scaled_weight(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """weight [out, in] in eight bits times `scale`, one number for each block of `block` rows and columns.

    The last blocks of rows and columns may be smaller. ValueError for a scale that has not one number for each block.
    """
    rows, columns = weight.shape
    if tuple(scale.shape) != (-(-rows // block[0]), -(-columns // block[1])):
        raise ValueError(f"a scale of shape {list(scale.shape)} is not one for each block")
    full = scale.float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return weight.float() * full[:rows, :columns]


# ---- checkpoints ----

Config = dict[str, Any]
Read = Callable[[str], Tensor | None]
"""A tensor of the checkpoint by its name, None if it has none of that name."""

SOURCE_FILE = "quantized.json"
"""Written last into a folder, so that a folder with it is whole."""
SCALES_FILE = "w8a8_scales"
"""Of a checkpoint in W8A8: safetensors with the scales [out] of each layer, whose weight is whole numbers times them.
Its name keeps it out of the weights that transformers reads."""
FORM = 2
"""Changes with what is written into the folder."""
SHARD_BYTES = 4 << 30
KEPT = (".json", ".jinja", ".txt", ".model")
"""Files beside the weights that are copied."""
NAMED_TEMPLATES = "additional_chat_templates"
"""The folder of chat templates beside the default one."""
UNUSED = (".input_scale", ".output_scale", ".activation_scale")
"""Tensors for activations in eight bits; activations here keep the dtype that is computed in."""


def _check_gptq(q: Config) -> str:
    if q.get("bits") not in (2, 4, 8):
        return f"has GPTQ weights of {q.get('bits')} bits; those of 2, 4 and 8 are read"
    kind = q.get("checkpoint_format", "gptq")
    return "" if kind in ("gptq", "gptq_v2") else f"has GPTQ weights in the form {kind!r}"


def _check_awq(q: Config) -> str:
    version = str(q.get("version", "gemm")).lower()
    if q.get("bits", 4) != 4 or version != "gemm" or not q.get("zero_point", True):
        return "has AWQ weights other than those of version gemm with 4 bits and zero points"
    return ""


def _check_fp8(q: Config) -> str:
    return "" if q.get("expert_dtype", "fp8") == "fp8" else "has experts in four bits"


def _check_compressed(q: Config) -> str:
    known = ("int-quantized", "float-quantized", "naive-quantized", "pack-quantized")
    if q.get("format") not in known:
        return (
            f"has compressed tensors in the form {q.get('format')!r}; {', '.join(known)} are read"
        )
    return "has scales for its KV cache" if q.get("kv_cache_scheme") else ""


def _gptq(name: str, read: Read, q: Config) -> Tensor | None:
    """From qweight [in * bits / 32, out], qzeros [G, out * bits / 32], scales [G, out] and each input's group [in]."""
    qweight, qzeros, scales, group = (
        read(f"{name}.{part}") for part in ("qweight", "qzeros", "scales", "g_idx")
    )
    if qweight is None or qzeros is None or scales is None:
        return None
    bits = q["bits"]
    if group is None:
        inputs = len(qweight) * 32 // bits
        group = torch.arange(inputs) // (inputs // len(scales))
    group = group.long()
    numbers = unpack(qweight.T, bits)  # [out, in]
    # Checkpoints of format gptq store zero points less 1, those of gptq_v2 as they are.
    zeros = unpack(qzeros, bits) + int(q.get("checkpoint_format", "gptq") == "gptq")  # [G, out]
    return (numbers - zeros[group].T).float() * scales.float()[group].T


def _awq(name: str, read: Read, q: Config) -> Tensor | None:
    """From qweight [in, out / 8], qzeros [G, out / 8], both in the order of AWQ's GEMM kernel, and scales [G, out], for
    groups of in / G inputs that follow each other."""
    qweight, qzeros, scales = (read(f"{name}.{part}") for part in ("qweight", "qzeros", "scales"))
    if qweight is None or qzeros is None or scales is None:
        return None
    numbers, zeros = (_in_order(unpack(words, 4)) for words in (qweight, qzeros))
    group = torch.arange(len(numbers)) // (len(numbers) // len(scales))
    return ((numbers - zeros[group]).float() * scales.float()[group]).T.contiguous()


def _fp8(name: str, read: Read, q: Config) -> Tensor | None:
    weight, scale = read(f"{name}.weight"), read(f"{name}.weight_scale_inv")
    if weight is None or scale is None:
        return None
    if scale.numel() == 1:
        return scaled_weight(weight, scale)
    rows, columns = q.get("weight_block_size") or (128, 128)
    return block_scaled_weight(weight, scale, (rows, columns))


def _compressed(name: str, read: Read, q: Config) -> Tensor | None:
    words, scale = read(f"{name}.weight_packed"), read(f"{name}.weight_scale")
    weight, zero = read(f"{name}.weight"), read(f"{name}.weight_zero_point")
    if words is not None and scale is not None:
        shape = read(f"{name}.weight_shape")
        return None if shape is None else _packed(name, words, shape, scale, zero, read)
    if weight is None or scale is None:
        return None
    if zero is not None and bool(zero.float().any()):
        raise UserError(f"{name} has zero points, which are not read")
    return scaled_weight(weight, scale)


def _packed(
    name: str, words: Tensor, shape: Tensor, scale: Tensor, zero: Tensor | None, read: Read
) -> Tensor:
    """From `words` [out, in * bits / 32], `shape` (out, in), `scale` [out, G], zero points [out * bits / 32, G] of the
    asymmetric form, and each input's group [in] of the one in act-order. Numbers are stored plus half their range."""
    outputs, inputs = shape.tolist()
    bits = {-(-inputs * b // 32): b for b in (8, 4)}.get(words.shape[1])
    if bits is None:
        raise UserError(f"{name} has numbers of neither 4 nor 8 bits")
    middle, groups = 2 ** (bits - 1), scale.shape[1]
    numbers = unpack(words, bits)[:, :inputs] - middle
    group = read(f"{name}.weight_g_idx")
    if group is None or bool((group < 0).any()):  # -1: not in act-order
        if inputs % groups:
            raise UserError(f"{name} has {groups} groups of unequal size for its {inputs} inputs")
        group = torch.arange(inputs) // (inputs // groups)
    group = group.long()
    if zero is not None and zero.dtype == torch.int32:
        numbers = numbers - (unpack(zero.T, bits).T[:outputs] - middle)[:, group]
    elif zero is not None and bool(zero.float().any()):
        raise UserError(f"{name} has zero points that are not packed")
    return numbers.float() * scale.float()[:, group]


METHODS: dict[
    str,
    tuple[Callable[[Config], str], Callable[[str, Read, Config], Tensor | None], tuple[str, ...]],
] = {
    "gptq": (_check_gptq, _gptq, (".qweight", ".qzeros", ".scales", ".g_idx")),
    "awq": (_check_awq, _awq, (".qweight", ".qzeros", ".scales")),
    "fp8": (_check_fp8, _fp8, (".weight_scale_inv",)),
    "compressed-tensors": (
        _check_compressed,
        _compressed,
        (".weight_packed", ".weight_scale", ".weight_zero_point"),
    ),
}
"""{quant_method: (why a config of it is not read, or ""; the weight of a layer, None if parts of it are missing; what
the names of its tensors end in)}"""


def quantized_folder(name: str, revision: str | None = None) -> str | None:
    """The cached folder with the plain weights of `name`, a folder or Hub name; None where it is not one of METHODS.

    Methods that are not listed are left to transformers, which loads some and names the packages that others need.
    UserError for a form of these methods that is not read, and for files that are damaged.
    """
    config_file = _config_file(name, revision)
    if config_file is None:
        return None
    try:
        q = read_json_object(config_file, "a config.json").get("quantization_config")
    except UserError:  # loading it will say what is wrong
        return None
    if not isinstance(q, dict) or q.get("quant_method") not in METHODS:
        return None
    reason = METHODS[q["quant_method"]][0](q)
    if reason:
        raise UserError(
            f"{name!r} {reason}: take the model's original folder, or one in a form that docs/families.md lists"
        )
    folder = Path(name)
    if not folder.is_dir():
        patterns = ["*.safetensors", *(f"*{suffix}" for suffix in KEPT)]
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    try:
        return str(dequantize_folder(folder, q, name))
    except UserError as error:
        if str(error).startswith(repr(name)):
            raise
        raise UserError(f"{name!r}: {error}") from error
    except Exception as error:  # damaged tensors fail in any of a dozen ways
        refused, reason = disk_error(error, folder), first_line(error)
        broken = f"the quantised weights of {name!r} cannot be read ({reason}): restore its files"
        raise UserError(f"{name!r}: {refused}" if refused else broken) from error


def check_whole_numbers(folder: Path, name: str) -> None:
    """UserError for weights in eight bits or fewer in a folder whose config.json names no method: bare numbers would be
    read as weights, since nothing says what they are to be multiplied by."""
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as stored:
                kinds = {key: stored.get_slice(key).get_dtype() for key in stored.keys()}  # noqa: SIM118
        except Exception:  # damaged: loading it will say so
            continue
        for key, kind in kinds.items():
            if kind.startswith(("F8", "F4")) or (key.endswith(".weight") and kind in ("I8", "U8")):
                raise UserError(
                    f"{name!r}: {key} is {kind}, and config.json has no quantization_config that says what its numbers "
                    "mean: restore its config.json"
                )


def _config_file(name: str, revision: str | None) -> Path | None:
    """config.json of a folder or on the Hub; None if there is none to be had, which transformers will tell."""
    if Path(name).exists():
        file = Path(name) / "config.json"
        return file if file.is_file() else None
    try:
        return Path(hf_hub_download(name, "config.json", revision=revision))
    except Exception:  # no such name, no network: loading it will give the reason
        return None


def dequantize_folder(folder: Path, q: Config, source: str) -> Path:
    """The cached folder with the plain weights of `folder`; made now unless it is there. `source` is noted in it."""
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise UserError("there are no safetensors: take a folder that has them")
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in weights]
    content = [FORM, str(folder.resolve()), (folder / "config.json").read_text(), stats]
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    save = partial(_save_plain, folder, weights, q, source)
    return made_folder("quantized", digest[:16], SOURCE_FILE, f"{source!r}", save)


def _save_plain(folder: Path, weights: list[Path], q: Config, source: str, made: Path) -> None:
    for file in folder.iterdir():
        if file.name == NAMED_TEMPLATES:
            shutil.copytree(file, made / file.name)
        elif file.suffix in KEPT and not file.name.endswith(".index.json"):
            shutil.copyfile(file, made / file.name)
    config = read_json_object(folder / "config.json", "a config.json")
    config.pop("quantization_config")
    write_atomically(made / "config.json", json.dumps(config, indent=2) + "\n")
    _save_shards(plain_tensors(weights, q), made)
    note = {"source": source, "quant_method": q["quant_method"]}
    activations = activation_refusal(q)
    if activations == "":
        save_file(w8a8_scales(weights), made / SCALES_FILE)
    elif activations is not None:
        note["activations"] = activations
    write_atomically(made / SOURCE_FILE, json.dumps(note, indent=2) + "\n")


def plain_tensors(files: list[Path], q: Config) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor in float32) of every weight in the safetensors `files` of a checkpoint with the config `q`.

    UserError as `plain_weights`.
    """
    opened = [safe_open(file, framework="pt") for file in files]
    place = {name: file for file in opened for name in file.keys()}  # noqa: SIM118 (not a dict)
    return plain_weights(place, lambda name: place[name].get_tensor(name), q)


def plain_weights(
    names: Collection[str], load: Callable[[str], Tensor], q: Config
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor in float32) of every weight among the tensors `names` of a checkpoint with the config `q`.

    UserError if no layer is quantised, for a layer that lacks a tensor, and for numbers in few bits without a scale.
    """
    _, dequantize, endings = METHODS[q["quant_method"]]

    def read(name: str) -> Tensor | None:
        return load(name) if name in names else None

    layers = {
        name.removesuffix(ending) for name in names for ending in endings if name.endswith(ending)
    }
    if not layers:
        raise UserError(
            f"config.json says that the weights are quantised ({q['quant_method']}), and no layer's are: restore its "
            "files"
        )
    for layer in sorted(layers):
        weight = dequantize(layer, read, q)
        if weight is None:
            raise UserError(f"{layer} lacks some of its quantised tensors: restore its files")
        yield f"{layer}.weight", weight
    for name in sorted(names):
        quantized = name.rpartition(".")[0] in layers and not name.endswith(".bias")
        if quantized or name.endswith(UNUSED):
            continue
        tensor = load(name)
        if tensor.is_floating_point() and tensor.element_size() > 1:
            yield name, tensor.float()
        elif tensor.dtype in (torch.int64, torch.bool):  # a buffer
            yield name, tensor
        else:
            raise UserError(f"{name} is {tensor.dtype}, and no scale of it is known")


# ---- activations in eight bits ----


def activation_refusal(q: Config) -> str | None:
    """What of the activations that a checkpoint rounds is not computed here; "" if dtype w8a8 computes it as it is, and
    None for one that rounds none."""
    groups = (q.get("config_groups") or {}).values()
    inputs = [group["input_activations"] for group in groups if group.get("input_activations")]
    if not inputs:
        return None
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


def w8a8_scales(files: list[Path]) -> dict[str, Tensor]:
    """{layer: scales [out] in float32} of the layers in int8 in the safetensors `files`."""
    found: dict[str, Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                if name.endswith(".weight_scale"):
                    found[name.removesuffix(".weight_scale")] = tensors.get_tensor(name).float()
    return {name: scale.flatten().contiguous() for name, scale in found.items()}


def stored_scales(folder: str, name: str) -> dict[str, Tensor]:
    """`w8a8_scales` of the checkpoint `name` that a cached folder was made from; {} where it was not in W8A8.

    UserError for one that rounds its activations in another way.
    """
    note = Path(folder) / SOURCE_FILE
    refused = read_json_object(note, "a note").get("activations") if note.is_file() else None
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


def quantize_linear_layers(model: Any, dtype: str, config: str = "Int8WeightOnlyConfig") -> None:
    """Turns the weights of the linear layers into int8 with one scale for each row; the LM head keeps its dtype.

    `config` is the class of torchao that says how they are multiplied, `dtype` what settings call that.

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
            vars(quantization)[config](),
            filter_fn=lambda module, _: isinstance(module, torch.nn.Linear) and module is not head,
        )
