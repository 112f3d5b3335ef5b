"""TODO: train.families.registry.base."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from decode.drafts.base import Draft
from decode.model.hidden_states import HiddenStateSpec
from decode.model.loading import Target
from train.data.sample_store import SampleRow
from train.families import config as families_config
from train.families.head_loss import LossWeights
from train.losses.objective import Criterion, DivergenceConfig, LossFn
from train.teacher.cached import CachedTeacher, FeatureFolder, make_teacher
from train.teacher.live import LiveTeacher


class FamilySettings(Protocol):
    """The settings of train/distill.py that families read."""

    draft: families_config.DraftConfig
    loss: Any
    compare: DivergenceConfig
    weights: LossWeights
    out: str


@dataclass(frozen=True)
class FamilyContext:
    """What a draft is made from."""

    s: FamilySettings
    target: Target
    rows: Sequence[SampleRow]
    """All samples, cut to length."""
    device: str = "cpu"
    where: FeatureFolder | None = None
    """Of the target's states and laws on disk; None: the live target."""

    def teacher(self, taps: HiddenStateSpec | None) -> LiveTeacher | CachedTeacher:
        """What the target says; without `taps` its law alone."""
        return make_teacher(self.where, self.target, taps, self.rows)

    def criterion(self) -> Criterion:
        """The loss of each position."""
        return Criterion(self.s.loss, self.s.compare)


@dataclass(frozen=True)
class TrainableDraft:
    """A draft in training."""

    model: nn.Module
    """What is optimised and wrapped for several processes."""
    objective: Callable[[nn.Module], LossFn]
    """Job `model` as it was wrapped."""
    draft: Callable[[], Draft]
    """The draft as it is now, ready to decode."""
    muon_parameters: list[nn.Parameter]
    """Those inside layers, which Muon may train."""
    save: Callable[[Path], None]
    """Writes the draft directory, but for draftsmith.json."""
    facts: dict[str, Any]
    """For draftsmith.json."""
    teacher: LiveTeacher | CachedTeacher | None
    """What it learns from; `Stored` has to be filled first."""
    slow: Sequence[nn.Parameter] = ()
    """Trained at a quarter of the rate."""


def matrix_parameters(part: nn.Module) -> list[nn.Parameter]:
    return [p for p in part.parameters() if p.ndim == 2 and p.requires_grad]


def model_dtype(target: Target) -> torch.dtype:
    return target.decoder.model.dtype


def make_loss_fn(teacher: LiveTeacher | CachedTeacher, trainer: torch.nn.Module) -> LossFn:
    """The loss of a draft; `trainer` is of train/families/causal.py or train/families/head_loss.py, perhaps wrapped."""
    return lambda batch: trainer(batch, teacher.get_output(batch))
