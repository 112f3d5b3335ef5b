"""The settings of a small language model as draft."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from decode.common.errors import UserError
from decode.common.published import Name, Option, Place
from decode.common.ranges import CountOrZero, at_least
from train.families.settings.base import FamilySettings
from train.settings.training import TrainingDefaults

VICUNA = "FastChat, scripts/train_vicuna_7b.sh"
FINE_TUNED = TrainingDefaults(VICUNA, lr=2e-5, warmup=0.04, min_lr=0.0)


@dataclass
class CausalSettings(FamilySettings):
    """A given language model, chosen layers of the target, or one with random weights."""

    RENAMED_SETTINGS: ClassVar[dict[str, str]] = {"scratch": "init_config"}

    family: Literal["causal"] = "causal"
    init: Place = ""
    """Folder or Hub name of a small language model with the target's tokenizer."""
    layers: list[CountOrZero] = field(default_factory=list)
    """Layers of init that stay, such as [0, 11]; without init the target's become the draft."""
    init_config: dict[Name, Option] = field(default_factory=dict)
    """Instead of init: random weights, with these changes to the target's config, such as {hidden_size: 512,
    num_hidden_layers: 4}."""
    lora_rank: Annotated[int, at_least(0, 4096)] = 0
    """Rank of LoRA adapters on all linear layers but the LM head, which alone are trained; 0: all weights are
    trained."""
    vocab: CountOrZero | None = None
    """Size of the draft's vocabulary, the most frequent tokens of the samples; 0: all tokens of the target; null:
    those that the draft in `init` has, or all."""
    activation_checkpointing: bool = False
    """Backward computes each layer of the draft again, so that only its inputs are kept: less memory, a third more
    arithmetic in the draft (same result)."""

    training = TrainingDefaults("ours, for random weights")
    description = "a small language model"
    hub_tag = "assisted-generation"
    is_language_model = True
    decodes_alone = True

    def __post_init__(self) -> None:
        if self.lora_rank and self.init_config:
            raise UserError(
                "draft.lora_rank adapts a draft that is trained already: give draft.init or draft.layers"
            )

    @property
    def continues(self) -> str:
        return self.init

    def training_defaults(self) -> TrainingDefaults:
        # Weights that can do something already are not trained at a new head's rate.
        return self.training if self.init_config else FINE_TUNED
