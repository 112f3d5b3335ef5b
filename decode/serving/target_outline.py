"""A target without its weights, for which a draft can be loaded but not decode: loading tells whether it is sound."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig

from decode.checkpoints import importers
from decode.checkpoints.draft_folder import read_metadata
from decode.common.errors import UserError
from decode.drafts.base import Draft
from decode.drafts.registry import draft_family, load_draft
from decode.model import loading
from decode.model.compatibility import context_length
from decode.model.layer_stack import decoder_config, layer_stack
from decode.model.loading import Target

LANGUAGE_MODELS = ("causal", "pard")
"""Families that read nothing of a target but its tokenizer and its vocabulary."""


COPIED = ("embed_tokens.weight", "lm_head.weight", "shared_head.head.weight")
"""How the names of tensors end that may be copies of the target's, so that loading compares them with it."""


class UnknownMatrix(nn.Parameter):
    """A matrix of which only the shape is known: loading compares nothing with it. It takes no memory."""


@dataclass(frozen=True)
class RunnerOutline:
    """What loading a draft asks a ModelRunner for. Its model has an embedding and an LM head, known or not, and layers
    on the meta device, but for the last one, of which an MTP layer is a copy."""

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


def load_without_target(path: str, target: str = "") -> Draft:
    """The draft in a folder, in float32, loaded as decoding does; raises the UserError that decoding would end with.

    Of the target (folder or Hub name) the embedding and the LM head alone are read, where the draft has copies of them.
    Without a target it is one that fits the draft: what is wrong then is wrong for every target.
    """
    folder = importers.resolve_folder(path)
    family = draft_family(folder)
    if target:
        config = loading.load_config(target, "target")
    elif family in (*LANGUAGE_MODELS, "mtp"):  # the folder of MTP layers has their target's config
        config = loading.load_config(folder, "draft")
    else:
        config = fitting_config(folder, family)
    tokenizer = tokenizer_for(folder, family, target)
    recorded = str(read_metadata(folder).tokenizer_hash)
    own = outline(
        config,
        recorded if tokenizer is None else loading.tokenizer_fingerprint(tokenizer),
        tokenizer,
    )
    if family == "mtp":
        give_last_layer(own.runner.model)
    copied = any(name.endswith(COPIED) for name in importers.tensor_files(folder))
    if target and copied and family not in LANGUAGE_MODELS:
        give_matrices(own.runner.model, target)
    return load_draft(path, own)


def tokenizer_for(folder: str, family: str, target: str) -> Any:
    """The target's tokenizer, of a language model without a target its own; None where it is not known."""
    if family in LANGUAGE_MODELS or target:
        try:
            return loading.load_tokenizer(target or folder)
        except UserError:
            if family in LANGUAGE_MODELS:
                raise
    return None


def fitting_config(folder: str, family: str) -> LlamaConfig:
    """The config of a target that heads may belong to, as far as their files tell. UserError if these say no size."""
    found = importers.read_checkpoint(folder)
    config, named = found.config, found.config.get("eagle_aux_hidden_state_layer_ids") or [6]
    width = config.get("target_hidden_size") or config.get("hidden_size")
    if width is None:
        raise UserError(f"draft {folder!r}: config.json lacks hidden_size: restore it")
    layers = config.get("num_target_layers") or found.surplus_layer or max(7, max(named) + 1)
    return LlamaConfig(
        vocab_size=config.get("vocab_size", 1),  # Medusa's heads may share the target's LM head
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=1,
        intermediate_size=1,
    )


def outline(config: Any, fingerprint: str, tokenizer: Any = None) -> Target:
    """A Target of this config without weights."""
    with torch.device("meta"):
        model = loading.auto_class(config).from_config(config)
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        zeros = torch.zeros(1, 1).expand(module.weight.shape)
        module.weight = UnknownMatrix(zeros, requires_grad=False)
    return Target(RunnerOutline(model), tokenizer, "the target", None, fingerprint, frozenset())  # type: ignore[arg-type]


def give_last_layer(model: Any) -> None:
    """Gives the last layer of an outline, and what its decoder has beside layers, memory of whatever values."""
    stack, embedding = layer_stack(model), model.get_input_embeddings()
    others = [m for m in model.get_decoder().children() if m not in (stack, embedding)]
    for module in (stack[-1], *others):  # the final norm, the tables of RoPE
        module.to_empty(device="cpu")


def give_matrices(model: Any, target: str) -> None:
    """Gives an outline the embedding and the LM head of `target`."""
    read = loading.load_model(target, "target", "cpu", "float32", with_layers=False)
    model.get_input_embeddings().weight = read.get_input_embeddings().weight
    model.get_output_embeddings().weight = read.get_output_embeddings().weight
