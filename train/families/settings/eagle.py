"""The settings of EAGLE-1 and EAGLE-3 heads."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from decode.common.errors import UserError
from decode.common.ranges import CountOrZero, at_least
from train.families.settings.base import HeadSettings, saved_vocab
from train.settings.training import TrainingDefaults


@dataclass
class LayeredHeadSettings(HeadSettings):
    """Heads with layers of their own."""

    activation_checkpointing: bool = False
    """Backward computes each layer of the draft again, so that only its inputs are kept: less memory, a third more
    arithmetic in the draft (same result)."""


@dataclass
class Eagle1Settings(LayeredHeadSettings):
    """One layer that predicts the target's next final hidden state."""

    family: Literal["eagle1"] = "eagle1"

    steps: ClassVar[int] = 1  # how many times each slot is run
    training = TrainingDefaults(
        "EAGLE, eagle/train/main.py (linear, each value clipped)",
        lr=3e-5,
        warmup=0.0025,
        min_lr=0.0,
        clip=0.5,
    )
    description = "an EAGLE-1 head"
    hub_tag = "eagle"


@dataclass
class FusedHeadSettings(LayeredHeadSettings):
    """Heads on the fused hidden states of several layers, perhaps with a smaller vocabulary."""

    vocab: CountOrZero | None = None
    """Size of the draft's vocabulary, the most frequent tokens of the samples; 0: all tokens of the target; null:
    32,000. With `init` what is left at its default is that draft's."""
    taps: list[CountOrZero] = field(default_factory=list)
    """Layers whose input hidden states are read; empty: 2, L/2 and L-3 of L layers, which every engine assumes."""


@dataclass
class EagleNetSettings(FusedHeadSettings):
    """EAGLE-3's network."""

    width: Annotated[int, at_least(0, 65_536)] = 0
    """Hidden size; 0: the target's."""
    norms: list[Literal["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"]] = (
        field(default_factory=list)
    )
    """Norms added to the published network, by their names in config.json: fc_norm and norm_output are those of
    EAGLE-3.1. vLLM reads all of them, other engines only some (docs/families.md)."""

    def __post_init__(self) -> None:
        if {"norm_before_fc", "fc_norm"} <= set(self.norms):
            raise UserError("draft.norms: norm_before_fc and fc_norm exclude each other: give one")

    def sizes_of(self, config: Mapping[str, Any], layers: int) -> dict[str, Any]:
        from decode.checkpoints import eagle_layouts

        return {
            "vocab": saved_vocab(config),
            "width": config["hidden_size"],
            "taps": list(eagle_layouts.aux_layers(config, layers)),
            "norms": eagle_layouts.saved_norms(config),
        }


@dataclass
class Eagle3Settings(EagleNetSettings):
    """One layer on the fused hidden states of three layers, trained by training-time test."""

    family: Literal["eagle3"] = "eagle3"
    steps: Annotated[int, at_least(1, 64)] = 7
    """How many times each slot is run in training (training-time test)."""

    training = TrainingDefaults(
        "SpecForge, qwen3-8b-eagle3-disaggregated.yaml",
        lr=1e-4, warmup=0.015, min_lr=0.0, clip=0.5, max_length=4096,
    )  # fmt: skip
    description = "an EAGLE-3 head"
    hub_tag = "eagle3"
