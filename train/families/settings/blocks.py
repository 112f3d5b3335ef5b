"""The settings of drafts of a block in one pass: PARD and P-EAGLE, DFlash and DSpark."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from decode.common.ranges import CountOrZero, Share, at_least
from train.families.settings.base import saved_vocab
from train.families.settings.causal import CausalSettings
from train.families.settings.eagle import EagleNetSettings, FusedHeadSettings
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


@dataclass
class DFlashSettings(FusedHeadSettings):
    """Layers over a block of masks, which read the target's states as keys and values."""

    family: Literal["dflash"] = "dflash"
    FORMER_DEFAULTS: ClassVar[dict[str, int]] = {"depth": 2, "block": 8}

    vocab: CountOrZero | None = 0
    """Size of the draft's vocabulary, the most frequent tokens of the samples; 0: all tokens of the target; null:
    32,000. With `init` what is left at its default is that draft's."""
    taps: list[CountOrZero] = field(default_factory=list)
    """Layers whose input hidden states are read; empty: five (of a small target fewer), evenly from 2 to L-2 of L
    layers."""
    block: Annotated[int, at_least(1, 64)] = 15
    """Tokens drafted in one pass."""
    depth: Annotated[int, at_least(1, 64)] = 5
    """Layers of the draft."""
    anchors: Share = 0.25
    """Share of a text's positions from which a block is trained in a step."""
    mask_token: CountOrZero | None = None
    """Id of the token in place of one not drafted yet; null: the one that answers have least often."""

    training = TrainingDefaults(
        "SpecForge, qwen3-8b-dflash-online.yaml",
        lr=6e-4, warmup=0.04, min_lr=0.0, max_length=3072, loss="hard_ce", decay=0.867,
    )  # fmt: skip
    description = "a DFlash head"
    hub_tag = "dflash"
    idle_slots: ClassVar[int] = 1
    """Slots of a block that predict nothing: that of the anchor."""

    def sizes_of(self, config: Mapping[str, Any], layers: int) -> dict[str, Any]:
        return {
            "vocab": saved_vocab(config),
            "taps": config["eagle_aux_hidden_state_layer_ids"],
            "depth": config["num_hidden_layers"],
            "block": config["block_size"] - self.idle_slots,
            "mask_token": config["dflash_config"]["mask_token_id"],
        }

    def new_config(
        self, target: Any, vocab: int, size: int, layers: Sequence[int], mask_token: int
    ) -> dict[str, Any]:
        """config.json of a new draft with `size` tokens in its vocabulary, for a `target` of this config."""
        from decode.checkpoints import block_layouts

        block = self.block + self.idle_slots
        return block_layouts.dflash_config(
            target, vocab, size, layers, self.depth, block, mask_token, self.rank
        )

    @property
    def rank(self) -> int:
        """Of DSpark's correction; 0: there is none."""
        return 0


@dataclass
class DSparkSettings(DFlashSettings):
    """DFlash with a low-rank correction by the token before, and a confidence."""

    family: Literal["dspark"] = "dspark"  # type: ignore[assignment]
    block: Annotated[int, at_least(1, 64)] = 7
    """Tokens drafted in one pass."""
    markov_rank: Annotated[int, at_least(1, 4096)] = 256
    """Rank of the correction by the token before."""

    training = TrainingDefaults(
        "DeepSpec, config/dspark/dspark_qwen3_8b.py",
        lr=6e-4, warmup=0.04, min_lr=0.0, max_length=4096,
        loss="tv", mix=(("tv", 0.8), ("hard_ce", 0.1)), decay=0.779,
    )  # fmt: skip
    description = "a DSpark head"
    hub_tag = "dspark"
    idle_slots = 0

    @property
    def rank(self) -> int:
        return self.markov_rank

    def sizes_of(self, config: Mapping[str, Any], layers: int) -> dict[str, Any]:
        return super().sizes_of(config, layers) | {"markov_rank": config["markov_rank"]}
