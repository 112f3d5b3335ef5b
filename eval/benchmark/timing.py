"""Times methods on the same prompts: every batch is decoded by all methods in turn before the next batch begins.

So a machine that slows down or speeds up affects all methods alike. eval/run.py times whole requests (`time_methods`),
eval/tune.py rounds alone (eval/tuning/sweep.py); both use the loop of InterleavedTimer.
"""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from decode.common.errors import UserError, first_line
from decode.constraints.matcher import Matcher
from decode.engine.engine import SpeculativeEngine, row_seeds
from decode.engine.records import DecodeRecord
from decode.engine.round import PhaseTimes
from decode.engine.warm_up import one_batch_per_shape, run_first_rounds
from decode.model.loading import Target
from decode.verification.sampling import SamplingParams
from eval.benchmark.journal import Journal
from eval.benchmark.methods import PLAIN_DECODING, Method
from eval.tasks.loading import TaskPrompt
from eval.tasks.stop_strings import collect_until_stop


@dataclass(frozen=True)
class TimingContext:
    """What every method decodes, and how."""

    target: Target
    items: Sequence[TaskPrompt]
    max_new_tokens: int
    top_k: int = 0
    top_p: float = 1.0
    mode: str = "eager"
    seed: int = 0
    grammar: Matcher | None = None
    """Of all answers; None: any text."""

    def sampling(self, temperature: float) -> SamplingParams:
        return SamplingParams(temperature, self.top_k, self.top_p)

    def batches(self, size: int) -> list[Sequence[TaskPrompt]]:
        """All prompts in their order, `size` at a time; the last batch may be smaller."""
        return [self.items[start : start + size] for start in range(0, len(self.items), size)]

    def build_engine(self, method: Method, sampling: SamplingParams) -> SpeculativeEngine:
        """One engine decodes all prompts, since it compiles at its first batch."""
        if method.draft is not None:
            method.draft.shape = method.shape
        return SpeculativeEngine(
            self.target,
            method.draft,
            k=max(1, method.k),
            sampling=sampling,
            rule=method.rule,
            mode=self.mode,
            grammar=self.grammar,
        )


@dataclass(frozen=True)
class FailedPrompt:
    """A prompt that a method could not decode, and why."""

    task: str
    id: str
    error: str


EngineAnswer = dict[str, Any]
"""One prompt decoded by another engine, as JSON holds it: {ids, seconds, …}, or {error}."""


@dataclass
class TimingResult:
    """Records and failures of each method; together they are all prompts, for every method."""

    records: dict[Method, list[DecodeRecord]] = field(default_factory=dict)
    failures: dict[Method, list[FailedPrompt]] = field(default_factory=dict)
    answers: dict[str, list[EngineAnswer]] = field(default_factory=dict)
    """Of other engines by label: one for each prompt, in their order."""
    refused: dict[Method, str] = field(default_factory=dict)
    """Methods that cannot run at their setting, and why; they have no records."""


def time_methods(
    context: TimingContext,
    methods: Sequence[Method],
    temperature: float,
    batch_size: int,
    journal: Journal,
    progress: Callable[[], None],
    others: Mapping[str, Callable[[TaskPrompt], EngineAnswer]] | None = None,
) -> TimingResult:
    """Whole requests: every prompt by plain decoding, the methods, the other engines, and plain decoding again.

    The seconds of plain decoding are the mean of both passes. `others` answer a batch's prompts one by one and raise
    nothing; their errors are kept in the journal too, since an answer that is measured later would not stand beside
    records of the same minutes.
    """
    sampling = context.sampling(temperature)
    timer = InterleavedTimer(context, methods, sampling, plain_twice=True, tolerant=True)
    timer.others = dict(others or {})
    return timer.run(context.batches(batch_size), journal, ["runs", temperature], progress)


