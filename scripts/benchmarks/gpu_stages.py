"""The stages of scripts/benchmarks/gpu_bench.py: each measures one thing and yields each row when it is measured.

A stage that runs out of time ends after its current row. `texts` and `graph_texts` use the widened weights, which
reproduce the small models' texts; all others use random weights of the same shapes, because zeros run faster.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from decode.drafts.causal import CausalDraft
from decode.engine.engine import SpeculativeEngine
from decode.model import attention
from decode.verification.sampling import SamplingParams
from scripts.benchmarks import gpu_timers
from scripts.benchmarks.gpu_harness import (
    BenchBatch,
    GpuHarness,
    HFGenerate,
    buffer_slots,
    draft_passes,
    first_logit_column,
    prefilled_batch,
    target_pass,
    wrap_for_mode,
)
from scripts.benchmarks.gpu_timers import Measurement


def texts(harness: GpuHarness) -> Iterator[Measurement]:
    """τ of every method on widened weights, and how many texts equal those of plain decoding.

    In bf16 a near-tie may make texts differ.
    """
    harness.set_weights("widened")
    for name, (draft, k) in harness.methods().items():
        out = harness.decode(SpeculativeEngine(harness.target, draft, k=k), harness.prompts)
        got = [o.output_ids for o in out]
        tau = (sum(map(len, got)) - len(got)) / max(1, sum(len(o.rounds) for o in out))
        against, want = (
            ("the small target", harness.reference_texts)
            if draft is None
            else ("plain", harness.plain_texts())
        )
        yield {"method": name, "tau": tau, "against": against} | gpu_timers.compare_texts(got, want)
    hf = HFGenerate(harness)
    prompts = harness.prompts[:4]
    got = [hf.tokens(p, harness.sizes.max_new_tokens, **hf.assistant_args()) for p in prompts]
    tau = sum(map(len, got)) / max(
        1, hf.target_passes
    )  # the first pass reads the prompt and verifies
    row = {"method": f"transformers assisted k={harness.sizes.k}", "tau": tau, "against": "plain"}
    yield row | gpu_timers.compare_texts(got, harness.plain_texts()[: len(prompts)])


def bandwidth(harness: GpuHarness) -> Iterator[Measurement]:
    """Measured memory bandwidth in bytes per second."""
    found = gpu_timers.measure_bandwidth(
        harness.device, harness.sizes.copy_bytes, harness.sizes.repeats
    )
    harness.bandwidth = max(found.values())
    yield found


def plain(harness: GpuHarness) -> Iterator[Measurement]:
    """Milliseconds per token of plain decoding without compilation, and the fraction of the roofline reached."""
    harness.set_weights("random")
    for mode in dict.fromkeys(["eager", harness.fastest_uncompiled_mode]):
        batch = harness.make_batch("plain", 1)
        run = wrap_for_mode(batch.round, mode, batch.mutated_tensors())
        yield {"mode": mode} | with_roofline(harness, harness.time(run, batch))


def with_roofline(harness: GpuHarness, ms: dict[str, float]) -> Measurement:
    """A plain step's time with its fraction of the roofline, at the specified bandwidth and, once it is measured, at
    the measured one."""
    each = harness.target.decoder.model.dtype.itemsize
    floor = partial(gpu_timers.floor_ms, harness.shape, harness.sizes.context, each=each)
    promised, real = (
        floor(harness.sizes.bandwidth),
        floor(harness.bandwidth) if harness.bandwidth else None,
    )
    row = {
        "ms": ms,
        "floor_ms": promised,
        "share": gpu_timers.roofline_share(promised, ms["median"]),
    }
    return row | ({"share_of_real": gpu_timers.roofline_share(real, ms["median"])} if real else {})


def verify(harness: GpuHarness) -> Iterator[Measurement]:
    """v(T) = t(T) / t(1): the time to verify T tokens in one pass relative to one token, at several contexts.

    On a GPU with both kinds of attention: SDPA with a dense mask, and the split-KV kernel.
    """
    harness.set_weights("random")
    kinds = {"dense": False} | ({"split": True} if harness.cuda and attention.HAS_TRITON else {})
    for context in harness.sizes.contexts:
        batch = prefilled_batch(
            harness.target,
            None,
            1,
            context,
            1,
            buffer_slots(context, 0, 0, max(harness.sizes.widths)),
        )
        for kind, split in kinds.items():
            one = None
            for width in harness.sizes.widths:
                tokens, base = batch.state.history[:, :width], batch.length - 1
                run = partial(_target_pass, harness, tokens, base)
                attention.use_split_kv(split)
                ms = harness.time(
                    wrap_for_mode(run, harness.fastest_uncompiled_mode, [batch.state.done])
                )
                attention.use_split_kv(False)
                one = ms["median"] if one is None else one
                row = {
                    "context": context,
                    "attention": kind,
                    "T": width,
                    "mode": harness.fastest_uncompiled_mode,
                }
                yield row | {"ms": ms, "v": ms["median"] / one}


def _target_pass(
    harness: GpuHarness, tokens: torch.Tensor, base: torch.Tensor, compiled: bool
) -> torch.Tensor:
    decoder = harness.target.decoder
    return first_logit_column(target_pass, compiled, decoder, tokens, base)


def _draft_passes(harness: GpuHarness, batch: BenchBatch, compiled: bool) -> torch.Tensor:
    rest = batch.state.history[:, :2], batch.length, batch.rules.k
    return first_logit_column(draft_passes, compiled, harness.assistant, *rest)


def round_breakdown(
    harness: GpuHarness, batch: BenchBatch, mode: str, ms: dict[str, float]
) -> Measurement:
    """Milliseconds of a round's target pass and draft passes alone, and the rest: verification, commit and report."""
    changed = [batch.state.done]
    width = 1 if batch.draft is None else batch.rules.k + 1
    tokens, base = batch.state.history[:, :width], batch.length - 1
    target = harness.time(
        wrap_for_mode(partial(_target_pass, harness, tokens, base), mode, changed)
    )["median"]
    draft = 0.0
    if batch.draft is not None:
        draft = harness.time(wrap_for_mode(partial(_draft_passes, harness, batch), mode, changed))[
            "median"
        ]
    return {"target_ms": target, "draft_ms": draft, "overhead_ms": ms["median"] - target - draft}


