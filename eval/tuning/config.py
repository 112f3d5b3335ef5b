"""The settings of eval/tune.py, and the stages of a sweep that follow from them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from decode.common.errors import UserError
from decode.model.loading import Target
from decode.verification.tree import DynamicTree, expected_tokens_per_round, optimal_static_tree
from eval.benchmark import config
from eval.benchmark.config import MethodConfig, TreeConfig
from eval.benchmark.journal import Journal
from eval.benchmark.methods import build_draft, follows_tree_shape
from eval.tasks import loading
from eval.tasks.loading import Task, TaskPrompt
from eval.tuning.sweep import Setting, SweepContext, SweepStage, measure_rank_accuracy


@dataclass
class TuneConfig:
    target: str = "assets/target"
    """The model to be made faster: folder or hub name."""
    revision: str | None = None
    """Commit, tag or branch of a hub target."""
    methods: list[MethodConfig] = field(default_factory=lambda: [MethodConfig("ngram")])
    """Drafts to tune, as eval/run.py takes them; their own k and tree are not used."""
    tasks: list[Task] = field(
        default_factory=lambda: [Task("code"), Task("prose"), Task("arithmetic")]
    )
    """Prompt sets; code, prose and arithmetic are bundled."""
    temperatures: list[float] = field(default_factory=lambda: [0.0, 1.0])
    """0 is greedy."""
    ks: list[int] = field(default_factory=lambda: list(range(1, 11)))
    """Draft lengths to try at batch 1."""
    calibrate: list[int] = field(default_factory=lambda: [2, 6])
    """The two draft lengths that the others are predicted from."""
    tree_nodes: list[int] = field(default_factory=lambda: [8, 16])
    """Sizes of trees to try at batch 1, of those grown by confidence and of the best fixed ones; [] tries none."""
    tree_width: int = 4
    """Children tried of a node."""
    tree_levels: int = 5
    """Depth of trees."""
    batch_sizes: list[int] = field(default_factory=lambda: [2, 4, 8, 16, 32])
    """Prompts decoded together, besides 1; [] tries none."""
    batch_ks: list[int] = field(default_factory=lambda: [1, 2, 4])
    """Draft lengths to try in batches: they are shorter there."""
    top_k: int = 0
    """0 keeps all tokens."""
    top_p: float = 1.0
    """1 keeps all tokens."""
    max_new_tokens: int = 64
    """Longest answer."""
    mode: Literal["eager", "compiled", "graph"] = "eager"
    """compiled takes a minute or more for each setting."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, …"""
    dtype: str = "float32"
    """float32, bfloat16 or float16."""
    seed: int = 0
    out: str = "outputs/tune"
    """Folder for the results."""
    overwrite: bool = False
    """Delete an earlier run of other settings in `out`."""


def check_config(s: TuneConfig) -> None:
    """UserError for settings that make no sweep; the rest is eval/run.py's to judge."""
    config.check(to_eval_config(s))
    lists = {
        "ks": s.ks,
        "batch_ks": s.batch_ks,
        "batch_sizes": s.batch_sizes,
        "tree_nodes": s.tree_nodes,
    }
    for name, values in lists.items():
        if any(value < 1 for value in values) or len(set(values)) < len(values):
            raise UserError(f"{name} {values}: give different whole numbers from 1 on")
    if not s.ks or (s.batch_sizes and not s.batch_ks):
        raise UserError(
            "give at least one draft length in ks, and in batch_ks if there are batch_sizes"
        )
    if len(s.calibrate) != 2 or not 0 < s.calibrate[0] < s.calibrate[1]:
        raise UserError(f"calibrate {s.calibrate}: give two draft lengths, the smaller one first")
    if s.tree_width < 1 or s.tree_levels < 1:
        raise UserError("tree_width and tree_levels must be at least 1")
    if any(m.alpha for m in s.methods):
        raise UserError("simulated acceptance cannot be tuned: drop alpha from the methods")


