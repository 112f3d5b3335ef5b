"""What the settings of every family have. train/families/builders.py says what builds the draft of which settings."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

from decode.common.errors import UserError
from decode.common.published import Place, Word
from decode.common.ranges import CountOrZero
from train.settings.training import TrainingDefaults

DEFAULT_VOCAB = 32_000
"""Size of the vocabulary of heads where `vocab` does not say it: that of EAGLE-3's authors."""


@dataclass
class FamilySettings:
    """What the draft is and where its weights start."""

    family: Word = ""
    """causal: a small language model; pard: one that drafts a block in one pass. medusa, eagle1, eagle3: heads on the
    target's hidden states; peagle, dflash, dspark: heads that draft a block in one pass. mtp: a multi-token prediction
    layer, the target's own or a new one. layerskip: an exit of the target after its first layers. medusa2: Medusa heads
    trained together with the target. layerskip2: the target itself, trained for early exit."""
    attention: Literal["auto", "dense", "blockwise", "flex"] = "auto"
    """How training attends where a mask is needed, in the draft and in the target: with all of the mask in memory, a
    block of queries at a time in memory linear in the length, or by flex_attention, which needs CUDA. auto: flex on a
    GPU of compute capability 8.0 or newer where torch has Triton, elsewhere dense for short samples and blockwise for
    others (same result)."""

    training: ClassVar[TrainingDefaults] = TrainingDefaults("ours")
    """How such a draft is trained where the settings do not say it."""
    description: ClassVar[str]
    """What such a draft is, for the model card, with an article."""
    hub_tag: ClassVar[str]
    """The family's tag on the Hub."""
    is_language_model: ClassVar[bool] = False
    """The saved folder is a language model that transformers loads; False: heads."""
    decodes_alone: ClassVar[bool] = False
    """The draft can write text without the target, as on-policy training needs."""
    trains_target: ClassVar[bool] = False
    """The target's weights are trained as well."""
    target_folder: ClassVar[str] = "target"
    """Where a target that was trained as well is in the saved folder; ".": the folder itself is that target."""

    @property
    def continues(self) -> str:
        """Folder or Hub name of the draft whose weights these are at first; empty: none."""
        return ""

    def training_defaults(self) -> TrainingDefaults:
        return self.training

    def planned(self, layers: int) -> Self:
        """These settings with the sizes of the saved draft, so that its shapes are known without its weights; `layers`
        are the target's."""
        return self

    def having(self, **values: Any) -> Self:
        """A copy with those of `values` that this family has a setting for."""
        return replace(self, **{name: x for name, x in values.items() if name in vars(self)})


@dataclass
class HeadSettings(FamilySettings):
    """Heads on the target's hidden states, new ones or saved ones."""

    init: Place = ""
    """Folder or Hub name of a draft whose training to continue."""

    @property
    def continues(self) -> str:
        return self.init

    def sizes_of(self, config: Mapping[str, Any], layers: int) -> dict[str, Any]:
        """{setting: its value in a saved draft} of the settings that weights have; `layers` are the target's."""
        return {}

    def continued(self, config: Mapping[str, Any], layers: int) -> Self:
        """These settings with the sizes of the draft in `init`, whose config.json is `config`.

        UserError for a setting that was given and has another value there.
        """
        sizes = self.sizes_of(config, layers)
        for name, size in sizes.items():
            given = getattr(self, name)
            if given not in (size, getattr(type(self)(), name)):
                raise UserError(
                    f"draft.{name} is {given}, and the draft in draft.init, {self.init!r}, has {size}: leave it out or "
                    "start anew without draft.init"
                )
        return replace(self, **sizes)

    def planned(self, layers: int) -> Self:
        from decode.checkpoints import importers  # imports torch

        if not self.init:
            return self
        config = importers.read_checkpoint(importers.resolve_folder(self.init)).config
        return replace(self.continued(config, layers), init="")


def vocab_size(given: CountOrZero | None, target: int, default: int = 0) -> int:
    """Tokens of the draft's vocabulary for a target with `target` of them; `default` is meant by null, 0 is all."""
    return min(target, (default if given is None else given) or target)


def saved_vocab(config: Mapping[str, Any]) -> int:
    """The setting `vocab` that a saved draft has: 0 where it drafts all of the target's tokens."""
    size: int = config["draft_vocab_size"]
    return 0 if size == config["vocab_size"] else size
