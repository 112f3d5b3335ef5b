"""The settings of drafts that are trained at a drawn depth of each block: PARD and P-EAGLE."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from decode.common.ranges import CountOrZero, Share, at_least
from train.families.settings.causal import CausalSettings
from train.families.settings.eagle import EagleNetSettings
from train.settings.training import TrainingDefaults


@dataclass
class BlockSettings:
    """Which slots of a block are trained."""

    block: Annotated[int, at_least(1, 64)] = 8
    """Tokens drafted in one pass."""
    retention: Share = 0.7
    """Share of the anchors of one depth that are trained at the next one too (conditional drop)."""
    min_retention: Share = 0.2
    """Share of a text's positions that are trained at every depth at least."""
    mask_token: CountOrZero | None = None
    """Id of the token in place of one not drafted yet; null: the one that answers have least often."""


@dataclass
class PardSettings(BlockSettings, CausalSettings):
    """A small language model that drafts a block in one pass, from the same weights as a causal draft."""

    family: Literal["pard"] = "pard"  # type: ignore[assignment]

    training = TrainingDefaults(
        "PARD, config/train/example_qwen.yaml",
        lr=3e-5, warmup=0, min_lr=1.0, max_length=512, loss="hard_ce",
    )  # fmt: skip
    description = "a small language model that drafts in parallel (PARD)"
    hub_tag = "pard"
    decodes_alone = False

    def training_defaults(self) -> TrainingDefaults:
        return self.training


@dataclass
class PEagleSettings(BlockSettings, EagleNetSettings):
    """EAGLE-3's network, which reads masks in place of its own states."""

    family: Literal["peagle"] = "peagle"

    block: Annotated[int, at_least(1, 64)] = 5
    """Tokens drafted in one pass."""
    retention: Share = 0.8
    """Share of the anchors of one depth that are trained at the next one too (conditional drop)."""

    training = TrainingDefaults(
        "SpecForge, qwen3-8b-peagle-disaggregated.yaml",
        lr=1e-4, warmup=0.0025, min_lr=0.0, max_length=4096,
    )  # fmt: skip
    description = "a P-EAGLE head"
    hub_tag = "p-eagle"

    def sizes_of(self, config: Mapping[str, Any], layers: int) -> dict[str, Any]:
        return super().sizes_of(config, layers) | {"mask_token": config.get("mask_token_id")}
