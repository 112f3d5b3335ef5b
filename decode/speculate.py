"""The loop: admit prompts to rows, run rounds, hand out what was emitted, refill rows that are done.

Plain decoding is the same loop with nothing proposed, so a baseline runs on the very engine it is compared with.
"""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from decode.drafts.base import Draft, Request
from decode.round import Phases, Rules, State, clock, play, read
from decode.sampling import Choose, Dice, Sampling, warp
from decode.settings import UserError
from decode.target import Target


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
class Output:
    """One prompt's decoding. output_ids end with EOS if that was met; rounds are (drafted, accepted)."""

    prompt_ids: list[int]
    output_ids: list[int] = field(default_factory=list)
    rounds: list[tuple[int, int]] = field(default_factory=list)
    finish_reason: str = ""
    first_token_seconds: float = 0.0
    round_seconds: list[float] = field(default_factory=list)


@dataclass
class Seat:
    """The host's view of one row: which prompt sits there, how long it is and may become."""

    prompt: int
    written: int
    limit: int
    finished: str | None = None


BUCKET = 128
"""Buffers hold a multiple of this many slots a row, and grow as rows do: what is not there is not attended to."""


def speculate(
    target: Target,
    draft: Draft | None,
    prompts: list[list[int]],
    *,
    k: int = 4,
    sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
    max_new_tokens: int = 128,
    rows: int | None = None,
    rule: str = "exact",
    seed: int = 0,
    seeds: list[int] | None = None,
    choose: Choose | None = None,
    phases: Phases | None = None,
) -> Iterator[RoundRecord]:
    """Decodes ragged prompts (token ids), yielding each prompt's record as soon as its round is done.

    The emitted text follows the target's own law under `sampling` (its argmax at temperature 0) whatever the
    draft; draft None is plain decoding. `rows` prompts are decoded at once (default: all), and a row that is done
    takes the next one. `seeds` gives each prompt its own randomness, so that its text does not depend on the
    batch it sits in. `rule` "block" verifies chains by blocks, "typical" accepts more and is lossy (decode/round.py).
    `choose` replaces all randomness (tests enumerate with it; it needs every prompt in a row of its own).
    UserError for an empty prompt or one that leaves no room in the target's context.
    """
    decoder, device = target.decoder, target.decoder.device
    _check(prompts, decoder.context, max_new_tokens, k)
    rows = len(prompts) if rows is None else min(rows, len(prompts))
    limits = [min(len(prompt) + max_new_tokens, decoder.context) for prompt in prompts]
    seeds = row_seeds_of(seed, len(prompts)) if seeds is None else seeds
    dice = Dice(torch.zeros(rows, dtype=torch.long, device=device)) if choose is None else None
    rules = Rules(k, sampling, dice or choose, rule)  # type: ignore[arg-type]
    reach = 1 if draft is None else draft.reach(k)
    waits = phases is not None or (draft is not None and draft.on_host)
    lag = int(device.type == "cuda" and not waits)  # the host reads a round while the next one runs
    longest = max(limits) + 2 * reach + 2  # rows that are done go on drafting behind their limit
    size = min(longest, _bucket(max(map(len, prompts)) + 2 * reach + 2))
    state = State.empty(rows, size, device)
    decoder.allocate(rows, size)
    if draft is not None:
        draft.begin(Request(rows, size, k, sampling, rules.choose))
    queue = deque(Seat(i, len(p), limits[i]) for i, p in enumerate(prompts))
    seats: list[Seat | None] = [None] * rows
    flying: deque[tuple[torch.Tensor, list[Seat | None], float]] = deque()  # rounds not read yet

    while True:
        free = [row for row, seat in enumerate(seats) if seat is None or seat.finished]
        if free and queue:
            start = clock(device)
            newly = {row: queue.popleft() for row in free[: len(queue)]}
            row = torch.tensor(list(newly), device=device)
            if dice is not None:
                numbers = [seeds[seat.prompt] for seat in newly.values()]
                dice.seat(row, torch.tensor(numbers, device=device))
            choose_first = rules.choose if dice is None else dice.of(row)
            texts = [prompts[seat.prompt] for seat in newly.values()]
            stops = [seat.limit for seat in newly.values()]
            first = _admit(target, draft, state, texts, stops, row, sampling, choose_first).tolist()
            seconds = clock(device) - start
            for (at, seat), token in zip(newly.items(), first, strict=True):
                seats[at] = seat
                seat.written += 1
                seat.finished = _reason(token, seat.written, seat.limit, target.eos)
                if draft is not None:
                    draft.observe(at, [*prompts[seat.prompt], token])
                yield RoundRecord(seat.prompt, True, 0, 0, [], [token], seat.finished, seconds)
            continue  # a row may be done with its first token
        if all(seat is None or seat.finished for seat in seats):
            break
        written = max(seat.written for seat in seats if seat is not None and not seat.finished)
        need = min(longest, written + (lag + 2) * reach + 2)
        if need > state.history.shape[1]:
            _grow(target, draft, state, min(longest, _bucket(need)))
        start = clock(device)
        flying.append((play(target, draft, state, rules, phases), list(seats), start))
        if len(flying) > lag:
            records = _land(*flying.popleft(), draft, target)
            if phases is not None:
                phases.total += time.perf_counter() - start
                phases.rounds += 1
            yield from records


