"""Times methods against plain decoding on the same prompts, interleaved so that drift hits all alike."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from decode.drafts.base import Draft
from decode.round import Phases
from decode.sampling import Sampling
from decode.speculate import Engine, Output, add, collect, row_seeds_of
from decode.target import Target
from eval.metrics import Sample
from eval.tasks import Item


@dataclass(frozen=True)
class Method:
    """A draft under the name that reports use; draft None is plain decoding."""

    name: str
    draft: Draft | None
    k: int
    rule: str = "exact"
    mode: str = "eager"

    def engine(self, target: Target, sampling: Sampling) -> Engine:
        """Ready to decode; one engine for all prompts, for it compiles at its first."""
        return Engine(
            target,
            self.draft,
            k=max(1, self.k),
            sampling=sampling,
            rule=self.rule,
            mode=self.mode,
        )


@dataclass(frozen=True)
class Run:
    """One prompt decoded by one method; `seconds` is its share of its batch's wall clock."""

    item: Item
    output: Output
    seconds: float

    def sample(self) -> Sample:
        return Sample(
            task=self.item.task,
            id=self.item.id,
            prompt_tokens=len(self.item.prompt_ids),
            output_tokens=len(self.output.output_ids),
            rounds=self.output.rounds,
            seconds=self.seconds,
            first_token_seconds=self.output.first_token_seconds,
            round_seconds=self.output.round_seconds,
        )


def measure(
    target: Target,
    methods: Sequence[Method],
    items: Sequence[Item],
    sampling: Sampling,
    max_new_tokens: int,
    batch_size: int,
    seed: int,
    progress: Callable[[], None],
) -> dict[str, list[Run]]:
    """{method: one Run for each item}. Plain runs before and after the others; its seconds are the mean.

    Every method is warmed up first. Rows are seeded by their place in `items`, whatever the batch.
    """
    plain = Method("plain", None, 0, "exact", methods[0].mode if methods else "eager")
    engines = {m.name: m.engine(target, sampling) for m in [plain, *methods]}
    for engine in engines.values():
        _decode(engine, items[:batch_size], min(max_new_tokens, 8), seed, 0)
    runs: dict[str, list[Run]] = {name: [] for name in engines}
    for start in range(0, len(items), batch_size):
        batch = items[start : start + batch_size]

        def once(name: str, batch: Sequence[Item] = batch, start: int = start) -> list[Run]:
            out = _decode(engines[name], batch, max_new_tokens, seed, start)
            progress()
            return out

        before = once("plain")
        for method in methods:
            runs[method.name] += once(method.name)
        after = once("plain")
        runs["plain"] += [
            Run(a.item, a.output, (a.seconds + b.seconds) / 2)
            for a, b in zip(before, after, strict=True)
        ]
    return runs


def untimed(
    target: Target,
    method: Method,
    items: Sequence[Item],
    sampling: Sampling,
    max_new_tokens: int,
    rows: int,
    seed: int,
    progress: Callable[[], None],
) -> list[Sample]:
    """One Sample for each item, decoded `rows` at a time: right in tokens and rounds, meaningless in seconds."""
    outputs = [Output(item.prompt_ids) for item in items]
    prompts = [item.prompt_ids for item in items]
    engine = method.engine(target, sampling)
    for record in engine.speculate(prompts, rows=rows, max_new_tokens=max_new_tokens, seed=seed):
        add(outputs[record.prompt], record)
        if record.finished:
            progress()
    return [Run(item, out, 0.0).sample() for item, out in zip(items, outputs, strict=True)]


def phase_ms(
    target: Target,
    method: Method,
    items: Sequence[Item],
    sampling: Sampling,
    max_new_tokens: int,
    seed: int,
) -> dict[str, float]:
    """Mean milliseconds a round of {draft, verify, overhead}, from a pass of its own: its clocks cost time."""
    phases = Phases()
    engine = method.engine(target, sampling)
    for row, item in enumerate(items):
        seeds = [row_seeds_of(seed, row + 1)[row]]
        records = engine.speculate(
            [item.prompt_ids], max_new_tokens=max_new_tokens, seeds=seeds, phases=phases
        )
        collect([item.prompt_ids], records)
    rounds = max(1, phases.rounds)
    parts = {"draft": phases.draft, "verify": phases.verify, "overhead": phases.overhead}
    return {name: 1000 * seconds / rounds for name, seconds in parts.items()}


def _decode(
    engine: Engine, batch: Sequence[Item], max_new_tokens: int, seed: int, first: int
) -> list[Run]:
    seeds = row_seeds_of(seed, first + len(batch))[first:]
    prompts = [item.prompt_ids for item in batch]
    _finish(engine.device)
    start = time.perf_counter()
    records = engine.speculate(prompts, max_new_tokens=max_new_tokens, seeds=seeds)
    outputs = collect(prompts, records)
    _finish(engine.device)
    share = (time.perf_counter() - start) / len(batch)
    return [Run(item, output, share) for item, output in zip(batch, outputs, strict=True)]


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
