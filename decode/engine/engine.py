"""The decoding loop: prompts are prefilled into rows, rounds run, and a row that is done takes the next prompt.

Plain decoding is the same loop without proposals, so a baseline runs on the same engine as what it is compared with.
A row that has ended is frozen on the device until another prompt takes it, whose prefill touches no other row.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from decode.common.errors import UserError
from decode.common.lock import Request
from decode.common.machine import keep_freed_memory, return_freed_memory_if_scarce
from decode.common.ranges import check_ranges
from decode.constraints.grammar import Matcher
from decode.constraints.rows import RowConstraints
from decode.drafts.base import Draft, DraftContext
from decode.engine.batch import ActiveBatch, ActiveRequest, DecodeRequests, kv_caches
from decode.engine.compiled import AsyncHostCopy, CudaGraphRunner, compile_function
from decode.engine.memory import (
    bucket,
    cache_bytes,
    fitting_rows,
    free_bytes,
    prefill_bytes,
    prompts_together,
    round_up_to_bucket,
)
from decode.engine.modes import CAPTURED, COMPILED, MODES, mode_refusal, pick_mode
from decode.engine.records import DecodeRecord, RoundRecord, collect_outputs
from decode.engine.request_checks import (
    check_constrained,
    check_draft_fits,
    check_draft_length,
    check_images,
    check_prompts,
    check_tokens,
    warn_of_short_draft,
)
from decode.engine.round import (
    MAX_FORCED,
    BatchState,
    PhaseTimes,
    StepConfig,
    can_skip,
    round_bytes,
    run_round,
    synchronized_time,
)
from decode.model.kv_cache import SlotMapping
from decode.model.linear import begin_request, pack_for_compiled_code
from decode.model.loading import Target
from decode.model.vision import ImageInputs
from decode.verification.registry import find_rule
from decode.verification.sampling import (
    CounterRNG,
    Sampler,
    SamplingParams,
    has_finite_logits,
    warp,
)
from decode.verification.tree import max_slots


class SpeculativeEngine:
    """A target and a draft (None: plain decoding), ready to decode; used repeatedly, it compiles only once.

    `k` is the number of drafted tokens of a chain, or of levels of a tree, in a round. `rule` names a verification rule
    (decode/verification/registry.py): a lossless one emits text that follows the target's distribution under
    `sampling`. `mode` "eager" runs anywhere; "compiled" compiles each new shape at its first round and is faster
    afterwards. Two modes run each round as one CUDA graph, which needs a draft that proposes on the device: "captured"
    the same kernels as eager ones, without any compilation, and "graph" compiled ones; "auto" is what `pick_mode` says.
    `k` may be set anew between calls of `speculate`: a chain's graph of each number is kept for as long as its buffers
    stay where they are.
    `grammar` constrains all answers for which `speculate` is not given another.
    UserError for an unknown rule or mode, for k or `sampling` out of range, or a mode that target or draft does not
    allow.
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
        grammar: Matcher | None = None,
    ):
        mode = pick_mode(mode, target, [draft], "grammars" if grammar else "")
        self.target, self.draft, self.mode = target, draft, mode
        self.grammar = grammar
        self.k, self.sampling, self.rule = k, sampling, rule
        self.device = target.runner.device
        # A graph holds the addresses of its buffers, and most compiled code is of a number of slots.
        self.grows = mode == "eager" or (
            mode == "compiled"
            and self.device.type == "cpu"
            and target.runner.can_grow
            and (draft is None or draft.buffers().can_grow)
        )
        self.max_slots = 1 if draft is None else max_slots(draft.shape, k)
        # a round is read while the next one runs
        on_device = draft is None or draft.runs == "device"
        self.rounds_ahead = int(self.device.type == "cuda" and on_device)
        self.batch_shape: tuple[int, int] | None = None  # rows and slots of the current buffers
        self.longest = k  # the largest `k` so far, for which the buffers of chains have room
        self.planned: dict[tuple[int, int], int] = {}  # by rows that were asked for, and slots
        self.least_rows = 0  # of CUDA graphs; empty ones stay where there are fewer prompts
        # by K and the tokens that a round drafts at most, all over `captured_buffers`
        self.graphs: dict[tuple[int, int], CudaGraphRunner] = {}
        self.captured_buffers: list[SlotMapping | Tensor] = []
        self.constraint: RowConstraints | None = None  # of the rows that are being decoded
        self.closing = contextlib.ExitStack()  # what ends with the requests
        if self.device.type == "cpu":
            keep_freed_memory()
        find_rule(rule)
        check_ranges(sampling, "sampling.")
        if draft is not None:
            check_draft_length(target, k)
            check_draft_fits(target, draft)
        if mode not in MODES:
            raise UserError(f"no mode {mode!r}; there are {', '.join(MODES)}")
        refused = mode_refusal(mode, target, draft)
        if refused:
            raise UserError(refused)

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
        matchers: Sequence[Matcher | None] | None = None,
        images: Sequence[ImageInputs | None] | None = None,
    ) -> Iterator[RoundRecord]:
        """Decodes prompts of any lengths (token ids) and yields a record for each prompt and round once it was read.

        `rows` prompts are decoded at once (default: all), fewer on a GPU without the memory (`rows_that_fit`), and a
        row that is done takes the next one; in modes other than eager rows stay empty where there are fewer prompts.
        `seeds` gives each prompt its own random numbers, so that its text does not depend on its batch. `choose`
        replaces all random choices (tests enumerate them; it needs a row for each prompt). `matchers` gives each prompt
        the grammar of its answer, or None; they themselves are not moved. `images` gives each prompt of a vision-
        language target the inputs of its images, or None; drafts see their placeholder tokens. UserError for an empty
        prompt, one that leaves no room in the target's context, or has a token that the target does not embed, for
        logits of target or draft that are NaN, for grammars in a mode other than eager or with a draft of trees, for
        images that the target does not read, and for a target or draft that another generator uses: from its first
        `next()` on, until it has ended, failed, been closed or been garbage-collected (decode/common/lock.py).
        """
        if matchers is None and self.grammar is not None:
            matchers = [self.grammar] * len(prompts)
        if seeds is None:
            seeds = row_seeds(seed, len(prompts))
        requests = DecodeRequests(prompts, seeds, max_new_tokens, choose, matchers, images)
        records = self._decode(requests, rows, phases)
        request = Request()
        with contextlib.ExitStack() as closing:
            closing.callback(request.release)
            request.claim(self.target.runner, f"target {self.target.name!r}")
            for part in [] if self.draft is None else self.draft.buffers().drafts:
                request.claim(part, f"draft {part.name!r}")
            self.closing = closing
            while True:
                with request.round(), own_dtypes():
                    record = next(records, None)
                if record is None:
                    return
                yield record

    def _decode(
        self, asked: DecodeRequests, rows: int | None, phases: PhaseTimes | None
    ) -> Iterator[RoundRecord]:
        """`speculate` for whoever alone uses target and draft."""
        target, draft, device = self.target, self.draft, self.device
        prompts, matchers, context = asked.prompts, asked.matchers, target.runner.context
        if matchers is not None:
            check_constrained(self.mode, draft)
        extra = 0 if draft is None or matchers is None else MAX_FORCED
        if draft is not None:
            check_draft_length(target, self.k)
            # of a tree K is the depth, for which alone its tensors are made
            self.longest = max(self.longest, self.k) if draft.shape is None else self.k
            self.max_slots = max_slots(draft.shape, self.longest + extra)
        check_prompts(prompts, context, asked.max_new_tokens)
        check_images(target, prompts, asked.images)
        check_tokens(target, prompts, asked.images)
        if rows is None or self.mode == "eager":  # compiled code is of a number of rows
            rows = min(rows or len(prompts), len(prompts))
        rows = self.rows_that_fit(prompts, asked.max_new_tokens, rows)
        if self.mode in CAPTURED:
            rows = max(rows, self.least_rows)
        limits = asked.limits(context)
        if draft is not None:
            warn_of_short_draft(draft, max(limits))
        begin = prompts[:rows] if self.mode == "eager" else prompts
        self.constraint = None
        if matchers is not None:
            self.constraint = RowConstraints(rows, target.runner.vocab_size, target.eos)
        size = slots = self.num_slots(begin, asked.max_new_tokens, rows)
        if self.grows:
            slots = self.slots_of_prompts(prompts[:rows], rows)
        if device.type == "cpu":
            return_freed_memory_if_scarce()
        state, config = self._prepare_batch(rows, size, slots, asked.choose, extra)
        rounds_ahead = 0 if phases is not None or matchers is not None else self.rounds_ahead
        queue = deque(ActiveRequest(i, len(p), limits[i]) for i, p in enumerate(prompts))
        batch = ActiveBatch(target, draft, state, self.constraint, queue, [None] * rows)

        while True:
            new = batch.next_requests()
            if new and batch.in_flight:
                # its time must not include the prefill, and it may free more rows
                yield from batch.collect_round()
            elif new:
                start = synchronized_time(device)
                first = self._prefill(state, asked, new).tolist()
                yield from batch.begin(new, prompts, first, synchronized_time(device) - start)
            elif batch.finished:
                return
            else:
                self._provide_slots(state, batch.longest + self.spare_slots(rounds_ahead))
                skip = draft is not None and can_skip(draft, batch.shortest, config)
                start = time.perf_counter() if rounds_ahead else synchronized_time(device)
                results = self._launch_round(state, config, phases, skip)
                batch.in_flight.append((results, list(batch.rows), start))
                if len(batch.in_flight) > rounds_ahead:
                    records = batch.collect_round()
                    if phases is not None:
                        phases.total += time.perf_counter() - start
                        phases.rounds += 1
                    yield from records

    def num_slots(self, prompts: list[list[int]], max_new_tokens: int, rows: int) -> int:
        """Tokens that each of `rows` rows begins with room for with these prompts, the first ones in mode eager.

        In other modes it is the longest row's limit, because compiled code and CUDA graphs are of one size. Buffers of
        graphs never shrink: those that the target has are taken, if they are of as many rows.
        """
        if self.mode == "eager":
            return self.slots_of_prompts(prompts, rows)
        limit = min(max(map(len, prompts)) + max_new_tokens, self.target.runner.context)
        size = limit + self.spare_slots()
        # A power of two: few different shapes, so that few are compiled.
        size = max(bucket(rows), 1 << (size - 1).bit_length())
        held_rows, held = self.target.runner.shape
        return max(size, held) if self.mode in CAPTURED and held_rows == rows else size

    def rows_that_fit(self, prompts: list[list[int]], max_new_tokens: int, rows: int) -> int:
        """Of `rows`, those that the memory of a GPU has room for with such prompts; all of them elsewhere.

        What a token takes in the caches is what it takes once one was read: that is the model's to say (grouped or
        latent heads, layers that share theirs, states). The answer for a number of rows and slots stays the same,
        because compiled code and graphs are of it.
        """
        if self.device.type != "cuda" or rows == 1:
            return rows
        target, longest = self.target.runner, max(map(len, prompts))
        limit = min(longest + max_new_tokens, target.context)

        def slots(count: int) -> int:
            if self.mode == "eager":
                return round_up_to_bucket(limit + self.spare_slots(), count)
            return self.num_slots(prompts, max_new_tokens, count)

        key = rows, slots(rows)
        if key in self.planned:
            return self.planned[key]
        used, itemsize = kv_caches(self.target, self.draft), target.model.dtype.itemsize
        caches = [target.cache_of_a_token(), *(x for x in used if x is not target.cache)]
        tree = self.draft is not None and self.draft.shape is not None

        def needed(count: int) -> int:
            tokens = 1 if self.draft is None else self.max_slots
            logits = round_bytes(
                count, tokens, target.vocab_size, self.sampling, rule=self.rule, tree=tree, itemsize=itemsize
            )  # fmt: skip
            each = slots(count)
            prefill = prefill_bytes(target.config, count, longest, each, itemsize)
            return count * cache_bytes(caches, each) + max(logits, prefill)

        free = free_bytes(self.device, used)
        self.planned[key] = fitting_rows(rows, free, needed, slots)
        return self.planned[key]

    def slots_of_prompts(self, prompts: list[list[int]], rows: int) -> int:
        """Slots a row of KV buffers that grow, for these prompts and a round."""
        return round_up_to_bucket(max(map(len, prompts)) + self.spare_slots(), rows)

    def spare_slots(self, rounds_ahead: int | None = None) -> int:
        """Slots beyond a row's tokens that rounds may write: rows that are done still draft."""
        ahead = self.rounds_ahead if rounds_ahead is None else rounds_ahead
        return (ahead + 2) * self.max_slots + 2

    @torch.inference_mode()
    def _prepare_batch(
        self, rows: int, size: int, slots: int, choose: Sampler | None, extra: int
    ) -> tuple[BatchState, StepConfig]:
        """Empty rows with room for `size` tokens and KV buffers of `slots`. Buffers, random numbers and CUDA graph are
        used again if the shape is the same as before."""
        if choose is not None or self.batch_shape != (rows, size):
            self.state = BatchState.empty(rows, size, self.device)
            self.rng = CounterRNG(torch.zeros(rows, dtype=torch.long, device=self.device))
            self.graphs, self.captured_buffers = {}, []  # of other buffers, which they keep alive
        begin_request()
        if self.mode in COMPILED:
            pack_for_compiled_code()
        self.batch_shape = None if choose is not None else (rows, size)
        self.state.clear()
        self.target.runner.allocate(rows, slots)
        self.target.runner.capture_hidden_states(
            None if self.draft is None else self.draft.reads.aux_layers
        )
        context = DraftContext(
            rows, slots, self.longest, self.sampling, choose or self.rng,
            constraint=self.constraint, extra=extra,
            compiled=partial(compile_function, device_type=self.device.type) if self.mode in COMPILED else None,
            closing=self.closing,
        )  # fmt: skip
        constrained = None if self.constraint is None else context
        config = StepConfig(self.k, self.sampling, context.choose, self.rule, constrained)
        if self.draft is not None:
            self.draft.begin_batch(context)
        for cache in kv_caches(
            self.target, self.draft
        ):  # an eager engine of the same target may have hidden some
            cache.slots.limit_to(slots)
        return self.state, config

    def _prefill(
        self, state: BatchState, asked: DecodeRequests, new: dict[int, ActiveRequest]
    ) -> Tensor:
        """What `_prefill_rows` returns for `new` requests by row, on a GPU in parts of which none has too many tokens;
        on a CPU the runner itself has groups of like length."""
        if self.constraint is not None and asked.matchers is not None:
            for row, request in new.items():
                self.constraint.start(row, asked.matchers[request.prompt])
        longest = max(len(asked.prompts[request.prompt]) for request in new.values())
        count = prompts_together(longest) if self.device.type == "cuda" else len(new)
        rows = list(new)
        parts = [{r: new[r] for r in rows[i : i + count]} for i in range(0, len(rows), count)]
        return torch.cat([self._prefill_rows(state, asked, part) for part in parts])

    @torch.inference_mode()
    def _prefill_rows(
        self, state: BatchState, asked: DecodeRequests, new: dict[int, ActiveRequest]
    ) -> Tensor:
        """Prefills the prompts of `new` requests into their rows, beside running rows.

        Returns [b, 2]: the first tokens, and 1 where the logits were numbers.
        """
        device, choose = self.device, asked.choose
        numbers = [request.prompt for request in new.values()]
        texts = [asked.prompts[number] for number in numbers]
        row = torch.tensor(list(new), device=device)
        if choose is None:
            row_seed = [asked.seeds[number] for number in numbers]
            self.rng.reset_rows(row, torch.tensor(row_seed, device=device))
            choose = self.rng.for_rows(row)
        padded = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.long)
        for line, text in zip(padded, texts, strict=True):
            line[: len(text)] = torch.tensor(text)
        tokens = padded.to(device)
        length = torch.tensor([len(text) for text in texts], device=device)
        self._provide_slots(state, tokens.shape[1] + 2 * self.max_slots + 2)
        prefill: Callable[..., Tensor] = self.target.runner.prefill
        if asked.images is not None and self.target.runner.takes_images:
            prefill = partial(prefill, images=[asked.images[number] for number in numbers])
        logits = prefill(tokens, length, row)
        finite = has_finite_logits(logits[:, None])
        if self.constraint is not None:
            mask = self.constraint.masks(list(new), [()] * len(new)).to(device)
            logits = logits.masked_fill(~mask, float("-inf"))
        greedy = self.sampling.greedy
        first = logits.argmax(-1) if greedy else choose(warp(logits, self.sampling))
        if self.draft is not None:
            features = self.target.runner.features if self.draft.reads.aux_layers else None
            self.draft.prefill(row, tokens, length, features)
        limit = torch.tensor([request.limit for request in new.values()], device=device)
        state.reset_rows(row, tokens, length, first, limit, self.target.eos_ids)
        return torch.stack([first, finite.long()], 1)

    def _launch_round(
        self, state: BatchState, config: StepConfig, phases: PhaseTimes | None, skip_draft: bool
    ) -> AsyncHostCopy:
        """Runs a round, as a CUDA graph in modes that capture one, and starts the copy of its results to the host."""
        compiled = self.mode in COMPILED
        if self.mode == "compiled" and self.device.type == "cpu":
            self._mark_dynamic_slots(state.history)
        run = partial(
            run_round, self.target, self.draft, state, config, compiled=compiled,
            skip_draft=skip_draft,
        )  # fmt: skip
        if self.mode not in CAPTURED or phases is not None:
            return AsyncHostCopy(run(phases=phases))
        drafted = 0 if skip_draft else config.k
        changed = [state.history, state.length, state.done, self.rng.draws]
        if self.draft is not None:
            changed += self.draft.buffers().state
        buffers: list[SlotMapping | Tensor] = [
            *(cache.slots for cache in kv_caches(self.target, self.draft)),
            *changed,
        ]
        if not same_objects(buffers, self.captured_buffers):  # graphs hold addresses
            self.graphs, self.captured_buffers = {}, buffers
        key = config.k, drafted
        if key not in self.graphs:
            # `begin_batch` replaces some of the draft's tensors, which the graph still needs
            parts = [] if self.draft is None else self.draft.buffers().drafts
            keep_alive = [dict(vars(part)) for part in parts]
            self.graphs[key] = CudaGraphRunner(run, changed, keep_alive)
            if self._may_skip(state):  # before any request comes that far
                skip = partial(run, skip_draft=True)
                self.graphs[config.k, 0] = CudaGraphRunner(skip, changed, keep_alive)
        return AsyncHostCopy(self.graphs[key]())

    def _may_skip(self, state: BatchState) -> bool:
        """Whether rows of these buffers can go beyond the draft's context, and no graph is of such a round yet."""
        limit = None if self.draft is None else self.draft.reads.context
        if limit is None or (self.k, 0) in self.graphs:
            return False
        room = min(state.history.shape[1] - self.spare_slots(), self.target.runner.context)
        return room > limit

    def _mark_dynamic_slots(self, history: Tensor) -> None:
        """Makes compiled code of any number of slots, and of tokens of the `history` [B, S], where it can be: also for
        engines that do not grow, so that all engines of a target run one code."""
        target, draft = self.target.runner, self.draft
        if target.can_grow:
            target.cache.mark_dynamic()
            torch._dynamo.maybe_mark_dynamic(history, 1)
        if draft is not None and (buffers := draft.buffers()).can_grow:
            for cache in buffers.kv_caches:
                cache.mark_dynamic()

    @torch.inference_mode()
    def _provide_slots(self, state: BatchState, count: int) -> None:
        """Enlarges all buffers to `count` slots a row where they have fewer; eager forwards attend to no more."""
        size = round_up_to_bucket(count, len(state.length))
        if size > state.history.shape[1]:
            self.batch_shape = None  # if `reserve` fails, the next request begins with new buffers
            state.reserve(size)
            self.batch_shape = (len(state.length), size)
        for cache in kv_caches(self.target, self.draft):
            cache.reserve(size)
        if self.mode == "eager":
            for cache in kv_caches(self.target, self.draft):
                cache.slots.limit_to(size)


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
    """`SpeculativeEngine.speculate` of a new engine; `settings` are the keywords of that method.

    With a lossless rule the text follows the target's distribution under `sampling` (its argmax at temperature 0)
    whatever the draft is; draft None is plain decoding.
    """
    engine = SpeculativeEngine(target, draft, k=k, sampling=sampling, rule=rule, mode=mode)
    return engine.speculate(prompts, **settings)


@contextlib.contextmanager
def own_dtypes() -> Iterator[None]:
    """The block computes in the dtypes of models and drafts: autocast, which a notebook may have on for whole cells,
    would give products inputs of another dtype than their weights. cuDNN's attention is off: it makes a plan for every
    new length."""
    with contextlib.ExitStack() as stack:
        if torch.version.cuda and torch.backends.cuda.cudnn_sdp_enabled():
            torch.backends.cuda.enable_cudnn_sdp(False)
            stack.callback(torch.backends.cuda.enable_cudnn_sdp, True)
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def decode(
    target: Target, draft: Draft | None, prompts: list[list[int]], **settings: Any
) -> list[DecodeRecord]:
    """`speculate` run to its end: one DecodeRecord for each prompt, in order. Takes the same keywords."""
    return collect_outputs(prompts, speculate(target, draft, prompts, **settings))


def row_seeds(seed: int, rows: int) -> list[int]:
    """One seed for each row, distinct for distinct (seed, row) up to 2**31 rows."""
    return [(seed << 31) + row for row in range(rows)]


def same_objects(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether both hold the very same objects in the same order."""
    return [id(x) for x in one] == [id(x) for x in other]
