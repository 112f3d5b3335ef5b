"""Draft checkpoints as this project writes them: config.json and tensor names that serving engines read.

EAGLE-3 has the flat layout whose config.json works in vLLM and SGLang, EAGLE-1 the layout of its authors, Medusa the
one that vLLM loads up to 0.32. No engine reads exit adapters. Parameters of our modules have the names of the tensors
in the files, except EAGLE-3's `midlayer.`. decode/checkpoints/importers.py reads checkpoints.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from decode.common.disk_errors import naming
from decode.common.errors import UserError
from decode.common.files import read_json_object
from decode.model.compatibility import rope_configs

WEIGHTS_FILE = "model.safetensors"
EAGLE3_ARCHITECTURE = "LlamaForCausalLMEagle3"
VOCAB_MAPS = ("d2t", "t2d")
"""Tensors that map a reduced vocabulary to the target's: offsets of draft ids [Vd], and a mask [V]."""
NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Norms that variants of EAGLE-3 add, by their names in config.json; EAGLE-3 itself has none of them."""


AUX_LAYER_FIELDS = (
    "eagle_aux_hidden_state_layer_ids",
    "num_aux_hidden_states",
    "eagle_config",
)
"""The fields of config.json that `aux_layer_fields` writes."""


def medusa_config(target: Any, heads: int, layers: int, vocab: int) -> dict[str, Any]:
    """config.json of Medusa heads for a target with this text config and `vocab` logits."""
    return {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": target.hidden_size,
        "vocab_size": vocab,
        "num_heads": heads,
        "num_hidden_layers": layers,
        "truncated_vocab_size": vocab,
        "medusa_fc_bias": True,  # without it vLLM drops the biases
        "original_lm_head": False,
        "max_paths": 64,
        "topk": 10,
    }


def eagle_config(target: Any, vocab: int, width: int = 0) -> dict[str, Any]:
    """The part of config.json that EAGLE-1 and -3 share: a Llama layer with the heads, norms and RoPE of its target.

    `width` is the draft's hidden size (0: the target's). In a narrower draft attention heads keep their size and there
    are fewer of them.
    """
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
    return {
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


def eagle1_config(target: Any, vocab: int) -> dict[str, Any]:
    """config.json of an EAGLE-1 draft, whose hidden size is that of its target."""
    # SGLang takes the first; vLLM puts Eagle before each and then knows the second.
    names = ["LlamaForCausalLMEagle", "LlamaForCausalLM"]
    return eagle_config(target, vocab) | {"architectures": names, "bias": False}


def eagle3_config(
    target: Any,
    vocab: int,
    draft_vocab: int,
    layers: tuple[int, ...],
    width: int = 0,
    norms: Sequence[str] = (),
) -> dict[str, Any]:
    """config.json of an EAGLE-3 draft that reads the hidden states entering `layers` (capture ids).

    `norms` are those of NORM_FLAGS that it has.
    """
    config = eagle_config(target, vocab, width) | {
        "architectures": [EAGLE3_ARCHITECTURE],
        "draft_vocab_size": draft_vocab,
        # Engines have different defaults for them.
        **{name: name in norms for name in NORM_FLAGS},
    }
    default = target.num_hidden_layers >= 7 and layers == default_aux_layers(
        target.num_hidden_layers
    )
    return config if default else config | aux_layer_fields(layers)


def peagle_config(eagle3: Mapping[str, Any], mask_token: int) -> dict[str, Any]:
    """config.json of a P-EAGLE draft, from that of EAGLE-3 with the same taps and sizes."""
    return {**eagle3, "mask_token_id": mask_token}


def dflash_config(
    target: Any,
    vocab: int,
    draft_vocab: int,
    layers: Sequence[int],
    depth: int,
    block_size: int,
    mask_token: int,
    markov_rank: int = 0,
) -> dict[str, Any]:
    """config.json of a DFlash draft of `depth` layers that reads the states entering `layers` (capture ids).

    With `markov_rank` it is DSpark. Causality is written out: vLLM takes layers for causal where a config is silent.
    """
    config = eagle_config(target, vocab) | {
        "architectures": ["DSparkDraftModel" if markov_rank else "DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": depth,
        "num_target_layers": target.num_hidden_layers,
        "draft_vocab_size": draft_vocab,
        "block_size": block_size,
        "dflash_config": {
            "mask_token_id": mask_token,
            "target_layer_ids": list(capture_to_output(layers)),
            "causal": False,
        },
        "eagle_aux_hidden_state_layer_ids": list(layers),
    }
    if not markov_rank:
        return config
    return config | {
        "markov_rank": markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "sample_from_anchor": True,
    }


def exit_config(
    target: Any, vocab: int, draft_vocab: int, layer: int, width: int
) -> dict[str, Any]:
    """config.json of an exit adapter of inner width `width` that reads the states entering `layer` (capture id).

    No engine reads it: they have no early exit.
    """
    return {
        "model_type": "layerskip",
        "architectures": ["ExitAdapter"],
        "hidden_size": target.hidden_size,
        "vocab_size": vocab,
        "draft_vocab_size": draft_vocab,
        "num_target_layers": target.num_hidden_layers,
        "exit_layer": layer,
        "exit_width": width,
    }


def aux_layer_fields(layers: Sequence[int] | None) -> dict[str, Any]:
    """Fields of config.json for the layers (capture ids) whose states the draft reads; none for the default (None)."""
    if not layers:
        return {}
    # vLLM reads the first (states entering a layer), SGLang `eagle_config` (states leaving one).
    fields: dict[str, Any] = {
        "eagle_aux_hidden_state_layer_ids": list(layers),
        "num_aux_hidden_states": len(layers),
    }
    if min(layers) > 0:  # the embedding is no layer's output: SGLang has no id for it
        fields["eagle_config"] = {
            "eagle_aux_hidden_state_layer_ids": list(capture_to_output(layers)),
            "use_aux_hidden_state": True,
        }
    return fields


def default_aux_layers(count: int) -> tuple[int, int, int]:
    """The layers of a target with `count` layers whose states EAGLE-3 reads by default, as capture ids.

    Capture id i is the state entering layer i: `hidden_states[i]` of transformers. vLLM and the EAGLE-3 paper use it.
    UserError for a target with fewer than 7 layers.
    """
    low, middle, high = 2, count // 2, count - 3
    if not low < middle < high:
        raise UserError(
            f"a target of {count} layers has no three default taps ({low}, {middle}, {high} do not "
            "rise): name the layers to tap explicitly"
        )
    return low, middle, high


def capture_to_output(ids: Sequence[int]) -> tuple[int, ...]:
    """Ids of the same states by the layer that outputs them, as used by SGLang, SpecForge and TensorRT-LLM.

    UserError for id 0, the embedding.
    """
    if any(i < 1 for i in ids):
        raise UserError(f"capture ids {list(ids)}: only those from 1 on are outputs of a layer")
    return tuple(i - 1 for i in ids)


def output_to_capture(ids: Sequence[int]) -> tuple[int, ...]:
    """Ids of the same states by the layer that they enter, the inverse of `capture_to_output`.

    UserError for negative ids.
    """
    if any(i < 0 for i in ids):
        raise UserError(f"layers {list(ids)}: count them from 0, never from the end")
    return tuple(i + 1 for i in ids)


def saved_norms(config: Mapping[str, Any]) -> list[str]:
    """The names of NORM_FLAGS that this config.json sets."""
    return [name for name in NORM_FLAGS if config.get(name)]


def aux_layers(config: Mapping[str, Any], count: int) -> tuple[int, ...]:
    """Capture ids of the states that a saved EAGLE-3 draft reads, for a target with `count` layers."""
    return tuple(config.get("eagle_aux_hidden_state_layer_ids") or default_aux_layers(count))


def save_heads(
    folder: Path,
    config: Mapping[str, Any],
    net: torch.nn.Module,
    dtype: torch.dtype,
    ids: torch.Tensor | None,
) -> None:
    """Writes config.json and model.safetensors of `net` in `dtype`.

    `ids` [Vd] are the target's ids of a reduced vocabulary (None: the whole one), which is written as d2t and t2d.
    """
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

    vLLM and TensorRT-LLM read `layers.0.` as well; older versions of SGLang silently drop such tensors.
    """
    return {name.replace("layers.0.", "midlayer.", 1): value for name, value in tensors.items()}


