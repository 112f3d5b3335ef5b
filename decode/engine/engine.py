"""The loop: admit prompts to rows, run rounds, hand out what was emitted, refill rows that are done.

Plain decoding is the same loop with nothing proposed, so a baseline runs on the very engine it is compared with.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from decode.common.errors import UserError
from decode.drafts.base import Draft, DraftContext
from decode.engine.cuda_graph import AsyncHostCopy, CudaGraphRunner
from decode.engine.round import (
    BatchState,
    PhaseTimes,
    StepConfig,
    read_results,
    run_round,
    synchronized_time,
)
from decode.model.kv_cache import SlotMapping
from decode.model.loading import Target
from decode.verification.sampling import CounterRNG, Sampler, SamplingParams, warp


@dataclass(frozen=True)
class RoundRecord:
    """What one round did to one prompt. `drafted` and `accepted` are counted before trimming at EOS and the limit."""

    prompt: int  # its place in the list of prompts
    prefill: bool  # the first token, which comes before any round
    drafted: int  # tokens, or nodes of a tree
    accepted: int
    proposed: list[int]  # the drafted ids
    tokens: list[int]  # the ids that were emitted: accepted ones and the bonus, trimmed
    finished: str | None  # "eos" | "length" | None
    seconds: float  # of the whole batch's round


@dataclass
class RequestOutput:
    """One prompt's decoding. output_ids end with EOS if that was met; rounds are (drafted, accepted)."""

    prompt_ids: list[int]
    output_ids: list[int] = field(default_factory=list)
    rounds: list[tuple[int, int]] = field(default_factory=list)
    finish_reason: str = ""
    first_token_seconds: float = 0.0
    round_seconds: list[float] = field(default_factory=list)


@dataclass
class ActiveRequest:
    """The host's view of one row: which prompt sits there, how long it is and may become."""

    prompt: int
    written: int
    limit: int
    finished: str | None = None


BUCKET = 128
"""Buffers hold a multiple of this many slots a row, and grow as rows do: what is not there is not attended to."""
MODES = ("eager", "compiled", "graph")


