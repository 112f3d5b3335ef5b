"""A target without its weights, for which a draft can be loaded but not decode: loading tells whether it is sound."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig

from decode.checkpoints import importers
from decode.common.errors import UserError
from decode.drafts.base import read_metadata
from decode.drafts.registry import draft_family, load_draft
from decode.model.compatibility import context_length
from decode.model.layer_stack import decoder_config, layer_stack
from decode.model.loading import (
    Target,
    auto_class,
    load_config,
    load_tokenizer,
    tokenizer_fingerprint,
)

LANGUAGE_MODELS = ("causal", "pard")
"""Families that read nothing of a target but its tokenizer and its vocabulary."""


@dataclass(frozen=True)
class RunnerOutline:
    """What loading a draft asks a ModelRunner for. Its model has no weights: matrices of zeros that take no memory, and
    layers on the meta device, but for the last one, of which an MTP layer is a copy."""

    model: Any
    device: torch.device = torch.device("cpu")
    takes_trees: bool = True

    @property
    def config(self) -> Any:
        return decoder_config(self.model)

    @property
    def context(self) -> int:
        return context_length(self.config)

    @property
    def vocab_size(self) -> int:
        return len(self.model.get_output_embeddings().weight)

    @property
    def embedding_rows(self) -> int:
        return len(self.model.get_input_embeddings().weight)


def check_loads(path: str, target: str = "") -> None:
    """Loads the draft in a folder as decoding does, and raises the UserError that decoding would end with.

    The target (folder or Hub name) is read without its weights. Without a target it is one that fits the draft: what is
    wrong then is wrong for every target.
    """
    folder = importers.resolve_folder(path)
    family = draft_family(folder)
    if target:
        config = load_config(target, "target")
    elif family in (*LANGUAGE_MODELS, "mtp"):  # the folder of MTP layers has their target's config
        config = load_config(folder, "draft")
    else:
        config = fitting_config(folder, family)
    load_draft(path, outline(config, fingerprint_for(folder, family, target), family == "mtp"))


def fingerprint_for(folder: str, family: str, target: str) -> str:
    """That of the target's tokenizer; where it is not known, the one that the draft was trained for."""
    if family in LANGUAGE_MODELS or target:
        try:
            return tokenizer_fingerprint(load_tokenizer(target or folder))
        except UserError:
            if family in LANGUAGE_MODELS:
                raise
    return str(read_metadata(folder).get("tokenizer_hash"))


def fitting_config(folder: str, family: str) -> LlamaConfig:
    """The config of a target that heads may belong to, as far as their files tell."""
    config = importers.read_checkpoint(folder).config
    named = config.get("eagle_aux_hidden_state_layer_ids") or [6]
    layers = config.get("num_target_layers") or max(7, max(named) + 1)
    return LlamaConfig(
        vocab_size=config["vocab_size"],
        hidden_size=config.get("target_hidden_size") or config["hidden_size"],
        num_hidden_layers=layers,
        num_attention_heads=1,
        intermediate_size=1,
    )


def outline(config: Any, fingerprint: str, with_last_layer: bool) -> Target:
    """A Target of this config without weights. `with_last_layer`: its last layer has memory, of whatever values."""
    with torch.device("meta"):
        model = auto_class(config).from_config(config)
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        zeros = torch.zeros(1, 1).expand(module.weight.shape)
        module.weight = nn.Parameter(zeros, requires_grad=False)
    if with_last_layer:
        stack, embedding = layer_stack(model), model.get_input_embeddings()
        others = [m for m in model.get_decoder().children() if m not in (stack, embedding)]
        for module in (stack[-1], *others):  # the final norm, the tables of RoPE
            module.to_empty(device="cpu")
    return Target(RunnerOutline(model), None, "the target", None, fingerprint, frozenset())  # type: ignore[arg-type]
