"""Where the weights of heads start: from a saved draft, or from what the target says already."""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from decode import formats, published
from decode.drafts import eagle, medusa
from decode.drafts.base import family_of
from decode.drafts.eagle_net import Eagle1, Eagle3, EagleNet, llama_config
from decode.drafts.medusa import MedusaNet
from decode.settings import UserError
from decode.taps import Taps, head_of
from decode.target import Target
from train import batches, vocab_map
from train.drafts import DraftSettings
from train.shards import Row
from train.teacher import Teacher

Net = TypeVar("Net", bound=nn.Module)
Config = dict[str, Any]


def medusa_net(s: DraftSettings, target: Target, device: str) -> MedusaNet:
    """Saved heads, or new ones that say what the target's own head says."""
    _refuse_other_widths(target)
    if s.init:
        config = _saved(s, "medusa")
        _agree(s, heads=config["num_heads"], head_layers=config["num_hidden_layers"])
        return medusa.load(s.init, target, device, "float32").net
    config = formats.medusa_config(
        target.decoder.config, s.heads, s.head_layers, target.decoder.vocab_size
    )
    net = MedusaNet(config)
    start = target.decoder.model.get_output_embeddings().weight.detach()
    with torch.no_grad():
        for parameter in net.lm_heads.parameters():
            parameter.copy_(start)
    return net.to(device)


def eagle1_net(s: DraftSettings, target: Target, device: str) -> tuple[EagleNet, Config]:
    """(net, its config.json)."""
    _refuse_other_widths(target)
    if s.init:
        config = _saved(s, "eagle1")
        return eagle.load(s.init, target, device, "float32").net, config
    config = formats.eagle1_config(target.decoder.config, target.decoder.vocab_size)
    return _fresh(Eagle1(llama_config(config), head_of(target.decoder.model))).to(device), config


def eagle3_net(
    s: DraftSettings, target: Target, device: str, rows: Sequence[Row], counts: Tensor
) -> tuple[EagleNet, Config]:
    """(net, its config.json). A new one speaks the most frequent tokens of `counts`, with the target's own rows."""
    _refuse_other_widths(target)
    depth, vocab = target.decoder.config.num_hidden_layers, target.decoder.vocab_size
    if s.taps != sorted(set(s.taps)):
        raise UserError(f"draft.taps {s.taps}: name layers in rising order, each once")
    if s.init:
        config = _saved(s, "eagle3")
        size, taps = config["draft_vocab_size"], list(formats.tapped_layers(config, depth))
        _agree(s, vocab=0 if size == vocab else size, width=config["hidden_size"], taps=taps)
        return eagle.load(s.init, target, device, "float32").net, config
    layers = tuple(s.taps) or formats.default_layers(depth)
    ids = vocab_map.build(counts, s.vocab or vocab, sorted(target.eos))
    size = vocab if ids is None else len(ids)
    config = formats.eagle3_config(target.decoder.config, vocab, size, layers, s.width)
    net = _fresh(Eagle3(llama_config(config), Taps(layers), ids))
    start = target.decoder.model.get_output_embeddings().weight.detach().cpu()
    with torch.no_grad():
        net.fc.weight /= _size_of_states(target, net.taps, rows)
        if start.shape[1] == config["hidden_size"]:
            net.lm_head.weight.copy_(start if ids is None else start[ids])
    return net.to(device), config


def _saved(s: DraftSettings, family: str) -> Config:
    """config.json of the draft to go on from. UserError if it is no draft of this family."""
    found = family_of(s.init)
    if found != family:
        what = "no saved heads" if found == "causal" else f"heads of family {found!r}"
        raise UserError(
            f"draft.init {s.init!r} holds {what}: give a draft directory of family {family!r}"
        )
    return published.read(published.local(s.init)).config


def _agree(s: DraftSettings, **saved: Any) -> None:
    """UserError for a setting that was given and is not what the draft to go on from has; defaults say nothing."""
    for name, value in saved.items():
        given = vars(s)[name]
        if given not in (value, vars(DraftSettings())[name]):
            raise UserError(
                f"draft.{name} is {given}, and the draft to go on from, {s.init!r}, has {value}: leave it out or "
                "start anew without draft.init"
            )


def _refuse_other_widths(target: Target) -> None:
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


def _fresh(net: Net) -> Net:
    """Matrices that keep the size of what they are given, whatever the width; norms stay at 1 and biases at 0."""
    for parameter in net.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return net


def _size_of_states(target: Target, taps: Taps, rows: Sequence[Row]) -> float:
    """Root mean square of tapped states over a few samples.

    States inside a target are large, ten and more, and grow with depth. A layer that adds numbers of size 1 to
    them says nothing at first, and learns as slowly; fused states of size 1 leave it a say.
    """
    few = [rows[i] for i in range(min(4, len(rows)))]
    some = batches.collate(few, pad_id=0).to(target.decoder.device)
    features = Teacher(target, taps).look(some).features.float()
    written = some.loss_mask[..., None].expand_as(features)  # of the text, not of padding
    return float(features[written].square().mean().sqrt())
