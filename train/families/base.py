"""A draft in training, what it is built from, and what heads of several families begin with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from decode.checkpoints import importers, layouts
from decode.common.errors import UserError
from decode.drafts.base import Draft
from decode.drafts.registry import draft_family
from decode.model.hidden_states import HiddenStateSpec, check_aux_layers
from decode.model.loading import Target
from decode.model.runner import ModelRunner
from train.data import vocab_mapping
from train.data.batching import Batch
from train.data.sample_store import SampleRow
from train.families.settings.base import HeadSettings
from train.losses.objective import Criterion
from train.settings.data import StatesServerConfig
from train.settings.training import DivergenceConfig, LossWeights
from train.teacher.cached import CachedTeacher, FeatureFolder, Teacher, running_teacher
from train.teacher.live import LiveTeacher

Net = TypeVar("Net", bound=nn.Module)
Config = dict[str, Any]
"""config.json of a draft."""


class LossSettings(Protocol):
    """The settings of train/distill.py that families read, besides their own."""

    loss: Any
    divergence: DivergenceConfig
    weights: LossWeights
    out: str


@dataclass(frozen=True)
class FamilyContext:
    """What a draft is built from."""

    config: LossSettings
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
        if self.feature_folder is None:
            return self.running_teacher(taps)
        rows = self.stored_rows or self.rows
        return CachedTeacher(self.target, taps, rows, self.feature_folder, self.states)

    def running_teacher(self, taps: HiddenStateSpec | None) -> LiveTeacher:
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
        output = [] if self.teacher is None else [self.teacher.get_output(batch)]
        sums: dict[str, Tensor] = model(batch, *output)
        return sums

    def to_draft(self) -> Draft:
        """The draft with its present weights, ready to decode; it shares them with `model`."""
        raise NotImplementedError

    def save(self, folder: Path) -> None:
        """Writes the draft's folder, without draftsmith.json."""
        raise NotImplementedError

    def language_model(self) -> ModelRunner:
        """The draft as a model that writes text without the target; only where its family `decodes_alone`."""
        raise NotImplementedError


class TrainableHead(TrainableDraft):
    """A net of its own on the target's hidden states in training; `config` is its config.json."""

    def __init__(
        self,
        context: FamilyContext,
        s: HeadSettings,
        net: Any,
        config: Config,
        trainer: Callable[..., nn.Module],
        draft: Callable[[Any, Target, str], Draft],
    ):
        """`trainer` makes the module that computes the loss, of the net, what gives the target's logits of the
        teacher's rows, the target's embedding, the context and the settings; `draft` what decodes with the net."""
        target = context.target
        check_aux_layers(net.aux_layers, target.runner.config.num_hidden_layers)
        self.net, self.config, self.target = net, config, target
        self.make_draft, self.family = draft, s.family
        self.teacher = context.teacher(net.aux_layers)
        embedding = target.runner.model.get_input_embeddings().weight.detach()
        self.model = trainer(net, self.teacher.head, embedding, context, s)
        self.muon_parameters = matrix_parameters(net.fc) + matrix_parameters(net.layers)
        self.metadata = {}

    def to_draft(self) -> Draft:
        return self.make_draft(self.net, self.target, self.family)

    def save(self, folder: Path) -> None:
        layouts.save_heads(folder, self.config, self.net, model_dtype(self.target), self.net.ids)


def check_trained_layers(init: str, fields: Config, found: Sequence[str]) -> None:
    """UserError for a draft to go on with that has the layers `found`, which are decoded but not trained, or others."""
    if "sliding_attention" in (fields.get("layer_types") or ()):
        found = [*found, "sliding layers"]
    if found:
        raise UserError(
            f"draft.init {init!r} has {' and '.join(found)}, which are decoded here but not trained: begin without "
            "draft.init, or go on with what made it"
        )


def matrix_parameters(part: nn.Module) -> list[nn.Parameter]:
    return [p for p in part.parameters() if p.ndim == 2 and p.requires_grad]


def model_dtype(target: Target) -> torch.dtype:
    return target.runner.model.dtype


def load_saved_config(init: str, family: str) -> Config:
    """config.json of the draft in `init`, whose training is continued. UserError if it is no draft of this family."""
    found = draft_family(init)
    if found != family:
        what = "no saved heads" if found == "causal" else f"heads of family {found!r}"
        raise UserError(
            f"draft.init {init!r} holds {what}: give a draft directory of family {family!r}"
        )
    return importers.read_checkpoint(importers.resolve_folder(init)).config


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


def vocabulary_facts(ids: Tensor | None, counts: Tensor) -> dict[str, Any]:
    """What draftsmith.json records of a reduced vocabulary `ids` [Vd]; {} for the whole one (None)."""
    return {} if ids is None else {"vocabulary": vocab_mapping.describe(ids.cpu(), counts)}
