"""The model that becomes a draft: an existing small LM, or chosen layers of the target."""

from dataclasses import dataclass, field
from typing import Any, Literal

from decode.common.errors import UserError


@dataclass
class DraftConfig:
    """What the draft is and where its weights start."""

    family: Literal["causal", "medusa", "medusa2", "eagle1", "eagle3"] = "causal"
    """causal: a small LM; the others are heads over the target's own states. medusa2 trains the target too."""
    init: str = ""
    """causal: folder or hub name of a small LM with the target's tokenizer. Heads: a draft directory to go on from."""
    layers: list[int] = field(default_factory=list)
    """causal, instead of init: layers of the target to cut a draft from, such as [0, 11]."""
    scratch: dict[str, Any] = field(default_factory=dict)
    """causal, instead of init: random weights, and how the config differs from the target's, such as {hidden_size: 512,
    num_hidden_layers: 4}."""
    lora_rank: int = 0
    """causal: of LoRA adapters on all linear layers, which are all that is trained then; 0: every weight is."""
    heads: int = 4
    """medusa: tokens drafted at once."""
    head_layers: int = 1
    """medusa: residual blocks of a head."""
    rank: int = 16
    """medusa2: of the LoRA adapters by which the target is trained along with its heads."""
    steps: int = 7
    """eagle3: times that each slot is run in training (training-time test)."""
    vocab: int = 32000
    """eagle3: size of the draft's vocabulary, the most frequent tokens of the samples; 0: all of the target's."""
    taps: list[int] = field(default_factory=list)
    """eagle3: layers whose incoming states are read; empty: 2, L/2, L-3 of L, which every engine assumes."""
    width: int = 0
    """eagle3: hidden size; 0: the target's."""

    def __post_init__(self) -> None:
        if min(self.heads, self.rank, self.steps) < 1:
            raise UserError("draft: need heads, rank and steps >= 1")
        if min(self.head_layers, self.vocab, self.width, self.lora_rank) < 0:
            raise UserError("draft: need head_layers, vocab, width and lora_rank >= 0")
        if self.lora_rank and (self.family != "causal" or self.scratch):
            raise UserError(
                "draft.lora_rank adapts a causal draft that is something already: give draft.init or draft.layers"
            )
