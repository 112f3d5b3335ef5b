"""The stages of scripts/benchmarks/gpu_bench.py: each measures one thing and yields a row as soon as it has it.

A stage that runs out of time is cut between two rows. `texts` and `graph_texts` run on widened weights, which say
what the small models say; all others on random weights of the same shapes, because zeros run faster.
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


def texts(lab: GpuHarness) -> Iterator[Measurement]:
    """τ of every method on widened weights, and how many texts equal plain's (in bf16 near-ties may part them)."""
    lab.put("widened")
    for name, (draft, k) in lab.methods().items():
        out = lab.decode(SpeculativeEngine(lab.target, draft, k=k), lab.prompts)
        got = [o.output_ids for o in out]
        tau = (sum(map(len, got)) - len(got)) / max(1, sum(len(o.rounds) for o in out))
        against, want = ("the small target", lab.small) if draft is None else ("plain", lab.plain())
        yield {"method": name, "tau": tau, "against": against} | gpu_timers.compare_texts(got, want)
    arms = HFGenerate(lab)
    few = lab.prompts[:4]
    got = [arms.tokens(prompt, lab.sizes.max_new_tokens, **arms.assisted()) for prompt in few]
    tau = sum(map(len, got)) / max(
        1, arms.target_passes
    )  # its first pass reads the prompt and verifies
    row = {"method": f"transformers assisted k={lab.sizes.k}", "tau": tau, "against": "plain"}
    yield row | gpu_timers.compare_texts(got, lab.plain()[: len(few)])


def bandwidth(lab: GpuHarness) -> Iterator[Measurement]:
    """What the memory really gives, in bytes a second."""
    found = gpu_timers.measure_bandwidth(lab.device, lab.sizes.copy_bytes, lab.sizes.repeats)
    lab.bandwidth = max(found.values())
    yield found


def plain(lab: GpuHarness) -> Iterator[Measurement]:
    """Milliseconds a token of plain decoding without compilation, and the share of the roofline."""
    lab.put("random")
    for mode in dict.fromkeys(["eager", lab.still]):
        rig = lab.make_batch("plain", 1)
        run = wrap_for_mode(rig.round, mode, rig.changed())
        yield {"mode": mode} | with_roofline(lab, lab.time(run, rig))


def with_roofline(lab: GpuHarness, ms: dict[str, float]) -> Measurement:
    """A plain step's time with its share of the roofline at the promised and, once measured, at the real bandwidth."""
    each = lab.target.decoder.model.dtype.itemsize
    floor = partial(gpu_timers.floor_ms, lab.shape, lab.sizes.context, each=each)
    promised, real = floor(lab.sizes.bandwidth), floor(lab.bandwidth) if lab.bandwidth else None
    row = {
        "ms": ms,
        "floor_ms": promised,
        "share": gpu_timers.roofline_share(promised, ms["median"]),
    }
    return row | ({"share_of_real": gpu_timers.roofline_share(real, ms["median"])} if real else {})


def verify(lab: GpuHarness) -> Iterator[Measurement]:
    """v(T) = t(T) / t(1): what it costs to verify T tokens in one pass, at several contexts.

    On a GPU with both kinds of attention: SDPA with a dense mask, and the split-KV kernel.
    """
    lab.put("random")
    kinds = {"dense": False} | ({"split": True} if lab.cuda and attention.HAS_TRITON else {})
    for context in lab.sizes.contexts:
        rig = prefilled_batch(
            lab.target, None, 1, context, 1, buffer_slots(context, 0, 0, max(lab.sizes.widths))
        )
        for kind, split in kinds.items():
            one = None
            for width in lab.sizes.widths:
                tokens, base = rig.state.history[:, :width], rig.length - 1
                run = partial(_target_pass, lab, tokens, base)
                attention.use_split_kv(split)
                ms = lab.time(wrap_for_mode(run, lab.still, [rig.state.done]))
                attention.use_split_kv(False)
                one = ms["median"] if one is None else one
                row = {"context": context, "attention": kind, "T": width, "mode": lab.still}
                yield row | {"ms": ms, "v": ms["median"] / one}


def _target_pass(
    lab: GpuHarness, tokens: torch.Tensor, base: torch.Tensor, compiled: bool
) -> torch.Tensor:
    decoder = lab.target.decoder
    return first_logit_column(target_pass, compiled, decoder, tokens, base)


def _draft_passes(lab: GpuHarness, rig: BenchBatch, compiled: bool) -> torch.Tensor:
    rest = rig.state.history[:, :2], rig.length, rig.rules.k
    return first_logit_column(draft_passes, compiled, lab.assistant, *rest)


def round_breakdown(
    lab: GpuHarness, rig: BenchBatch, mode: str, ms: dict[str, float]
) -> Measurement:
    """A round beside its model passes alone; what is left is acceptance, commit and the report."""
    changed = [rig.state.done]
    width = 1 if rig.draft is None else rig.rules.k + 1
    tokens, base = rig.state.history[:, :width], rig.length - 1
    target = lab.time(wrap_for_mode(partial(_target_pass, lab, tokens, base), mode, changed))[
        "median"
    ]
    draft = 0.0
    if rig.draft is not None:
        draft = lab.time(wrap_for_mode(partial(_draft_passes, lab, rig), mode, changed))["median"]
    return {"target_ms": target, "draft_ms": draft, "overhead_ms": ms["median"] - target - draft}


def overhead(lab: GpuHarness) -> Iterator[Measurement]:
    """Milliseconds of a round that are neither target nor draft, without compilation."""
    lab.put("random")
    for name in ("plain", f"causal k={lab.sizes.k}"):
        rig = lab.make_batch(name, 1)
        ms = lab.time(wrap_for_mode(rig.round, lab.still, rig.changed()), rig)
        yield {"method": name, "mode": lab.still, "round_ms": ms} | round_breakdown(
            lab, rig, lab.still, ms
        )


