"""The trainer of each draft family, found by the family's name in decode/drafts/registry.py."""

import importlib

from decode.common.errors import UserError
from decode.drafts.registry import DRAFT_FAMILIES
from train.families.base import FamilyTrainer


def trained_families() -> list[str]:
    """Names of the families that can be trained."""
    return [family.name for family in DRAFT_FAMILIES.values() if family.trainer]


def family_trainer(name: str) -> FamilyTrainer:
    """The trainer of family `name`. UserError if there is no such family, or none that is trained."""
    if name not in trained_families():
        raise UserError(
            f"draft family {name!r} is not known: choose one of {', '.join(trained_families())}"
        )
    module, _, cls = DRAFT_FAMILIES[name].trainer.partition(":")
    trainer: FamilyTrainer = getattr(importlib.import_module(module), cls)()
    return trainer
