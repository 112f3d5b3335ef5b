"""Rounds of many settings, interleaved: every prompt is decoded by all of them in turn before the next one is.

Drift of the machine hits all settings alike, and every other prompt turns the order round. A unit, one batch of prompts
under all settings, is kept in the journal as soon as it is done.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from decode.common.errors import UserError
from decode.drafts.base import Draft
from decode.engine.engine import RoundRecord, SpeculativeEngine, row_seeds
from decode.model.loading import Target
from decode.verification.sampling import SamplingParams
from decode.verification.tree import DynamicTree, StaticTree, TreeShape, tree_from_paths
from eval.benchmark.journal import Journal
from eval.metrics.records import DecodeRecord
from eval.tasks.loading import TaskPrompt
from eval.tasks.stop_strings import collect_until_stop


@dataclass(frozen=True)
class Setting:
    """A method at one setting; method plain is plain decoding."""

    method: str
    k: int = 1
    shape: TreeShape = None
    rule: str = "exact"

    @property
    def setting(self) -> str:
        """The words for it."""
        if isinstance(self.shape, DynamicTree):
            return f"tree of {self.shape.nodes}, width {self.shape.width}, K = {self.k}"
        if isinstance(self.shape, StaticTree):
            return f"static tree of {len(self.shape.parents)}, depth {self.shape.depth}"
        return f"K = {self.k}"

    @property
    def label(self) -> str:
        """Its name in the journal."""
        return f"{self.method}, {self.setting}, {self.rule}"


PLAIN_DECODING = Setting("plain")


@dataclass(frozen=True)
class SweepStage:
    """What is measured together: these arms beside plain decoding, at one temperature and batch size."""

    name: str
    arms: tuple[Setting, ...]
    temperature: float
    batch_size: int

    def key(self, *more: Any) -> list[Any]:
        labels = [arm.label for arm in self.arms]
        return [self.name, labels, self.temperature, self.batch_size, *more]


@dataclass(frozen=True)
class SweepContext:
    """What decodes what, the same for every stage."""

    target: Target
    drafts: Mapping[str, Draft]
    items: Sequence[TaskPrompt]
    max_new_tokens: int
    top_k: int = 0
    top_p: float = 1.0
    mode: str = "eager"
    seed: int = 0

    def sampling(self, temperature: float) -> SamplingParams:
        return SamplingParams(temperature, self.top_k, self.top_p)

    def batches(self, size: int) -> list[Sequence[TaskPrompt]]:
        """Full ones: a smaller batch is faster, and would count as this size."""
        return [self.items[at : at + size] for at in range(0, len(self.items) - size + 1, size)]


@dataclass(frozen=True)
class SweepResult:
    """{arm: one Sample for each prompt}, PLAIN among them, and {arm: why it cannot be}."""

    samples: dict[Setting, list[DecodeRecord]]
    refused: dict[Setting, str]


def run_sweep(
    load: SweepContext, stage: SweepStage, journal: Journal, progress: Callable[[], None]
) -> SweepResult:
    """Every arm of the stage on every full batch of prompts. `seconds` of a sample are those of its rounds."""
    sampling = load.sampling(stage.temperature)
    engines: dict[Setting, SpeculativeEngine] = {}

    def start() -> dict[str, str]:
        """Warms every arm up; what a draft cannot do shows here."""
        refused = {}
        for arm in (PLAIN_DECODING, *stage.arms):
            try:
                engines[arm] = build_engine(load, arm, sampling)
                time_batch(load, engines[arm], arm, load.items[: stage.batch_size], 0, 8)
            except UserError as error:
                refused[arm.label] = str(error)
        return refused

    said = journal.once(stage.key("refused"), start)
    arms = [PLAIN_DECODING, *(arm for arm in stage.arms if arm.label not in said)]
    samples: dict[Setting, list[DecodeRecord]] = {arm: [] for arm in arms}
    for number, batch in enumerate(load.batches(stage.batch_size)):

        def measure(number: int = number, batch: Sequence[TaskPrompt] = batch) -> dict[str, Any]:
            if not engines:
                start()
            order = arms if number % 2 == 0 else arms[::-1]
            first = number * stage.batch_size
            found = {
                arm.label: time_batch(load, engines[arm], arm, batch, first, load.max_new_tokens)
                for arm in order
            }
            return {name: [vars(sample) for sample in own] for name, own in found.items()}

        ids = [[item.task, item.id] for item in batch]
        kept = journal.once(stage.key(ids), measure)
        for arm in arms:
            samples[arm] += [DecodeRecord(**values) for values in kept[arm.label]]
        progress()
    refused = {arm: said[arm.label] for arm in stage.arms if arm.label in said}
    return SweepResult(samples, refused)


def build_engine(load: SweepContext, arm: Setting, sampling: SamplingParams) -> SpeculativeEngine:
    """Ready to decode. Arms of one method share its draft, which `timed` sets to the arm's shape."""
    draft = load.drafts.get(arm.method)
    if draft is not None:
        draft.shape = arm.shape
    return SpeculativeEngine(
        load.target, draft, k=arm.k, sampling=sampling, rule=arm.rule, mode=load.mode
    )