class SpeculativeEngine:
    """A target and a draft set up to decode; it may be used again and again, and then compiles only once.

    `rule` "exact" follows the target's law, "block" does so with whole drafted blocks, "typical" accepts more and is
    lossy (decode/engine/round.py). `mode` "eager" runs anywhere; "compiled" takes a minute or more at first for each shape
    and is faster from then on; "graph" makes each round one CUDA graph, which eager code and drafts on the device
    allow, and implies compilation.
    """

    def __init__(
        self,
        target: Target,
        draft: Draft | None = None,
        *,
        k: int = 4,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008 (frozen)
        rule: str = "exact",
        mode: str = "eager",
    ):
        self.target, self.draft, self.mode = target, draft, mode
        self.k, self.sampling, self.rule = k, sampling, rule
        self.device = target.decoder.device
        self.on_host = draft is not None and draft.on_host
        self.reach = 1 if draft is None else draft.reach(k)
        self.key: tuple[int, int] | None = None
        self.captured_buffers: list[SlotMapping] = []  # those that the graph was captured over
        self.last_read_time = 0.0  # when the last report was read
        if k < 1:
            raise UserError(f"need k >= 1, got {k}")
        if mode not in MODES:
            raise UserError(f"no mode {mode!r}; there are {', '.join(MODES)}")
        if mode == "graph" and (self.device.type != "cuda" or self.on_host):
            raise UserError("mode graph needs a CUDA device and a draft that proposes on it")

    def speculate(
        self,
        prompts: list[list[int]],
        *,
        max_new_tokens: int = 128,
        rows: int | None = None,
        seed: int = 0,
        seeds: list[int] | None = None,
        choose: Sampler | None = None,
        phases: PhaseTimes | None = None,
    ) -> Iterator[RoundRecord]:
        """Decodes ragged prompts (token ids), yielding each prompt's record as soon as its round is done.

        `rows` prompts are decoded at once (default: all), and a row that is done takes the next one. `seeds` gives
        each prompt its own randomness, so that its text does not depend on the batch it sits in. `choose` replaces
        all randomness (tests enumerate with it; it needs every prompt in a row of its own). UserError for an empty
        prompt or one that leaves no room in the target's context.
        """
        target, draft, device = self.target, self.draft, self.device
        context = target.decoder.context
        _check_prompts(prompts, context, max_new_tokens)
        rows = len(prompts) if rows is None else min(rows, len(prompts))
        limits = [min(len(prompt) + max_new_tokens, context) for prompt in prompts]
        seeds = row_seeds(seed, len(prompts)) if seeds is None else seeds
        longest = max(limits) + 2 * self.reach + 2  # rows that are done go on drafting
        enough = max(map(len, prompts)) + 2 * self.reach + 2
        size = (
            _round_up_to_bucket(enough)
            if self.mode == "eager"
            else _round_up_to_power_of_two(longest)
        )
        state, rules = self._prepare_batch(rows, size, choose)
        waits = phases is not None or self.on_host
        lag = int(device.type == "cuda" and not waits)  # a round is read while the next one runs
        queue = deque(ActiveRequest(i, len(p), limits[i]) for i, p in enumerate(prompts))
        seats: list[ActiveRequest | None] = [None] * rows
        flying: deque[tuple[AsyncHostCopy, list[ActiveRequest | None], float]] = (
            deque()
        )  # not read yet

        while True:
            free = [row for row, seat in enumerate(seats) if seat is None or seat.finished]
            if free and queue:
                if flying:  # its time ends here, and it may free more rows
                    yield from self._collect_round(*flying.popleft())
                    continue
                start = synchronized_time(device)
                newly = {row: queue.popleft() for row in free[: len(queue)]}
                first = self._prefill_prompts(state, rules, prompts, newly, seeds, choose).tolist()
                seconds = synchronized_time(device) - start
                for (row, seat), token in zip(newly.items(), first, strict=True):
                    seats[row] = seat
                    seat.written += 1
                    seat.finished = _finish_reason(token, seat.written, seat.limit, target.eos)
                    if draft is not None:
                        draft.on_commit(row, [*prompts[seat.prompt], token])
                    yield RoundRecord(seat.prompt, True, 0, 0, [], [token], seat.finished, seconds)
                continue  # a row may be done with its first token
            active = [seat for seat in seats if seat is not None and not seat.finished]
            if not active:
                return
            need = max(seat.written for seat in active) + (lag + 2) * self.reach + 2
            if need > state.history.shape[1]:
                self._reserve(state, _round_up_to_bucket(need))
            start = time.perf_counter() if lag else synchronized_time(device)
            flying.append((self._launch_round(state, rules, phases), list(seats), start))
            if len(flying) > lag:
                records = self._collect_round(*flying.popleft())
                if phases is not None:
                    phases.total += time.perf_counter() - start
                    phases.rounds += 1
                yield from records

    def _prepare_batch(
        self, rows: int, size: int, choose: Sampler | None
    ) -> tuple[BatchState, StepConfig]:
        """Empty rows. The same shape as before finds the same buffers, dice and graph."""
        if choose is not None or self.key != (rows, size):
            self.state = BatchState.empty(rows, size, self.device)
            self.rng = CounterRNG(torch.zeros(rows, dtype=torch.long, device=self.device))
            self.graph: CudaGraphRunner | None = None
        self.key = None if choose is not None else (rows, size)
        self.state.clear()
        self.target.decoder.allocate(rows, size)
        self.target.decoder.capture_hidden_states(None if self.draft is None else self.draft.taps)
        rules = StepConfig(self.k, self.sampling, choose or self.rng, self.rule)
        if self.draft is not None:
            self.draft.begin_batch(DraftContext(rows, size, self.k, self.sampling, rules.choose))
        return self.state, rules

    @torch.inference_mode()
    def _prefill_prompts(
        self,
        state: BatchState,
        rules: StepConfig,
        prompts: list[list[int]],
        newly: dict[int, ActiveRequest],
        seeds: list[int],
        choose: Sampler | None,
    ) -> torch.Tensor:
        """Seats prompts in rows, next to rows that go on, and returns their first tokens [b]."""
        device = self.device
        texts = [prompts[seat.prompt] for seat in newly.values()]
        row = torch.tensor(list(newly), device=device)
        if choose is None:
            numbers = [seeds[seat.prompt] for seat in newly.values()]
            self.rng.reset_rows(row, torch.tensor(numbers, device=device))
            choose = self.rng.of(row)
        padded = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.long)
        for line, text in zip(padded, texts, strict=True):
            line[: len(text)] = torch.tensor(text)
        tokens = padded.to(device)
        length = torch.tensor([len(text) for text in texts], device=device)
        if tokens.shape[1] + 2 * self.reach + 2 > state.history.shape[1]:
            self._reserve(state, _round_up_to_bucket(tokens.shape[1] + 2 * self.reach + 2))
        logits = self.target.decoder.prefill(tokens, length, row)
        greedy = self.sampling.greedy
        first = logits.argmax(-1) if greedy else choose(warp(logits, self.sampling))
        if self.draft is not None:
            features = None if self.draft.taps is None else self.target.decoder.features
            self.draft.prefill(row, tokens, length, features)
        limit = torch.tensor([seat.limit for seat in newly.values()], device=device)
        state.reset_rows(row, tokens, length, first, limit, self.target.eos_ids)
        return first

    def _launch_round(
        self, state: BatchState, rules: StepConfig, phases: PhaseTimes | None
    ) -> AsyncHostCopy:
        compiled = self.mode != "eager"
        run = partial(run_round, self.target, self.draft, state, rules, compiled=compiled)
        if self.mode != "graph" or phases is not None:
            return AsyncHostCopy(run(phases=phases))
        buffers = self._kv_buffers()
        same = [a is b for a, b in zip(self.captured_buffers, buffers, strict=False)]
        if self.graph is None or not all(same):  # a graph knows buffers by their addresses
            changed = [state.history, state.length, state.done, self.rng.draws]
            holds = [] if self.draft is None else [dict(vars(self.draft))]  # `begin` replaces some
            self.graph, self.captured_buffers = CudaGraphRunner(run, changed, holds), buffers
        return AsyncHostCopy(self.graph())

    def _kv_buffers(self) -> list[SlotMapping]:
        """What stands for the K/V buffers of target and draft: new objects whenever these are new or longer."""
        own = [] if self.draft is None else self.draft.kv_slots()
        return [self.target.decoder.cache.slots, *own]

    def _reserve(self, state: BatchState, size: int) -> None:
        self.key = (len(state.length), size)
        self.target.decoder.reserve(size)
        state.reserve(size)
        if self.draft is not None:
            self.draft.reserve(size)

    def _collect_round(
        self, report: AsyncHostCopy, seats: list[ActiveRequest | None], start: float
    ) -> list[RoundRecord]:
        """Reads a round and hands out what it emitted; rows that were done before it are passed over."""
        rows, records = read_results(report.wait()), []
        now = time.perf_counter()
        # A round that was given to the device early began when the one before it ended.
        seconds, self.last_read_time = now - max(start, self.last_read_time), now
        for at, (seat, row) in enumerate(zip(seats, rows, strict=True)):
            if seat is None or seat.finished:
                continue
            tokens, seat.finished = _trim_at_stop(
                row.tokens, seat.written, seat.limit, self.target.eos
            )
            seat.written += len(tokens)
            if self.draft is not None:
                self.draft.on_commit(at, tokens)
            records.append(
                RoundRecord(
                    seat.prompt,
                    False,
                    row.drafted,
                    row.accepted,
                    row.proposed,
                    tokens,
                    seat.finished,
                    seconds,
                )
            )
        return records


