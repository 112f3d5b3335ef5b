"""What each family of drafts brings to the one training loop: weights, objective, decoding, files."""

from collections.abc import Callable

from train.families.base import FamilyContext, TrainableDraft
from train.families.causal import build_causal
from train.families.eagle import build_eagle1, build_eagle3
from train.families.medusa import build_medusa1
from train.families.medusa2 import build_medusa2

FAMILIES: dict[str, Callable[[FamilyContext], TrainableDraft]] = {
    "causal": build_causal,
    "medusa": build_medusa1,
    "medusa2": build_medusa2,
    "eagle1": build_eagle1,
    "eagle3": build_eagle3,
}