def overhead(harness: GpuHarness) -> Iterator[Measurement]:
    """Milliseconds of a round that are spent in neither model, without compilation."""
    harness.set_weights("random")
    for name in ("plain", f"causal k={harness.sizes.k}"):
        batch = harness.make_batch(name, 1)
        ms = harness.time(
            wrap_for_mode(batch.round, harness.fastest_uncompiled_mode, batch.mutated_tensors()),
            batch,
        )
        yield {
            "method": name,
            "mode": harness.fastest_uncompiled_mode,
            "round_ms": ms,
        } | round_breakdown(harness, batch, harness.fastest_uncompiled_mode, ms)


def compiled(harness: GpuHarness) -> Iterator[Measurement]:
    """Plain and chain rounds: compiled, as CUDA graphs, and through the engine by wall clock (the host included)."""
    harness.set_weights("random")
    if not harness.compiled:
        return
    context, new = harness.sizes.context, harness.sizes.max_new_tokens
    for name in ("plain", f"causal k={harness.sizes.k}"):
        draft, k = harness.methods()[name]
        reach = 1 if draft is None else draft.max_slots(k)
        size = 1 << (context + new + 2 * reach + 1).bit_length()  # the size that the engine chooses
        batch = prefilled_batch(harness.target, draft, 1, context, k, max(128, size))
        for mode in ["compiled", "graph"] if harness.cuda else ["compiled"]:
            run, seconds = gpu_timers.wall_ms(
                partial(wrap_for_mode, batch.round, mode, batch.mutated_tensors()), harness.device
            )
            _, first = gpu_timers.wall_ms(run, harness.device)
            batch.rewind()
            ms = harness.time(run, batch)
            row = {"method": name, "mode": mode, "round_ms": ms, "ready_s": (seconds + first) / 1e3}
            yield row | (with_roofline(harness, ms) if draft is None else {})
        yield {"method": name, "mode": mode, "round_ms": ms} | round_breakdown(
            harness, batch, mode, ms
        )
        engine = SpeculativeEngine(harness.target, draft, k=k, mode=mode)
        filler = batch.state.history[0, :context].tolist()
        harness.decode(engine, [filler])
        out = harness.decode(engine, [filler])[0]
        ms = gpu_timers.summary([1e3 * x for x in out.round_seconds[1:]])
        yield {"method": name, "mode": f"{mode}, engine's wall clock", "round_ms": ms}


