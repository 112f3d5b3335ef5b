"""Times methods against plain decoding on the same prompts, interleaved so that drift hits all alike."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from decode.drafts.base import Draft
from decode.round import Phases
from decode.sampling import Sampling
from decode.speculate import Engine, Output, collect, row_seeds_of
from decode.target import Target
from eval.journal import Journal
from eval.samples import Sample
from eval.stops import gather
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
    """One prompt decoded by one method; `seconds` is its share of the wall clock of its batch of `rows`."""

    item: Item
    output: Output
    seconds: float
    rows: int = 1

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
            rows=self.rows,
        )


@dataclass(frozen=True)
class Failure:
    """A prompt that a method could not decode, and why."""

    task: str
    id: str
    error: str


Answer = dict[str, Any]
"""What another engine made of one prompt, as JSON holds it: {ids, seconds, …}, or {error}."""


@dataclass
class Measured:
    """What each method did: {name: runs}, {name: failures}. Together they are all prompts, for every method."""

    runs: dict[str, list[Run]] = field(default_factory=dict)
    failures: dict[str, list[Failure]] = field(default_factory=dict)
    answers: dict[str, list[Answer]] = field(default_factory=dict)
    """Of other engines: one for each prompt, in their order."""


def measure(
    target: Target,
    methods: Sequence[Method],
    items: Sequence[Item],
    sampling: Sampling,
    max_new_tokens: int,
    batch_size: int,
    seed: int,
    journal: Journal,
    progress: Callable[[], None],
    others: Mapping[str, Callable[[Item], Answer]] | None = None,
) -> Measured:
    """Every item by every method, then by the other engines. Plain runs before and after them all; its seconds are the
    mean.

    Everything is warmed up first. Rows are seeded by their place in `items`, whatever the batch. What an error
    interrupts is a Failure, and plain decoding's failure is that of all, since nothing can be compared then. Batches
    without one are kept in the journal.

    `others` answer a batch's prompts one by one, and raise nothing. Their errors are kept in the journal as well: asked
    again later, they would not stand beside runs of the same minutes.
    """
    others = others or {}
    plain = Method("plain", None, 0, "exact", methods[0].mode if methods else "eager")
    every = [plain, *methods]
    found = Measured(
        {m.name: [] for m in every}, {m.name: [] for m in every}, {name: [] for name in others}
    )
    engines: dict[str, Engine] = {}
    for start in range(0, len(items), batch_size):
        batch = items[start : start + batch_size]
        key = ["runs", sampling.temperature, start, *([item.task, item.id] for item in batch)]
        kept, said = journal.get(key), journal.get(["others", *key[1:]])
        if kept is not None and (said is not None or not others):
            for name in found.runs:
                found.runs[name] += [_restore(*x) for x in zip(batch, kept[name], strict=True)]
            for name in others:
                found.answers[name] += said[name]
            progress()
            continue
        if not engines:
            engines = {m.name: m.engine(target, sampling) for m in every}
            for engine in engines.values():
                _try(engine, batch, min(max_new_tokens, 8), seed, 0)
            for answer in others.values():
                answer(batch[0])
        before = _try(engines["plain"], batch, max_new_tokens, seed, start)
        done = {m.name: _try(engines[m.name], batch, max_new_tokens, seed, start) for m in methods}
        said = {name: [answer(item) for item in batch] for name, answer in others.items()}
        after = _try(engines["plain"], batch, max_new_tokens, seed, start)
        done["plain"] = _mean(before, after)
        for method in every:
            one = done[method.name]
            failed = one if isinstance(one, str) else _blame(done["plain"])
            if failed:
                engines[method.name] = method.engine(target, sampling)  # whatever state it is in
                found.failures[method.name] += [Failure(x.task, x.id, failed) for x in batch]
            elif not isinstance(one, str):
                found.runs[method.name] += one
        for name in others:
            found.answers[name] += said[name]
        if not any(isinstance(one, str) for one in done.values()):
            if others:
                journal.put(["others", *key[1:]], said)
            journal.put(key, {name: [_plain_values(run) for run in done[name]] for name in done})  # type: ignore[arg-type]
        progress()
    return found


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
    prompts = [item.prompt_ids for item in items]
    engine = method.engine(target, sampling)
    records = engine.speculate(prompts, rows=rows, max_new_tokens=max_new_tokens, seed=seed)
    stops = [item.stop for item in items]
    outputs = gather(prompts, records, stops, target.tokenizer, lambda _: progress())
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


def gpu_utilisation(
    target: Target, items: Sequence[Item], sampling: Sampling, max_new_tokens: int, batch_size: int
) -> float | None:
    """Mean share of time, in percent, that the GPU was busy during plain decoding, as NVML says; None without one.

    A pass of its own, since asking takes time. NVML calls a GPU busy while any kernel runs, however small.
    """
    device = target.decoder.device
    if device.type != "cuda":
        return None
    engine = Engine(target, None, sampling=sampling)
    seen: list[int] = []
    try:
        for start in range(0, len(items), batch_size):
            batch = [item.prompt_ids for item in items[start : start + batch_size]]
            last = time.perf_counter()
            for _ in engine.speculate(batch, max_new_tokens=max_new_tokens):
                if time.perf_counter() - last > NVML_PERIOD:
                    seen.append(torch.cuda.utilization(device))
                    last = time.perf_counter()
    except (ImportError, RuntimeError):  # no NVML bindings, or none for this GPU
        return None
    return sum(seen) / len(seen) if seen else None


NVML_PERIOD = 0.2
"""Seconds between two questions; NVML's own window is between 1/6 s and 1 s."""


