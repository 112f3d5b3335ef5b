"""DistillConfig, the settings of train/distill.py, which loads nothing that trains."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from decode.common.published import WORD, Place, Private, Revision
from decode.common.ranges import CountOrZero, DtypeName
from decode.common.run_dir import RunSettings
from decode.common.target_settings import PlacementConfig
from train.families.registry import DraftSettings
from train.families.settings.causal import CausalSettings
from train.settings.data import DataSpec, StatesServerConfig, Supervised
from train.settings.training import (
    AcceptanceEvalConfig,
    DivergenceConfig,
    LoopConfig,
    LossName,
    LossWeights,
    OnPolicyConfig,
    Precision,
    TrackerName,
    TrainingPublishConfig,
    WandbMode,
)


@dataclass
class DistillConfig(RunSettings):
    COMMON: ClassVar[str] = (
        "target data draft loss loop.epochs loop.steps loop.batch_size loop.micro_batch loop.lr "
        "loop.max_length target_dtype tracker out dry_run"
    )

    RENAMED_SETTINGS: ClassVar[dict[str, str]] = {"compare": "divergence"}

    target: Place = "assets/target"
    """The model whose distributions the draft learns: a folder, a GGUF file or a Hub name."""
    revision: Revision | None = None
    """Commit, tag or branch of a target on the Hub."""
    tokenizer: Place = ""
    """For a GGUF whose own tokenizer is refused: a folder or Hub name with the same tokens, as in train/sample.py."""
    data: DataSpec = "outputs/samples"
    """A sampled set from train/sample.py, or several mixed: [{path: one, weight: 3}, {path: other, weight: 1}]."""
    supervise: Supervised = "answers"
    """answers: the draft learns the target's distribution where the target wrote; all: also where it read the prompt,
    which gives more labels from the same pass of the target."""
    on_policy: OnPolicyConfig = field(default_factory=OnPolicyConfig)
    draft: DraftSettings = field(default_factory=CausalSettings)
    loss: LossName = "forward_kl"
    """Divergence from the target's distribution: that of the family's publication, mostly forward_kl."""
    divergence: DivergenceConfig = field(default_factory=DivergenceConfig)
    weights: LossWeights = field(default_factory=LossWeights)
    """Weights of the parts of the loss of heads."""
    features: Private[str] = ""
    """Folder of the target's stored hidden states and distributions; those that are missing are computed in one pass
    before training. Empty: the target runs in every step."""
    features_top: CountOrZero = 0
    """features: 0 stores final hidden states, which give the whole distribution; K > 0 the K most probable tokens,
    which is biased where the target is flat (divergence.top of at most K leaves out the rest)."""
    states: Private[StatesServerConfig] = field(default_factory=StatesServerConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
    check: AcceptanceEvalConfig = field(default_factory=AcceptanceEvalConfig)
    mixed_precision: Precision = "auto"
    """Precision of the draft's forward pass; no: fp32; auto: the launcher's, else bf16 on a GPU that has it, fp16 on
    another GPU and fp32 on a CPU. fp16 comes with scaled gradients."""
    target_dtype: Annotated[DtypeName, WORD] = "float32"
    """Precision of the frozen target."""
    placement: Private[PlacementConfig] = field(default_factory=PlacementConfig)
    tracker: Private[TrackerName] = "wandb"
    """What logs metrics beside metrics.jsonl: Weights & Biases, TensorBoard (in out/tensorboard), Trackio (in
    out/trackio, or where TRACKIO_DIR says) or none. The second and the third are packages to install."""
    wandb: Private[WandbMode] = "auto"
    """Weights & Biases; auto: what WANDB_MODE says, else online if wandb finds a login, else offline. It gets metrics,
    settings and manifests; the draft's weights only with WANDB_LOG_MODEL=end, checkpoints too with
    WANDB_LOG_MODEL=checkpoint. metrics.jsonl is always written."""
    project: Private[str] = ""
    """Project in Weights & Biases or Trackio; empty: that of WANDB_PROJECT, else draftsmith."""
    publish: Private[TrainingPublishConfig] = field(default_factory=TrainingPublishConfig)
    out: Private[str] = "outputs/drafts/causal"
    """Folder of the draft and its checkpoints."""
    resume: Private[bool] = False
    """Continue in `out` although the settings differ (a run with equal settings resumes by itself)."""
    allow_changed: Private[bool] = False
    """Go on although the target (its weights or dtype), the sampled set, `draft.init` or stored features are others
    than before, or the samples are another target's answers. Right if you know that the difference does not matter, as
    after adding prompts to the set or for answers of a target that was fine-tuned a little since."""
    dry_run: Private[bool] = False
    """Only estimate what the run needs and try two steps of it, with the live target; writes nothing into `out`."""

    def defaults(self, given: Collection[str]) -> "DistillConfig":
        """The settings of a run that is told nothing but this draft: those of its family. What belongs to a loss is
        left out where another loss is `given`."""
        of = self.draft.training_defaults()
        return DistillConfig(
            loss=of.loss,
            divergence=DivergenceConfig(mix={} if "loss" in given else dict(of.mix)),
            weights=LossWeights(decay=of.decay),
            loop=LoopConfig(
                lr=of.lr, warmup=of.warmup, min_lr=of.min_lr, clip=of.clip, max_length=of.max_length
            ),
        )
