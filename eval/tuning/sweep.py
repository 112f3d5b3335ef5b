"""A sweep: rounds of many settings timed in turn, and the ranks at which a draft has the target's tokens.

The loop is that of eval/benchmark/timing.py. Every other batch reverses the order of the settings.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from decode.common.journal import Journal
from decode.engine.records import RoundRecord
from decode.verification.tree import StaticTree, tree_from_paths
from eval.benchmark.methods import PLAIN_DECODING, Method
from eval.benchmark.timing import InterleavedTimer, TimingContext, TimingResult
from eval.metrics.acceptance import timed_places
from eval.tasks.loading import TaskPrompt

RANK_ROWS = 8
"""Prompts decoded together where ranks are counted, which needs no clock."""


@dataclass(frozen=True)
class SweepStage:
    """Settings that are measured together, beside plain decoding, at one temperature and batch size."""

    name: str
    settings: tuple[Method, ...]
    temperature: float
    batch_size: int

    def key(self) -> list[Any]:
        """Begins the keys of its journal entries."""
        labels = [setting.label for setting in self.settings]
        return [self.name, labels, self.temperature, self.batch_size]


def full_batches(context: TimingContext, size: int) -> list[Sequence[TaskPrompt]]:
    """Without a smaller last batch, which would be faster than the others and count as this size."""
    return [batch for batch in context.batches(size) if len(batch) == size]


def run_sweep(
    context: TimingContext, stage: SweepStage, journal: Journal, progress: Callable[[], None]
) -> TimingResult:
    """Every setting of the stage on every full batch of prompts; settings that a draft cannot do are `refused`.

    Records are those of `rounds_only` (eval/benchmark/turns.py), without turns that were dropped; where these are too
    many, all of them, and the stage is void.
    """
    sampling = context.sampling(stage.temperature)
    timer = InterleavedTimer(context, stage.settings, sampling, plain_twice=False, tolerant=False)
    result = timer.run(full_batches(context, stage.batch_size), journal, stage.key(), progress)
    places, result.void = timed_places([x.untimed for x in result.records[PLAIN_DECODING]])
    result.records = {m: [own[i] for i in places] for m, own in result.records.items()}
    return result


def comb_tree(levels: int, width: int) -> StaticTree:
    """A chain of the draft's first choices with `width` children at every node: shows the rank of each token."""
    return tree_from_paths(
        [[0] * depth + [rank] for depth in range(levels) for rank in range(width)]
    )


def measure_rank_accuracy(
    context: TimingContext,
    method: Method,
    items: Sequence[TaskPrompt],
    temperature: float,
    levels: int,
    width: int,
) -> list[list[float]]:
    """[depth][rank]: how often the target's token was the draft's rank-th, where the first choices above were right.

    The input of decode.verification.tree.optimal_static_tree. Depths that no round reached are left out.
    """
    tree = comb_tree(levels, width)
    engine = context.build_engine(
        replace(method, k=levels, shape=tree), context.sampling(temperature)
    )
    rounds = engine.speculate(
        [item.prompt_ids for item in items],
        rows=RANK_ROWS,
        max_new_tokens=context.max_new_tokens,
        seed=context.seed + 1,
    )
    hits = [[0] * width for _ in range(levels)]
    reached = [0] * levels
    for record in rounds:
        for depth, rank in emitted_ranks(record, tree):
            reached[depth] += 1
            if rank is not None:
                hits[depth][rank] += 1
    return [[hit / n for hit in row] for row, n in zip(hits, reached, strict=True) if n > 0]


def emitted_ranks(record: RoundRecord, tree: StaticTree) -> list[tuple[int, int | None]]:
    """(depth, rank of the token that was emitted there, None for a token off the tree) down the first choices.

    Empty for a round that did not draft the whole tree, as at the end of the context.
    """
    if len(record.proposed) != len(tree.parents):
        return []
    ranks: list[tuple[int, int | None]] = []
    node = 0
    for depth, token in enumerate(record.tokens[: tree.depth]):
        children = [i for i, parent in enumerate(tree.parents) if parent == node]
        hit = next((i for i in children if record.proposed[i] == token), None)
        ranks.append((depth, None if hit is None else tree.ranks[hit]))
        if hit is None or tree.ranks[hit] != 0:
            break
        node = hit + 1
    return ranks
