"""Changes to a saved draft's files, of which scripts/engine_compat/corruptions.py makes mistakes: settings, tensors, names, shapes."""

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from decode.checkpoints import importers, layouts
from decode.drafts.base import METADATA_FILE
from scripts import export

Tensors = dict[str, torch.Tensor]
Edit = Callable[[Path], None]


def set_config(**changes: Any) -> Edit:
    """Settings changed; None takes a setting away."""

    def edit(folder: Path) -> None:
        file = folder / "config.json"
        held = json.loads(file.read_text()) | changes
        kept = {
            key: value for key, value in held.items() if value is not None or key not in changes
        }
        file.write_text(json.dumps(kept, indent=1))

    return edit


def edit_tensors(change: Callable[[Tensors], Any]) -> Edit:
    """Tensors changed in place."""

    def edit(folder: Path) -> None:
        held = load_file(folder / layouts.WEIGHTS_FILE)
        change(held)
        save_file(
            {name: value.contiguous() for name, value in held.items()},
            folder / layouts.WEIGHTS_FILE,
        )

    return edit


def combine(*edits: Edit) -> Edit:
    def edit(folder: Path) -> None:
        for one in edits:
            one(folder)

    return edit


def rename(old: str, new: str) -> Edit:
    return edit_tensors(lambda held: held.update({new: held.pop(old)}))


def drop(name: str) -> Edit:
    return edit_tensors(lambda held: held.pop(name))


def add(**shapes_of: str) -> Edit:
    """New tensors of ones, each as another one is shaped; __ stands for a dot."""

    def change(held: Tensors) -> None:
        for name, like in shapes_of.items():
            held[name.replace("__", ".")] = torch.ones_like(held[like])

    return edit_tensors(change)


def cast(name: str, dtype: torch.dtype) -> Edit:
    return edit_tensors(lambda held: held.update({name: held[name].to(dtype)}))


def offsets_to_ids(held: Tensors) -> None:
    held["d2t"] = held["d2t"] + torch.arange(len(held["d2t"]))


def shift_ids(held: Tensors) -> None:
    """Each draft id one token on, but for the last ones, which must stay in the vocabulary."""
    ids = held["d2t"] + torch.arange(len(held["d2t"]))
    free = int(held["t2d"].numel()) - int(ids[-1]) - 1
    held["d2t"] = (
        held["d2t"] + 1
        if free
        else held["d2t"] - (ids > int(ids[0])).long() * (held["d2t"] > 0).long()
    )


def set_nan(name: str) -> Edit:
    return edit_tensors(lambda held: held[name].view(-1)[:1].fill_(float("nan")))


def set_fc_bias(held: Tensors) -> None:
    held["fc.bias"] = torch.ones_like(held["fc.bias"])


def add_query_bias(held: Tensors) -> None:
    name = "midlayer.self_attn.q_proj"
    held[f"{name}.bias"] = torch.ones(len(held[f"{name}.weight"]))


def nest_config(folder: Path) -> None:
    """The draft in the speculators format."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "nested"
        facts = json.loads((folder / METADATA_FILE).read_text())
        target = facts.get("target", {}).get("name", "")
        found = importers.read_checkpoint(str(folder))
        layouts.write_checkpoint(out, *export.to_speculators(found, target, 4))
        for file in out.iterdir():
            shutil.copyfile(file, folder / file.name)


def set_layer_config(key: str, value: Any) -> Edit:
    def edit(folder: Path) -> None:
        file = folder / "config.json"
        held = json.loads(file.read_text())
        held["transformer_layer_config"][key] = value
        file.write_text(json.dumps(held))

    return edit


def set_rope_theta(new: float) -> Edit:
    return set_config(rope_parameters={"rope_type": "default", "rope_theta": new})


def set_aux_layers(count: int, top: int | None, output: int | None) -> Edit:
    """Default layers of a target of `count` written under vLLM's key, SGLang's or both, off by so many."""
    layers = layouts.default_aux_layers(count)
    changes: dict[str, Any] = {}
    if top is not None:
        changes["eagle_aux_hidden_state_layer_ids"] = [i + top for i in layers]
    if output is not None:
        ids = [i + output for i in layers]
        changes["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": ids}
    return set_config(**changes)
