"""The settings of the laboratory's larger commands. Nothing here imports torch: they say their --help at once."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from decode.common.ranges import (
    Count,
    CountOrZero,
    DraftLength,
    DtypeName,
    LearningRate,
    Seed,
    Share,
    at_least,
)
from decode.common.target_settings import TargetSettings
from eval.settings.evaluation import Task
from scripts.lab.cells import BenchSettings


@dataclass
class BuildTargetConfig:
    tokens: Count = 8_000_000
    """Tokens to train on."""
    batch_tokens: Count = 8192
    """Tokens a step."""
    muon_lr: LearningRate = 0.02
    """Peak learning rate of Muon, which trains the matrices of the layers."""
    adam_lr: LearningRate = 0.004
    """Peak learning rate of AdamW, which trains embeddings and norms."""
    decay: Share = 0.5
    """Share of the run, at its end, over which the learning rate falls linearly to zero."""
    save_every: Count = 100
    """Steps between checkpoints."""
    model: Literal["target", "draft"] = "target"
    """target: 12 layers of 256; draft: one layer of 256 on the target's tokenizer."""
    gsm8k: str = "openai/gsm8k"
    """A Hub name, or a local jsonl with `question` and `answer`."""
    work: str = "outputs/build_target"
    """Checkpoints and the tokenised corpus."""
    assets: str = "assets"
    """The folder that receives target/ or draft/."""
    window: Annotated[int, at_least(2)] = 512
    """The model's context length, and the window of the last fifth of the run."""
    short_window: Annotated[int, at_least(2)] = 256
    """Window, in tokens, until then: attention over short windows is cheaper."""
    seed: Seed = 0
    """Of the order of the windows."""
    compile: bool = True
    """Compile the training step."""


@dataclass
class FloorConfig(BenchSettings, TargetSettings):
    mode: str = "eager"
    """The decoder's mode: eager, compiled or graph."""
    split_kv: bool = False
    """On a GPU: decode with decode/model/gpu/split_kv_attention.py, whatever was chosen at load."""
    rows: list[Count] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32, 64])
    """Rows of a step."""
    repeats: Count = 7
    """Products of each kind; the fastest counts, after one that does not."""
    tasks: list[Task] = field(default_factory=lambda: [Task("code", limit=16)])
    """The prompts that the decoder continues, repeated where a batch has more rows."""
    max_new_tokens: Count = 32
    """Tokens decoded for each prompt."""
    sampled_rows: list[Count] = field(default_factory=lambda: [32, 64])
    """Rows of a sampled step."""
    samples: CountOrZero = 4
    """Samples of a pass of features and of a step of training; 0: neither is timed."""
    sample_tokens: Annotated[int, at_least(2)] = 256
    """Tokens of each of these samples, the second half of which is an answer."""


@dataclass
class GpuSmokeConfig(BenchSettings):
    target: str = "assets/target"
    draft: str = ""
    """A draft for it that proposes on the device; empty: a new EAGLE-3 head, which has learned nothing."""
    k: DraftLength = 4
    rows: Count = 2
    """Prompts decoded together, half of all."""
    max_new_tokens: Count = 64
    device: str = "auto"
    dtype: DtypeName = "auto"
    """auto: on a GPU what the checkpoint is stored in, else float32."""
    seconds: Annotated[float, at_least(1)] = 570.0
    """Seconds for all stages; those that do not fit are not run."""
    vllm_python: str = ""
    """The interpreter of the environment with vLLM; empty: $VLLM_PYTHON, else .venv-vllm/bin/python."""
    stage: str = ""
    """Run only this stage and print its JSON (used internally)."""


TrainerName = Literal[
    "ours", "ours-features", "trainer", "gkd", "ours-on-policy", "gkd-on-policy",
    "eagle3", "eagle3-features", "eagle3-trainer",
]  # fmt: skip


@dataclass
class CompareTrainersConfig(BenchSettings):
    target: str = "assets/target"
    draft: str = "assets/draft"
    """The small LM to train."""
    data: str = "outputs/compare/samples"
    """A sampled set from train/sample.py."""
    arms: list[TrainerName] = field(default_factory=lambda: ["ours", "trainer", "gkd"])  # type: ignore[arg-type]
    rounds: Count = 3
    """Runs of each trainer."""
    warm: Count = 3
    """Untimed steps at the start of each run."""
    steps: Count = 20
    """Timed steps of each run."""
    batch_size: Count = 8
    max_length: Count = 256
    """Longer samples are cut to this many tokens."""
    max_new_tokens: Count = 64
    """On policy: tokens of a continuation at most."""
    pack: bool = False
    """This project's trainers: rows packed into lines (--loop.pack of train/distill.py) instead of padded."""
    epochs: Count = 3
    """With features: epochs of training for which their pass is made."""
    eagle_vocab: CountOrZero = 8192
    """Size of the EAGLE-3 head's vocabulary; 0: all tokens of the target."""
    eagle_steps: Count = 7
    """Steps of the EAGLE-3 head's training-time test."""
    on_policy_every: Count = 10
    """ours-on-policy: number of steps whose texts are generated together."""
    dtype: str = "float32"
    """Data type of the target; drafts train in fp32, on a GPU in mixed bf16."""
    one: bool = False
    """Run only the first trainer, in this process, and print its JSON (used internally)."""
