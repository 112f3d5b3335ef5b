"""What is measured: tasks with their prompts, methods, and the settings of the commands that measure them."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from decode.common.chat.choice import TemplateSetting, TrainedTemplate
from decode.common.ranges import (
    MAX_DRAFT_LENGTH,
    Count,
    CountOrZero,
    DraftLength,
    DtypeName,
    MatchLength,
    Seed,
    Share,
    Temperature,
    TopP,
    TreeNodes,
    TreeRank,
    TreeWidth,
    at_least,
)
from decode.common.run_dir import RunSettings
from decode.common.target_settings import ConstraintConfig, PlacedTargetSettings, TargetSettings
from decode.drafts.settings import LEARN_RATE, LearnRate, MirrorConfig, SwiftConfig


@dataclass
class Task:
    """A named set of prompts."""

    name: str
    """code, prose, arithmetic and json are bundled; mt-bench, humaneval, mbpp, gsm8k, xsum, cnn-dailymail, wmt-en-de
    and alpaca come from a local file or the Hub; spec-bench, speed-bench, speculator-benchmarks and any other name need
    a path."""
    path: str = ""
    """A .jsonl, .json or .txt file, also .gz or .zst, or a .parquet; a folder of them or of `save_to_disk`; or a Hub
    name. Without a spec its rows hold `turns` (the user's messages, in order), else `messages` (a chat, maybe as JSON),
    `prompt` and others, as training reads them, and maybe `tools`, `chat_template_kwargs`, `id` and `domain`; the
    paragraphs of a .txt file are prompts. Empty: bundled, or the Hub data set of the spec."""
    split: str = ""
    """Which split of a Hub data set or of a folder; empty: the spec's, else test, or the only one that there is."""
    kind: str = ""
    """Name of the spec to read the file by, where `name` is not one."""
    limit: CountOrZero = 0
    """Number of prompts (or chats) to take from the start; 0 takes all."""
    turns: CountOrZero = 0
    """Number of turns of a chat to take; 0 takes all."""
    too_long: Literal["refuse", "fail"] = "refuse"
    """For a prompt that leaves no room in the target's context: refuse ends the command, fail reports it as failed."""


@dataclass
class TreeConfig:
    """A tree grown where the draft is confident (EAGLE-2), or a fixed one; with neither nodes nor paths, a chain."""

    width: TreeWidth = 4
    """Nodes expanded per level, and children tried of each."""
    nodes: Annotated[int, at_least(0, MAX_DRAFT_LENGTH)] = 0
    """Drafted nodes that the target verifies."""
    paths: list[list[TreeRank]] = field(default_factory=list)
    """A fixed tree instead: the ranks on the way to each node, [[0], [1], [0, 0], …]; eval/tune.py finds the best."""


@dataclass
class MethodConfig:
    """A draft and how it is used."""

    name: str
    """ngram, suffix, early-exit, swift and grammar (tokens that `constraint` forces) need no draft; any other name
    (causal, causal-base, …) needs one."""
    draft: str = ""
    """Folder or Hub name of a saved draft."""
    device: str = ""
    """Device of the draft, such as cpu or cuda:1; empty: the target's."""
    dtype: DtypeName = ""
    """Number type of the draft, such as bfloat16, or on a CPU w8a8 or int4 (weights in four bits); empty: the target's.
    It changes what is drafted, never the output."""
    gguf: str = ""
    """compare llamacpp: the same draft as a GGUF file that llama.cpp serves, such as one in Q4_K_M; empty: `draft`, if
    that is a GGUF file, else its weights in `dtype`, or in float32 where that has few bits."""
    k: Annotated[int, at_least(0, MAX_DRAFT_LENGTH)] = 0
    """Tokens, or levels of a tree, drafted per round; 0 takes the setting `k`."""
    layers: CountOrZero = 0
    """early-exit: number of the target's first layers that draft. swift: the same as swift.min_layers."""
    swift: SwiftConfig = field(default_factory=SwiftConfig)
    """swift: settings of the drafted chains and of the search for the sub-layers to skip."""
    state: str = ""
    """swift: folder in which the search is kept from run to run; empty: each run begins anew."""
    lookup: str = ""
    """`ngram` or `suffix`: where the text repeats itself, copy from it and do not ask the draft; empty: never."""
    min_match: MatchLength = 3
    """Tokens that `lookup` must find again."""
    confidence: Share = 0.0
    """Draft fewer than `k` where the draft is unsure: a chain ends where the product of its tokens' probabilities falls
    below this, such as 0.3. 0: always `k`."""
    mirror: MirrorConfig = field(default_factory=MirrorConfig)
    """Drafting while the target verifies, for chains of small language models on a CPU; off with exit_layer 0."""
    learn: bool = False
    """The draft learns from what verification computes of the target, anew at each temperature. For chains of EAGLE-3
    heads and of small language models with attention alone and the target's tokenizer, in mode eager."""
    learn_rate: LearnRate = LEARN_RATE
    """The size of the steps in which it learns."""
    tree: TreeConfig = field(default_factory=TreeConfig)
    """For drafts that can propose trees, such as causal ones and early-exit, without `lookup`."""
    rule: str = "exact"
    """Verification rule: exact and block are lossless, typical (Medusa's) is lossy and marked so in the report."""


@dataclass
class AcceptanceComparisonConfig:
    """Compares α of methods in an untimed pass in batches, which allows more prompts and so narrower intervals."""

    pairs: list[list[str]] = field(default_factory=list)
    """Pairs [a, b] of methods; the report gives α of a minus α of b with a paired interval."""
    temperature: Temperature = 1.0
    prompts: CountOrZero = 0
    """Prompts per task; 0 takes all that the task has, whatever its limit."""
    rows: Count = 16
    """Prompts decoded together."""


@dataclass
class MeasuringSettings(RunSettings):
    allow_changed: bool = False
    """Go on in `out` although the target (its weights or dtype) or a draft is another one than before. Right if you
    know that both decode alike; what is written says that it has measurements of both."""


@dataclass
class EvalConfig(MeasuringSettings, PlacedTargetSettings):
    COMMON: ClassVar[str] = (
        "target methods tasks temperatures k max_new_tokens batch_size mode dtype compare out"
    )

    out: str = "outputs/eval"
    original: str = ""
    """The target before it was trained itself (medusa2, layerskip2); the report then measures how far it has moved."""
    methods: list[MethodConfig] = field(default_factory=lambda: [MethodConfig("ngram")])
    """Methods to compare with plain decoding, which is always measured."""
    tasks: list[Task] = field(
        default_factory=lambda: [Task("code"), Task("prose"), Task("arithmetic")]
    )
    """Prompt sets; code, prose and arithmetic are bundled."""
    template: TrainedTemplate = None
    temperatures: list[Temperature] = field(default_factory=lambda: [0.0, 1.0])
    """0 is greedy."""
    top_k: CountOrZero = 0
    """0 keeps all tokens."""
    top_p: TopP = 1.0
    """1 keeps all tokens."""
    k: DraftLength = 4
    """Tokens drafted per round."""
    max_new_tokens: Count = 128
    """Tokens of the longest answer."""
    batch_size: Count = 1
    """Prompts decoded together."""
    mode: Literal["auto", "eager", "captured", "compiled", "graph"] = "auto"
    """compiled is faster after a minute of compilation for each shape. On a GPU only: captured, each round as one CUDA
    graph without compilation, and graph, the same of compiled code. auto: on a GPU graph, or captured where torch has
    no Triton, if target and all methods allow it; else eager."""
    acceptance: AcceptanceComparisonConfig = field(default_factory=AcceptanceComparisonConfig)
    """Pairs of methods whose acceptance to compare."""
    constraint: ConstraintConfig = field(default_factory=ConstraintConfig)
    """The grammar of all answers, of plain decoding too; none: any text. Needs llguidance."""
    compare: str = ""
    """Other engines on the same prompts, separated by commas: hf (transformers' generate), hf-assisted (its assisted
    generation, with each causal draft), hf-lookup (its prompt lookup, for each method ngram), llamacpp (its server:
    plain, with each draft that it has too, and with its n-grams for each method ngram), vllm."""
    llama_server: str = ""
    """llama.cpp's server; empty: $LLAMA_SERVER, else llama-server in $PATH."""
    llama_gguf: str = ""
    """The target's GGUF file that llama.cpp serves, such as one in Q4_K_M; empty: `target`, if that is a GGUF file,
    else its weights in `dtype`."""
    vllm_python: str = ""
    """Interpreter of an environment that has vLLM; `compare` vllm needs it."""
    vllm_target: str = ""
    """What vLLM serves, such as an int8 checkpoint of the target; empty: `target`."""
    vllm_dtype: str = ""
    """vLLM's dtype; empty: `dtype`."""
    check_law: CountOrZero = 0
    """Sampled tokens per method for the test that its output follows the target's distribution; 0 skips it. It needs a
    temperature above 0; 20000 tokens show a shift of 2.7 % of the probability."""
    run_code: bool = False
    """Run the code that models write for tasks with tests: in a process with little time and memory and no network,
    but with your user's rights. Leave it off for models that you do not trust."""
    phase_prompts: CountOrZero = 2
    """Prompts per task for the separate pass that times draft and verify; 0 skips it."""


@dataclass
class TuneConfig(MeasuringSettings, TargetSettings):
    COMMON: ClassVar[str] = (
        "target methods tasks ks batch_sizes temperatures max_new_tokens dtype out"
    )

    out: str = "outputs/tune"
    methods: list[MethodConfig] = field(default_factory=lambda: [MethodConfig("ngram")])
    """Drafts to tune, with the fields of eval/run.py's methods; their own k and tree are not used."""
    tasks: list[Task] = field(
        default_factory=lambda: [Task("code"), Task("prose"), Task("arithmetic")]
    )
    """Prompt sets; code, prose and arithmetic are bundled."""
    template: TrainedTemplate = None
    temperatures: list[Temperature] = field(default_factory=lambda: [0.0, 1.0])
    """0 is greedy."""
    ks: list[DraftLength] = field(default_factory=lambda: list(range(1, 11)))
    """Draft lengths to try at batch 1."""
    layers: list[Count] = field(default_factory=list)
    """early-exit: numbers of the target's first layers to try, each with every draft length; []: the method's own."""
    calibrate: list[DraftLength] = field(default_factory=lambda: [2, 6])
    """The two draft lengths that the others are predicted from; of a stage that does not try both (`batch_ks`) its
    second and its last, and of fewer than three nothing is predicted."""
    tree_nodes: list[TreeNodes] = field(default_factory=lambda: [8, 16])
    """Nodes of trees to try at batch 1, both grown by confidence and best fixed ones; [] tries none."""
    tree_width: TreeWidth = 4
    """Children tried of a node."""
    tree_levels: DraftLength = 5
    """Depth of trees."""
    batch_sizes: list[Count] = field(default_factory=lambda: [2, 4, 8, 16, 32])
    """Prompts decoded together, besides 1; [] tries none."""
    batch_ks: list[DraftLength] = field(default_factory=lambda: [1, 2, 4])
    """Draft lengths to try in batches, where the best ones are shorter."""
    top_k: CountOrZero = 0
    """0 keeps all tokens."""
    top_p: TopP = 1.0
    """1 keeps all tokens."""
    max_new_tokens: Count = 64
    """Longest answer."""
    mode: Literal["auto", "eager", "captured", "compiled", "graph"] = "auto"
    """compiled and graph take a minute or more for each setting; captured and graph need a GPU. auto: on a GPU
    graph, or captured where torch has no Triton, if target and all methods allow it; else eager."""


@dataclass
class FidelityConfig:
    target: str = "assets/target"
    """The target model: a folder, a GGUF file or a Hub name."""
    revision: str | None = None
    """Commit, tag or branch of a target on the Hub."""
    reference: DtypeName = "float32"
    """What the dtypes are compared with."""
    dtypes: list[DtypeName] = field(default_factory=lambda: ["w8a8", "bfloat16"])
    """float32, bfloat16, float16, w8a8, w4a8, int8, int8_bfloat16; the others' TV is compared with the first one's."""
    tasks: list[Task] = field(
        default_factory=lambda: [Task(x, limit=16) for x in ("code", "prose", "arithmetic")]
    )
    """The prompts, of chats the first turn."""
    template: TemplateSetting | None = None
    """How the chat template renders prompts, as in train/sample.py: its arguments, such as '{enable_thinking: false}',
    or the name of one of several. null and '{}': the tokenizer's own."""
    max_new_tokens: Count = 128
    """Longest answer, in tokens."""
    rows: Count = 16
    """Prompts answered together."""
    samples: str = ""
    """A folder of train/sample.py, whose answers are taken in place of the tasks'."""
    limit: CountOrZero = 0
    """Texts to take from `samples`, from the start; 0 takes all."""
    scored: list[Task] = field(default_factory=list)
    """Tasks with right answers, such as gsm8k and humaneval: reference and dtypes answer them greedily, and their
    scores are compared."""
    run_code: bool = False
    """Run the code of such answers to score it, as in eval/run.py: only for models that you trust."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, …"""
    seed: Seed = 0
    """Of the answers."""
    out: str = ""
    """File for the JSON of the last line; empty: none."""
