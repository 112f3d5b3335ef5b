"""Draft heads on disk: the names and settings that serving engines read, written as training leaves them.

EAGLE-3 is the flat layout whose one config.json is right for vLLM and SGLang, EAGLE-1 the layout of its authors,
Medusa the one that vLLM loads up to 0.32. Parameters of our nets carry the names of the files, but for EAGLE-3's
`midlayer.`. Reading is decode/checkpoints/importers.py.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from decode.common.errors import UserError
from decode.model.compatibility import rope_configs

WEIGHTS_FILE = "model.safetensors"
VLLM_METHODS = {"causal": "draft_model", "medusa": "medusa", "eagle1": "eagle", "eagle3": "eagle3"}
"""What vLLM calls our families, in the `method` of its --speculative-config. It guesses from the path otherwise, and
wrongly."""
NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Variants of EAGLE-3, all false in what is trained here."""


def medusa_config(target: Any, heads: int, layers: int, vocab: int) -> dict[str, Any]:
    """config.json of Medusa heads over a target of this text config."""
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
    """What EAGLE-1 and -3 have in common: a Llama layer with the heads, norms and RoPE of its target.

    `width` is the draft's hidden size (0: the target's); heads keep their size and become fewer.
    """
    has, hidden = target.to_dict(), target.hidden_size
    width = width or hidden
    size = has.get("head_dim") or hidden // target.num_attention_heads
    ratio = target.num_attention_heads // (
        has.get("num_key_value_heads") or target.num_attention_heads
    )
    most = max(1, target.num_attention_heads * width // hidden)
    # Llama wants heads to divide its width, and K/V heads to divide them.
    heads = next(n for n in range(most, 0, -1) if width % n == n % max(1, n // ratio) == 0)
    inner = has.get("intermediate_size") or 4 * hidden
    # The draft's one layer sees everything, so it turns as those of the target that do (Gemma has two RoPEs).
    found = vars(target).get("rope_parameters") or {}
    rope = dict(found.get("full_attention") or (rope_configs(target) or [{}])[0])
    rope = {"rope_type": rope.get("rope_type", "default"), **rope}
    rope.setdefault("rope_theta", 10000.0)
    part = rope.pop("partial_rotary_factor", None) or 1.0  # the draft turns its whole heads
    if part != 1.0 and "short_factor" in rope:  # which has factors for that part only
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
        "rms_norm_eps": has.get("rms_norm_eps") or 1e-5,
        "max_position_embeddings": target.max_position_embeddings,
        "vocab_size": vocab,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": has.get("bos_token_id"),
        "eos_token_id": has.get("eos_token_id"),
        "pad_token_id": has.get("pad_token_id"),
        # Engines of different age read one or the other.
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
    }


def eagle1_config(target: Any, vocab: int) -> dict[str, Any]:
    """config.json of an EAGLE-1 head, which is as wide as its target."""
    # SGLang takes the first, vLLM puts Eagle before each and knows the second then.
    names = ["LlamaForCausalLMEagle", "LlamaForCausalLM"]
    return eagle_config(target, vocab) | {"architectures": names, "bias": False}


def eagle3_config(
    target: Any, vocab: int, draft_vocab: int, layers: tuple[int, ...], width: int = 0
) -> dict[str, Any]:
    """config.json of an EAGLE-3 head that taps the states entering `layers`."""
    config = eagle_config(target, vocab, width) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": draft_vocab,
        # Engines disagree on what their absence means.
        **dict.fromkeys(NORM_FLAGS, False),
    }
    default = target.num_hidden_layers >= 7 and layers == default_aux_layers(
        target.num_hidden_layers
    )
    return config if default else config | aux_layer_fields(layers)


def aux_layer_fields(layers: Sequence[int] | None) -> dict[str, Any]:
    """What config.json says of the tapped layers; nothing of the default ones (None)."""
    if not layers:
        return {}
    # vLLM reads the first (states entering a layer), SGLang the second (states leaving one).
    found: dict[str, Any] = {
        "eagle_aux_hidden_state_layer_ids": list(layers),
        "num_aux_hidden_states": len(layers),
    }
    if min(layers) > 0:  # the embedding is no layer's output: SGLang has no name for it
        found["eagle_config"] = {
            "eagle_aux_hidden_state_layer_ids": list(capture_to_output(layers)),
            "use_aux_hidden_state": True,
        }
    return found


def default_aux_layers(count: int) -> tuple[int, int, int]:
    """The layers of a target of `count` layers that EAGLE-3 taps unless told otherwise, as capture ids.

    Capture id i is the state entering layer i: `hidden_states[i]` of transformers. vLLM and the EAGLE paper count so.
    """
    low, middle, high = 2, count // 2, count - 3
    if not low < middle < high:
        raise UserError(
            f"a target of {count} layers has no three default taps ({low}, {middle}, {high} do not "
            "rise): name the layers to tap explicitly"
        )
    return low, middle, high


def capture_to_output(ids: Sequence[int]) -> tuple[int, ...]:
    """The same states named by the layer whose output they are, as SGLang, SpecForge and TensorRT-LLM count."""
    if any(i < 1 for i in ids):
        raise UserError(f"capture ids {list(ids)}: only those from 1 on are outputs of a layer")
    return tuple(i - 1 for i in ids)


def output_to_capture(ids: Sequence[int]) -> tuple[int, ...]:
    """The same states named by the layer they enter: undoes `capture_to_output`."""
    if any(i < 0 for i in ids):
        raise UserError(f"layers {list(ids)}: count them from 0, never from the end")
    return tuple(i + 1 for i in ids)


def aux_layers(config: Mapping[str, Any], count: int) -> tuple[int, ...]:
    """Those that a saved EAGLE-3 draft taps, as states entering a layer."""
    return tuple(config.get("eagle_aux_hidden_state_layer_ids") or default_aux_layers(count))


def save_heads(
    folder: Path,
    config: Mapping[str, Any],
    net: torch.nn.Module,
    dtype: torch.dtype,
    ids: torch.Tensor | None,
) -> None:
    """Writes config.json and model.safetensors, floats in `dtype`, with the map of a reduced vocabulary."""
    name = str(dtype).removeprefix("torch.")
    tensors = {key: value.detach().to("cpu", dtype) for key, value in net.state_dict().items()}
    if "draft_vocab_size" in config:
        tensors = to_midlayer(tensors)
    if ids is not None:
        ids = ids.cpu()
        tensors |= {"d2t": d2t_offsets(ids), "t2d": t2d_mask(ids, config["vocab_size"])}
    write_checkpoint(folder, {**config, "dtype": name, "torch_dtype": name}, tensors)


def to_midlayer(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """EAGLE-3's layer under the name that its authors gave it, which every version of every engine reads.

    vLLM and TensorRT-LLM read `layers.0.` as well; SGLang came to it late, and before dropped such tensors silently.
    """
    return {name.replace("layers.0.", "midlayer.", 1): value for name, value in tensors.items()}


def write_checkpoint(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    file: str = WEIGHTS_FILE,
) -> None:
    """Writes config.json and the tensors as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = {name: value.contiguous() for name, value in tensors.items()}
    save_file(whole, folder / file, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def read_config(path: str) -> dict[str, Any]:
    """config.json of a draft directory."""
    try:
        found = json.loads((Path(path) / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"draft {path!r} has no readable config.json: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"draft {path!r} has no readable config.json: it holds no settings")
    return found


def check_config(path: str, config: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """UserError naming the first setting that is not what the target needs."""
    for key, value in wanted.items():
        if config.get(key) != value:
            raise UserError(
                f"draft {path!r} has {key} {config.get(key)} and its target {value}: give the target it was made for"
            )


def check_family(path: str, found: str, wanted: str) -> None:
    """UserError if the tensors of a draft are those of another family than draftsmith.json says."""
    if found != wanted:
        raise UserError(
            f"draft {path!r} holds the tensors of family {found} and is called {wanted}: restore its files"
        )


def draft_to_target_ids(
    path: str, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> torch.Tensor | None:
    """[Vd] the target's id of each draft id, rising; None for the whole vocabulary."""
    if config["draft_vocab_size"] == config["vocab_size"]:
        return None
    if "d2t" not in tensors:
        raise UserError(
            f"draft {path!r} has {config['draft_vocab_size']} of {config['vocab_size']} ids and no d2t that "
            "says which: save it again"
        )
    size = config["draft_vocab_size"]
    ids = ids_from_d2t(tensors["d2t"], config["vocab_size"])
    if "t2d" in tensors and not torch.equal(ids, tensors["t2d"].nonzero()[:, 0]):
        raise UserError(
            f"draft {path!r}: d2t and t2d name different tokens: get the checkpoint anew"
        )
    if len(ids) != size:
        raise UserError(f"draft {path!r} has {len(ids)} ids in d2t and draft_vocab_size {size}")
    return ids


def d2t_offsets(ids: torch.Tensor) -> torch.Tensor:
    """d2t [Vd] int64: what to add to a draft id to get the target's."""
    return ids - torch.arange(len(ids), device=ids.device)


def t2d_mask(ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """t2d [V] bool: True for the target's tokens that the draft can say."""
    _check_ids(ids, vocab_size)
    inside = torch.zeros(vocab_size, dtype=torch.bool, device=ids.device)
    inside[ids] = True
    return inside


def ids_from_d2t(d2t: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Ids [Vd] of a saved d2t. Raises UserError if they do not rise or leave the vocabulary."""
    ids = d2t.long() + torch.arange(len(d2t), device=d2t.device)
    _check_ids(ids, vocab_size)
    return ids


def ids_of_pair(d2t: torch.Tensor, t2d: torch.Tensor) -> torch.Tensor:
    """Ids [Vd] of a saved map. Raises UserError if its two halves disagree."""
    ids = ids_from_d2t(d2t, len(t2d))
    if not torch.equal(ids, t2d.nonzero()[:, 0]):
        raise UserError("d2t and t2d name different tokens: the checkpoint is damaged, get it anew")
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

    UserError for one that is missing, unknown, of another shape or not finite. Parameters start as NaN, so that none
    can keep what it was initialised with.
    """
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(float("nan"))
    tensors = {name: value for name, value in tensors.items() if name not in ("d2t", "t2d")}
    try:
        net.load_state_dict(tensors, strict=True)
    except RuntimeError as error:
        what = " ".join(line.strip() for line in str(error).splitlines()[1:])
        raise UserError(f"draft {path!r} does not fit its config.json: {what}") from error
    for name, parameter in net.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise UserError(f"draft {path!r}: {name} holds values that are not finite")
