"""Edits of a saved draft's files, from which eval/served/ builds mistakes and readings."""

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file

from decode.checkpoints import importers, layouts
from decode.checkpoints.draft_folder import METADATA_FILE
from decode.checkpoints.importers import Tensors
from decode.serving.export import to_speculators


class Edit(Protocol):
    """A change of a draft's folder."""

    def apply(self, folder: Path) -> None: ...


@dataclass(frozen=True)
class ConfigEdit:
    """Sets keys of config.json, or of its object `section`; None deletes a key."""

    changes: Mapping[str, Any]
    section: str = ""

    def apply(self, folder: Path) -> None:
        file = folder / "config.json"
        config = json.loads(file.read_text())
        part = config[self.section] if self.section else config
        for key, value in self.changes.items():
            if value is None:
                part.pop(key, None)
            else:
                part[key] = value
        file.write_text(json.dumps(config, indent=1))


@dataclass(frozen=True)
class TensorEdit:
    """Changes the tensors in place, by their names in the file."""

    change: Callable[[Tensors], Any]

    def apply(self, folder: Path) -> None:
        tensors = load_file(folder / layouts.WEIGHTS_FILE)
        self.change(tensors)
        # A copy of each: safetensors refuses two names of one tensor.
        copies = {
            name: value.clone(memory_format=torch.contiguous_format)
            for name, value in tensors.items()
        }
        save_file(copies, folder / layouts.WEIGHTS_FILE)


@dataclass(frozen=True)
class RemoveFile:
    """Deletes a file."""

    name: str

    def apply(self, folder: Path) -> None:
        (folder / self.name).unlink()


class NestConfig:
    """Rewrites EAGLE-3 heads in the speculators format."""

    def apply(self, folder: Path) -> None:
        metadata = json.loads((folder / METADATA_FILE).read_text())
        target = metadata.get("target", {}).get("name", "")
        checkpoint = importers.read_checkpoint(str(folder))
        with tempfile.TemporaryDirectory() as scratch:
            out = Path(scratch) / "nested"
            layouts.write_checkpoint(out, *to_speculators(checkpoint, target, 4))
            for file in out.iterdir():
                shutil.copyfile(file, folder / file.name)


@dataclass(frozen=True)
class EditSequence:
    """Several edits, in their order."""

    edits: tuple[Edit, ...]

    def apply(self, folder: Path) -> None:
        for edit in self.edits:
            edit.apply(folder)


def combine(*edits: Edit) -> EditSequence:
    return EditSequence(edits)


def set_config(**changes: Any) -> ConfigEdit:
    return ConfigEdit(changes)


def set_rope_theta(theta: float) -> ConfigEdit:
    return set_config(rope_parameters={"rope_type": "default", "rope_theta": theta})


def set_layer_config(**changes: Any) -> ConfigEdit:
    """Keys of the decoder layer in the speculators format."""
    return ConfigEdit(changes, section="transformer_layer_config")


def set_aux_layers(count: int, top: int | None, output: int | None) -> ConfigEdit:
    """The default hidden-state layers of a target of `count` layers, moved by `top` under the key of states that
    enter a layer and by `output` under that of states that leave one; None leaves the key as it is.
    """
    layers = layouts.default_aux_layers(count)
    changes: dict[str, Any] = {}
    if top is not None:
        changes["eagle_aux_hidden_state_layer_ids"] = [i + top for i in layers]
    if output is not None:
        ids = [i + output for i in layers]
        changes["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": ids}
    return set_config(**changes)


def rename(old: str, new: str) -> TensorEdit:
    return TensorEdit(lambda tensors: tensors.update({new: tensors.pop(old)}))


def drop(name: str) -> TensorEdit:
    return TensorEdit(lambda tensors: tensors.pop(name))


def add(name: str, like: str) -> TensorEdit:
    """A new tensor of ones with the shape of the tensor `like`."""
    return TensorEdit(lambda tensors: tensors.update({name: torch.ones_like(tensors[like])}))


def cast(name: str, dtype: torch.dtype) -> TensorEdit:
    return TensorEdit(lambda tensors: tensors.update({name: tensors[name].to(dtype)}))


def set_nan(name: str) -> TensorEdit:
    """The first value of a tensor becomes NaN."""
    return TensorEdit(lambda tensors: tensors[name].view(-1)[:1].fill_(float("nan")))


def drop_last_row(name: str) -> TensorEdit:
    return TensorEdit(lambda tensors: tensors.update({name: tensors[name][:-1]}))


def offsets_to_ids(tensors: Tensors) -> None:
    """d2t with target ids instead of offsets."""
    tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))


def shift_ids(tensors: Tensors) -> None:
    """Moves each draft id to the next token; without room at the end of the vocabulary, some to the previous one."""
    ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    free = int(tensors["t2d"].numel()) - int(ids[-1]) - 1
    tensors["d2t"] = (
        tensors["d2t"] + 1
        if free
        else tensors["d2t"] - (ids > int(ids[0])).long() * (tensors["d2t"] > 0).long()
    )


def set_fc_bias(tensors: Tensors) -> None:
    """fc.bias of ones instead of zeros."""
    tensors["fc.bias"] = torch.ones_like(tensors["fc.bias"])


def add_query_bias(tensors: Tensors) -> None:
    """A bias of ones for the query projection."""
    name = "midlayer.self_attn.q_proj"
    tensors[f"{name}.bias"] = torch.ones(len(tensors[f"{name}.weight"]))
