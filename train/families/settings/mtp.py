"""The settings of multi-token prediction layers."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from decode.common.published import Place
from decode.common.ranges import at_least
from train.families.settings.base import HeadSettings
from train.settings.training import TrainingDefaults


@dataclass
class MtpSettings(HeadSettings):
    """A layer of the target's own kind that continues its final hidden states."""

    family: Literal["mtp"] = "mtp"
    init: Place = ""
    """Folder of a draft whose training to continue, or of a target which has such a layer."""
    steps: Annotated[int, at_least(1, 64)] = 3
    """How many times each slot is run in training (training-time test)."""

    activation_checkpointing: ClassVar[bool] = False
    training = TrainingDefaults(
        "speculators, examples/train/mtp_qwen3_5_9b_gsm8k_online.sh (8,192 tokens)",
        lr=1e-4, warmup=0.01, max_length=4096, loss="hard_ce", decay=0.6,
    )  # fmt: skip
    description = "a multi-token prediction layer"
    hub_tag = "mtp"
