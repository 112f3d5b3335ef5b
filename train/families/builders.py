"""Which code trains the draft of which settings. Settings are read without torch, so they do not know it."""

from collections.abc import Callable
from typing import Any

from train.families.base import FamilyContext, TrainableDraft
from train.families.blocks import TrainablePard, build_peagle
from train.families.causal import TrainableCausal
from train.families.dflash import build_dflash
from train.families.eagle import build_eagle1, build_eagle3
from train.families.layerskip import build_exit
from train.families.layerskip2 import TrainableLayerSkip2
from train.families.medusa import TrainableMedusa, TrainableMedusa2
from train.families.mtp import build_mtp
from train.families.registry import add_settings
from train.families.settings.base import FamilySettings
from train.families.settings.blocks import (
    DFlashSettings,
    DSparkSettings,
    PardSettings,
    PEagleSettings,
)
from train.families.settings.causal import CausalSettings
from train.families.settings.eagle import Eagle1Settings, Eagle3Settings
from train.families.settings.heads import (
    LayerSkip2Settings,
    LayerSkipSettings,
    Medusa2Settings,
    MedusaSettings,
    MtpSettings,
)

Builder = Callable[[FamilyContext, Any], TrainableDraft]
"""Makes the draft in training from these settings. UserError if settings, target and samples do not fit together."""

BUILDERS: dict[type[FamilySettings], Builder] = {
    CausalSettings: TrainableCausal,
    PardSettings: TrainablePard,
    MedusaSettings: TrainableMedusa,
    Medusa2Settings: TrainableMedusa2,
    Eagle1Settings: build_eagle1,
    Eagle3Settings: build_eagle3,
    PEagleSettings: build_peagle,
    DFlashSettings: build_dflash,
    DSparkSettings: build_dflash,
    MtpSettings: build_mtp,
    LayerSkipSettings: build_exit,
    LayerSkip2Settings: TrainableLayerSkip2,
}


def build_trainable(settings: FamilySettings, context: FamilyContext) -> TrainableDraft:
    """The draft in training. UserError if settings, target and samples do not fit together."""
    return BUILDERS[type(settings)](context, settings)


def register_trained(settings: type[FamilySettings], build: Builder) -> None:
    """Makes a family trainable under the default of its setting `family`. UserError if there is one already."""
    add_settings(settings)
    BUILDERS[settings] = build
