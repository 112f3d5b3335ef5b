"""The settings of eval/run.py, and the checks of them before anything is measured."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from decode.common.errors import UserError
from decode.common.ranges import (
    MAX_DRAFT_LENGTH,
    Count,
    CountOrZero,
    DraftLength,
    DtypeName,
    MatchLength,
    Share,
    Temperature,
    TopP,
    TreeRank,
    TreeWidth,
    at_least,
)
from decode.common.target_settings import QUANTIZED_DTYPES, PlacedTargetSettings
from decode.common.template_choice import TemplateSetting
from decode.constraints.grammar import ConstraintConfig, is_constrained
from decode.drafts.adaptive import CONFIDENCE, AdaptiveConfig, Milliseconds
from decode.drafts.mirror import MirrorConfig
from decode.drafts.swift_search import SwiftConfig
from decode.engine.engine import CAPTURED
from decode.model.loading import pick_device
from decode.verification.registry import find_rule
from eval.benchmark.journal import MeasuringSettings
from eval.tasks.dataset_specs import load_dataset_specs
from eval.tasks.loading import Task

ENGINES = ("hf", "hf-assisted", "hf-lookup", "vllm")


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
    """Number type of the draft, such as bfloat16, w8a8 or int4 (weights in four bits, on a CPU); empty: the target's.
    It changes what is drafted, never the output."""
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
    adaptive: str = ""
    """Draft at most `k`: `confidence` stops where the draft is unsure, `acceptance` takes the fastest length for what
    was accepted so far, 0 included, `both`; empty: always `k`. For chains."""
    confidence: Share = CONFIDENCE
    """A chain of `adaptive` ends where the product of its tokens' probabilities falls below this."""
    round_ms: list[Milliseconds] = field(default_factory=list)
    """For `adaptive` by acceptance: milliseconds of a round with K = 0, 1, 2, …; empty: measured while decoding."""
    mirror: MirrorConfig = field(default_factory=MirrorConfig)
    """Drafting while the target verifies, for chains of small language models on a CPU; off with exit_layer 0."""
    tree: TreeConfig = field(default_factory=TreeConfig)
    """For drafts that can propose trees, such as causal ones and early-exit, without `lookup`."""
    rule: str = "exact"
    """Verification rule: exact and block are lossless, typical (Medusa's) is lossy and marked so in the report."""
    alpha: list[Share] = field(default_factory=list)
    """Simulates this acceptance rate by position (the last one continues), at temperature 0: the engine's speed with a
    draft of that quality and the cost of `draft` (none if that is empty). The report marks the method as simulated."""


def adaptive_config(m: MethodConfig) -> AdaptiveConfig | None:
    """How the method adapts the length of chains; None: it does not. UserError for an unknown way."""
    return AdaptiveConfig(m.adaptive, m.confidence, tuple(m.round_ms)) if m.adaptive else None


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
    template: TemplateSetting | None = None
    """How the chat template renders prompts, as in train/sample.py: its arguments, such as '{enable_thinking: false}',
    or the name of one of several. null: as in the training of the draft; '{}': the tokenizer's own."""
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
    mode: Literal["eager", "captured", "compiled", "graph"] = "eager"
    """compiled is faster after a minute of compilation for each shape. On a GPU only: captured, each round as one CUDA
    graph without compilation, and graph, the same of compiled code."""
    acceptance: AcceptanceComparisonConfig = field(default_factory=AcceptanceComparisonConfig)
    """Pairs of methods whose acceptance to compare."""
    constraint: ConstraintConfig = field(default_factory=ConstraintConfig)
    """The grammar of all answers, of plain decoding too; none: any text. Needs llguidance."""
    compare: str = ""
    """Other engines on the same prompts, separated by commas: hf (transformers' generate), hf-assisted (its assisted
    generation, with each causal draft), hf-lookup (its prompt lookup, for each method ngram), vllm."""
    vllm_python: str = ""
    """Interpreter of an environment that has vLLM."""
    check_law: CountOrZero = 0
    """Sampled tokens per method for the test that its output follows the target's distribution; 0 skips it. It needs a
    temperature above 0; 20000 tokens show a shift of 2.7 % of the probability."""
    run_code: bool = False
    """Run the code that models write for tasks with tests: in a process with little time and memory and no network,
    but with your user's rights. Leave it off for models that you do not trust."""
    phase_prompts: CountOrZero = 2
    """Prompts per task for the separate pass that times draft and verify; 0 skips it."""


def requested_engines(s: EvalConfig) -> list[str]:
    """The engines named in `compare`."""
    return [name.strip() for name in s.compare.split(",") if name.strip()]


