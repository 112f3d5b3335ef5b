"""The trained families: the settings class of each by name."""

from typing import Annotated

from decode.common.errors import UserError
from decode.common.ranges import OneOf
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

TRAINED_FAMILIES: dict[str, type[FamilySettings]] = {
    cls().family: cls
    for cls in (
        CausalSettings,
        PardSettings,
        MedusaSettings,
        Medusa2Settings,
        Eagle1Settings,
        Eagle3Settings,
        PEagleSettings,
        DFlashSettings,
        DSparkSettings,
        MtpSettings,
        LayerSkipSettings,
        LayerSkip2Settings,
    )
}
"""A family of decode/drafts/registry.py can be trained if its settings are here (`register_trained`, builders.py)."""
DraftSettings = Annotated[FamilySettings, OneOf("family", TRAINED_FAMILIES)]
"""The type of a setting that is the draft to train: `family` in it says which class it has."""


def family_settings(name: str) -> type[FamilySettings]:
    """The settings of family `name`. UserError if there is no such family, or none that is trained."""
    if name not in TRAINED_FAMILIES:
        known = ", ".join(TRAINED_FAMILIES)
        raise UserError(f"draft family {name!r} is not known: choose one of {known}")
    return TRAINED_FAMILIES[name]


def add_settings(settings: type[FamilySettings]) -> None:
    """Makes the default of the setting `family` a name of these settings. UserError if it is one already."""
    name = settings().family
    if name in TRAINED_FAMILIES:
        raise UserError(f"there is a trained family {name!r} already: choose another name")
    TRAINED_FAMILIES[name] = settings
