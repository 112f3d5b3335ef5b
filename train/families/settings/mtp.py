"""The settings of multi-token prediction layers."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from decode.common.published import Place
from decode.common.ranges import at_least
from train.families.settings.base import HeadSettings

if TYPE_CHECKING:
    from train.families.base import FamilyContext, TrainableDraft


@dataclass
class MtpSettings(HeadSettings):
    """A layer of the target's own kind that continues its final hidden states."""

    family: Literal["mtp"] = "mtp"
    init: Place = ""
    """Folder of a draft whose training to continue, or of a target which has such a layer."""
    steps: Annotated[int, at_least(1, 64)] = 7
    """How many times each slot is run in training (training-time test)."""

    description = "a multi-token prediction layer"
    hub_tag = "mtp"

    def build(self, context: "FamilyContext") -> "TrainableDraft":
        from train.families.mtp import build_mtp

        return build_mtp(context, self)
