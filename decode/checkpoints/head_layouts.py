"""Medusa's heads, exit adapters and MTP layers: config.json and tensors as saved here and as others save them.

Medusa is saved in the layout that serving engines load, and read as FasterDecoding and Model-Optimizer write it too.
"""

import re
from typing import Any

from decode.checkpoints.layouts import HeadConfig, Layout, ReadFiles, Shapes, Tensors
from decode.common.errors import UserError

# ---- Medusa ----


def medusa_config(target: Any, heads: int, layers: int, vocab: int) -> HeadConfig:
    """config.json of Medusa heads for a target with this text config and `vocab` logits."""
    return HeadConfig(
        model_type="medusa",
        architectures=["MedusaModel"],
        hidden_size=target.hidden_size,
        vocab_size=vocab,
        num_heads=heads,
        num_hidden_layers=layers,
        truncated_vocab_size=vocab,
        medusa_fc_bias=True,  # without it engines drop the biases
        original_lm_head=False,
        max_paths=64,
        topk=10,
    )


def medusa_counts(config: HeadConfig) -> tuple[int, int]:
    """(heads, residual layers of each); 5 and 1 if neither our key nor that of Medusa's authors is set."""
    heads = config.value("num_heads", config.value("medusa_num_heads", 5))
    return int(heads), int(config.value("num_hidden_layers", config.value("medusa_num_layers", 1)))


def _medusa_shapes(config: HeadConfig) -> Shapes:
    """Biases only with medusa_fc_bias. Sizes that are not set are those that engines take."""
    hidden, vocab = config.value("hidden_size", 4096), config.value("vocab_size", 32001)
    heads, layers = medusa_counts(config)
    shapes: Shapes = {}
    for i in range(heads):
        for j in range(layers):
            shapes[f"blocks.{i}.layers.{j}.weight"] = (hidden, hidden)
            if config.value("medusa_fc_bias", False):
                shapes[f"blocks.{i}.layers.{j}.bias"] = (hidden,)
        if not config.value("original_lm_head", False):
            shapes[f"lm_heads.{i}.weight"] = (vocab, hidden)
    return shapes


def _read_medusa(config: HeadConfig, tensors: Tensors) -> ReadFiles:
    """Config and tensors as they are saved here. In other layouts all counts and sizes come from the tensors, because
    published configs have wrong ones."""
    if "token_map" in tensors:
        raise UserError("Medusa over a reduced vocabulary (token_map) is not supported")
    activation = config.get("hidden_act") if config.get("model_type") == "medusa" else None
    if activation not in (None, "silu", "swish"):
        raise UserError(f"Medusa with the activation {activation!r}: its blocks compute SiLU")
    if "lm_head.weight" in tensors:
        tensors = {"lm_heads.0.weight": tensors["lm_head.weight"]} | tensors
        tensors.pop("lm_head.weight")
    names = {name: MEDUSA.name(name) for name in tensors}
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
    own = set(names.values()) == set(names)  # the layout of engines, whose config is right
    kept = (
        config.keys() - {"medusa_num_heads", "medusa_num_layers"}
        if own
        else {"dtype", "torch_dtype"}
    )
    return HeadConfig(fields | {key: config[key] for key in config if key in kept}), renamed


HEADS = r"^(?:medusa_heads?\.)?"
OWN_NAMES = r"blocks\.\d+\.layers\.\d+\.(?:weight|bias)|lm_heads\.\d+\.weight"
MEDUSA = Layout(
    "medusa",
    rf"{HEADS}({OWN_NAMES}|\d+\.\d+\.(linear\.(weight|bias)|weight))",
    _read_medusa,
    _medusa_shapes,
    aliases=(
        (rf"{HEADS}({OWN_NAMES})$", r"\1"),
        (rf"{HEADS}(\d+)\.(\d+)\.linear\.(weight|bias)$", r"blocks.\1.layers.\2.\3"),
        (rf"{HEADS}(\d+)\.\d+\.weight$", r"lm_heads.\1.weight"),
    ),
)

# ---- exit adapters and MTP layers ----


def exit_config(target: Any, vocab: int, draft_vocab: int, layer: int, width: int) -> HeadConfig:
    """config.json of an exit adapter of inner width `width` that reads the states entering `layer` (capture id). No
    engine reads it: they have no early exit."""
    return HeadConfig(
        model_type="layerskip",
        architectures=["ExitAdapter"],
        hidden_size=target.hidden_size,
        vocab_size=vocab,
        draft_vocab_size=draft_vocab,
        num_target_layers=target.num_hidden_layers,
        exit_layer=layer,
        exit_width=width,
    )


def _read_exit(config: HeadConfig, tensors: Tensors) -> ReadFiles:
    sizes = ("hidden_size", "vocab_size", "draft_vocab_size", "exit_layer", "exit_width")
    return HeadConfig({**config, **{name: int(config[name]) for name in sizes}}), tensors


EXIT = Layout("layerskip", r"gate_proj\.weight", _read_exit)
MTP = Layout("mtp", r"layers\.\d+\.eh_proj\.weight", lambda config, tensors: (config, tensors))
"""In DeepSeek's layout. The tensors keep the names in their files, and what they hold depends on the target."""