def write_checkpoint(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    file: str = WEIGHTS_FILE,
) -> None:
    """Writes config.json and the tensors, unchanged, into `file` of `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    contiguous = {name: value.contiguous() for name, value in tensors.items()}
    with naming(folder / file):
        save_file(contiguous, folder / file, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def read_config(path: str) -> dict[str, Any]:
    """config.json of the draft in the folder `path`. UserError when it cannot be read."""
    try:
        return read_json_object(Path(path) / "config.json", "the config of a draft")
    except UserError as error:
        raise UserError(f"draft {path!r} has no readable config.json: {error}") from error


def check_config(path: str, config: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
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
    path: str, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> torch.Tensor | None:
    """[Vd] the target's id of each draft id, rising; None if the draft has the target's whole vocabulary.

    UserError when the map is missing, damaged or contradicts itself.
    """
    if config["draft_vocab_size"] == config["vocab_size"]:
        maps = {name: tensors[name] for name in VOCAB_MAPS if name in tensors}
        if maps.get("d2t", torch.zeros(1)).any() or not maps.get("t2d", torch.ones(1)).all():
            raise UserError(
                f"draft {path!r} has {' and '.join(maps)}, the map of a reduced vocabulary, and its config.json says "
                "that it has the whole one: correct draft_vocab_size"
            )
        return None
    if "d2t" not in tensors:
        raise UserError(
            f"draft {path!r} has {config['draft_vocab_size']} of {config['vocab_size']} ids and no d2t that "
            "maps them: save it again"
        )
    size = config["draft_vocab_size"]
    ids = ids_from_d2t(tensors["d2t"], config["vocab_size"])
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
    """Loads every parameter of `net` from the draft at `path`.

    UserError for a tensor that is missing, unknown, of another shape or not finite. Parameters are set to NaN first,
    so that none can keep its random initialisation unnoticed.
    """
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(float("nan"))
    own = net.state_dict()
    absent, unknown = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
    wrong = [
        f"{name} is {list(tensors[name].shape)} and not {list(value.shape)}"
        for name, value in own.items()
        if name in tensors and tensors[name].shape != value.shape
    ]
    if absent or wrong:
        what = ", ".join(wrong or [f"{name} is missing" for name in absent])
        raise UserError(
            f"draft {path!r} does not fit its config.json ({what:.120}): get its files again"
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
    """The tensors that are parameters, after `draft_to_target_ids` has read the others."""
    return {name: value for name, value in tensors.items() if name not in VOCAB_MAPS}


def take_copy(
    path: str, tensors: dict[str, torch.Tensor], name: str, own: torch.Tensor, what: str
) -> None:
    """Removes the tensor `name`, if there is one, which must be a copy of the target's `own`.

    UserError if it is another: the draft was trained with it, and it would not be read.
    """
    found = tensors.pop(name, None)
    plain = type(own) in (
        torch.Tensor,
        torch.nn.Parameter,
    )  # not in eight bits, nor split over devices
    if found is not None and plain and not equal_values(found, own):
        raise UserError(
            f"draft {path!r} has {what} of its own ({name}), and its family reads the target's: give the target that "
            "it was trained for"
        )


def equal_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two matrices hold equal values, after rounding to the narrower of their dtypes."""
    if a.shape != b.shape:
        return False
    b, narrow = b.detach().cpu(), min(a.dtype, b.dtype, key=lambda dtype: dtype.itemsize)
    return torch.equal(a.to(narrow), b.to(narrow)) or torch.equal(a.float(), b.float())