def rounds(harness: GpuHarness) -> Iterator[Measurement]:
    """Milliseconds per round of every method and batch size; a round's cost does not depend on what is accepted."""
    harness.set_weights("random")
    for rows in harness.sizes.batches:
        for name in harness.methods():
            batch = harness.make_batch(name, rows)
            ms = harness.time(
                wrap_for_mode(
                    batch.round, harness.fastest_uncompiled_mode, batch.mutated_tensors()
                ),
                batch,
            )
            yield {
                "method": name,
                "rows": rows,
                "mode": harness.fastest_uncompiled_mode,
                "round_ms": ms,
            }


def host(harness: GpuHarness) -> Iterator[Measurement]:
    """Waits of the host for the device in a round: none is allowed. The first row plants one to test the detection."""
    if not harness.cuda:
        return
    harness.set_weights("random")
    runs: dict[str, Callable[[], Any]] = {
        "planted": lambda: torch.zeros(1, device=harness.device).item()
    }
    for name in harness.methods():
        for how, sampling in (
            ("greedy", SamplingParams()),
            ("sampled", SamplingParams(0.8, top_p=0.9)),
        ):
            runs[f"{name}, {how}"] = partial(harness.make_batch, name, 2, sampling)
    for name, make in runs.items():
        batch, found = None if name == "planted" else make(), list[str]()
        run = make if batch is None else partial(batch.round, False)
        run()
        with gpu_timers.record_syncs(found):
            for _ in range(3):
                run()
        yield {"method": name, "rounds": 3, "waits": len(found), "where": sorted(set(found))}
    engine = SpeculativeEngine(harness.target, CausalDraft(harness.assistant), k=harness.sizes.k)
    records = engine.speculate(harness.prompts[:2], max_new_tokens=40)
    warm = [next(records) for _ in range(4)]  # the first tokens of two rows, then a round
    with gpu_timers.forbid_syncs():
        more = [next(records) for _ in range(10)]
    yield {"method": "engine's loop", "rounds": len(warm + more) // 2, "waits": 0, "where": []}


def transformers(harness: GpuHarness) -> Iterator[Measurement]:
    """Milliseconds per token of transformers' generate, and per round of its assisted generation."""
    harness.set_weights("random")
    hf = HFGenerate(harness)
    prompt = harness.prompts[0] * (1 + harness.sizes.context // len(harness.prompts[0]))
    prompt = prompt[: harness.sizes.context]
    each, _ = hf.time_without_prefill(prompt)
    yield {"arm": "generate"} | with_roofline(harness, each)
    _, turn = hf.time_without_prefill(prompt, **hf.assistant_args())
    yield {"arm": f"transformers assisted k={harness.sizes.k}", "round_ms": turn}
    if harness.compiled or not harness.cuda:
        static = HFGenerate(
            harness
        )  # without the hook that counts passes: it would break the graph
        static.model._forward_pre_hooks.clear()
        each, _ = static.time_without_prefill(prompt, cache_implementation="static")
        name = "generate, static cache, compiled" if harness.cuda else "generate, static cache"
        yield {"arm": name} | with_roofline(harness, each)


def graph_texts(harness: GpuHarness) -> Iterator[Measurement]:
    """Texts of the engine's compiled mode (CUDA graphs on a GPU) compared with eager ones, while rows are refilled."""
    if not harness.compiled:
        return
    harness.set_weights("widened")
    mode = "graph" if harness.cuda else "compiled"
    filler = (harness.prompts[0] * (1 + harness.sizes.context // len(harness.prompts[0])))[
        : harness.sizes.context
    ]
    for name in ("plain", f"causal k={harness.sizes.k}"):
        draft, k = harness.methods()[name]
        out = harness.decode(
            SpeculativeEngine(harness.target, draft, k=k, mode=mode),
            [*harness.prompts, filler],
            rows=1,
        )
        got = [o.output_ids for o in out[:-1]]
        yield {"method": name, "mode": mode} | gpu_timers.compare_texts(got, harness.plain_texts())


STAGES: dict[str, tuple[Callable[[GpuHarness], Iterator[Measurement]], float]] = {
    "texts": (texts, 70),
    "bandwidth": (bandwidth, 10),
    "plain": (plain, 20),
    "verify": (verify, 40),
    "compiled": (compiled, 200),
    "overhead": (overhead, 20),
    "host": (host, 30),
    "rounds": (rounds, 110),
    "transformers": (transformers, 110),
    "graph_texts": (graph_texts, 40),
}
"""{name: (stage, seconds that it may take on a large GPU)}, in the order in which they run."""
