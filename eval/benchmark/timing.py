"""Times methods against plain decoding on the same prompts, interleaved so that drift hits all alike."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from decode.drafts.base import Draft
from decode.engine.engine import RequestOutput, SpeculativeEngine, collect_outputs, row_seeds
from decode.engine.round import PhaseTimes
from decode.model.loading import Target
from decode.verification.sampling import SamplingParams
from eval.benchmark.journal import Journal
from eval.metrics.records import DecodeRecord
from eval.tasks.loading import TaskPrompt
from eval.tasks.stop_strings import collect_until_stop


@dataclass(frozen=True)
class Method:
    """A draft under the name that reports use; draft None is plain decoding."""

    name: str
    draft: Draft | None
    k: int
    rule: str = "exact"
    mode: str = "eager"

    def engine(self, target: Target, sampling: SamplingParams) -> SpeculativeEngine:
        """Ready to decode; one engine for all prompts, for it compiles at its first."""
        return SpeculativeEngine(
            target,
            self.draft,
            k=max(1, self.k),
            sampling=sampling,
            rule=self.rule,
            mode=self.mode,
        )


@dataclass(frozen=True)
class TimedOutput:
    """One prompt decoded by one method; `seconds` is its share of the wall clock of its batch of `rows`."""

    item: TaskPrompt
    output: RequestOutput
    seconds: float
    rows: int = 1

    def sample(self) -> DecodeRecord:
        return DecodeRecord(
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
class FailedPrompt:
    """A prompt that a method could not decode, and why."""

    task: str
    id: str
    error: str


EngineAnswer = dict[str, Any]
"""What another engine made of one prompt, as JSON holds it: {ids, seconds, …}, or {error}."""


@dataclass
class TimingResult:
    """What each method did: {name: runs}, {name: failures}. Together they are all prompts, for every method."""

    runs: dict[str, list[TimedOutput]] = field(default_factory=dict)
    failures: dict[str, list[FailedPrompt]] = field(default_factory=dict)
    answers: dict[str, list[EngineAnswer]] = field(default_factory=dict)
    """Of other engines: one for each prompt, in their order."""


def time_methods(
    target: Target,
    methods: Sequence[Method],
    items: Sequence[TaskPrompt],
    sampling: SamplingParams,
    max_new_tokens: int,
    batch_size: int,
    seed: int,
    journal: Journal,
    progress: Callable[[], None],
    others: Mapping[str, Callable[[TaskPrompt], EngineAnswer]] | None = None,
) -> TimingResult:
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
    found = TimingResult(
        {m.name: [] for m in every}, {m.name: [] for m in every}, {name: [] for name in others}
    )
    engines: dict[str, SpeculativeEngine] = {}
    for start in range(0, len(items), batch_size):
        batch = items[start : start + batch_size]
        key = ["runs", sampling.temperature, start, *([item.task, item.id] for item in batch)]
        kept, said = journal.get(key), journal.get(["others", *key[1:]])
        if kept is not None and (said is not None or not others):
            for name in found.runs:
                found.runs[name] += [_from_journal(*x) for x in zip(batch, kept[name], strict=True)]
            for name in others:
                found.answers[name] += said[name]
            progress()
            continue
        if not engines:
            engines = {m.name: m.engine(target, sampling) for m in every}
            for engine in engines.values():
                _decode_or_error(engine, batch, min(max_new_tokens, 8), seed, 0)
            for answer in others.values():
                answer(batch[0])
        before = _decode_or_error(engines["plain"], batch, max_new_tokens, seed, start)
        done = {
            m.name: _decode_or_error(engines[m.name], batch, max_new_tokens, seed, start)
            for m in methods
        }
        said = {name: [answer(item) for item in batch] for name, answer in others.items()}
        after = _decode_or_error(engines["plain"], batch, max_new_tokens, seed, start)
        done["plain"] = _average_seconds(before, after)
        for method in every:
            one = done[method.name]
            failed = one if isinstance(one, str) else _baseline_error(done["plain"])
            if failed:
                engines[method.name] = method.engine(target, sampling)  # whatever state it is in
                found.failures[method.name] += [FailedPrompt(x.task, x.id, failed) for x in batch]
            elif not isinstance(one, str):
                found.runs[method.name] += one
        for name in others:
            found.answers[name] += said[name]
        if not any(isinstance(one, str) for one in done.values()):
            if others:
                journal.put(["others", *key[1:]], said)
            journal.put(key, {name: [_to_journal(run) for run in done[name]] for name in done})  # type: ignore[arg-type]
        progress()
    return found


def decode_untimed(
    target: Target,
    method: Method,
    items: Sequence[TaskPrompt],
    sampling: SamplingParams,
    max_new_tokens: int,
    rows: int,
    seed: int,
    progress: Callable[[], None],
) -> list[DecodeRecord]:
    """One Sample for each item, decoded `rows` at a time: right in tokens and rounds, meaningless in seconds."""
    prompts = [item.prompt_ids for item in items]
    engine = method.engine(target, sampling)
    records = engine.speculate(prompts, rows=rows, max_new_tokens=max_new_tokens, seed=seed)
    stops = [item.stop for item in items]
    outputs = collect_until_stop(prompts, records, stops, target.tokenizer, lambda _: progress())
    return [TimedOutput(item, out, 0.0).sample() for item, out in zip(items, outputs, strict=True)]


def measure_phase_ms(
    target: Target,
    method: Method,
    items: Sequence[TaskPrompt],
    sampling: SamplingParams,
    max_new_tokens: int,
    seed: int,
) -> dict[str, float]:
    """Mean milliseconds a round of {draft, verify, overhead}, from a pass of its own: its clocks cost time."""
    phases = PhaseTimes()
    engine = method.engine(target, sampling)
    for row, item in enumerate(items):
        seeds = [row_seeds(seed, row + 1)[row]]
        records = engine.speculate(
            [item.prompt_ids], max_new_tokens=max_new_tokens, seeds=seeds, phases=phases
        )
        collect_outputs([item.prompt_ids], records)
    rounds = max(1, phases.rounds)
    parts = {"draft": phases.draft, "verify": phases.verify, "overhead": phases.overhead}
    return {name: 1000 * seconds / rounds for name, seconds in parts.items()}


def measure_gpu_utilisation(
    target: Target,
    items: Sequence[TaskPrompt],
    sampling: SamplingParams,
    max_new_tokens: int,
    batch_size: int,
) -> float | None:
    """Mean share of time, in percent, that the GPU was busy during plain decoding, as NVML says; None without one.

    A pass of its own, since asking takes time. NVML calls a GPU busy while any kernel runs, however small.
    """
    device = target.decoder.device
    if device.type != "cuda":
        return None
    engine = SpeculativeEngine(target, None, sampling=sampling)
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


def _decode_or_error(
    engine: SpeculativeEngine,
    batch: Sequence[TaskPrompt],
    max_new_tokens: int,
    seed: int,
    first: int,
) -> list[TimedOutput] | str:
    """The batch's runs, or in one line what went wrong."""
    try:
        return _decode_timed(engine, batch, max_new_tokens, seed, first)
    except Exception as error:  # a report names what failed and goes on; Ctrl-C is no Exception
        first_line = (str(error).strip().splitlines() or [""])[0]
        return f"{type(error).__name__}: {first_line}"


