"""Initial weights of heads: from a saved draft, or random ones; and checks that settings and target fit them."""

from dataclasses import replace
from typing import Any, TypeVar

from torch import nn

from decode.checkpoints import eagle_layouts, importers, layouts
from decode.common.errors import UserError
from decode.drafts.registry import draft_family
from decode.model.loading import Target
from train.families.config import DraftConfig

Net = TypeVar("Net", bound=nn.Module)
Config = dict[str, Any]


def load_saved_config(s: DraftConfig, family: str) -> Config:
    """config.json of the draft whose training is continued. UserError if it is no draft of this family."""
    found = draft_family(s.init)
    if found != family:
        what = "no saved heads" if found == "causal" else f"heads of family {found!r}"
        raise UserError(
            f"draft.init {s.init!r} holds {what}: give a draft directory of family {family!r}"
        )
    return importers.read_checkpoint(importers.resolve_folder(s.init)).config


def with_saved_sizes(s: DraftConfig) -> DraftConfig:
    """The settings with the sizes of the saved draft in `init`, if there is one."""
    if not s.init:
        return s
    config = layouts.read_config(s.init)
    if config.get("eagle_aux_hidden_state_layer_ids"):  # one of which may be surplus
        config = importers.read_checkpoint(s.init).config
    sizes: dict[str, Any] = {
        "heads": config.get("num_heads"),
        "head_layers": config.get("num_hidden_layers"),
        "vocab": config.get("draft_vocab_size"),
        "width": config.get("hidden_size"),
        "taps": list(config.get("eagle_aux_hidden_state_layer_ids") or []),
        "norms": eagle_layouts.saved_norms(config),
        "depth": config.get("num_hidden_layers"),
        "block": block_of(config),
        "markov_rank": config.get("markov_rank"),
        "exit_layer": config.get("exit_layer"),
        "exit_width": config.get("exit_width"),
    }
    return replace(s, **{name: size for name, size in sizes.items() if size is not None})


def block_of(config: Config) -> int | None:
    """Tokens that a saved DFlash or DSpark draft proposes in one pass; None for other drafts."""
    size, first = config.get("block_size"), config.get("sample_from_anchor")
    if first is None:
        first = bool(config.get("markov_rank"))
    return None if size is None else size - (not first)


def check_against_saved(s: DraftConfig, **saved: Any) -> None:
    """UserError for a setting that differs from its default and from the value in the saved draft."""
    for name, value in saved.items():
        given = vars(s)[name]
        if given not in (value, vars(DraftConfig())[name]):
            raise UserError(
                f"draft.{name} is {given}, and the draft in draft.init, {s.init!r}, has {value}: leave it out or "
                "start anew without draft.init"
            )


def check_widths(target: Target) -> None:
    """UserError unless the target's embedding and LM head are as wide as its layers."""
    model, hidden = target.runner.model, target.runner.config.hidden_size
    for what, part in (
        ("embedding", model.get_input_embeddings()),
        ("LM head", model.get_output_embeddings()),
    ):
        if part.weight.shape[1] != hidden:
            raise UserError(
                f"{target.name!r} has an {what} of width {part.weight.shape[1]} and layers of width {hidden}, and "
                "heads need one width for all: train a causal draft for it"
            )


def random_init(net: Net) -> Net:
    """Sets matrices in place so that outputs have the size of inputs at any width; norms stay 1 and biases 0."""
    for parameter in net.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return net