class InterleavedTimer:
    """Decodes batches by plain decoding and several methods in turn; finished batches are kept in the journal.

    `plain_twice`: plain decoding runs before and after the methods of each batch. Otherwise it runs once, and every
    other batch reverses the order. `tolerant`: an error is recorded as a failure of the batch's prompts and the run
    goes on, but a batch with a failure is not kept, so that the same command tries it again. Otherwise errors are
    raised, and a method that raises UserError when it is warmed up is left out as refused.

    Rows are seeded by their index among all prompts, whatever the batch size. Engines are built and warmed up if a
    batch is not in the journal: on every shape of those batches, so that nothing is compiled while a clock runs.
    """

    def __init__(
        self,
        context: TimingContext,
        methods: Sequence[Method],
        sampling: SamplingParams,
        *,
        plain_twice: bool,
        tolerant: bool,
    ):
        self.context, self.sampling = context, sampling
        self.methods = [PLAIN_DECODING, *methods]
        self.plain_twice, self.tolerant = plain_twice, tolerant
        self.others: dict[str, Callable[[TaskPrompt], EngineAnswer]] = {}
        self.engines: dict[Method, SpeculativeEngine] = {}

    def run(
        self,
        batches: Sequence[Sequence[TaskPrompt]],
        journal: Journal,
        key: list[Any],
        progress: Callable[[], None],
    ) -> TimingResult:
        """All batches by all methods. `key` begins the journal's keys; `progress` is called after every batch."""
        result = TimingResult()
        keys = [[*key, [[item.task, item.id] for item in batch]] for batch in batches]
        waiting = [b for b, k in zip(batches, keys, strict=True) if journal.get(k) is None]
        warmed = self.warm_up(waiting) if waiting else {}
        if not self.tolerant:
            refused = journal.get_or_measure([*key, "refused"], lambda: warmed)
            result.refused = {m: refused[m.label] for m in self.methods if m.label in refused}
        methods = [m for m in self.methods if m not in result.refused]
        result.records = {m: [] for m in methods}
        result.failures = {m: [] for m in methods}
        result.answers = {label: [] for label in self.others}
        first = 0
        for number, batch in enumerate(batches):
            kept = journal.get(keys[number])
            if kept is None:
                kept = self._time_batch(result, methods, batch, first, number)
                if kept is not None:
                    journal.put(keys[number], kept)
            else:
                for method in methods:
                    values = kept["records"][method.label]
                    result.records[method] += [DecodeRecord(**value) for value in values]
                for label in self.others:
                    result.answers[label] += kept["answers"][label]
            first += len(batch)
            progress()
        return result

    def warm_up(self, batches: Sequence[Sequence[TaskPrompt]]) -> dict[str, str]:
        """Builds every engine and runs the first rounds of each shape. {label: message} of the refused methods."""
        refused = {}
        for method in self.methods:
            try:
                self.engines[method] = self.context.build_engine(method, self.sampling)
                run_every_shape(
                    self.engines[method],
                    method,
                    batches,
                    self.context.max_new_tokens,
                    self.tolerant,
                )
            except UserError as error:
                if self.tolerant or method == PLAIN_DECODING:
                    raise
                refused[method.label] = str(error)
        for answer in self.others.values():
            answer(batches[0][0])
        return refused

    def _time_batch(
        self,
        result: TimingResult,
        methods: Sequence[Method],
        batch: Sequence[TaskPrompt],
        first: int,
        number: int,
    ) -> dict[str, Any] | None:
        """Adds the batch to `result` and returns it for the journal; None if anything failed.

        A failure of plain decoding is one of all methods, since nothing can be compared then.
        """
        timed, answers = self._decode_in_turn(methods, batch, first, number)
        for label, own in answers.items():
            result.answers[label] += own
        baseline = timed[PLAIN_DECODING]
        complete = True
        for method in methods:
            outcome = timed[method]
            if not isinstance(outcome, str) and isinstance(baseline, str):
                outcome = f"plain decoding failed: {baseline}"
            if isinstance(outcome, str):
                complete = False
                self.engines[method] = self.context.build_engine(method, self.sampling)
                failed = [FailedPrompt(item.task, item.id, outcome) for item in batch]
                result.failures[method] += failed
            else:
                result.records[method] += outcome
        if not complete:
            return None
        records = {m.label: [asdict(record) for record in timed[m]] for m in methods}  # type: ignore[arg-type]
        return {"records": records, "answers": answers}

    def _decode_in_turn(
        self, methods: Sequence[Method], batch: Sequence[TaskPrompt], first: int, number: int
    ) -> tuple[dict[Method, list[DecodeRecord] | str], dict[str, list[EngineAnswer]]]:
        """({method: records, or in one line what went wrong}, {label: answers of the other engines})."""
        tokens = self.context.max_new_tokens
        if not self.plain_twice:
            order = methods if number % 2 == 0 else methods[::-1]
            return {m: self._decode(m, batch, first, tokens) for m in order}, {}
        timed = {m: self._decode(m, batch, first, tokens) for m in methods}
        answers = {label: [answer(item) for item in batch] for label, answer in self.others.items()}
        again = self._decode(PLAIN_DECODING, batch, first, tokens)
        timed[PLAIN_DECODING] = _average_seconds(timed[PLAIN_DECODING], again)
        return timed, answers

    def _decode(
        self, method: Method, batch: Sequence[TaskPrompt], first: int, max_new_tokens: int
    ) -> list[DecodeRecord] | str:
        seeds = row_seeds(self.context.seed, first + len(batch))[first:]
        try:
            return decode_batch(self.engines[method], method, batch, seeds, max_new_tokens)
        except Exception as error:  # a report names what failed and goes on; Ctrl-C is no Exception
            if not self.tolerant:
                raise
            return f"{type(error).__name__}: {first_line(error)}"


