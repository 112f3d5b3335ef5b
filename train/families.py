"""What each family of drafts brings to the one training loop: weights, objective, decoding, files."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from decode import attention, formats
from decode.drafts import eagle, medusa
from decode.drafts.base import Draft, read_facts
from decode.drafts.causal import CausalDraft
from decode.drafts.eagle import EagleDraft
from decode.drafts.eagle_net import Eagle1, Eagle3, EagleNet, llama_config
from decode.drafts.medusa import MedusaDraft, MedusaNet
from decode.settings import UserError
from decode.taps import Catch, Taps, head_of, layer_stack
from decode.target import Decoder, Target
from train import batches, drafts, vocab_map
from train.features import Folder, Stored, teacher_of
from train.heads import EagleTrainer, MedusaTrainer, Weights
from train.loop import Sums
from train.medusa2 import Adapted, Medusa2Trainer
from train.objectives import causal_objective, head_objective
from train.shards import Row
from train.teacher import Teacher


class Recipe(Protocol):
    """The settings of train/distill.py that families read."""

    draft: drafts.DraftSettings
    loss: Any
    weights: Weights
    out: str


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
    matrices: list[nn.Parameter]
    """Those inside layers, which Muon may train."""
    save: Callable[[Path], None]
    """Writes the draft directory, but for draftsmith.json."""
    facts: dict[str, Any]
    """For draftsmith.json."""
    teacher: Teacher | Stored | None
    """What it learns from; `Stored` has to be filled first."""
    slow: Sequence[nn.Parameter] = ()
    """Trained at a quarter of the rate."""


def causal(
    s: Recipe,
    target: Target,
    rows: Sequence[Row],
    device: str,
    where: Folder | None = None,
) -> Trainee:
    lm = drafts.new_draft(s.draft, target, device).train()
    lm.set_attn_implementation(attention.NAME)
    teacher = teacher_of(where, target, None, rows)

    def save(out: Path) -> None:
        lm.save_pretrained(out, safe_serialization=True)
        target.tokenizer.save_pretrained(out)

    return Trainee(
        model=lm,
        objective=lambda model: causal_objective(teacher, model, lm, s.loss),
        draft=lambda: CausalDraft(Decoder(lm)),
        matrices=_matrices(layer_stack(lm)),
        save=save,
        facts={},
        teacher=teacher,
    )


def medusa_heads(
    s: Recipe,
    target: Target,
    rows: Sequence[Row],
    device: str,
    where: Folder | None = None,
) -> Trainee:
    net = _medusa_net(s, target, device)
    teacher = teacher_of(where, target, net.taps, rows)
    trainer = MedusaTrainer(net, teacher.head, s.loss, s.weights)
    return Trainee(
        model=trainer,
        objective=lambda model: head_objective(teacher, model),
        draft=lambda: MedusaDraft(net, target),
        matrices=_matrices(net.blocks),
        save=lambda out: formats.save(out, net.config, net, _dtype(target), None),
        facts={},
        teacher=teacher,
    )


def medusa2(
    s: Recipe,
    target: Target,
    rows: Sequence[Row],
    device: str,
    where: Folder | None = None,
) -> Trainee:
    if where is not None:
        raise UserError("medusa2 trains the target as well: leave `features` empty, it runs live")
    net = _medusa_net(s, target, device)
    adapted = Adapted(target, s.draft.rank)
    trainer = Medusa2Trainer(net, adapted, s.loss, s.weights)

    def save(out: Path) -> None:
        formats.save(out, net.config, net, _dtype(target), None)
        adapted.save(out / "target")

    return Trainee(
        model=trainer,
        objective=lambda model: lambda batch: model(batch),
        draft=lambda: MedusaDraft(net, target),
        matrices=_matrices(net.blocks),
        slow=list(trainer.adapters),
        save=save,
        facts={
            "family": "medusa",
            "target": {"name": str(Path(s.out) / "target"), "revision": None},
            "original_target": {"name": target.name, "revision": target.revision},
        },
        teacher=None,
    )


def _medusa_net(s: Recipe, target: Target, device: str) -> MedusaNet:
    """Saved heads, or new ones that say what the target's own head says."""
    if s.draft.init:
        return medusa.load(_saved(s, "medusa"), target, device, "float32").net
    config = formats.medusa_config(
        target.decoder.config, s.draft.heads, s.draft.head_layers, target.decoder.vocab_size
    )
    net = MedusaNet(config)
    start = target.decoder.model.get_output_embeddings().weight.detach()
    with torch.no_grad():
        for parameter in net.lm_heads.parameters():
            parameter.copy_(start)
    return net.to(device)


