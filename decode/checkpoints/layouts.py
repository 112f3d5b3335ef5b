"""How drafts are stored: what a layout is, and how files of any layout are written, read, checked and loaded.

The layouts are those of eagle_layouts.py, block_layouts.py and head_layouts.py; importers.py has them by family.
Parameters of our modules have the names of the tensors in the files, except EAGLE-3's `midlayer.`.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from decode.common.errors import UserError, naming
from decode.common.files import read_json_object

WEIGHTS_FILE = "model.safetensors"
EAGLE3_ARCHITECTURE = "LlamaForCausalLMEagle3"
VOCAB_MAPS = ("d2t", "t2d")
"""Tensors that map a reduced vocabulary to the target's: offsets of draft ids [Vd], and a mask [V]."""
AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
AUX_LAYER_FIELDS = (AUX_LAYERS, "num_aux_hidden_states", "eagle_config")
"""The fields of config.json that `aux_layer_fields` writes."""

Tensors = dict[str, torch.Tensor]
Shapes = dict[str, tuple[int, ...]]
Names = tuple[tuple[str, str], ...]  # (pattern of a name, the name in our modules)


class HeadConfig(dict[str, Any]):
    """config.json of a draft."""

    def value(self, key: str, default: Any = None) -> Any:
        """A setting, or the default where it is absent or null."""
        found = self.get(key)
        return default if found is None else found

    @property
    def lacks_sizes(self) -> bool:
        """Whether a size is not set without which no shape of a layer is known."""
        sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
        return any(self.get(size) is None for size in sizes)

    @property
    def head_dim(self) -> int:
        return int(self.value("head_dim", self["hidden_size"] // self["num_attention_heads"]))


ReadFiles = tuple[HeadConfig, Tensors]  # config.json and tensors by the names of our modules


@dataclass(frozen=True)
class Layout:
    """How the drafts of one family are stored, by us and by others."""

    family: str
    known_by: str
    """A pattern of names of tensors; the first layout in importers.LAYOUTS that knows one of a file is the file's."""
    read: Callable[[HeadConfig, Tensors], ReadFiles]
    """Settings and tensors, of any project, as this one writes them. UserError for what our modules do not compute."""
    shapes: Callable[[HeadConfig], Shapes] | None = None
    """Every tensor that config.json implies; {} if it lacks a size. None: no shape is known without the target."""
    shared: Callable[[HeadConfig], set[str]] = lambda config: set()
    """Those of them that are taken from the target where the files lack them."""
    aliases: Names = ()  # other names of tensors that engines read
    foreign: Names = ()  # other names that are read here alone
    default_layers: int | None = None
    """Layers of the target whose states are read where config.json names none; 0: it has to; None: it reads none."""

    def name(self, name: str, names: Names | None = None) -> str:
        """The name in our modules of a tensor in a file; `names`: these instead of `aliases`."""
        for pattern, own in self.aliases if names is None else names:
            name = re.sub(pattern, own, name)
        return name


def llama_layer(config: HeadConfig, width: int) -> Shapes:
    """The tensors of a Llama layer whose attention reads states of size `width`."""
    hidden, inner, heads = (
        config[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads")
    )
    queries = heads * config.head_dim
    keys = config.value("num_key_value_heads", heads) * config.head_dim
    return {
        "self_attn.q_proj.weight": (queries, width),
        "self_attn.k_proj.weight": (keys, width),
        "self_attn.v_proj.weight": (keys, width),
        "self_attn.o_proj.weight": (hidden, queries),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }


def reduced_vocabulary(config: HeadConfig) -> Shapes:
    size, vocab = config.value("draft_vocab_size", config["vocab_size"]), config["vocab_size"]
    return {} if size == vocab else {"d2t": (size,), "t2d": (vocab,)}


# ---- the layers of the target whose states a draft reads ----


def aux_layer_fields(layers: Sequence[int] | None) -> dict[str, Any]:
    """Fields of config.json for the layers (capture ids) whose states the draft reads; none for the default (None)."""
    if not layers:
        return {}
    # Engines read the first (states entering a layer) or `eagle_config` (states leaving one).
    fields: dict[str, Any] = {AUX_LAYERS: list(layers), "num_aux_hidden_states": len(layers)}
    if min(layers) > 0:  # the embedding is no layer's output: SGLang has no id for it
        outputs = list(capture_to_output(layers))
        fields["eagle_config"] = {AUX_LAYERS: outputs, "use_aux_hidden_state": True}
    return fields


def default_aux_layers(count: int) -> tuple[int, int, int]:
    """The layers of a target with `count` layers whose states EAGLE-3 reads by default, as capture ids. Capture id i is
    the state entering layer i: `hidden_states[i]` of transformers, as in the EAGLE-3 paper. UserError for a target with
    fewer than 7 layers."""
    low, middle, high = 2, count // 2, count - 3
    if not low < middle < high:
        raise UserError(
            f"a target of {count} layers has no three default taps ({low}, {middle}, {high} do not "
            "rise): name the layers to tap explicitly"
        )
    return low, middle, high


def capture_to_output(ids: Sequence[int]) -> tuple[int, ...]:
    """Ids of the same states by the layer that outputs them, as used by SGLang, SpecForge and TensorRT-LLM. UserError
    for id 0, the embedding."""
    if any(i < 1 for i in ids):
        raise UserError(f"capture ids {list(ids)}: only those from 1 on are outputs of a layer")
    return tuple(i - 1 for i in ids)


def output_to_capture(ids: Sequence[int]) -> tuple[int, ...]:
    """The inverse of `capture_to_output`. UserError for negative ids."""
    if any(i < 0 for i in ids):
        raise UserError(f"layers {list(ids)}: count them from 0, never from the end")
    return tuple(i + 1 for i in ids)


# ---- files ----


def save_heads(
    folder: Path,
    config: Mapping[str, Any],
    net: torch.nn.Module,
    dtype: torch.dtype,
    ids: torch.Tensor | None,
) -> None:
    """Writes config.json and model.safetensors of `net` in `dtype`. `ids` [Vd] are the target's ids of a reduced
    vocabulary (None: the whole one), which is written as d2t and t2d."""
    name = str(dtype).removeprefix("torch.")
    tensors = {key: value.detach().to("cpu", dtype) for key, value in net.state_dict().items()}
    if EAGLE3_ARCHITECTURE in config["architectures"]:
        tensors = to_midlayer(tensors)
    if ids is not None:
        ids = ids.cpu()
        tensors |= {"d2t": d2t_offsets(ids), "t2d": t2d_mask(ids, config["vocab_size"])}
    write_checkpoint(folder, {**config, "dtype": name, "torch_dtype": name}, tensors)


def to_midlayer(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of EAGLE-3 with its authors' name `midlayer.` for `layers.0.`, which all versions of all engines read.
    Older versions of SGLang silently drop tensors named `layers.0.`."""
    return {name.replace("layers.0.", "midlayer.", 1): value for name, value in tensors.items()}


def write_checkpoint(
    folder: Path,
    config: Mapping[str, object],
    tensors: Mapping[str, torch.Tensor],
    file: str = WEIGHTS_FILE,
) -> None:
    """Writes config.json and the tensors, unchanged, into `file` of `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    contiguous = {name: value.contiguous() for name, value in tensors.items()}
    with naming(folder / file):
        save_file(contiguous, folder / file, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def read_config(path: str) -> HeadConfig:
    """config.json of the draft in the folder `path`. UserError when it cannot be read."""
    try:
        return HeadConfig(read_json_object(Path(path) / "config.json", "the config of a draft"))
    except UserError as error:
        raise UserError(f"draft {path!r} has no readable config.json: {error}") from error


def check_config(path: str, config: HeadConfig, wanted: Mapping[str, object]) -> None:
    """UserError that names the first setting of `config` that is not as `wanted` for the target."""
    for key, value in wanted.items():
        if config.get(key) != value:
            raise UserError(
                f"draft {path!r} has {key} {config.get(key)} and its target {value}: give the target it was trained for"
            )


def check_family(path: str, found: str, wanted: str) -> None:
    """UserError if the tensors of a draft are of family `found` while draftsmith.json names another, `wanted`."""
    if found != wanted:
        raise UserError(
            f"draft {path!r} holds the tensors of family {found}, but its metadata says {wanted}: restore its files"
        )


def draft_to_target_ids(
    path: str, config: HeadConfig, tensors: Mapping[str, torch.Tensor]
) -> torch.Tensor | None:
    """[Vd] the target's id of each draft id, rising; None if the draft has the target's whole vocabulary. UserError
    when the map is missing, damaged or contradicts itself."""
    size, whole = config["draft_vocab_size"], config["vocab_size"]
    if size == whole:
        maps = {name: tensors[name] for name in VOCAB_MAPS if name in tensors}
        if maps.get("d2t", torch.zeros(1)).any() or not maps.get("t2d", torch.ones(1)).all():
            raise UserError(
                f"draft {path!r} has {' and '.join(maps)}, the map of a reduced vocabulary, and its config.json says "
                "that it has the whole one: correct draft_vocab_size"
            )
        return None
    if "d2t" not in tensors:
        raise UserError(
            f"draft {path!r} has {size} of {whole} ids and no d2t that maps them: save it again"
        )
    ids = ids_from_d2t(tensors["d2t"], whole)
    if "t2d" in tensors and not torch.equal(ids, tensors["t2d"].nonzero()[:, 0]):
        raise UserError(
            f"draft {path!r}: d2t and t2d name different tokens: download or save the checkpoint again"
        )
    if len(ids) != size:
        raise UserError(f"draft {path!r} has {len(ids)} ids in d2t and draft_vocab_size {size}")
    return ids


def d2t_offsets(ids: torch.Tensor) -> torch.Tensor:
    """d2t [Vd] int64: the difference between the target's id and the draft id of each token."""
    return ids - torch.arange(len(ids), device=ids.device)


def t2d_mask(ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """t2d [V] bool: True for the target's tokens that are in the draft's vocabulary."""
    _check_ids(ids, vocab_size)
    mask = torch.zeros(vocab_size, dtype=torch.bool, device=ids.device)
    mask[ids] = True
    return mask


def ids_from_d2t(d2t: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The target's ids [Vd] of a saved d2t. UserError if they do not rise or are outside the vocabulary."""
    ids = d2t.long() + torch.arange(len(d2t), device=d2t.device)
    _check_ids(ids, vocab_size)
    return ids


def _check_ids(ids: torch.Tensor, vocab_size: int) -> None:
    inside = len(ids) > 0 and int(ids[0]) >= 0 and int(ids[-1]) < vocab_size
    if not inside or not bool((ids[1:] > ids[:-1]).all()):
        raise UserError(
            f"draft token ids must rise within 0..{vocab_size - 1}: the vocabulary map is damaged, "
            "belongs to another target, or holds ids where offsets are meant"
        )


def load_parameters(net: torch.nn.Module, path: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Loads every parameter of `net` from the draft at `path`. UserError for a tensor that is missing, unknown, of
    another shape or not finite. Parameters are set to NaN first, so that none can keep its random initialisation
    unnoticed."""
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(float("nan"))
    own = net.state_dict()
    unknown = sorted(tensors.keys() - own.keys())
    wrong = [
        f"{name} is {list(tensors[name].shape)} and not {list(value.shape)}"
        for name, value in own.items()
        if name in tensors and tensors[name].shape != value.shape
    ]
    wrong = wrong or [f"{name} is missing" for name in sorted(own.keys() - tensors.keys())]
    if wrong:
        raise UserError(
            f"draft {path!r} does not fit its config.json ({', '.join(wrong):.120}): get its files again"
        )
    if unknown:
        raise UserError(
            f"draft {path!r} holds {', '.join(unknown):.120}, which no module of its family reads: it was trained to "
            "compute something else"
        )
    net.load_state_dict(dict(tensors), strict=True)
    for name, parameter in net.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise UserError(f"draft {path!r}: {name} holds values that are not finite")


def without_maps(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in tensors.items() if name not in VOCAB_MAPS}


def take_copy(
    path: str, tensors: dict[str, torch.Tensor], name: str, own: torch.nn.Module, what: str
) -> None:
    """Removes the tensor `name`, if there is one, which must be a copy of the weight of `own`, the target's embedding
    or LM head. UserError if it is another: the draft was trained with it, and it would not be read."""
    found, weight = tensors.pop(name, None), own.weight
    # Not in eight bits, where it is made at each call, nor split over devices.
    if found is not None and type(weight) is torch.nn.Parameter and not equal_values(found, weight):
        raise UserError(
            f"draft {path!r} has {what} of its own ({name}), and its family reads the target's: give the target that "
            "it was trained for"
        )


def equal_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two matrices hold equal values, after rounding to the narrower of their dtypes."""
    b, narrow = b.detach().cpu(), min(a.dtype, b.dtype, key=lambda dtype: dtype.itemsize)
    return torch.equal(a.to(narrow), b.to(narrow)) or torch.equal(a.float(), b.float())
