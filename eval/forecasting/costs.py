"""What a round costs: milliseconds by batch, context and drafted tokens, measured with our engine or with vLLM. From
them throughput against concurrency, and the best K by batch size in the form that engines read.

In a schedule all requests are taken to decode all the time, each with the τ of the forecast: prefill of new requests
and waiting are not in it. Costs between two measured batch sizes are on a straight line; beyond the largest nothing is
said.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from decode.common.errors import UserError
from decode.drafts.base import Draft
from decode.engine.engine import decode
from decode.model.loading import Target
from decode.serving import sglang_engine, trtllm_engine, vllm_engine
from decode.serving.engine import KRange
from decode.serving.running import vllm_client
from eval.forecasting.rounds import ExpectedRounds
from eval.metrics.bootstrap import MS_PER_SECOND
from eval.metrics.speedup_model import RoundCost, fit_round_cost
from eval.results.forecast import CostPoint, EngineSchedule, KSchedule, SglangSchedule


@dataclass(frozen=True)
class EngineCost:
    """Costs at one batch and context: a plain step, and a round as a straight line in its drafted tokens."""

    plain_ms: float
    line: RoundCost
    plain_prefill_ms: float = 0.0
    prefill_ms: float = 0.0
    """With a draft."""

    def plain_request_ms(self, rounds: ExpectedRounds) -> float:
        """A request without a draft that emits as many tokens."""
        return self.plain_prefill_ms + self.plain_ms * rounds.emitted

    def request_ms(self, rounds: ExpectedRounds) -> float:
        """A request with these rounds; rounds that draft nothing cost a plain step."""
        undrafted = rounds.rounds - rounds.drafting_rounds
        drafting = self.line.fixed_ms * rounds.drafting_rounds
        each = self.line.per_token_ms * rounds.drafted
        return self.prefill_ms + self.plain_ms * undrafted + drafting + each

    def round_ms(self, k: int) -> float:
        """A round that drafts K tokens; K = 0 is a plain step."""
        return self.line.ms_at(k) if k else self.plain_ms


def fit_engine_cost(points: Iterable[CostPoint]) -> EngineCost:
    """From points of one batch and context: K = 0, and the line through the shortest and the longest other K.

    UserError without these three.
    """
    by_k = {point.k: point for point in points}
    lengths = sorted(k for k in by_k if k > 0)
    if 0 not in by_k or len(lengths) < 2 or by_k[lengths[0]].drafted == by_k[lengths[-1]].drafted:
        raise UserError(
            f"costs have K = {sorted(by_k)} at one batch and context: give 0 and two other K whose rounds draft "
            "different numbers of tokens"
        )
    plain, short, long = by_k[0], by_k[lengths[0]], by_k[lengths[-1]]
    line = fit_round_cost((short.drafted, short.round_ms), (long.drafted, long.round_ms))
    prefill = (short.prefill_ms + long.prefill_ms) / 2
    return EngineCost(plain.round_ms, line, plain.prefill_ms, prefill)


def group_costs(points: Sequence[CostPoint]) -> dict[tuple[int, int], EngineCost]:
    """{(context, batch): costs}, in rising order."""
    keys = sorted({(point.context, point.batch) for point in points})
    return {key: fit_engine_cost(p for p in points if (p.context, p.batch) == key) for key in keys}


def read_points(rows: Any) -> list[CostPoint]:
    """Cost points from a list of JSON objects. UserError for one that lacks a field or holds no numbers."""
    names = {field.name for field in fields(CostPoint)}
    for row in rows:
        numbers = all(isinstance(value, int | float) and value >= 0 for value in row.values())
        if row.keys() != names or not numbers:
            raise UserError(
                f"a point of costs is {row}: give {', '.join(sorted(names))} as numbers"
            )
    return [CostPoint(**row) for row in rows]


def context_prompts(prompts: Sequence[list[int]], context: int) -> list[list[int]]:
    """The prompts, or for a context above 0 as many of exactly that length, made of all prompts' tokens."""
    if context == 0:
        return [list(prompt) for prompt in prompts]
    tokens = [token for prompt in prompts for token in prompt]
    stream = tokens * (1 + (context + len(prompts)) // len(tokens))
    return [stream[i : i + context] for i in range(len(prompts))]


class CostShape(NamedTuple):
    """How many requests are measured together, how long their prompts are (0: as they come) and their answers."""

    batch: int
    context: int
    max_new_tokens: int


def measure_ours(
    target: Target, draft: Draft, texts: Sequence[list[int]], shape: CostShape, ks: Sequence[int]
) -> list[CostPoint]:
    """Cost points of our engine, greedy, a batch of these prompts at a time; `target` must have no EOS."""
    batch = shape.batch
    texts = [texts[i % len(texts)] for i in range(max(batch, len(texts)) // batch * batch)]
    points = []
    for k in ks:
        settings = {"max_new_tokens": shape.max_new_tokens} | ({"k": k} if k else {})
        timed, first = [], []
        for start in range(0, len(texts), batch):
            group = texts[start : start + batch]
            records = decode(target, draft if k else None, group, **settings)
            first.append(records[0].first_token_seconds)
            longest = max(records, key=lambda r: len(r.rounds))
            pairs = zip(longest.rounds, longest.round_seconds, strict=True)
            # The first round of a request may compile or allocate.
            timed += [(d, t) for (d, _), t in list(pairs)[1:] if d > 0 or k == 0]
        if not timed:
            raise UserError(
                f"no round drafted with K = {k}: give more or longer answers for the costs"
            )
        drafted = statistics.fmean(d for d, _ in timed)
        ms = MS_PER_SECOND * statistics.median(t for _, t in timed)
        prefill = MS_PER_SECOND * statistics.fmean(first)
        points.append(CostPoint(batch, shape.context, k, drafted, ms, prefill))
    return points


def vllm_point(
    answers: Sequence[dict[str, Any]], k: int, batch: int, context: int, plain_ms: float
) -> CostPoint:
    """The cost point of vLLM's answers with `batch` draws of each prompt, which take the same rounds (greedy) or are
    one (batch 1). `plain_ms` is a plain step, the cost of rounds without a draft; not used for K = 0.
    """
    decoding = MS_PER_SECOND * sum(a["seconds"] - a["first_token_seconds"] for a in answers)
    prefill = MS_PER_SECOND * statistics.fmean(a["first_token_seconds"] for a in answers)
    tokens = sum(len(ids) - 1 for a in answers for ids in a["ids"])
    if k == 0:
        return CostPoint(batch, context, 0, 0.0, batch * decoding / tokens, prefill)
    rounds, drafted, accepted = (
        sum(a[name] for a in answers) for name in ("rounds", "drafted", "accepted")
    )
    if rounds == 0:
        raise UserError(f"no round of vLLM drafted with K = {k}: give more prompts for the costs")
    undrafted = max(0, tokens - accepted - rounds)  # nearly: a last round may be cut
    ms = (batch * decoding - plain_ms * undrafted) / rounds
    return CostPoint(batch, context, k, drafted / rounds, ms, prefill)


def measure_vllm(
    python: str,
    target: str,
    speculative: dict[int, dict[str, Any]],
    texts: Sequence[list[int]],
    shape: CostShape,
    dtype: str,
) -> list[CostPoint]:
    """Cost points of vLLM, greedy: K = 0 and the K of `speculative`, {K: vLLM's speculative_config}.

    UserError with vLLM's message if it fails.
    """
    limit = shape.max_new_tokens
    longest = vllm_client.context_length(texts, max(speculative), limit)
    jobs = [
        vllm_client.build_job(
            target, texts, speculative=config, dtype=dtype, max_new_tokens=limit,
            max_model_len=longest, draws=shape.batch,
        )
        for config in (None, *speculative.values())
    ]  # fmt: skip
    points: list[CostPoint] = []
    results = vllm_client.run_jobs(python, jobs)
    for k, result in zip((0, *speculative), results, strict=True):
        if "error" in result:
            raise UserError(f"vLLM failed: {result['error'][:600]}")
        plain = points[0].round_ms if points else 0.0
        points.append(vllm_point(result["answers"], k, shape.batch, shape.context, plain))
    return points


def throughput(
    costs: dict[int, EngineCost], tau: dict[int, float], batches: Sequence[int]
) -> dict[int, list[float]]:
    """{K: tokens per second at each of `batches`} from {batch: costs} and {K: τ}; K = 0 is plain decoding, τ 1."""
    known = sorted(costs)
    found = {}
    for k, length in {0: 1.0, **tau}.items():
        ms = np.interp(batches, known, [costs[batch].round_ms(k) for batch in known])
        found[k] = (MS_PER_SECOND * np.array(batches) * length / ms).tolist()
    return found


def best_ranges(costs: dict[int, EngineCost], tau: dict[int, float]) -> list[KRange]:
    """The K with the highest throughput for every batch size up to the largest measured one."""
    batches = list(range(1, max(costs) + 1))
    rates = throughput(costs, tau, batches)
    best = [list(rates)[i] for i in np.argmax(list(rates.values()), axis=0)]
    runs = [(k, list(run)) for k, run in groupby(batches, key=lambda batch: best[batch - 1])]
    return [(run[0], run[-1], k) for k, run in runs]


def k_schedule(
    costs: dict[int, EngineCost], tau: dict[int, float], temperature: float, rule: str, context: int
) -> KSchedule:
    """Throughput at the measured batch sizes, and the schedule in each engine's form."""
    ranges, batches = best_ranges(costs, tau), sorted(costs)
    rates = throughput(costs, tau, batches)
    return KSchedule(
        temperature=temperature,
        rule=rule,
        context=context,
        batches=batches,
        tokens_per_second={str(k): values for k, values in rates.items()},
        best_k=ranges,
        vllm=EngineSchedule(**vllm_engine.schedule(ranges)),
        tensorrt_llm=EngineSchedule(**trtllm_engine.schedule(ranges)),
        sglang=SglangSchedule(**sglang_engine.schedule(ranges)),
    )