def _decode_timed(
    engine: SpeculativeEngine,
    batch: Sequence[TaskPrompt],
    max_new_tokens: int,
    seed: int,
    first: int,
) -> list[TimedOutput]:
    seeds = row_seeds(seed, first + len(batch))[first:]
    prompts = [item.prompt_ids for item in batch]
    stops = [item.stop for item in batch]
    _synchronize(engine.device)
    start = time.perf_counter()
    records = engine.speculate(prompts, max_new_tokens=max_new_tokens, seeds=seeds)
    outputs = collect_until_stop(prompts, records, stops, engine.target.tokenizer)
    _synchronize(engine.device)
    rows = len(batch)
    share = (time.perf_counter() - start) / rows
    return [
        TimedOutput(item, output, share, rows) for item, output in zip(batch, outputs, strict=True)
    ]


def _average_seconds(
    before: list[TimedOutput] | str, after: list[TimedOutput] | str
) -> list[TimedOutput] | str:
    """The first pass with the mean seconds of both."""
    if isinstance(before, str):
        return before
    if isinstance(after, str):
        return after
    return [
        replace(a, seconds=(a.seconds + b.seconds) / 2) for a, b in zip(before, after, strict=True)
    ]


def _baseline_error(plain: list[TimedOutput] | str) -> str:
    return f"plain decoding failed: {plain}" if isinstance(plain, str) else ""


def _to_journal(run: TimedOutput) -> list[Any]:
    out = run.output
    return [
        out.output_ids, out.rounds, out.finish_reason, out.first_token_seconds, out.round_seconds,
        run.seconds, run.rows,
    ]  # fmt: skip


def _from_journal(item: TaskPrompt, values: list[Any]) -> TimedOutput:
    ids, rounds, reason, first, seconds, share, rows = values
    pairs = [(drafted, accepted) for drafted, accepted in rounds]
    return TimedOutput(
        item, RequestOutput(item.prompt_ids, ids, pairs, reason, first, seconds), share, rows
    )


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
