"""What each family of drafts brings to the one training loop: weights, objective, decoding, files."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from decode import attention, formats
from decode.drafts.base import Draft
from decode.drafts.causal import CausalDraft
from decode.drafts.eagle import EagleDraft
from decode.drafts.eagle_net import EagleNet
from decode.drafts.medusa import MedusaDraft, MedusaNet
from decode.settings import UserError
from decode.taps import Catch, Taps, layer_stack
from decode.target import Decoder, Target
from train import drafts, starts, vocab_map
from train.causal import CausalTrainer
from train.criterion import Comparison, Criterion
from train.features import Folder, Stored, teacher_of
from train.heads import EagleTrainer, MedusaTrainer, Weights
from train.loop import Sums
from train.medusa2 import Adapted, Medusa2Trainer
from train.objectives import objective
from train.shards import Row
from train.teacher import Teacher


class Recipe(Protocol):
    """The settings of train/distill.py that families read."""

    draft: drafts.DraftSettings
    loss: Any
    compare: Comparison
    weights: Weights
    out: str


@dataclass(frozen=True)
class Job:
    """What a draft is made from."""

    s: Recipe
    target: Target
    rows: Sequence[Row]
    """All samples, cut to length."""
    device: str = "cpu"
    where: Folder | None = None
    """Of the target's states and laws on disk; None: the live target."""

    def teacher(self, taps: Taps | None) -> Teacher | Stored:
        """What the target says; without `taps` its law alone."""
        return teacher_of(self.where, self.target, taps, self.rows)

    def criterion(self) -> Criterion:
        """The loss of each position."""
        return Criterion(self.s.loss, self.s.compare)


@dataclass(frozen=True)
class Trainee:
    """A draft in training."""

    model: nn.Module
    """What is optimised and wrapped for several processes."""
    objective: Callable[[nn.Module], Sums]
    """Job `model` as it was wrapped."""
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


def causal(job: Job) -> Trainee:
    lm = drafts.new_draft(job.s.draft, job.target, job.device).train()
    lm.set_attn_implementation(attention.NAME)
    settings = job.s.draft
    adapters = None
    if settings.lora_rank:
        adapters = drafts.Adapters(lm, settings.lora_rank, settings.init)
    teacher = job.teacher(None)

    def save(out: Path) -> None:
        if adapters is None:
            lm.save_pretrained(out, safe_serialization=True)
        else:
            adapters.save(out)
        job.target.tokenizer.save_pretrained(out)

    return Trainee(
        model=CausalTrainer(lm, teacher.head, job.criterion()),
        objective=partial(objective, teacher),
        draft=lambda: CausalDraft(Decoder(lm)),
        matrices=_matrices(layer_stack(lm)),
        save=save,
        facts={},
        teacher=teacher,
    )


def medusa1(job: Job) -> Trainee:
    net = starts.medusa_net(job.s.draft, job.target, job.device)
    teacher = job.teacher(net.taps)
    model = MedusaTrainer(net, teacher.head, job.criterion(), job.s.weights)
    return _medusa(job, net, model, partial(objective, teacher), teacher)


def medusa2(job: Job) -> Trainee:
    if job.where is not None:
        raise UserError("medusa2 trains the target as well: leave `features` empty, it runs live")
    net = starts.medusa_net(job.s.draft, job.target, job.device)
    adapted = Adapted(job.target, job.s.draft.rank)
    model = Medusa2Trainer(net, adapted, job.criterion(), job.s.weights)
    trainee = _medusa(job, net, model, lambda wrapped: lambda batch: wrapped(batch), None)

    def save(out: Path) -> None:
        trainee.save(out)
        adapted.save(out / "target")

    facts = {
        "family": "medusa",
        "target": {"name": str(Path(job.s.out) / "target"), "revision": None},
        "original_target": {"name": job.target.name, "revision": job.target.revision},
    }
    return replace(trainee, save=save, facts=facts, slow=list(model.adapters))


def _medusa(
    job: Job,
    net: MedusaNet,
    model: nn.Module,
    objective: Callable[[nn.Module], Sums],
    teacher: Teacher | Stored | None,
) -> Trainee:
    return Trainee(
        model=model,
        objective=objective,
        draft=lambda: MedusaDraft(net, job.target),
        matrices=_matrices(net.blocks),
        save=lambda out: formats.save(out, net.config, net, _dtype(job.target), None),
        facts={},
        teacher=teacher,
    )


def eagle1(job: Job) -> Trainee:
    net, config = starts.eagle1_net(job.s.draft, job.target, job.device)
    return _eagle(job, net, "eagle1", config, 1)


def eagle3(job: Job) -> Trainee:
    s, target = job.s.draft, job.target
    counts = vocab_map.count_tokens(job.rows, target.decoder.vocab_size)
    net, config = starts.eagle3_net(s, target, job.device, job.rows, counts)
    trainee = _eagle(job, net, "eagle3", config, s.steps)
    if net.ids is not None:
        trainee.facts["vocabulary"] = {
            "size": len(net.ids),
            "coverage": vocab_map.coverage(net.ids.cpu(), counts),
            "digest": vocab_map.digest(net.ids),
        }
    return trainee


def _eagle(job: Job, net: EagleNet, name: str, config: dict[str, Any], steps: int) -> Trainee:
    target = job.target
    Catch(target.decoder.model, net.taps).remove()  # refuses layers that are not there
    teacher = job.teacher(net.taps)
    embedding = target.decoder.model.get_input_embeddings().weight.detach()
    head, criterion = teacher.head, job.criterion()
    return Trainee(
        model=EagleTrainer(net, head, embedding, criterion, job.s.weights, steps),
        objective=partial(objective, teacher),
        draft=lambda: EagleDraft(net, target, name),
        matrices=_matrices(net.fc) + _matrices(net.layers),
        save=lambda out: formats.save(out, config, net, _dtype(target), net.ids),
        facts={},
        teacher=teacher,
    )


def _matrices(part: nn.Module) -> list[nn.Parameter]:
    return [p for p in part.parameters() if p.ndim == 2 and p.requires_grad]


def _dtype(target: Target) -> torch.dtype:
    return target.decoder.model.dtype


FAMILIES: dict[str, Callable[[Job], Trainee]] = {
    "causal": causal,
    "medusa": medusa1,
    "medusa2": medusa2,
    "eagle1": eagle1,
    "eagle3": eagle3,
}