def eagle1(
    s: Recipe,
    target: Target,
    rows: Sequence[Row],
    device: str,
    where: Folder | None = None,
) -> Trainee:
    head = head_of(target.decoder.model)
    net: EagleNet
    if s.draft.init:
        net = eagle.load(_saved(s, "eagle1"), target, device, "float32").net
        config = formats.read_config(s.draft.init)
    else:
        config = formats.eagle1_config(target.decoder.config, target.decoder.vocab_size)
        net = _fresh(Eagle1(llama_config(config), head)).to(device)
    return _eagle(net, "eagle1", config, 1, s, target, rows, where)


def eagle3(
    s: Recipe,
    target: Target,
    rows: Sequence[Row],
    device: str,
    where: Folder | None = None,
) -> Trainee:
    vocab = target.decoder.vocab_size
    counts = vocab_map.count_tokens(rows, vocab)
    net: EagleNet
    if s.draft.init:
        net = eagle.load(_saved(s, "eagle3"), target, device, "float32").net
        config = formats.read_config(s.draft.init)
    else:
        layers = tuple(s.draft.taps) or formats.default_layers(
            target.decoder.config.num_hidden_layers
        )
        ids = vocab_map.build(counts, s.draft.vocab or vocab, sorted(target.eos))
        size = vocab if ids is None else len(ids)
        config = formats.eagle3_config(target.decoder.config, vocab, size, layers, s.draft.width)
        new = _fresh(Eagle3(llama_config(config), Taps(layers), ids))
        with torch.no_grad():
            new.fc.weight /= _size_of_states(target, new.taps, rows)
        start = target.decoder.model.get_output_embeddings().weight.detach().cpu()
        if start.shape[1] == config["hidden_size"]:
            with torch.no_grad():
                new.lm_head.weight.copy_(start if ids is None else start[ids])
        net = new.to(device)
    trainee = _eagle(net, "eagle3", config, s.draft.steps, s, target, rows, where)
    if net.ids is not None:
        trainee.facts["vocabulary"] = {
            "size": len(net.ids),
            "coverage": vocab_map.coverage(net.ids.cpu(), counts),
            "digest": vocab_map.digest(net.ids),
        }
    return trainee


def _eagle(
    net: EagleNet,
    name: str,
    config: dict[str, Any],
    steps: int,
    s: Recipe,
    target: Target,
    rows: Sequence[Row],
    where: Folder | None,
) -> Trainee:
    Catch(target.decoder.model, net.taps).remove()  # refuses layers that are not there
    teacher = teacher_of(where, target, net.taps, rows)
    embedding = target.decoder.model.get_input_embeddings().weight.detach()
    trainer = EagleTrainer(net, teacher.head, embedding, s.loss, s.weights, steps)
    return Trainee(
        model=trainer,
        objective=lambda model: head_objective(teacher, model),
        draft=lambda: EagleDraft(net, target, name),
        matrices=_matrices(net.fc) + _matrices(net.layers),
        save=lambda out: formats.save(out, config, net, _dtype(target), net.ids),
        facts={},
        teacher=teacher,
    )


def _saved(s: Recipe, family: str) -> str:
    """`draft.init`. UserError if it is no draft directory of this family."""
    found = read_facts(s.draft.init).get("family")
    if found != family:
        what = "no saved heads" if found is None else f"heads of family {found!r}"
        raise UserError(
            f"draft.init {s.draft.init!r} holds {what}: give a draft directory of family {family!r}"
        )
    return s.draft.init


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
    some = batches.collate(rows[:4], pad_id=0).to(target.decoder.device)
    features = Teacher(target, taps).look(some).features.float()
    written = some.loss_mask[..., None].expand_as(features)  # of the text, not of padding
    return float(features[written].square().mean().sqrt())


def _matrices(part: nn.Module) -> list[nn.Parameter]:
    return [p for p in part.parameters() if p.ndim == 2 and p.requires_grad]


def _dtype(target: Target) -> torch.dtype:
    return target.decoder.model.dtype


FAMILIES = {
    "causal": causal,
    "medusa": medusa_heads,
    "medusa2": medusa2,
    "eagle1": eagle1,
    "eagle3": eagle3,
}
