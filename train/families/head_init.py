"""Where the weights of heads start: from a saved draft, or from what the target says already."""

from typing import Any, TypeVar

from torch import nn

from decode.checkpoints import importers
from decode.common.errors import UserError
from decode.drafts.registry import draft_family
from decode.model.loading import Target
from train.families.config import DraftConfig

Net = TypeVar("Net", bound=nn.Module)
Config = dict[str, Any]


def load_saved_config(s: DraftConfig, family: str) -> Config:
    """config.json of the draft to go on from. UserError if it is no draft of this family."""
    found = draft_family(s.init)
    if found != family:
        what = "no saved heads" if found == "causal" else f"heads of family {found!r}"
        raise UserError(
            f"draft.init {s.init!r} holds {what}: give a draft directory of family {family!r}"
        )
    return importers.read_checkpoint(importers.resolve_folder(s.init)).config


def check_against_saved(s: DraftConfig, **saved: Any) -> None:
    """UserError for a setting that was given and is not what the draft to go on from has; defaults say nothing."""
    for name, value in saved.items():
        given = vars(s)[name]
        if given not in (value, vars(DraftConfig())[name]):
            raise UserError(
                f"draft.{name} is {given}, and the draft to go on from, {s.init!r}, has {value}: leave it out or "
                "start anew without draft.init"
            )


def check_widths(target: Target) -> None:
    """UserError unless what the target embeds and what its LM head reads is as wide as its layers."""
    model, hidden = target.decoder.model, target.decoder.config.hidden_size
    for what, part in (
        ("embedding", model.get_input_embeddings()),
        ("LM head", model.get_output_embeddings()),
    ):
        if part.weight.shape[1] != hidden:
            raise UserError(
                f"{target.name!r} has an {what} of width {part.weight.shape[1]} and layers of width {hidden}, and "
                "heads know one width alone: train a causal draft for it"
            )


def random_init(net: Net) -> Net:
    """Matrices that keep the size of what they are given, whatever the width; norms stay at 1 and biases at 0."""
    for parameter in net.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return net
