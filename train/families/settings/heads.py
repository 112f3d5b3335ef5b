"""The settings of Medusa heads, multi-token prediction layers and exits of the target, which may be trained as well."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from decode.common.published import Place
from decode.common.ranges import CountOrZero, Share, at_least
from train.families.settings.base import FamilySettings, HeadSettings, saved_vocab
from train.settings.training import TrainingDefaults


@dataclass
class MedusaSettings(HeadSettings):
    """Medusa heads on a frozen target."""

    family: Literal["medusa"] = "medusa"
    heads: Annotated[int, at_least(1, 64)] = 4
    """Number of heads, which is the number of tokens drafted at once."""
    head_layers: Annotated[int, at_least(0, 64)] = 1
    """Residual blocks per head."""

    training = TrainingDefaults(
        "Medusa, scripts/train_vicuna_7b.sh (3 heads)", warmup=0.1, min_lr=0.0
    )
    description = "Medusa heads"
    hub_tag = "medusa"

    def sizes_of(self, config: Mapping[str, Any], layers: int) -> dict[str, Any]:
        return {"heads": config["num_heads"], "head_layers": config["num_hidden_layers"]}


@dataclass
class Medusa2Settings(MedusaSettings):
    """Medusa heads together with LoRA adapters of the target; saved as family `medusa`."""

    RENAMED_SETTINGS: ClassVar[dict[str, str]] = {"rank": "target_lora_rank"}

    family: Literal["medusa2"] = "medusa2"  # type: ignore[assignment]
    target_lora_rank: Annotated[int, at_least(1, 4096)] = 16
    """Rank of the LoRA adapters with which the target is trained."""

    trains_target = True


@dataclass
class MtpSettings(HeadSettings):
    """A layer of the target's own kind that continues its final hidden states."""

    family: Literal["mtp"] = "mtp"
    init: Place = ""
    """Folder or Hub name of a draft whose training to continue, or of a target which has such a layer."""
    steps: Annotated[int, at_least(1, 64)] = 3
    """How many times each slot is run in training (training-time test)."""

    activation_checkpointing: ClassVar[bool] = False
    training = TrainingDefaults(
        "speculators, examples/train/mtp_qwen3_5_9b_gsm8k_online.sh (8,192 tokens)",
        lr=1e-4, warmup=0.01, max_length=4096, loss="hard_ce", decay=0.6,
    )  # fmt: skip
    description = "a multi-token prediction layer"
    hub_tag = "mtp"


@dataclass
class ExitSettings(FamilySettings):
    exit_layer: Annotated[int, at_least(0, 4096)] = 0
    """Number of the target's first layers that draft; 0: a quarter of them."""

    def draft_layers(self, layers: int) -> int:
        """The number of first layers that draft, of the target's `layers`."""
        return self.exit_layer or max(1, layers // 4)


@dataclass
class LayerSkipSettings(ExitSettings, HeadSettings):
    """An exit adapter on a frozen target."""

    family: Literal["layerskip"] = "layerskip"
    vocab: CountOrZero | None = None
    """Size of the draft's vocabulary, the most frequent tokens of the samples; 0: all tokens of the target; null:
    32,000. With `init` what is left at its default is that draft's."""
    exit_width: Annotated[int, at_least(0, 65_536)] = 0
    """Inner width of the exit's gated block; 0: the target's hidden size."""

    description = "a trained early exit"
    hub_tag = "layerskip"

    def sizes_of(self, config: Mapping[str, Any], layers: int) -> dict[str, Any]:
        own = {name: config[name] for name in ("exit_layer", "exit_width")}
        return own | {"vocab": saved_vocab(config)}

    def new_config(self, target: Any, vocab: int, size: int) -> dict[str, Any]:
        """config.json of a new adapter with `size` tokens in its vocabulary, for a `target` of this config."""
        from decode.checkpoints import head_layouts

        width = self.exit_width or target.hidden_size
        layer = self.draft_layers(target.num_hidden_layers)
        return head_layouts.exit_config(target, vocab, size, layer, width)


@dataclass
class LayerSkip2Settings(ExitSettings):
    """The target itself, trained for early exit; the saved folder is the new target and its draft."""

    RENAMED_SETTINGS: ClassVar[dict[str, str]] = {"rank": "target_lora_rank"}

    family: Literal["layerskip2"] = "layerskip2"
    target_lora_rank: Annotated[int, at_least(1, 4096)] = 16
    """Rank of the LoRA adapters with which the target is trained."""
    layer_dropout: Share = 0.1
    """Probability with which a sample goes past the last layer; it falls to 0 at the first one."""
    exit_scale: Share = 1.0
    """In the loss an exit E weighs this times 1 + … + E, the last layer L weighs L plus this times 1 + … + (L - 1), all
    divided by their sum."""
    exit_period: Annotated[int, at_least(1, 4096)] = 8
    """Besides exit_layer and the last layer, step t trains the exits E with E = t modulo this number."""

    description = "a target trained for early exit"
    hub_tag = "layerskip"
    is_language_model = True
    trains_target = True
    target_folder = "."
