"""The checks of the settings of eval/tune.py, and the stages of its sweep."""

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from math import prod

from decode.common.errors import UserError
from decode.common.journal import Journal
from decode.engine.request_checks import check_draft_length
from decode.model.loading import Target
from decode.verification.tree import DynamicTree, expected_tokens_per_round, optimal_static_tree
from eval.benchmark import config
from eval.benchmark.methods import Method, build_draft, follows_tree_shape
from eval.benchmark.timing import TimingContext
from eval.settings.evaluation import EvalConfig, MethodConfig, TreeConfig, TuneConfig
from eval.tasks import loading
from eval.tasks.loading import TaskPrompt
from eval.tuning.sweep import SweepStage, measure_rank_accuracy

TUNED_EXIT = "early-exit"
"""The method whose number of layers is tuned; a trained exit has the one that it was trained for."""


def check_config(s: TuneConfig) -> None:
    """UserError for settings that make no sweep, or that eval/run.py would refuse."""
    config.check(to_eval_config(s))
    if not s.methods:
        raise UserError("methods is empty: give at least one draft to tune")
    for name in ("ks", "batch_ks", "batch_sizes", "tree_nodes", "layers"):
        values = vars(s)[name]
        if len(set(values)) < len(values):
            raise UserError(f"{name} {values}: give every number once")
    if not s.ks or (s.batch_sizes and not s.batch_ks):
        raise UserError(
            "give at least one draft length in ks, and in batch_ks if there are batch_sizes"
        )
    if len(s.calibrate) != 2 or s.calibrate[0] >= s.calibrate[1]:
        raise UserError(f"calibrate {s.calibrate}: give two draft lengths, the smaller one first")
    if any(m.confidence for m in s.methods):
        raise UserError(
            "confidence sets the draft length by itself: drop it from the methods to tune"
        )
    if any(m.learn for m in s.methods):
        raise UserError("learn: a setting would be judged by what others taught the draft: drop it")
    if s.layers and not any(m.name == TUNED_EXIT for m in s.methods):
        raise UserError(f"layers {s.layers} are for the method {TUNED_EXIT}: add it or drop them")


def to_eval_config(s: TuneConfig) -> EvalConfig:
    """The settings of eval/run.py for the same measurement."""
    shared = {field.name for field in fields(s)} & {field.name for field in fields(EvalConfig)}
    own = {"out", "overwrite", "allow_changed"}
    return EvalConfig(**{name: vars(s)[name] for name in shared - own})


def load_methods(s: TuneConfig, target: Target) -> list[Method]:
    """Each method's draft as a chain, without a draft length yet; the stages set both."""
    lengths = {"ks": s.ks, "batch_ks": s.batch_ks, "tree_levels": [s.tree_levels]}
    for name, values in lengths.items():
        check_draft_length(target, max(values, default=1), name)
    return [
        Method(
            m.name,
            build_draft(replace(m, tree=TreeConfig()), target, s.dtype),
            rule=m.rule,
            layers=m.layers if s.layers and m.name == TUNED_EXIT else 0,
        )
        for m in with_layers_to_try(s)
    ]


def with_layers_to_try(s: TuneConfig) -> list[MethodConfig]:
    """The methods, early exit once for each of `layers`."""
    return [
        replace(m, layers=layers)
        for m in s.methods
        for layers in (s.layers if s.layers and m.name == TUNED_EXIT else [m.layers])
    ]


def load_timing_context(s: TuneConfig, target: Target) -> TimingContext:
    """The prompts, domains alternating so that every batch and each half of the prompts holds all of them."""
    groups = [
        [x for x in loading.load_task_prompts(task, target) if not x.error] for task in s.tasks
    ]
    items = interleave_groups(groups)
    largest = max([1, *s.batch_sizes])
    if len(items) < max(4, largest):
        raise UserError(
            f"{len(items)} prompts are too few: need at least 4, and as many as the largest of batch_sizes ({largest})"
        )
    return TimingContext(target, items, s.max_new_tokens, s.top_k, s.top_p, s.mode, s.seed)


def interleave_groups(groups: Sequence[Sequence[TaskPrompt]]) -> list[TaskPrompt]:
    """Pairs of prompts from each group in turn: every other prompt of the result is every other one of its group."""
    longest = max(map(len, groups), default=0)
    return [item for at in range(0, longest, 2) for group in groups for item in group[at : at + 2]]


def chain_stages(s: TuneConfig, methods: Sequence[Method], temperature: float) -> list[SweepStage]:
    """Every draft length in `ks` at batch 1, and every one in `batch_ks` at the larger batches."""
    sizes = [("chains", s.ks, 1), *(("batches", s.batch_ks, b) for b in s.batch_sizes if b > 1)]
    return [
        SweepStage(name, tuple(replace(m, k=k) for m in methods for k in ks), temperature, size)
        for name, ks, size in sizes
    ]


def tree_stage(
    s: TuneConfig,
    context: TimingContext,
    methods: Sequence[Method],
    temperature: float,
    journal: Journal,
) -> tuple[SweepStage, dict[Method, float]]:
    """(trees grown by confidence and the best fixed trees of the same sizes, {fixed tree: expected tokens a round}).

    Fixed trees are fitted to the ranks that every other prompt shows.
    """
    settings: list[Method] = []
    expected: dict[Method, float] = {}
    largest = s.tree_width * (1 + (s.tree_levels - 1) * s.tree_width)
    for m, method in zip(with_layers_to_try(s), methods, strict=True):
        assert method.draft is not None
        if not follows_tree_shape(m, method.draft):
            continue
        settings += [
            replace(method, k=s.tree_levels, shape=DynamicTree(s.tree_width, n))
            for n in s.tree_nodes
            if n <= largest
        ]
        accuracy = journal.get_or_measure(
            ["ranks", method.name, temperature, *([method.layers] if method.layers else [])],
            partial(fit_rank_accuracy, context, method, temperature, s.tree_levels, s.tree_width),
        )
        most = sum(prod(map(len, accuracy[:levels])) for levels in range(1, len(accuracy) + 1))
        for n in (n for n in s.tree_nodes if n <= most):  # few levels have no larger trees
            tree = optimal_static_tree(accuracy, n)
            fixed = replace(method, k=len(accuracy), shape=tree)
            settings.append(fixed)
            expected[fixed] = expected_tokens_per_round(tree, accuracy)
    return SweepStage("trees", tuple(settings), temperature, 1), expected


def fit_rank_accuracy(
    context: TimingContext, method: Method, temperature: float, levels: int, width: int
) -> list[list[float]]:
    """measure_rank_accuracy on every other prompt, with as many levels as the draft has, at most `levels`."""
    while levels > 0:
        try:
            return measure_rank_accuracy(
                context, method, context.items[::2], temperature, levels, width
            )
        except UserError:  # Medusa has as many levels as heads
            levels -= 1
    return []