def input_paths(s: EvalConfig) -> list[str]:
    """What the run reads: folders and files, or names of other things."""
    models = [s.target, s.original, *(m.draft for m in s.methods)]
    grammars = [s.constraint.json_schema, s.constraint.grammar]
    return [*models, *grammars, *(task.path for task in s.tasks)]


def check(s: EvalConfig) -> None:
    """UserError for settings that contradict each other."""
    names, tasks = [m.name for m in s.methods], [task.name for task in s.tasks]
    engines, kinds = requested_engines(s), load_dataset_specs()
    grammar = is_constrained(s.constraint)
    on_gpu = pick_device(s.device).startswith("cuda")
    _refuse(
        (not s.temperatures or not s.tasks, "give at least one temperature and one task"),
        (len({*s.temperatures}) < len(s.temperatures), f"temperatures {s.temperatures}: give each one once"),
        (s.mode in CAPTURED and not on_gpu, f"mode {s.mode} needs a CUDA device: choose eager or compiled"),
        *((x.kind not in ("", *kinds), f"task {x.name!r}: no kind {x.kind!r}; there are {', '.join(kinds)}")
          for x in s.tasks),
        (len({*tasks, "all"}) <= len(tasks),
         f"tasks {', '.join(tasks)}: give every task its own name; `all` is the pooled one"),
        (len({*names, "plain", ""}) < len(names) + 2, "give every method its own name; plain is always there"),
        *((len(x) != 2 or len({*x} & {*names}) != 2,
           f"acceptance.pairs {x}: give pairs of two of the methods {', '.join(names)}") for x in s.acceptance.pairs),
        *((x not in ENGINES, f"compare: no engine {x!r}; there are {', '.join(ENGINES)}") for x in engines),
        ("vllm" in engines and not s.vllm_python,
         "compare vllm: give --vllm_python, an interpreter that has vLLM"),
        ("vllm" in engines and s.dtype in QUANTIZED_DTYPES,
         f"compare vllm: it has no dtype {s.dtype}: choose another or drop vllm"),
        (s.check_law and not any(s.temperatures), "check_law tests sampling: add a temperature above 0"),
        (grammar and s.mode != "eager",
         "constraint: a grammar is asked for each token on the host: choose mode eager"),
        (grammar and (engines or s.check_law or s.original),
         "constraint: leave out compare, check_law and original, which know no grammar"),
    )  # fmt: skip
    for m in s.methods:
        _check_method(s, m, grammar)


def _check_method(s: EvalConfig, m: MethodConfig, grammar: bool) -> None:
    find_rule(m.rule)  # raises UserError, as adaptive_config does
    adaptive_config(m)
    captured, name, nodes = s.mode in CAPTURED, f"method {m.name!r}", len(m.tree.paths)
    tree, mirror = m.tree.nodes > 0, m.mirror.exit_layer > 0
    _refuse(
        (nodes > MAX_DRAFT_LENGTH, f"{name}: tree.paths has {nodes} nodes: give at most {MAX_DRAFT_LENGTH:,}"),
        (m.layers and m.draft, f"{name}: layers is for early-exit and swift, without a draft"),
        (m.alpha and any(s.temperatures),
         f"{name} simulates acceptance, which needs temperature 0: set --temperatures '[0.0]'"),
        (m.alpha and (tree or m.lookup or m.rule != "exact" or captured),
         f"{name} simulates chains: give it no tree, no lookup and no rule, and a mode without a CUDA graph"),
        (m.lookup and captured,
         f"{name}: in mode {s.mode} the host cannot ask a lookup: choose eager or compiled"),
        (m.adaptive and (m.alpha or captured),
         f"{name}: adaptive is for real drafts, and in mode {s.mode} the host cannot end a chain: choose eager or "
         "compiled"),
        (m.round_ms and m.adaptive in ("", "confidence"),
         f"{name}: round_ms is for adaptive: acceptance or both"),
        ((m.swift != SwiftConfig() or m.state) and (m.name != "swift" or m.draft),
         f"{name}: swift and state are for the method swift without a draft"),
        (mirror and (m.alpha or m.adaptive or m.lookup or s.mode != "eager"),
         f"{name}: mirror is for small language models alone and mode eager: drop alpha, adaptive, lookup and mode"),
        (grammar and (m.alpha or m.adaptive or tree or m.tree.paths or mirror),
         f"{name}: a grammar follows chains of K real drafts: leave out alpha, adaptive, tree, mirror"),
    )  # fmt: skip


def _refuse(*cases: tuple[object, str]) -> None:
    """UserError with the message of the first case that holds."""
    for holds, message in cases:
        if holds:
            raise UserError(message)