def to_eval_config(s: TuneConfig) -> config.EvalConfig:
    """What eval/run.py would be given for the same measurement."""
    return config.EvalConfig(
        target=s.target, revision=s.revision, methods=s.methods, tasks=s.tasks,
        temperatures=s.temperatures, top_k=s.top_k, top_p=s.top_p, max_new_tokens=s.max_new_tokens,
        mode=s.mode, device=s.device, dtype=s.dtype, seed=s.seed,
    )  # fmt: skip


def load_sweep_context(s: TuneConfig, target: Target) -> SweepContext:
    """Drafts and prompts, domains alternating so that every batch and each half of the prompts holds all of them."""
    drafts = {
        m.name: build_draft(replace(m, tree=TreeConfig()), target, s.dtype) for m in s.methods
    }
    groups = [
        [x for x in loading.load_task_prompts(task, target) if not x.error] for task in s.tasks
    ]
    items = interleave_groups(groups)
    most = max([1, *s.batch_sizes])
    if len(items) < max(4, most):
        raise UserError(
            f"{len(items)} prompts are too few: need at least 4, and as many as the largest of batch_sizes ({most})"
        )
    return SweepContext(target, drafts, items, s.max_new_tokens, s.top_k, s.top_p, s.mode, s.seed)


def interleave_groups(groups: Sequence[Sequence[TaskPrompt]]) -> list[TaskPrompt]:
    """Pairs of prompts from each group in turn: every other prompt of the whole is every other one of its group."""
    longest = max(map(len, groups), default=0)
    return [item for at in range(0, longest, 2) for group in groups for item in group[at : at + 2]]


def chain_stage(s: TuneConfig, temperature: float) -> SweepStage:
    arms = [Setting(m.name, k, rule=m.rule) for m in s.methods for k in s.ks]
    return SweepStage("chains", tuple(arms), temperature, 1)


def batch_stage(s: TuneConfig, temperature: float, size: int) -> SweepStage:
    arms = [Setting(m.name, k, rule=m.rule) for m in s.methods for k in s.batch_ks]
    return SweepStage("batches", tuple(arms), temperature, size)


def tree_stage(
    s: TuneConfig, load: SweepContext, temperature: float, journal: Journal
) -> tuple[SweepStage, dict[Setting, float]]:
    """Trees grown by confidence and the best fixed ones of the same sizes, and what the fixed ones should yield.

    Fixed trees are fitted to the ranks that every other prompt shows.
    """
    arms: list[Setting] = []
    expected: dict[Setting, float] = {}
    for m in s.methods:
        if not follows_tree_shape(m, load.drafts[m.name]):
            continue
        most = s.tree_width * (1 + (s.tree_levels - 1) * s.tree_width)
        arms += [
            Setting(m.name, s.tree_levels, DynamicTree(s.tree_width, n), m.rule)
            for n in s.tree_nodes
            if n <= most
        ]
        accuracy = journal.once(
            ["ranks", m.name, temperature],
            lambda m=m: fit_rank_accuracy(s, load, m.name, temperature),  # type: ignore[misc]
        )
        for n in s.tree_nodes if accuracy else ():
            fixed = Setting(m.name, len(accuracy), optimal_static_tree(accuracy, n), m.rule)
            arms.append(fixed)
            expected[fixed] = expected_tokens_per_round(fixed.shape, accuracy)  # type: ignore[arg-type]
    return SweepStage("trees", tuple(arms), temperature, 1), expected


def fit_rank_accuracy(
    s: TuneConfig, load: SweepContext, method: str, temperature: float
) -> list[list[float]]:
    """Ranks on every other prompt; a draft with fewer levels than asked for gets what it has."""
    for levels in range(s.tree_levels, 0, -1):
        try:
            return measure_rank_accuracy(
                load, method, load.items[::2], temperature, levels, s.tree_width
            )
        except UserError:  # Medusa has as many levels as heads
            continue
    return []
