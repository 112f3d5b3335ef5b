"""The settings of drafts that look for something while they decode, and those of decode/generate.py, which has all.

Nothing here imports torch: commands say their --help at once.
"""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from decode.common.chat.choice import TrainedTemplate
from decode.common.ranges import (
    Count,
    CountOrZero,
    DraftLength,
    DtypeName,
    MatchLength,
    Seed,
    Share,
    above,
    at_least,
)
from decode.common.target_settings import PlacedTargetSettings, SamplingParams

MAX_BRANCHES = 16
LEARN_RATE = 5.0
LearnRate = Annotated[float, above(0, 100)]


@dataclass(frozen=True)
class SwiftConfig:
    """Settings of SWIFT. The defaults are those of its authors."""

    skip_threshold: Share = 0.8
    """Drafting stops behind a token to which the draft gives less probability. It is no threshold for layers."""
    min_layers: CountOrZero = 0
    """Layers' worth of sub-layers that are never skipped, the first and the last included."""
    adaptive: bool = True
    """Search for a better set while decoding; False: keep the one at hand."""
    ratio: Share = 0.45
    """Share of the sub-layers between the first and the last layer that is skipped."""
    window: Count = 32
    """Tokens of an answer on which a set is tried."""
    max_iterations: CountOrZero = 1000
    """Sets that are tried at most."""
    tolerance: Count = 300
    """Sets tried without improvement after which the search ends."""
    max_score: Share = 0.93
    """Score at which the search ends."""
    bayes_every: Annotated[int, at_least(2, 10_000)] = 25
    """Every such set is chosen by Bayesian optimisation, the others at random."""
    seed: Seed = 0


@dataclass(frozen=True)
class MirrorConfig:
    """Where the target's pass is read, and how many outcomes are drafted for."""

    exit_layer: CountOrZero = 0
    """Draft the next proposal while the target verifies this one: behind the outcomes that are most probable by the
    target's first `exit_layer` layers. For small language models as drafts, on a CPU; 0: draft after verification."""
    branches: Annotated[int, at_least(0, MAX_BRANCHES)] = 2
    """Bonus tokens drafted for at each of the K + 1 positions. 0: the draft goes on behind its own proposal from the
    beginning of the target's pass, as if all of it would be accepted."""
    overlap: bool = True
    """Draft in a second thread, each with half of the cores; false: the target waits (for measurements)."""


@dataclass
class LoadingSettings(PlacedTargetSettings):
    """Which target decodes, in what, and how its chats are rendered."""

    dtype: DtypeName = "auto"
    """As in the other commands; auto: float32 on a CPU, on a GPU what the checkpoint is stored in (float16 for bfloat16
    where the card only emulates that, bfloat16 for a GGUF)."""
    template: TrainedTemplate = None


@dataclass
class DecodingSettings:
    """How a prompt is continued once target and draft are loaded."""

    image: str | list[str] = ""
    """Image files that stand before the prompt, a path or a list [a.png, b.png]; for vision-language targets."""
    k: DraftLength = 4
    """Tokens drafted per round."""
    lookup: str = ""
    """`ngram` or `suffix`: where the text repeats itself, copy from it and do not ask the draft; empty: never."""
    min_match: MatchLength = 3
    """Tokens that `lookup` must find again."""
    confidence: Share = 0.0
    """Draft fewer than `k` where the draft is unsure: a chain ends where the product of its tokens' probabilities falls
    below this, such as 0.3. 0: always `k`."""
    mirror: MirrorConfig = field(default_factory=MirrorConfig)
    """Drafting while the target verifies; --mirror.exit_layer switches it on."""
    learn: bool = False
    """The draft learns from what verification computes of the target, which never changes the output's distribution.
    For chains of EAGLE-3 heads and of small language models with attention alone and the target's tokenizer."""
    learn_rate: LearnRate = LEARN_RATE
    """The size of the steps in which it learns."""
    max_new_tokens: Count = 128
    """Tokens generated at most."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """How tokens are sampled; temperature 0 is greedy."""
    json_schema: str = ""
    """The answer is JSON of this schema: a file, or the schema itself, {…}. Needs llguidance, as the next two do."""
    regex: str = ""
    """The answer matches this regular expression."""
    grammar: str = ""
    """The answer follows the Lark grammar in this file (llguidance's dialect; the rule `start` is the whole text)."""
    seed: Seed = 0
    """Seed of sampling; equal seeds give equal text."""


@dataclass
class GenerateConfig(DecodingSettings, LoadingSettings):
    COMMON: ClassVar[str] = (
        "target draft prompt prompt_file image k lookup max_new_tokens sampling.temperature dtype device"
    )

    prompt: str = ""
    """The text to continue, or to answer if the target has a chat template."""
    prompt_file: str = ""
    """A file to read the prompt from instead."""
    draft: str = "ngram"
    """Folder or Hub name of a draft; `ngram`, `suffix`: lookup in the text so far; `swift`: the target without some
    sub-layers; `grammar`: only tokens that a grammar forces; `none`: plain decoding."""
    draft_dtype: DtypeName = ""
    """What the draft computes in, such as bfloat16, or on a CPU w8a8 or int4 (weights in four bits); empty: the
    target's dtype. It never changes the output."""
    swift: SwiftConfig = field(default_factory=SwiftConfig)
    """--draft swift: settings of the drafted chains and of the search for the sub-layers to skip."""
    state: str = ""
    """--draft swift, --learn true: folder in which the search, or what was learned, is kept from run to run; empty:
    each run begins anew."""
    rejected: bool = True
    """Show rejected tokens too. They are never shown outside a terminal."""
