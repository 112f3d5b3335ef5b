"""Times methods against plain decoding on the same prompts, interleaved so that drift hits all alike."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from decode.drafts.base import Draft
from decode.round import Phases
from decode.sampling import Sampling
from decode.speculate import Output, add, decode, row_seeds_of, speculate
from decode.target import Target
from eval.metrics import Sample
from eval.tasks import Item


@dataclass(frozen=True)
class Method:
    """A draft under the name that reports use; draft None is plain decoding."""

    name: str
    draft: Draft | None
    k: int


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
    plain = Method("plain", None, 0)
    for method in [plain, *methods]:
        _decode(target, method, items[:batch_size], sampling, min(max_new_tokens, 8), seed, 0)
    runs: dict[str, list[Run]] = {method.name: [] for method in [plain, *methods]}
    for start in range(0, len(items), batch_size):
        batch = items[start : start + batch_size]

        def once(method: Method, batch: Sequence[Item] = batch, start: int = start) -> list[Run]:
            out = _decode(target, method, batch, sampling, max_new_tokens, seed, start)
            progress()
            return out

        before = once(plain)
        for method in methods:
            runs[method.name] += once(method)
        after = once(plain)
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
    for record in speculate(
        target,
        method.draft,
        prompts,
        k=max(1, method.k),
        rows=rows,
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        seed=seed,
    ):
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
    for row, item in enumerate(items):
        decode(
            target,
            method.draft,
            [item.prompt_ids],
            k=max(1, method.k),
            sampling=sampling,
            max_new_tokens=max_new_tokens,
            seeds=[row_seeds_of(seed, row + 1)[row]],
            phases=phases,
        )
    rounds = max(1, phases.rounds)
    parts = {"draft": phases.draft, "verify": phases.verify, "overhead": phases.overhead}
    return {name: 1000 * seconds / rounds for name, seconds in parts.items()}


def _decode(
    target: Target,
    method: Method,
    batch: Sequence[Item],
    sampling: Sampling,
    max_new_tokens: int,
    seed: int,
    first: int,
) -> list[Run]:
    seeds = row_seeds_of(seed, first + len(batch))[first:]
    _finish(target.decoder.device)
    start = time.perf_counter()
    outputs = decode(
        target,
        method.draft,
        [item.prompt_ids for item in batch],
        k=max(1, method.k),
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        seeds=seeds,
    )
    _finish(target.decoder.device)
    share = (time.perf_counter() - start) / len(batch)
    return [Run(item, output, share) for item, output in zip(batch, outputs, strict=True)]


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
