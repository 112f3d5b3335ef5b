"""The parts of train/distill.py's settings: losses, the loop, measurements, and what comes after."""

import math
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, get_args

from decode.common.errors import UserError
from decode.common.published import Name
from decode.common.ranges import (
    Count,
    CountOrZero,
    DraftLength,
    LearningRate,
    Share,
    above,
    at_least,
    inside,
)
from decode.common.target_settings import SamplingParams

Precision = Literal["auto", "no", "bf16", "fp16"]
TrackerName = Literal["wandb", "tensorboard", "trackio", "none"]
WandbMode = Literal["auto", "online", "offline", "disabled"]
LossName = Literal[
    "forward_kl",
    "reverse_kl",
    "jsd",
    "renyi_half",
    "tv",
    "lk_alpha",
    "lk_lambda",
    "hard_ce",
    "soft_ce",
    "top_k",
]


@dataclass
class DivergenceConfig:
    """How the loss compares the target's distribution p with the draft's distribution q."""

    temperature: Annotated[float, at_least(0.001, 100)] = 1.0
    """Temperature applied to both distributions before they are compared; hard_ce ignores it."""
    top: CountOrZero = 0
    """Compare only this many of the target's likeliest tokens one by one, and all others as one sum; 0: compare every
    token. For top_k it is K; 0: 10."""
    beta: Annotated[float, inside(0, 1)] = 0.5
    """jsd: weight of p in the mixture of p and q, between 0 (forward KL) and 1 (reverse KL)."""
    mix: dict[Name, Annotated[float, at_least(0)]] = field(default_factory=dict)
    """Further divergences added to the loss with their weights, such as {hard_ce: 0.1}."""

    def __post_init__(self) -> None:
        unknown = sorted(set(self.mix) - set(get_args(LossName)))
        if unknown:
            raise UserError(
                f"divergence.mix: no divergence {unknown[0]!r}; there are {', '.join(get_args(LossName))}"
            )


@dataclass
class LossWeights:
    """Weights of the parts of the loss of heads."""

    positions: Literal["decay", "dpace", "dpard"] = "decay"
    """Weight of step j. decay: decay^j. dpace: what the step adds to the expected accepted length of its slot, by the
    probabilities of the samples' tokens. dpard: the same, by the probabilities of acceptance."""
    decay: Share = 0.8
    """Weight of each step relative to the one before, since a token counts only if those before it were accepted."""
    feature: Annotated[float, at_least(0)] = 1.0
    """eagle1: weight of the smooth L1 distance to the target's next final hidden state."""
    divergence: Annotated[float, at_least(0)] = 0.1
    """eagle1: weight of the divergence."""
    heads: Annotated[float, at_least(0)] = 0.01
    """medusa2: weight of the heads' loss; the KL that keeps the target close to the original has weight 1."""


@dataclass(frozen=True)
class TrainingDefaults:
    """What a family's publication trains with: the defaults of settings that are not the draft's own."""

    source: str
    """Where the values are from, for docs/families.md."""
    lr: float = 1e-3
    warmup: float = 50
    min_lr: float = 0.1
    clip: float = 1.0
    max_length: int = 2048
    loss: LossName = "forward_kl"
    mix: tuple[tuple[LossName, float], ...] = ()
    decay: float = 0.8