def _try(
    engine: Engine, batch: Sequence[Item], max_new_tokens: int, seed: int, first: int
) -> list[Run] | str:
    """The batch's runs, or in one line what went wrong."""
    try:
        return _decode(engine, batch, max_new_tokens, seed, first)
    except Exception as error:  # a report names what failed and goes on; Ctrl-C is no Exception
        first_line = (str(error).strip().splitlines() or [""])[0]
        return f"{type(error).__name__}: {first_line}"


def _decode(
    engine: Engine, batch: Sequence[Item], max_new_tokens: int, seed: int, first: int
) -> list[Run]:
    seeds = row_seeds_of(seed, first + len(batch))[first:]
    prompts = [item.prompt_ids for item in batch]
    stops = [item.stop for item in batch]
    _finish(engine.device)
    start = time.perf_counter()
    records = engine.speculate(prompts, max_new_tokens=max_new_tokens, seeds=seeds)
    outputs = gather(prompts, records, stops, engine.target.tokenizer)
    _finish(engine.device)
    rows = len(batch)
    share = (time.perf_counter() - start) / rows
    return [Run(item, output, share, rows) for item, output in zip(batch, outputs, strict=True)]


def _mean(before: list[Run] | str, after: list[Run] | str) -> list[Run] | str:
    """The first pass with the mean seconds of both."""
    if isinstance(before, str):
        return before
    if isinstance(after, str):
        return after
    return [
        replace(a, seconds=(a.seconds + b.seconds) / 2) for a, b in zip(before, after, strict=True)
    ]


def _blame(plain: list[Run] | str) -> str:
    return f"plain decoding failed: {plain}" if isinstance(plain, str) else ""


def _plain_values(run: Run) -> list[Any]:
    out = run.output
    return [
        out.output_ids, out.rounds, out.finish_reason, out.first_token_seconds, out.round_seconds,
        run.seconds, run.rows,
    ]  # fmt: skip


def _restore(item: Item, values: list[Any]) -> Run:
    ids, rounds, reason, first, seconds, share, rows = values
    pairs = [(drafted, accepted) for drafted, accepted in rounds]
    return Run(item, Output(item.prompt_ids, ids, pairs, reason, first, seconds), share, rows)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
