"""The settings of train/sample.py and train/write_prompts.py."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from decode.common.chat.choice import TemplateSetting
from decode.common.ranges import (
    Count,
    CountOrZero,
    DraftLength,
    Share,
    Spellings,
    above,
    at_least,
)
from decode.common.run_dir import RunSettings
from decode.common.target_settings import PlacedTargetSettings, SamplingParams, TargetSettings
from train.settings.data import FilterConfig, PromptSource, TurnSelection


@dataclass
class SampleConfig(RunSettings, PlacedTargetSettings):
    COMMON: ClassVar[str] = (
        "target sources template sampling.temperature max_new_tokens engine url batch_size dtype origin out"
    )

    out: str = "outputs/samples"
    """Folder of the sampled set."""
    origin: Literal["target", "text"] = "target"
    """target: the target generates the answers; text: answers, texts and agents' rollouts (docs/data_forms.md) are
    stored as they stand, and only the target's tokenizer and chat template are used. What answered rows have in common
    at their beginnings is learned once."""
    sources: list[PromptSource] = field(default_factory=lambda: [PromptSource("bundled", "all")])
    """Where prompts come from. Prompts that overlap the bundled evaluation prompts are dropped."""
    decontaminate: str | list[str] = ""
    """Files or folders with further evaluation prompts (one path or a list), read as sources are: prompts that overlap
    them are dropped too."""
    filters: FilterConfig = field(default_factory=FilterConfig)
    max_bad_rows: Share = 0.05
    """Largest share of the sources' rows that may be skipped because they cannot be read, or because the target's chat
    template refuses them. With more of them the run ends before it samples; 0: with the first one."""
    template: TemplateSetting | None = None
    """How the chat template renders prompts: its arguments, such as '{enable_thinking: false}'; the name of one of
    several templates; both, '{name: rag, date: 2026-01-31}'; or none, for plain text. A row's own arguments, in its
    column chat_template_kwargs, stand above these. Without a name the template called default is taken."""
    turns: TurnSelection = "last"
    """Which replies of a chat are generated and trained on. last: only the last one; all: every reply, the target's own
    replies replacing those of the chat. all needs a chat template that leaves earlier turns unchanged."""
    window: Annotated[int, at_least(2)] = 512
    """origin text: texts without a prompt are cut into pieces of this many tokens."""
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=1.0))
    """How answers are sampled. At temperature 1 they follow the target's own distribution."""
    max_new_tokens: CountOrZero = 0
    """Tokens of the longest answer; 0: 2,048 where the target's chat template writes thoughts, 1,024 with another one,
    256 for a target without any. A chat ends with the first reply that was cut off here."""
    engine: Annotated[
        Literal["auto", "local", "openai", "vllm"], Spellings({"draftsmith": "local"})
    ] = "auto"
    """local, or draftsmith: this project's engine loads the target; openai: a server that speaks OpenAI's API answers
    (vLLM, SGLang, llama.cpp), and only the target's tokenizer and chat template are loaded; vllm: such a server is
    started for this run, and ended with it; auto: vllm on a GPU where it is installed and the other settings are not
    of the local engine, else local."""
    vllm_python: str = ""
    """engines vllm and auto: the interpreter of the environment with vLLM; empty: $VLLM_PYTHON, else
    .venv-vllm/bin/python."""
    vllm_args: list[str] = field(default_factory=list)
    """engines vllm and auto: further arguments of its server, such as '[--tensor-parallel-size, "4"]'. Empty: a copy of
    the target on the GPU of each process."""
    start_timeout: Annotated[float, above(0, 86_400)] = 1800.0
    """engine vllm: seconds that its server may take to load the target."""
    url: str = ""
    """engine openai: the address of the server's API, such as http://localhost:8000/v1. A key is read from the
    environment variable OPENAI_API_KEY."""
    model: str = ""
    """engine openai: the server's name for the target; empty: the only model that it serves."""
    concurrency: Annotated[int, at_least(1, 4096)] = 32
    """engines openai and vllm: requests that each process has open at the same time; 256 at least where auto chose
    vllm."""
    timeout: Annotated[float, above(0, 86_400)] = 600.0
    """engines openai and vllm: seconds until a request is given up and tried again."""
    retries: CountOrZero = 8
    """engines openai and vllm: how often a request is repeated, after waits that double from 1 to 60 seconds, before
    its prompt counts as failed. A failed prompt is asked again by the next start."""
    batch_size: Count = 32
    """Prompts decoded together by each process, fewer where a GPU lacks the memory. A row that is finished is refilled
    with the next prompt."""
    draft: str = "none"
    """none, ngram, suffix, or a draft's folder or Hub name. With a draft small batches decode faster; answers follow
    the same distribution, because speculative decoding is lossless."""
    k: DraftLength = 4
    """Tokens drafted per round."""
    mode: Literal["auto", "eager", "captured", "compiled", "graph"] = "auto"
    """engine local: how rounds run. compiled: after a minute or more of compilation faster, where prompts are of like
    length; captured and graph: as one CUDA graph, of the usual or of compiled kernels (no GPU has run them yet). auto:
    on a GPU graph, or captured where torch has no Triton, if target and draft allow it; else eager."""
    shard_rows: Count = 128
    """Answers per file at most. Finished ones are written once a minute as well: no more is repeated after a kill."""
    device: str = "auto"
    """auto, cpu or cuda; with several processes auto gives each its own GPU."""
    resume: bool = False
    """Resume in `out` although the settings differ. A run with the same settings resumes by itself."""
    allow_changed: bool = False
    """Go on in `out` although its answers are of another target: other weights, another dtype. Right if you know that
    both write alike, such as the same weights stored with a rounding."""

    @property
    def served(self) -> bool:
        return self.engine in ("openai", "vllm")


@dataclass
class WritePromptsConfig(RunSettings, TargetSettings):
    COMMON: ClassVar[str] = "target out dtype count systems"

    target: str = "assets/target"
    """A model with a chat template, which writes the users' turns: a folder, a GGUF file or a Hub name. The default has
    none, so name one."""
    out: str = "outputs/prompts"
    """Folder of prompts.jsonl, one chat a line."""
    systems: list[str] = field(default_factory=lambda: [""])
    """System messages, which steer what is asked; each gets an equal share. Empty: the template's own."""
    template: TemplateSetting | None = None
    """Which chat template, and its arguments, as in train/sample.py."""
    count: Annotated[int, at_least(1, 10_000_000)] = 1000
    """Prompts to write. Those that are cut off, empty or written twice are dropped afterwards."""
    sampling: SamplingParams = field(
        default_factory=lambda: SamplingParams(temperature=1.0, top_p=0.95)
    )
    max_new_tokens: Count = 256
    """Tokens of the longest prompt; one that has not ended by then is dropped."""
    batch_size: Count = 32
    """Prompts written together."""
    resume: bool = False
    """Continue in `out` although the settings differ, such as a larger count."""
    allow_changed: bool = False
    """Go on in `out` although another target (other weights, another dtype) wrote the prompts that are there."""
