"""The host's view of prompts that are decoded together: rows, what they decode, who waits, what rounds gave."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from decode.common.errors import NotFiniteError
from decode.constraints.grammar import Matcher
from decode.constraints.rows import RowConstraints
from decode.drafts.base import Draft
from decode.engine.compiled import AsyncHostCopy
from decode.engine.records import RoundRecord
from decode.engine.round import BatchState, read_results
from decode.model.kv_cache import StaticKVCache
from decode.model.loading import Target
from decode.model.vision import ImageInputs
from decode.verification.sampling import Sampler


@dataclass(frozen=True)
class DecodeRequests:
    """The prompts of one call of `SpeculativeEngine.speculate`, which describes what each was given beside its ids."""

    prompts: list[list[int]]
    seeds: list[int]
    max_new_tokens: int
    choose: Sampler | None = None
    matchers: Sequence[Matcher | None] | None = None
    images: Sequence[ImageInputs | None] | None = None

    def limits(self, context: int) -> list[int]:
        """The length at which each ends, for a target whose context holds `context` tokens."""
        return [min(len(prompt) + self.max_new_tokens, context) for prompt in self.prompts]


@dataclass
class ActiveRequest:
    """A prompt that is being decoded in a row."""

    prompt: int
    """Its index in the list of prompts."""
    length: int
    """Tokens so far, the prompt included."""
    limit: int
    """The length at which it ends."""
    finished: str | None = None
    """eos, length, or grammar (it allows no token of the vocabulary here); None while it runs."""

    def append(self, tokens: list[int], eos: frozenset[int]) -> list[int]:
        """Adds the tokens up to and including the first EOS, at most up to the limit, and returns those it added."""
        for i, token in enumerate(tokens):
            self.length += 1
            if token in eos:
                self.finished = "eos"
            elif self.length >= self.limit:
                self.finished = "length"
            if self.finished:
                return tokens[: i + 1]
        return tokens


@dataclass
class ActiveBatch:
    """Rows that decode requests, and the queue of those that wait: a row that is done takes the next one.

    Rounds may be launched before the results of the one before were read; those are `in_flight`.
    """

    target: Target
    draft: Draft | None
    state: BatchState
    constraint: RowConstraints | None
    """The grammars of the rows; None: there are none."""
    queue: deque[ActiveRequest]
    rows: list[ActiveRequest | None]
    in_flight: deque[tuple[AsyncHostCopy, list[ActiveRequest | None], float]] = field(
        default_factory=deque
    )
    """Results that were not read, whose they are, and when the round was launched."""
    last_read_time: float = 0.0

    @property
    def begun(self) -> list[ActiveRequest]:
        return [request for request in self.rows if request is not None]

    @property
    def finished(self) -> bool:
        """Whether all rows are done. Requests may still wait for them."""
        return all(request.finished for request in self.begun)

    @property
    def longest(self) -> int:
        """Tokens of the longest row; rows that are done count, since they still draft."""
        return max(request.length for request in self.begun)

    @property
    def shortest(self) -> int:
        """Tokens of the shortest row that is not done."""
        return min(request.length for request in self.begun if not request.finished)

    def next_requests(self) -> dict[int, ActiveRequest]:
        """Requests that wait, by the free row that each may take now."""
        free = [row for row, request in enumerate(self.rows) if request is None or request.finished]
        return dict(zip(free, self.queue, strict=False))

    def begin(
        self,
        new: dict[int, ActiveRequest],
        prompts: list[list[int]],
        first: list[list[int]],
        seconds: float,
    ) -> Iterator[RoundRecord]:
        """The records of a prefill of `seconds`, which gave each of the `new` requests, by row, its token and whether
        the logits were numbers."""
        for (row, request), (token, finite) in zip(new.items(), first, strict=True):
            self.check_finite(request, bool(finite), True)
            self.rows[row] = self.queue.popleft()
            tokens = self.append(request, row, [token])
            if self.draft is not None:
                self.draft.on_commit(row, [*prompts[request.prompt], token])
            yield RoundRecord(request.prompt, True, 0, 0, [], tokens, request.finished, seconds)

    def collect_round(self) -> list[RoundRecord]:
        """Reads the results of the oldest round in flight into records; rows that were done before it are skipped."""
        results, requests, start = self.in_flight.popleft()
        rows, records = read_results(results.wait()), []
        now = time.perf_counter()
        # A round that was launched early began when the one before it ended.
        seconds, self.last_read_time = now - max(start, self.last_read_time), now
        for at, (request, row) in enumerate(zip(requests, rows, strict=True)):
            if request is None or request.finished:
                continue
            self.check_finite(request, row.target_finite, row.draft_finite)
            forced: list[bool] = []
            if self.constraint is not None:
                forced = self.constraint.forced_positions(at, row.proposed)
            tokens = self.append(request, at, row.tokens)
            if self.draft is not None:
                self.draft.on_commit(at, tokens)
            records.append(
                RoundRecord(
                    request.prompt,
                    False,
                    row.drafted,
                    row.accepted,
                    row.proposed,
                    tokens,
                    request.finished,
                    seconds,
                    forced=(sum(forced), sum(forced[: row.accepted])),
                )
            )
        return records

    def append(self, request: ActiveRequest, row: int, tokens: list[int]) -> list[int]:
        """Adds a row's new tokens to its request, those that its grammar allows, and returns the ones that it added."""
        if self.constraint is None:
            return request.append(tokens, self.target.eos)
        fitting, goes_on = self.constraint.commit(row, tokens)
        added = request.append(fitting, self.target.eos)
        if not goes_on and request.finished is None:
            request.finished = "grammar"
            with torch.inference_mode():
                self.state.done[row] = True
        if request.finished is not None:
            self.constraint.stop(row)
        return added

    @torch.inference_mode()
    def check_finite(self, request: ActiveRequest, target: bool, draft: bool) -> None:
        """NotFiniteError if the logits of target or draft were no numbers: any token would pass for its text."""
        if target and draft:
            return
        name = "the draft" if target else f"target {self.target.name!r}"
        # the next request must not find NaN in slots that it masks
        for cache in kv_caches(self.target, self.draft):
            for layer in cache.kv_layers:
                if layer.is_initialized:
                    layer.keys.zero_()
                    layer.values.zero_()
        raise NotFiniteError(
            None if target else request.prompt,
            f"{name} gives NaN or infinite logits after {request.length} tokens of prompt {request.prompt}: its "
            "weights are damaged, or its dtype is too narrow (float16 overflows where bfloat16 and float32 do not)",
        )


def kv_caches(target: Target, draft: Draft | None) -> list[StaticKVCache]:
    """The KV caches of target and draft."""
    return [target.runner.cache, *([] if draft is None else draft.buffers().kv_caches)]
