"""The settings of the commands that decode a saved draft here and in an engine."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from decode.common.chat.choice import TrainedTemplate
from decode.common.ranges import Count, DraftLength, DtypeName, Seed, Temperature, at_least
from decode.common.run_dir import RunSettings
from eval.settings.evaluation import Task


@dataclass
class RefereeConfig:
    draft: str = ""
    """A draft's folder; may stand first without --draft."""
    target: str = "assets/target"
    """The target's folder or Hub name."""
    python: str = ""
    """Interpreter with vLLM; empty: $VLLM_PYTHON or .venv-vllm/bin/python."""
    tasks: list[Task] = field(default_factory=list)
    """Empty: the bundled tasks, 4 prompts of each, 16 at a temperature."""
    k: DraftLength = 4
    """Tokens drafted a round."""
    max_new_tokens: Count = 64
    """Tokens decoded for each prompt."""
    margin: Annotated[float, at_least(0)] = 1e-3
    """Greedy: gap of the target's two best logits below which a difference counts as a tie."""
    temperature: Temperature = 0.0
    """0 is greedy."""
    draws: Count = 4
    """At a temperature: how often each prompt is decoded."""
    seed: Seed = 0
    """Of the sampling on both sides and of the permutation test."""
    control: bool = False
    """At a temperature: vLLM drafts greedily and we sample, which the test must detect."""
    repair: bool = True
    """At a temperature: repair the broken sampling of vLLM's CPU build first."""
    out: str = ""
    """File for the JSON of the last line; empty writes none."""


@dataclass
class LlamaCppParityConfig:
    draft: str = ""
    """The draft's folder; may stand first without --draft."""
    target: str = "assets/target"
    """The target's folder, Hub name or GGUF file."""
    server: str = ""
    """llama-server's path; empty: $LLAMA_SERVER, else llama-server in $PATH."""
    target_gguf: str = ""
    """A GGUF file of the target that llama.cpp serves as it is; empty: the target's weights, written in float32."""
    tasks: list[Task] = field(default_factory=list)
    """Empty: the bundled tasks, 4 prompts of each."""
    k: DraftLength = 4
    """Tokens drafted a round."""
    max_new_tokens: Count = 64
    """Tokens decoded for each prompt, unless its text ends before."""
    margin: Annotated[float, at_least(0)] = 1e-3
    """Gap of the target's two best logits below which a difference counts as a tie."""
    out: str = ""
    """File for the JSON of the last line; empty writes none."""


@dataclass
class AuditConfig(RunSettings):
    COMMON: ClassVar[str] = "draft target served tasks out"

    out: str = "outputs/audit"
    draft: str = ""
    """The draft's folder or Hub name; may stand first without --draft."""
    target: str = "assets/target"
    """The target's folder, GGUF file or Hub name."""
    served: str = "vllm"
    """vllm, none, or a file of what an engine accepted, as outputs.jsonl."""
    python: str = ""
    """Interpreter with vLLM; empty: $VLLM_PYTHON or .venv-vllm/bin/python."""
    tasks: list[Task] = field(
        default_factory=lambda: [Task(name, limit=8) for name in ("code", "prose", "arithmetic")]
    )
    """The prompts; of chats the first turn. Fewer than twelve show large differences only."""
    template: TrainedTemplate = None
    k: DraftLength = 4
    """Tokens drafted a round."""
    max_new_tokens: Count = 32
    """Tokens decoded for each prompt."""
    temperature: Temperature = 1.0
    """Of the sampled comparison with vLLM, for which 24 prompts are needed; 0 leaves it out."""
    draws: Count = 2
    """Sampled: how often each prompt is decoded."""
    device: str = "auto"
    """Of our decoder."""
    dtype: DtypeName = "float32"
    """Of both sides. In float32 equal functions accept equal tokens; in others a test compares them."""