@dataclass
class LoopConfig:
    """Optimiser, batch sizes, and how often to log, measure and save."""

    steps: CountOrZero = 1000
    """Optimiser steps."""
    epochs: Annotated[float, at_least(0)] = 0.0
    """Passes over the samples, used in place of `steps`; 0: `steps` is used."""
    batch_size: Count = 16
    """Samples per optimiser step, summed over processes and micro-batches."""
    micro_batch: Count = 16
    """Samples per forward pass of each process; a lower value needs less memory and gives the same result. The
    launcher's gradient_accumulation_steps replaces the default."""
    pack: bool = False
    """Packs several samples of a forward pass into one line instead of padding each to the longest (same result)."""
    lr: LearningRate = 1e-3
    """Peak learning rate of AdamW."""
    min_lr: Share = 0.1
    """Share of the peak to which the learning rate falls along a cosine, until the last step; 1: it stays."""
    muon_lr: Annotated[float, at_least(0, 10)] = 0.0
    """Peak learning rate of Muon for the weight matrices inside layers, such as 0.02; 0: AdamW trains them as well."""
    fused_adamw: bool = True
    """On a GPU AdamW is one kernel for all weights, without copies of the gradients; false: torch's own choice, as on a
    CPU."""
    warmup: Annotated[float, at_least(0)] = 50
    """Steps of linear warm-up; below 1: as a share of all steps."""
    weight_decay: Annotated[float, at_least(0, 100)] = 0.0
    """Decoupled weight decay of AdamW and Muon."""
    clip: Annotated[float, above(0)] = 1.0
    """The gradient is scaled down to this norm where its norm is larger. The launcher's gradient_clipping replaces the
    default."""
    max_length: Count = 512
    """Tokens; longer samples are cut."""
    log_every: Count = 10
    """Steps between lines of the log."""
    eval_every: CountOrZero = 100
    """Steps between measurements of τ and α with the decoder; 0: never."""
    save_every: Count = 100
    """Steps between checkpoints."""
    keep: Count = 2
    """How many of the newest checkpoints to keep; 1 keeps two as well, so that a damaged one costs little."""
    keep_best: bool = False
    """Saves the draft with the highest measured τ instead of the last one, and keeps its checkpoint. Differences of τ
    are meaningful only if check.prompts is large."""

    def __post_init__(self) -> None:
        if self.keep_best and self.eval_every == 0:
            raise UserError("loop.keep_best needs measurements of τ: give loop.eval_every")

    def resolve_epochs(self, samples: int) -> "LoopConfig":
        """The same settings with `steps` computed from `epochs`, if `epochs` is given."""
        if self.epochs == 0:
            return self
        return replace(self, steps=math.ceil(self.epochs * samples / self.batch_size), epochs=0.0)


@dataclass
class OnPolicyConfig:
    """Training on rows that the draft generates itself."""

    share: Share = 0.0
    """Share of a step's rows that the draft generates; 0: none, 1: all, so that the data only gives prompts."""
    every: Count = 100
    """Steps after which the current draft generates new rows; each row is read once."""
    max_new_tokens: Count = 64
    """Tokens of a continuation at most."""
    batch_size: Count = 32
    """Prompts continued together by each process."""
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=1.0))
    """How the draft's tokens are sampled."""


@dataclass
class AcceptanceEvalConfig:
    """The fixed prompts on which τ and α are measured during training, with the real decoder."""

    prompts: Count = 6
    """How many: a third of them, at least one, from each of the three domains of the bundled training prompts, never
    from the evaluation prompts. Of an encoder-decoder, which answers only what it was made for, they are the first
    prompts of the training data; of samples with images those of the first samples that hold some."""
    k: DraftLength = 4
    """Tokens drafted per round."""
    max_new_tokens: Count = 32
    """Longest answer."""


@dataclass
class HubLabels:
    """Metadata for the Hub that is in no file of the draft; empty: unknown."""

    base_model: str = ""
    """The target's name on the Hub, as Qwen/Qwen3-8B: needed for a target that was loaded from a folder."""
    license: str = ""
    """Licence of the draft or the samples, as the Hub names it (apache-2.0)."""
    dataset: str = ""
    """Name on the Hub of the samples that the draft was trained on, or of the prompts of a sampled set."""


@dataclass
class TrainingPublishConfig:
    """Where a draft is published at the end of its training."""

    repo: str = ""
    """Repository on the Hub, as me/my-draft; without an owner it is yours, by the Hub's login; empty: the draft is not
    published."""
    private: bool = False
    """Make the repository visible only to you and your organisation."""
    labels: HubLabels = field(default_factory=HubLabels)
