"""The settings of the draft to train: its family, where its weights come from, and what each family needs besides."""

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from decode.common.errors import UserError
from decode.common.ranges import Count, CountOrZero, Share, at_least
from decode.drafts.registry import DRAFT_FAMILIES


@dataclass
class DraftConfig:
    """What the draft is and where its weights start."""

    RENAMED_SETTINGS: ClassVar[dict[str, str]] = {
        "scratch": "init_config",
        "rank": "target_lora_rank",
    }

    family: str = "causal"
    """causal: a small language model; pard: one that drafts a block in one pass. medusa, eagle1, eagle3: heads on the
    target's hidden states; peagle, dflash, dspark: heads that draft a block in one pass. mtp: a multi-token prediction
    layer, the target's own or a new one. layerskip: an exit of the target after its first layers. medusa2: Medusa heads
    trained together with the target. layerskip2: the target itself, trained for early exit."""
    init: str = ""
    """causal, pard: folder or Hub name of a small language model with the target's tokenizer. Heads: folder of a draft
    whose training to continue. mtp: also that of a target which has such a layer."""
    layers: list[CountOrZero] = field(default_factory=list)
    """causal, pard: layers of init that stay, such as [0, 11]; without init the target's become the draft."""
    keep_layers: CountOrZero = 0
    """causal, pard: as many layers of init stay (without init: of the target), chosen by measurement: one after the
    other goes that costs least acceptance on the samples. 0: all, or those in layers."""
    choice_tokens: Count = 2048
    """keep_layers: tokens of the samples' answers on which each layer is tried."""
    init_config: dict[str, Any] = field(default_factory=dict)
    """causal, pard, instead of init: random weights, with these changes to the target's config, such as {hidden_size:
    512, num_hidden_layers: 4}."""
    lora_rank: Annotated[int, at_least(0, 4096)] = 0
    """causal, pard: rank of LoRA adapters on all linear layers, which alone are trained; 0: all weights are trained."""
    heads: Annotated[int, at_least(1, 64)] = 4
    """medusa: number of heads, which is the number of tokens drafted at once."""
    head_layers: Annotated[int, at_least(0, 64)] = 1
    """medusa: residual blocks per head."""
    target_lora_rank: Annotated[int, at_least(1, 4096)] = 16
    """medusa2, layerskip2: rank of the LoRA adapters with which the target is trained."""
    steps: Annotated[int, at_least(1, 64)] = 7
    """eagle3, mtp: how many times each slot is run in training (training-time test)."""
    vocab: CountOrZero | None = None
    """Size of the draft's vocabulary, the most frequent tokens of the samples; 0: all tokens of the target; null: all
    for causal and pard, 32,000 for heads. medusa and eagle1 have the whole one."""
    taps: list[CountOrZero] = field(default_factory=list)
    """eagle3, peagle, dflash, dspark: layers whose input hidden states are read; empty: 2, L/2 and L-3 of L layers,
    which every engine assumes."""
    width: Annotated[int, at_least(0, 65_536)] = 0
    """eagle3, peagle: hidden size; 0: the target's."""
    norms: list[Literal["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"]] = (
        field(default_factory=list)
    )
    """eagle3, peagle: norms added to the published network, by their names in config.json: fc_norm and norm_output are
    those of EAGLE-3.1. Serving engines read them."""

    block: Annotated[int, at_least(1, 64)] = 8
    """pard, peagle, dflash, dspark: tokens drafted in one pass."""
    depth: Annotated[int, at_least(1, 64)] = 2
    """dflash, dspark: layers of the draft."""
    anchors: Share = 0.25
    """dflash, dspark: share of a text's positions from which a block is trained in a step."""
    markov_rank: Annotated[int, at_least(1, 4096)] = 256
    """dspark: rank of the correction by the token before."""
    retention: Share = 0.7
    """pard, peagle: share of the anchors of one depth that are trained at the next one too (conditional drop)."""
    min_retention: Share = 0.2
    """pard, peagle: share of a text's positions that are trained at every depth at least."""
    exit_layer: Annotated[int, at_least(0, 4096)] = 0
    """layerskip, layerskip2: number of the target's first layers that draft; 0: a quarter of them."""
    exit_width: Annotated[int, at_least(0, 65_536)] = 0
    """layerskip: inner width of the exit's gated block; 0: the target's hidden size."""
    layer_dropout: Share = 0.1
    """layerskip2: probability with which a sample goes past the last layer; it falls to 0 at the first one."""
    exit_scale: Share = 1.0
    """layerskip2: weight of all exits but the last layer in the loss, each also in proportion to 1 + … + its number."""
    exit_period: Annotated[int, at_least(1, 4096)] = 8
    """layerskip2: besides exit_layer and the last layer, step t trains the exits E with E = t modulo this number."""
    attention: Literal["auto", "dense", "blockwise", "flex"] = "auto"
    """How training attends where a mask is needed, in the draft and in the target: with all of the mask in memory, a
    block of queries at a time in memory linear in the length, or by flex_attention, which needs CUDA. auto: dense for
    short samples, else blockwise (same result)."""
    activation_checkpointing: bool = False
    """causal, pard, eagle1, eagle3, peagle, dflash, dspark: backward computes each layer of the draft again, so that
    only its inputs are kept: less memory, a third more arithmetic in the draft (same result)."""
    mask_token: CountOrZero | None = None
    """pard, peagle, dflash, dspark: id of the token in place of one not drafted yet; null: the one that answers have
    least often."""

    def __post_init__(self) -> None:
        trained = [family.name for family in DRAFT_FAMILIES.values() if family.trainer]
        if self.family not in trained:
            raise UserError(
                f"draft.family {self.family!r} is not known: choose one of {', '.join(trained)}"
            )
        if {"norm_before_fc", "fc_norm"} <= set(self.norms):
            raise UserError("draft.norms: norm_before_fc and fc_norm exclude each other: give one")
        if self.layers and self.keep_layers:
            raise UserError(
                "draft.layers names the layers that stay and draft.keep_layers has them chosen: give one"
            )
        if self.lora_rank and self.init_config:
            raise UserError(
                "draft.lora_rank adapts a draft that is trained already: give draft.init or draft.layers"
            )

    def vocab_size(self, target: int, default: int = 0) -> int:
        """Tokens of the draft's vocabulary for a target with `target` of them; `default` is meant by null, 0 is all."""
        return min(target, (default if self.vocab is None else self.vocab) or target)