def run_every_shape(
    engine: SpeculativeEngine,
    method: Method,
    batches: Sequence[Sequence[TaskPrompt]],
    max_new_tokens: int,
    tolerant: bool,
) -> None:
    """The first rounds of one batch of each shape. Errors are raised unless `tolerant`: the timed pass names them."""
    prompts = [[item.prompt_ids for item in batch] for batch in batches]
    for batch in one_batch_per_shape(engine, prompts, max_new_tokens):
        if engine.draft is not None:
            engine.draft.shape = method.shape
        with contextlib.suppress(Exception) if tolerant else contextlib.nullcontext():
            run_first_rounds(engine, batch, max_new_tokens)


def decode_batch(
    engine: SpeculativeEngine,
    method: Method,
    batch: Sequence[TaskPrompt],
    seeds: list[int],
    max_new_tokens: int,
    phases: PhaseTimes | None = None,
) -> list[DecodeRecord]:
    """One record for each prompt of the batch; `seconds` is an even share of the batch's wall clock.

    Methods with one draft share its object, so the draft gets the method's tree shape here.
    """
    if engine.draft is not None:
        engine.draft.shape = method.shape
    prompts = [item.prompt_ids for item in batch]
    synchronize(engine.device)
    start = time.perf_counter()
    rounds = engine.speculate(prompts, max_new_tokens=max_new_tokens, seeds=seeds, phases=phases)
    records = collect_until_stop(batch, rounds, engine.target.tokenizer)
    synchronize(engine.device)
    share = (time.perf_counter() - start) / len(batch)
    return [replace(record, seconds=share, rows=len(batch)) for record in records]


def _average_seconds(
    before: list[DecodeRecord] | str, after: list[DecodeRecord] | str
) -> list[DecodeRecord] | str:
    """The first pass with the mean seconds of both; the first error if there is one."""
    if isinstance(before, str):
        return before
    if isinstance(after, str):
        return after
    return [
        replace(a, seconds=(a.seconds + b.seconds) / 2) for a, b in zip(before, after, strict=True)
    ]


def synchronize(device: torch.device) -> None:
    """Waits until a CUDA device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
