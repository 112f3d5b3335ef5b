"""Times methods on the same prompts: every batch is decoded by all methods in turn before the next batch begins.

So a machine that slows down or speeds up affects all methods alike. eval/run.py times whole requests (`time_methods`),
eval/tune.py rounds alone (eval/tuning/sweep.py); both use the loop of InterleavedTimer.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch

from decode.common import damage
from decode.common.errors import UserError, first_line
from decode.common.journal import Journal
from decode.constraints.grammar import Matcher
from decode.engine.engine import SpeculativeEngine, row_seeds
from decode.engine.learning import LearningDraft
from decode.engine.records import DecodeRecord
from decode.engine.round import PhaseTimes
from decode.engine.warm_up import one_batch_per_shape, run_first_rounds, share_buffers
from decode.model.loading import Target
from decode.verification.sampling import SamplingParams
from eval.benchmark.machine_load import MachineWatch
from eval.benchmark.methods import PLAIN_DECODING, Method
from eval.benchmark.turns import Attempt, EngineAnswer, Turn, repeat_troubled_turns
from eval.results.report import FailedPrompt
from eval.tasks.loading import TaskPrompt, read_images
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
    grammar: Matcher | None = None  # of all answers; None: any text

    @property
    def device(self) -> torch.device:
        return self.target.runner.device

    def sampling(self, temperature: float) -> SamplingParams:
        return SamplingParams(temperature, self.top_k, self.top_p)

    def batches(self, size: int) -> list[Sequence[TaskPrompt]]:
        """All prompts in their order, `size` at a time; the last batch may be smaller."""
        return [self.items[start : start + size] for start in range(0, len(self.items), size)]

    def build_engine(self, method: Method, sampling: SamplingParams) -> SpeculativeEngine:
        """One engine decodes all prompts, since it compiles at its first batch. A draft that learns begins anew."""
        if method.draft is not None:
            method.draft.shape = method.shape
            for part in method.draft.buffers().drafts:
                if isinstance(part, LearningDraft):
                    part.forget()
        return SpeculativeEngine(
            self.target,
            method.draft,
            k=max(1, method.k),
            sampling=sampling,
            rule=method.rule,
            mode=self.mode,
            grammar=self.grammar,
        )


@dataclass
class TimingResult:
    """Records and failures of each method; together they are all prompts, for every method."""

    records: dict[Method, list[DecodeRecord]] = field(default_factory=dict)
    failures: dict[Method, list[FailedPrompt]] = field(default_factory=dict)
    answers: dict[str, list[EngineAnswer]] = field(default_factory=dict)
    """Of other engines by label: one for each prompt, in their order."""
    refused: dict[Method, str] = field(default_factory=dict)
    """Methods that cannot run at their setting, and why; they have no records."""
    repeated_turns: int = (
        0  # turns that were measured again: a method stalled, or the machine was busy
    )
    dropped_turns: dict[str, int] = field(default_factory=dict)
    """Turns whose seconds count for no method, by reason."""
    void: str = ""  # of a sweep: why its seconds say nothing


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

    When all are done, turns in which a method stalled or the machine was busy are repeated; records say of which turns
    the seconds do not count all the same (eval/benchmark/turns.py).

    `plain_twice`: plain decoding runs before and after the methods of each batch. Otherwise it runs once, every other
    batch reverses the order, and records are those of `rounds_only`. `tolerant`: an error is recorded as a failure of
    the batch's prompts and the run goes on, but a batch with a failure is not kept, so that the same command tries it
    again. Otherwise errors are raised, and a method that raises UserError when it is warmed up is left out as refused.

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
        self.watch = MachineWatch(context.device)

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
        turns: list[Turn] = []
        starts = list(accumulate(map(len, batches), initial=0))
        for number, batch in enumerate(batches):
            kept = journal.get(keys[number])
            if kept is None:
                attempt, failed = self._decode_in_turn(methods, batch, starts[number], number)
                turns.append(Turn([attempt], complete=not failed))
                for method, error in failed.items():
                    result.failures[method] += [FailedPrompt(x.task, x.id, error) for x in batch]
                if not failed:
                    journal.put(keys[number], turns[-1].to_json())
            else:
                turns.append(Turn.from_json(kept))
            progress()

        def repeat(number: int) -> None:
            if not self.engines:
                self.warm_up(batches)
            batch, turn = batches[number], turns[number]
            attempt, failed = self._decode_in_turn(methods, batch, starts[number], number)
            if not turn.add_repeat(attempt):
                what = next(iter(failed.values()), "other tokens or rounds than before")
                damage.warn(f"the repeat of a turn gave {what}: it is left out")
            journal.put(keys[number], turn.to_json())

        judged = repeat_troubled_turns(turns, repeat, of_rounds=not self.plain_twice)
        for turn in judged:
            for method in methods:
                result.records[method] += turn.attempt.records.get(method.label, [])
            for label in self.others:
                result.answers[label] += turn.attempt.answers[label]
        result.repeated_turns = sum(turn.repeats > 0 for turn in turns)
        result.dropped_turns = dict(Counter(turn.trouble for turn in judged if turn.trouble))
        return result

    def warm_up(self, batches: Sequence[Sequence[TaskPrompt]]) -> dict[str, str]:
        """Builds every engine, gives all of them the same buffers and runs the first rounds of each shape.

        {label: message} of the refused methods.
        """
        context, refused = self.context, dict[str, str]()

        def build(method: Method) -> None:
            engine = self.engines[method] = context.build_engine(method, self.sampling)
            rows, prompts = max(map(len, batches)), [x.prompt_ids for b in batches for x in b]
            fit = engine.rows_that_fit(prompts, context.max_new_tokens, rows)
            if fit < rows:  # which would be measured for `rows`
                raise UserError(
                    f"batch size {rows}: the GPU has memory for {fit} rows of these prompts and "
                    f"{context.max_new_tokens} new tokens: lower it or max_new_tokens, or load the target in fewer "
                    "bits (dtype bfloat16, int8)"
                )

        def run(method: Method) -> None:
            engine = self.engines[method]
            run_every_shape(engine, method, batches, context.max_new_tokens, self.tolerant)

        for step in (build, run):
            for method in (m for m in self.methods if m.label not in refused):
                try:
                    step(method)
                except UserError as error:
                    if self.tolerant or method == PLAIN_DECODING:
                        raise
                    refused[method.label] = str(error)
            if step is build:
                prompts = [[item.prompt_ids for item in batch] for batch in batches]
                share_buffers([*self.engines.values()], prompts, context.max_new_tokens)
        for answer in self.others.values():
            answer(batches[0][0])
        return refused

    def _decode_in_turn(
        self, methods: Sequence[Method], batch: Sequence[TaskPrompt], first: int, number: int
    ) -> tuple[Attempt, dict[Method, str]]:
        """(what was measured, {method: in one line what went wrong}).

        A failure of plain decoding is one of all methods, since nothing can be compared then.
        """
        self.watch.begin()
        order = methods if self.plain_twice or number % 2 == 0 else methods[::-1]
        passes = {m: self._decode(m, batch, first) for m in order}
        answers: dict[str, list[EngineAnswer]] = {}
        again: dict[Method, list[DecodeRecord] | str] = {}
        if self.plain_twice:
            answers = {label: [f(item) for item in batch] for label, f in self.others.items()}
            again = {PLAIN_DECODING: self._decode(PLAIN_DECODING, batch, first)}
        evidence = self.watch.end()
        failed = {m: own for m, own in (again | passes).items() if isinstance(own, str)}
        if PLAIN_DECODING in failed:
            error = f"plain decoding failed: {failed[PLAIN_DECODING]}"
            failed = dict.fromkeys(methods, error) | failed
        for method in failed:
            self.engines[method] = self.context.build_engine(method, self.sampling)
        records, second = (
            {m.label: x for m, x in own.items() if not isinstance(x, str) and m not in failed}
            for own in (passes, again)
        )
        return Attempt(records, second, answers, evidence), failed

    def _decode(
        self, method: Method, batch: Sequence[TaskPrompt], first: int
    ) -> list[DecodeRecord] | str:
        seeds = row_seeds(self.context.seed, first + len(batch))[first:]
        arguments = self.engines[method], method, batch, seeds, self.context.max_new_tokens
        try:
            return decode_batch(*arguments)
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
    for number in one_batch_per_shape(engine, prompts, max_new_tokens):
        if engine.draft is not None:
            engine.draft.shape = method.shape
        with contextlib.suppress(Exception) if tolerant else contextlib.nullcontext():
            images = read_images(batches[number])
            run_first_rounds(engine, prompts[number], max_new_tokens, images)


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
    prompts, images = [item.prompt_ids for item in batch], read_images(batch)
    synchronize(engine.device)
    start = time.perf_counter()
    rounds = engine.speculate(
        prompts, max_new_tokens=max_new_tokens, seeds=seeds, phases=phases, images=images
    )
    records = collect_until_stop(batch, rounds, engine.target.tokenizer)
    synchronize(engine.device)
    share = (time.perf_counter() - start) / len(batch)
    return [replace(record, seconds=share, rows=len(batch)) for record in records]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
