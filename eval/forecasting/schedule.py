"""Throughput against concurrency from measured costs, and the best K by batch size as engines read it.

All requests are taken to decode all the time, each with the τ of the forecast: prefill of new requests and waiting are
not in it. Costs between two measured batch sizes are on a straight line; beyond the largest nothing is said.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from eval.forecasting.costs import EngineCost
from eval.metrics.common import MS_PER_SECOND

VLLM = "0.32"
"""The version of vLLM in whose code the keys were read (vllm/config/speculative.py, vllm/v1/spec_decode/dynamic)."""
TENSORRT_LLM = "1.3, as of NVIDIA/TensorRT-LLM pull request 10860"
"""Where the meaning of its key was read; earlier code took the batch sizes for lower bounds."""
Range = tuple[int, int, int]
"""(first batch size, last batch size, K)."""


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


def best_ranges(costs: dict[int, EngineCost], tau: dict[int, float]) -> list[Range]:
    """The K with the highest throughput for every batch size up to the largest measured one."""
    batches = list(range(1, max(costs) + 1))
    rates = throughput(costs, tau, batches)
    ks = list(rates)
    best = [ks[i] for i in np.argmax([rates[k] for k in ks], axis=0)]
    ranges: list[Range] = []
    for batch, k in zip(batches, best, strict=True):
        if ranges and ranges[-1][2] == k:
            ranges[-1] = (ranges[-1][0], batch, k)
        else:
            ranges.append((batch, batch, k))
    return ranges


def vllm_schedule(ranges: Sequence[Range]) -> dict[str, Any]:
    """Fields of vLLM's speculative_config. Its last K holds for larger batches too; {} where no K above 0 pays."""
    most = max(k for _, _, k in ranges)
    if most == 0:
        return {}
    schedule = [list(one) for one in ranges]
    return {"num_speculative_tokens": most, "num_speculative_tokens_per_batch_size": schedule}


def tensorrt_llm_schedule(ranges: Sequence[Range]) -> dict[str, Any]:
    """Fields of TensorRT-LLM's speculative_config: {largest batch size: K}; larger ones do not speculate."""
    most = max(k for _, _, k in ranges)
    if most == 0:
        return {}
    drafting = max(last for _, last, k in ranges if k > 0)
    lengths = {last: k for _, last, k in ranges if last <= drafting}
    return {"max_draft_len": most, "draft_len_schedule": lengths}


def sglang_flags(ranges: Sequence[Range]) -> list[str]:
    """Flags of SGLang, whose K is the same for every batch size: that of one request; [] where none pays there."""
    k = ranges[0][2]
    if k == 0:
        return []
    flags = [("num-steps", k), ("eagle-topk", 1), ("num-draft-tokens", k + 1)]
    return [f"--speculative-{name} {value}" for name, value in flags]


def schedule_entry(costs: dict[int, EngineCost], tau: dict[int, float]) -> dict[str, Any]:
    """Throughput at the measured batch sizes, and the schedule in each engine's form."""
    ranges, batches = best_ranges(costs, tau), sorted(costs)
    rates = throughput(costs, tau, batches)
    return {
        "batches": batches,
        "tokens_per_second": {str(k): values for k, values in rates.items()},
        "best_k": [list(one) for one in ranges],
        "vllm": {"version": VLLM, "speculative_config": vllm_schedule(ranges)},
        "tensorrt_llm": {
            "version": TENSORRT_LLM,
            "speculative_config": tensorrt_llm_schedule(ranges),
        },
        "sglang": {"flags": sglang_flags(ranges)},
    }
