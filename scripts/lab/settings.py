"""The settings of the laboratory's larger commands. Nothing here imports torch: they say their --help at once."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from decode.common.ranges import (
    Count,
    DraftLength,
    DtypeName,
    LearningRate,
    Seed,
    Share,
    at_least,
)
from decode.common.target_settings import TargetSettings
from eval.settings.evaluation import Task


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
class FloorConfig(TargetSettings):
    out: str = ""
    """File for the JSON of the last line; empty: none."""
    mode: str = "eager"
    """The decoder's mode: eager, captured, compiled or graph."""
    rows: list[Count] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32, 64])
    """Rows of a step."""
    repeats: Count = 7
    """Products of each kind; the fastest counts, after one that does not."""
    tasks: list[Task] = field(default_factory=lambda: [Task("code", limit=16)])
    """The prompts that the decoder continues, repeated where a batch has more rows."""
    max_new_tokens: Count = 32
    """Tokens decoded for each prompt."""


@dataclass
class GpuSmokeConfig:
    out: str = ""
    """File for the JSON of the last line; empty: none."""
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