def time_batch(
    load: SweepContext,
    engine: SpeculativeEngine,
    arm: Setting,
    batch: Sequence[TaskPrompt],
    first: int,
    max_new_tokens: int,
) -> list[DecodeRecord]:
    """One Sample for each item of a batch, under its domain's name; rows are seeded by their place among all items.

    Seconds are those of a row's rounds: prefill is the same for every setting, and a row that has ended early waits
    for no other, as it would not in a server that fills its place.
    """
    if engine.draft is not None:
        engine.draft.shape = arm.shape
    prompts = [item.prompt_ids for item in batch]
    seeds = row_seeds(load.seed, first + len(batch))[first:]
    records = engine.speculate(prompts, max_new_tokens=max_new_tokens, seeds=seeds)
    outputs = collect_until_stop(
        prompts, records, [item.stop for item in batch], load.target.tokenizer
    )
    return [
        DecodeRecord(
            task=item.domain or item.task,
            id=f"{item.task}/{item.id}",
            prompt_tokens=len(item.prompt_ids),
            output_tokens=len(out.output_ids),
            rounds=out.rounds,
            seconds=sum(out.round_seconds),
            first_token_seconds=out.first_token_seconds,
            round_seconds=out.round_seconds,
            rows=len(batch),
        )
        for item, out in zip(batch, outputs, strict=True)
    ]


def comb_tree(levels: int, width: int) -> StaticTree:
    """A chain of the draft's first choices with `width` children at every node of it: shows the rank of each token."""
    return tree_from_paths(
        [[0] * depth + [rank] for depth in range(levels) for rank in range(width)]
    )


def measure_rank_accuracy(
    load: SweepContext,
    method: str,
    items: Sequence[TaskPrompt],
    temperature: float,
    levels: int,
    width: int,
) -> list[list[float]]:
    """[depth][rank]: how often the target's token was the draft's rank-th, where the first choices above were right.

    What decode.tree.best_static wants. Decoded a few rows at a time: ranks need no clock. Depths that no round
    reached are left out.
    """
    tree = comb_tree(levels, width)
    engine = build_engine(load, Setting(method, levels, tree), load.sampling(temperature))
    prompts = [item.prompt_ids for item in items]
    records = engine.speculate(
        prompts, rows=8, max_new_tokens=load.max_new_tokens, seed=load.seed + 1
    )
    hits = [[0] * width for _ in range(levels)]
    reached = [0] * levels
    for record in records:
        for depth, rank in emitted_ranks(record, tree):
            reached[depth] += 1
            if rank is not None:
                hits[depth][rank] += 1
    return [[hit / n for hit in row] for row, n in zip(hits, reached, strict=True) if n > 0]


def emitted_ranks(record: RoundRecord, tree: StaticTree) -> list[tuple[int, int | None]]:
    """(depth, rank of the token that was emitted there, None for a token off the tree) down the first choices.

    Nothing for a round that did not draft the whole tree, as at the end of the context.
    """
    if len(record.proposed) != len(tree.parents):
        return []
    found: list[tuple[int, int | None]] = []
    node = 0
    for depth, token in enumerate(record.tokens[: tree.depth]):
        children = [i for i, parent in enumerate(tree.parents) if parent == node]
        hit = next((i for i in children if record.proposed[i] == token), None)
        found.append((depth, None if hit is None else tree.ranks[hit]))
        if hit is None or tree.ranks[hit] != 0:
            break
        node = hit + 1
    return found