def decode(
    target: Target, draft: Draft | None, prompts: list[list[int]], **kwargs: object
) -> list[Output]:
    """`speculate` run to its end: one Output for each prompt, in order. Takes the same keywords."""
    outputs = [Output(prompt) for prompt in prompts]
    for record in speculate(target, draft, prompts, **kwargs):  # type: ignore[arg-type]
        add(outputs[record.prompt], record)
    return outputs


def add(output: Output, record: RoundRecord) -> None:
    """Appends a record of this prompt to its output."""
    output.output_ids += record.tokens
    output.finish_reason = record.finished or ""
    if record.prefill:
        output.first_token_seconds = record.seconds
    else:
        output.rounds.append((record.drafted, record.accepted))
        output.round_seconds.append(record.seconds)


def row_seeds_of(seed: int, rows: int) -> list[int]:
    """One seed a row, distinct for distinct (seed, row) below 2**31 rows."""
    return [(seed << 31) + row for row in range(rows)]


@torch.inference_mode()
def _admit(
    target: Target,
    draft: Draft | None,
    state: State,
    prompts: list[list[int]],
    limits: list[int],
    row: torch.Tensor,
    sampling: Sampling,
    choose: Choose,
) -> torch.Tensor:
    """Puts prompts into rows `row` [b], next to rows that go on, and returns their first tokens [b]."""
    device = row.device
    tokens = torch.zeros(len(prompts), max(map(len, prompts)), dtype=torch.long)
    for text, prompt in zip(tokens, prompts, strict=True):
        text[: len(prompt)] = torch.tensor(prompt)
    tokens = tokens.to(device)
    length = torch.tensor([len(prompt) for prompt in prompts], device=device)
    logits = target.decoder.prefill(tokens, length, row)
    first = logits.argmax(-1) if sampling.greedy else choose(warp(logits, sampling))
    if draft is not None:
        draft.admit(row, tokens, length)
    state.history[row, : tokens.shape[1]] = tokens
    state.history[row, length] = first
    state.length[row] = length + 1
    state.limit[row] = torch.tensor(limits, device=device)
    state.done[row] = (first[:, None] == target.eos_ids).any(1) | (length + 1 >= state.limit[row])
    return first


def _grow(target: Target, draft: Draft | None, state: State, size: int) -> None:
    target.decoder.grow(size)
    state.grow(size)
    if draft is not None:
        draft.reserve(size)


def _land(
    report: torch.Tensor,
    seats: list[Seat | None],
    start: float,
    draft: Draft | None,
    target: Target,
) -> list[RoundRecord]:
    """Reads a round and hands out what it emitted; rows that were done before it are passed over."""
    rows, records = read(report), []
    seconds = time.perf_counter() - start
    for at, (seat, row) in enumerate(zip(seats, rows, strict=True)):
        if seat is None or seat.finished:
            continue
        tokens, seat.finished = _trim(row.tokens, seat.written, seat.limit, target.eos)
        seat.written += len(tokens)
        if draft is not None:
            draft.observe(at, row.tokens)
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
            )  # fmt: skip
        )
    return records


def _bucket(size: int) -> int:
    return -(-size // BUCKET) * BUCKET


def _trim(
    tokens: list[int], written: int, limit: int, eos: frozenset[int]
) -> tuple[list[int], str | None]:
    """The tokens up to and with the first EOS and no further than the limit, and why the row ended."""
    for i, token in enumerate(tokens):
        reason = _reason(token, written + i + 1, limit, eos)
        if reason is not None:
            return tokens[: i + 1], reason
    return tokens, None


def _reason(token: int, written: int, limit: int, eos: frozenset[int]) -> str | None:
    return "eos" if token in eos else "length" if written >= limit else None


def _check(prompts: list[list[int]], context: int, max_new_tokens: int, k: int) -> None:
    if len(prompts) == 0:
        raise UserError("there is no prompt to decode")
    if max_new_tokens < 1 or k < 1:
        raise UserError(f"need max_new_tokens >= 1 and k >= 1, got {max_new_tokens} and {k}")
    for i, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise UserError(f"prompt {i} is empty: give at least one token")
        if len(prompt) >= context:
            raise UserError(
                f"prompt {i} has {len(prompt)} tokens and the target's context holds {context}: shorten it"
            )