def speculate(
    target: Target,
    draft: Draft | None,
    prompts: list[list[int]],
    *,
    k: int = 4,
    sampling: SamplingParams = SamplingParams(),  # noqa: B008 (frozen)
    rule: str = "exact",
    mode: str = "eager",
    **settings: Any,
) -> Iterator[RoundRecord]:
    """`Engine.speculate` of an engine made for these prompts; `settings` are its keywords.

    The emitted text follows the target's own law under `sampling` (its argmax at temperature 0) whatever the
    draft; draft None is plain decoding.
    """
    engine = SpeculativeEngine(target, draft, k=k, sampling=sampling, rule=rule, mode=mode)
    return engine.speculate(prompts, **settings)


def decode(
    target: Target, draft: Draft | None, prompts: list[list[int]], **settings: Any
) -> list[RequestOutput]:
    """`speculate` run to its end: one Output for each prompt, in order. Takes the same keywords."""
    return collect_outputs(prompts, speculate(target, draft, prompts, **settings))


def collect_outputs(
    prompts: list[list[int]], records: Iterable[RoundRecord]
) -> list[RequestOutput]:
    """One Output for each prompt, in order."""
    outputs = [RequestOutput(prompt) for prompt in prompts]
    for record in records:
        add_record(outputs[record.prompt], record)
    return outputs


def add_record(output: RequestOutput, record: RoundRecord) -> None:
    """Appends a record of this prompt to its output."""
    output.output_ids += record.tokens
    output.finish_reason = record.finished or ""
    if record.prefill:
        output.first_token_seconds = record.seconds
    else:
        output.rounds.append((record.drafted, record.accepted))
        output.round_seconds.append(record.seconds)


def row_seeds(seed: int, rows: int) -> list[int]:
    """One seed a row, distinct for distinct (seed, row) below 2**31 rows."""
    return [(seed << 31) + row for row in range(rows)]


def _round_up_to_bucket(size: int) -> int:
    """The next multiple of BUCKET."""
    return -(-size // BUCKET) * BUCKET


def _round_up_to_power_of_two(size: int) -> int:
    """The next power of two, BUCKET at least: few shapes, so that little is compiled."""
    return max(BUCKET, 1 << (size - 1).bit_length())


def _trim_at_stop(
    tokens: list[int], written: int, limit: int, eos: frozenset[int]
) -> tuple[list[int], str | None]:
    """The tokens up to and with the first EOS and no further than the limit, and why the row ended."""
    for i, token in enumerate(tokens):
        reason = _finish_reason(token, written + i + 1, limit, eos)
        if reason is not None:
            return tokens[: i + 1], reason
    return tokens, None


def _finish_reason(token: int, written: int, limit: int, eos: frozenset[int]) -> str | None:
    return "eos" if token in eos else "length" if written >= limit else None


def _check_prompts(prompts: list[list[int]], context: int, max_new_tokens: int) -> None:
    if len(prompts) == 0:
        raise UserError("there is no prompt to decode")
    if max_new_tokens < 1:
        raise UserError(f"need max_new_tokens >= 1, got {max_new_tokens}")
    for i, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise UserError(f"prompt {i} is empty: give at least one token")
        if len(prompt) >= context:
            raise UserError(
                f"prompt {i} has {len(prompt)} tokens and the target's context holds {context}: shorten it"
            )
