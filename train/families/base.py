"""What a draft family brings to training: a `FamilyTrainer`, which builds a `TrainableDraft` from a `FamilyContext`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from decode.common.errors import UserError
from decode.drafts.base import Draft
from decode.model.hidden_states import HiddenStateSpec
from decode.model.loading import Target
from decode.model.runner import ModelRunner
from train.data.batching import Batch
from train.data.sample_store import SampleRow
from train.families.config import DraftConfig
from train.families.head_loss import LossWeights
from train.losses.objective import Criterion, DivergenceConfig
from train.teacher.cached import FeatureFolder, Teacher, make_teacher, running_teacher
from train.teacher.live import LiveTeacher
from train.teacher.served import StatesServerConfig


class FamilySettings(Protocol):
    """The settings of train/distill.py that families read."""

    draft: DraftConfig
    loss: Any
    divergence: DivergenceConfig
    weights: LossWeights
    out: str


@dataclass(frozen=True)
class FamilyContext:
    """What a draft is built from."""

    config: FamilySettings
    target: Target
    rows: Sequence[SampleRow]
    """All samples, cut to length."""
    device: str = "cpu"
    feature_folder: FeatureFolder | None = None
    """Where the target's hidden states and distributions are stored; None: the live target is the teacher."""
    stored_rows: Sequence[SampleRow] | None = None
    """The rows of that folder, if `rows` are only some of them."""
    states: StatesServerConfig | None = None
    """The server that computes the target's hidden states; None, or one without an address: the target runs here."""

    init_shape: Any = None
    """Config of the language model in draft.init where shapes are enough (train/planning/shape_run.py); None: its
    weights are read."""

    def teacher(self, taps: HiddenStateSpec | None) -> Teacher:
        """The teacher, which gives the hidden states of `taps` and the target's distribution; None: only the latter."""
        rows = self.stored_rows or self.rows
        return make_teacher(self.feature_folder, self.target, taps, rows, self.states)

    def running_teacher(self, taps: HiddenStateSpec) -> LiveTeacher:
        """The teacher that runs the target, where no hidden states are stored yet."""
        return running_teacher(self.target, taps, self.states)

    def criterion(self) -> Criterion:
        """The loss at each position."""
        return Criterion(self.config.loss, self.config.divergence)


class TrainableDraft:
    """A draft in training: its module, its loss, and how it decodes and is saved. One subclass per family."""

    model: nn.Module
    """The module that is optimised, and wrapped for several processes."""
    teacher: Teacher | None
    """Gives the target's outputs; a CachedTeacher has to be filled before training. None: `model` runs the target."""
    muon_parameters: Sequence[nn.Parameter]
    """The matrices inside layers, which Muon may train."""
    low_lr_parameters: Sequence[nn.Parameter] = ()
    """Trained at a quarter of the learning rate."""
    metadata: dict[str, Any]
    """Fields for draftsmith.json besides those of every draft."""

    def loss(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Sums over the supervised positions of `batch`: "loss", which carries the gradient, and metrics.

        `model` is `self.model`, or what wraps it for several processes.
        """
        assert self.teacher is not None
        sums: dict[str, Tensor] = model(batch, self.teacher.get_output(batch))
        return sums

    def to_draft(self) -> Draft:
        """The draft with its present weights, ready to decode; it shares them with `model`."""
        raise NotImplementedError

    def save(self, folder: Path) -> None:
        """Writes the draft's folder, without draftsmith.json."""
        raise NotImplementedError

    def language_model(self) -> ModelRunner:
        """The draft as a model that writes text without the target; only where `FamilyTrainer.decodes_alone`."""
        raise NotImplementedError


class FamilyTrainer:
    """All that training and publishing know about one draft family. One subclass per family, without state.

    decode/drafts/registry.py names the subclass and says how the saved draft is loaded, and how engines serve it.
    """

    settings: ClassVar[frozenset[str]]
    """Fields of DraftConfig that the family reads, `family` apart."""
    description: ClassVar[str]
    """What such a draft is, for the model card, with an article."""
    hub_tag: ClassVar[str]
    """The family's tag on the Hub."""
    is_language_model: ClassVar[bool] = False
    """The saved folder is a language model that transformers loads; False: heads."""
    decodes_alone: ClassVar[bool] = False
    """The draft can write text without the target, as on-policy training needs."""
    trains_target: ClassVar[bool] = False
    """The target's weights are trained as well."""
    target_folder: ClassVar[str] = "target"
    """Where a target that was trained as well is in the saved folder; ".": the folder itself is that target."""

    def build(self, context: FamilyContext) -> TrainableDraft:
        """The draft in training. UserError if settings, target and samples do not fit together."""
        raise NotImplementedError

    def check_settings(self, s: DraftConfig) -> None:
        """UserError for a setting that would be ignored and makes the run another than was asked for."""
        if s.lora_rank and "lora_rank" not in self.settings:
            raise UserError(
                f"draft.lora_rank adapts a causal draft, and draft.family is {s.family}: set it to 0"
            )

    def unused_settings(self, s: DraftConfig) -> list[str]:
        """Names of settings that differ from their defaults and that neither this family nor its target reads."""
        defaults = vars(DraftConfig())
        return [
            name
            for name, value in vars(s).items()
            if name not in {"family", "attention", *self.settings} and value != defaults[name]
        ]


def matrix_parameters(part: nn.Module) -> list[nn.Parameter]:
    return [p for p in part.parameters() if p.ndim == 2 and p.requires_grad]


def model_dtype(target: Target) -> torch.dtype:
    return target.runner.model.dtype