def compiled(lab: GpuHarness) -> Iterator[Measurement]:
    """Plain and chain rounds compiled, then as graphs, then through the engine with the host's share: wall clock."""
    lab.put("random")
    if not lab.compiled:
        return
    context, new = lab.sizes.context, lab.sizes.max_new_tokens
    for name in ("plain", f"causal k={lab.sizes.k}"):
        draft, k = lab.methods()[name]
        reach = 1 if draft is None else draft.reach(k)
        size = 1 << (context + new + 2 * reach + 1).bit_length()  # as the engine chooses it
        rig = prefilled_batch(lab.target, draft, 1, context, k, max(128, size))
        for mode in ["compiled", "graph"] if lab.cuda else ["compiled"]:
            run, seconds = gpu_timers.wall_ms(
                partial(wrap_for_mode, rig.round, mode, rig.changed()), lab.device
            )
            _, first = gpu_timers.wall_ms(run, lab.device)
            rig.rewind()
            ms = lab.time(run, rig)
            row = {"method": name, "mode": mode, "round_ms": ms, "ready_s": (seconds + first) / 1e3}
            yield row | (with_roofline(lab, ms) if draft is None else {})
        yield {"method": name, "mode": mode, "round_ms": ms} | round_breakdown(lab, rig, mode, ms)
        engine = SpeculativeEngine(lab.target, draft, k=k, mode=mode)
        filler = rig.state.history[0, :context].tolist()
        lab.decode(engine, [filler])
        out = lab.decode(engine, [filler])[0]
        ms = gpu_timers.summary([1e3 * x for x in out.round_seconds[1:]])
        yield {"method": name, "mode": f"{mode}, engine's wall clock", "round_ms": ms}


def rounds(lab: GpuHarness) -> Iterator[Measurement]:
    """Milliseconds a round of every method and batch size; it costs the same whatever is accepted."""
    lab.put("random")
    for rows in lab.sizes.batches:
        for name in lab.methods():
            rig = lab.make_batch(name, rows)
            ms = lab.time(wrap_for_mode(rig.round, lab.still, rig.changed()), rig)
            yield {"method": name, "rows": rows, "mode": lab.still, "round_ms": ms}


def host(lab: GpuHarness) -> Iterator[Measurement]:
    """Waits of the host for the device in a round: none are allowed. The first row plants one, which must be seen."""
    if not lab.cuda:
        return
    lab.put("random")
    runs: dict[str, Callable[[], Any]] = {
        "planted": lambda: torch.zeros(1, device=lab.device).item()
    }
    for name in lab.methods():
        for how, sampling in (
            ("greedy", SamplingParams()),
            ("sampled", SamplingParams(0.8, top_p=0.9)),
        ):
            runs[f"{name}, {how}"] = partial(lab.make_batch, name, 2, sampling)
    for name, make in runs.items():
        rig, found = None if name == "planted" else make(), list[str]()
        run = make if rig is None else partial(rig.round, False)
        run()
        with gpu_timers.record_syncs(found):
            for _ in range(3):
                run()
        yield {"method": name, "rounds": 3, "waits": len(found), "where": sorted(set(found))}
    engine = SpeculativeEngine(lab.target, CausalDraft(lab.assistant), k=lab.sizes.k)
    records = engine.speculate(lab.prompts[:2], max_new_tokens=40)
    warm = [next(records) for _ in range(4)]  # two first tokens, then a round
    with gpu_timers.forbid_syncs():
        more = [next(records) for _ in range(10)]
    yield {"method": "engine's loop", "rounds": len(warm + more) // 2, "waits": 0, "where": []}


def transformers(lab: GpuHarness) -> Iterator[Measurement]:
    """Milliseconds a token of transformers' generate, and a round of its assisted generation."""
    lab.put("random")
    arms = HFGenerate(lab)
    prompt = lab.prompts[0] * (1 + lab.sizes.context // len(lab.prompts[0]))
    prompt = prompt[: lab.sizes.context]
    each, _ = arms.time_without_prefill(prompt)
    yield {"arm": "generate"} | with_roofline(lab, each)
    _, turn = arms.time_without_prefill(prompt, **arms.assisted())
    yield {"arm": f"transformers assisted k={lab.sizes.k}", "round_ms": turn}
    if lab.compiled or not lab.cuda:
        static = HFGenerate(lab)  # its passes are not counted: the hook would break the graph
        static.model._forward_pre_hooks.clear()
        each, _ = static.time_without_prefill(prompt, cache_implementation="static")
        name = "generate, static cache, compiled" if lab.cuda else "generate, static cache"
        yield {"arm": name} | with_roofline(lab, each)


def graph_texts(lab: GpuHarness) -> Iterator[Measurement]:
    """Texts of the engine's compiled mode, on a GPU as CUDA graphs, against eager ones; rows are refilled meanwhile."""
    if not lab.compiled:
        return
    lab.put("widened")
    mode = "graph" if lab.cuda else "compiled"
    filler = (lab.prompts[0] * (1 + lab.sizes.context // len(lab.prompts[0])))[: lab.sizes.context]
    for name in ("plain", f"causal k={lab.sizes.k}"):
        draft, k = lab.methods()[name]
        out = lab.decode(
            SpeculativeEngine(lab.target, draft, k=k, mode=mode), [*lab.prompts, filler], rows=1
        )
        got = [o.output_ids for o in out[:-1]]
        yield {"method": name, "mode": mode} | gpu_timers.compare_texts(got, lab.plain())


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
"""In the order in which they run, with the seconds that each may take on a large GPU."""
