"""Throughput against concurrency from measured costs, and the best K by batch size as engines read it.

All requests are taken to decode all the time, each with the τ of the forecast: prefill of new requests and waiting are
not in it. Costs between two measured batch sizes are on a straight line; beyond the largest nothing is said.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from decode.serving import sglang_engine, trtllm_engine, vllm_engine
from decode.serving.engine import KRange
from eval.forecasting.costs import EngineCost
from eval.metrics.common import MS_PER_SECOND


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
    ks = list(rates)
    best = [ks[i] for i in np.argmax([rates[k] for k in ks], axis=0)]
    ranges: list[KRange] = []
    for batch, k in zip(batches, best, strict=True):
        if ranges and ranges[-1][2] == k:
            ranges[-1] = (ranges[-1][0], batch, k)
        else:
            ranges.append((batch, batch, k))
    return ranges


def schedule_entry(costs: dict[int, EngineCost], tau: dict[int, float]) -> dict[str, Any]:
    """Throughput at the measured batch sizes, and the schedule in each engine's form."""
    ranges, batches = best_ranges(costs, tau), sorted(costs)
    rates = throughput(costs, tau, batches)
    return {
        "batches": batches,
        "tokens_per_second": {str(k): values for k, values in rates.items()},
        "best_k": [list(one) for one in ranges],
        "vllm": vllm_engine.schedule(ranges),
        "tensorrt_llm": trtllm_engine.schedule(ranges),
        "sglang": sglang_engine.schedule(ranges),
    }
