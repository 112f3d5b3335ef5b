"""What each family of drafts brings to the one training loop: weights, objective, decoding, files."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from decode import attention, formats
from decode.drafts import eagle, medusa
from decode.drafts.base import Draft
from decode.drafts.causal import CausalDraft
from decode.drafts.eagle import EagleDraft
from decode.drafts.eagle_net import Eagle1, Eagle3, EagleNet, llama_config
from decode.drafts.medusa import MedusaDraft, MedusaNet
from decode.taps import Taps, head_of
from decode.target import Decoder, Target
from train import drafts, vocab_map
from train.heads import EagleTrainer, MedusaTrainer, Weights
from train.loop import Sums
from train.objectives import causal_objective, head_objective
from train.shards import Row
from train.teacher import Teacher


class Recipe(Protocol):
    """The settings of train/distill.py that families read."""

    draft: drafts.DraftSettings
    loss: Any
    weights: Weights


Net = TypeVar("Net", bound=nn.Module)


@dataclass(frozen=True)
class Trainee:
    """A draft in training."""

    model: nn.Module
    """What is optimised and wrapped for several processes."""
    objective: Callable[[nn.Module], Sums]
    """Given `model` as it was wrapped."""
    draft: Callable[[], Draft]
    """The draft as it is now, ready to decode."""
    save: Callable[[Path], None]
    """Writes the draft directory, but for draftsmith.json."""
    facts: dict[str, Any]
    """For draftsmith.json."""


def causal(s: Recipe, target: Target, rows: Sequence[Row], device: str) -> Trainee:
    lm = drafts.new_draft(s.draft, target, device).train()
    lm.set_attn_implementation(attention.NAME)

    def save(out: Path) -> None:
        lm.save_pretrained(out, safe_serialization=True)
        target.tokenizer.save_pretrained(out)

    return Trainee(
        model=lm,
        objective=lambda model: causal_objective(target, model, lm, s.loss),
        draft=lambda: CausalDraft(Decoder(lm)),
        save=save,
        facts={},
    )


def medusa_heads(s: Recipe, target: Target, rows: Sequence[Row], device: str) -> Trainee:
    if s.draft.init:
        net = medusa.load(s.draft.init, target, device, "float32").net
    else:
        config = formats.medusa_config(
            target.decoder.config, s.draft.heads, s.draft.head_layers, target.decoder.vocab_size
        )
        net = MedusaNet(config)
        start = target.decoder.model.get_output_embeddings().weight.detach()
        with torch.no_grad():
            for parameter in net.lm_heads.parameters():
                parameter.copy_(start)
        net = net.to(device)
    teacher = Teacher(target, net.taps)
    trainer = MedusaTrainer(net, teacher.head, s.loss, s.weights)
    return Trainee(
        model=trainer,
        objective=lambda model: head_objective(teacher, model),
        draft=lambda: MedusaDraft(net, target),
        save=lambda out: formats.save(out, net.config, net, _dtype(target), None),
        facts={},
    )


def eagle1(s: Recipe, target: Target, rows: Sequence[Row], device: str) -> Trainee:
    head = head_of(target.decoder.model)
    net: EagleNet
    if s.draft.init:
        net = eagle.load(s.draft.init, target, device, "float32").net
        config = formats.read_config(s.draft.init)
    else:
        config = formats.eagle1_config(target.decoder.config, target.decoder.vocab_size)
        net = _fresh(Eagle1(llama_config(config), head)).to(device)
    return _eagle(net, "eagle1", config, 1, s, target)


def eagle3(s: Recipe, target: Target, rows: Sequence[Row], device: str) -> Trainee:
    vocab = target.decoder.vocab_size
    counts = vocab_map.count_tokens(rows, vocab)
    net: EagleNet
    if s.draft.init:
        net = eagle.load(s.draft.init, target, device, "float32").net
        config = formats.read_config(s.draft.init)
    else:
        layers = tuple(s.draft.taps) or formats.default_layers(
            target.decoder.config.num_hidden_layers
        )
        ids = vocab_map.build(counts, s.draft.vocab or vocab, sorted(target.eos))
        size = vocab if ids is None else len(ids)
        config = formats.eagle3_config(target.decoder.config, vocab, size, layers, s.draft.width)
        new = _fresh(Eagle3(llama_config(config), Taps(layers), ids))
        start = target.decoder.model.get_output_embeddings().weight.detach().cpu()
        if start.shape[1] == config["hidden_size"]:
            with torch.no_grad():
                new.lm_head.weight.copy_(start if ids is None else start[ids])
        net = new.to(device)
    trainee = _eagle(net, "eagle3", config, s.draft.steps, s, target)
    if net.ids is not None:
        trainee.facts["vocabulary"] = {
            "size": len(net.ids),
            "coverage": vocab_map.coverage(net.ids.cpu(), counts),
            "digest": vocab_map.digest(net.ids),
        }
    return trainee


def _eagle(
    net: EagleNet, name: str, config: dict[str, Any], steps: int, s: Recipe, target: Target
) -> Trainee:
    teacher = Teacher(target, net.taps)
    embedding = target.decoder.model.get_input_embeddings().weight.detach()
    trainer = EagleTrainer(net, teacher.head, embedding, s.loss, s.weights, steps)
    return Trainee(
        model=trainer,
        objective=lambda model: head_objective(teacher, model),
        draft=lambda: EagleDraft(net, target, name),
        save=lambda out: formats.save(out, config, net, _dtype(target), net.ids),
        facts={},
    )


def _fresh(net: Net) -> Net:
    """Matrices of small normal numbers, as Llama starts; norms stay at 1 and biases at 0."""
    for parameter in net.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.02)
    return net


def _dtype(target: Target) -> torch.dtype:
    return target.decoder.model.dtype


FAMILIES = {"causal": causal, "medusa": medusa_heads, "eagle1": eagle1, "eagle3": eagle3}
