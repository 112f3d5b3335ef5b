"""The settings of Medusa heads, on a frozen target or trained together with it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from decode.common.ranges import at_least
from train.families.settings.base import HeadSettings
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
