"""Measuring tools of scripts/benchmarks/gpu_bench.py: bytes and rooflines, clocks, and synchronisation with the host.

Times are milliseconds, sizes bytes, bandwidths bytes per second. On CUDA a time is taken by a pair of events around
several runs, so that the queue is never empty between them; elsewhere by the host's clock.
"""

import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from scripts.benchmarks.widen_llama import LlamaShape

Measurement = dict[str, Any]
"""One row of a table; a repeated measurement is a `summary`."""
MODES = {
    "eager": "one kernel after another, launched by Python",
    "captured": "the same kernels in one CUDA graph a round",
    "compiled": "inductor's kernels, launched by Python",
    "graph": "inductor's kernels in one CUDA graph a round",
}

# ---- bytes ----


def weight_bytes(shape: LlamaShape, each: int = 2) -> int:
    """Bytes of weights that one forward pass reads, at `each` bytes per weight.

    An untied input embedding is left out, because a pass reads only one of its rows per token.
    """
    attention = shape.hidden * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    layer = attention + 3 * shape.hidden * shape.intermediate + 2 * shape.hidden
    return each * (shape.layers * layer + shape.hidden + shape.vocab * shape.hidden)


def kv_bytes(shape: LlamaShape, each: int = 2) -> int:
    """Bytes of keys and values per token of context."""
    return each * 2 * shape.layers * shape.kv_heads * shape.head_dim


def floor_ms(
    shape: LlamaShape, context: int, bandwidth: float, rows: int = 1, each: int = 2
) -> float:
    """Milliseconds to read weights and K/V once at `bandwidth` bytes per second: the roofline of a plain step.

    `rows` is the batch size, `context` the tokens of each row.
    """
    return 1e3 * (weight_bytes(shape, each) + rows * context * kv_bytes(shape, each)) / bandwidth


def roofline_share(floor: float, measured: float) -> float:
    """Fraction of the roofline reached, floor ÷ measured time; 1 means as fast as memory allows."""
    return floor / measured


# ---- clocks ----


def summary(values: Sequence[float]) -> dict[str, float]:
    """{"median", "low", "high", "n"}: median, quartiles and number of values."""
    several = [*values] * (1 if len(values) > 1 else 2)
    low, middle, high = statistics.quantiles(several, n=4, method="inclusive")
    return {"median": middle, "low": low, "high": high, "n": len(values)}


def time_ms(
    run: Callable[[], Any],
    device: torch.device,
    repeats: int,
    inner: int = 1,
    before: Callable[[], Any] | None = None,
) -> dict[str, float]:
    """`summary` of milliseconds per `run`, from `repeats` samples; a sample is the mean of `inner` runs in a row.

    `before` is called ahead of each sample and not timed. One untimed sample comes first as a warm-up.
    """
    times = []
    for _ in range(repeats + 1):
        if before is not None:
            before()
        times.append(_cuda_ms(run, inner) if device.type == "cuda" else _host_ms(run, inner))
    return summary(times[1:])


def _cuda_ms(run: Callable[[], Any], inner: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(inner):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / inner


def _host_ms(run: Callable[[], Any], inner: int) -> float:
    start = time.perf_counter()
    for _ in range(inner):
        run()
    return 1e3 * (time.perf_counter() - start) / inner


def wall_ms(run: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """The result of `run` and the milliseconds until the device has finished."""
    start = time.perf_counter()
    value = run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return value, 1e3 * (time.perf_counter() - start)


def measure_bandwidth(device: torch.device, size: int, repeats: int) -> dict[str, float]:
    """Bytes per second of a copy (reads and writes counted) and of a sum (reads only) of `size` random bytes."""
    source = torch.rand(size // 4, device=device)
    sink = torch.empty_like(source)
    copied = time_ms(lambda: sink.copy_(source), device, repeats, 3)["median"]
    summed = time_ms(source.sum, device, repeats, 3)["median"]
    return {"copy": 2e3 * size / copied, "read": 1e3 * size / summed}


@contextmanager
def record_syncs(found: list[str]) -> Iterator[None]:
    """Appends "file:line" for each place inside where the host waited for the device, as reported by torch.

    On CUDA only.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found += [
        f"{w.filename}:{w.lineno}" for w in caught if "called a synchronizing" in str(w.message)
    ]


@contextmanager
def forbid_syncs() -> Iterator[None]:
    """Inside, a wait of the host for the device raises an error wherever torch detects it. On CUDA only."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- results ----

MIN_EQUAL_SHARE = 0.3
"""In bf16 texts may differ from a near-tie on; texts of some dozens of tokens that differ earlier than at this share
of their length are an error."""


def compare_texts(got: Sequence[Sequence[int]], want: Sequence[Sequence[int]]) -> Measurement:
    """{"equal", "of", "same_until"}: number of equal texts, of texts, and mean share before the first difference."""
    shares = []
    for a, b in zip(got, want, strict=True):
        first = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(b))
        shares.append(min(1.0, min(first, len(a)) / max(1, len(b))))
    equal = sum(list(a) == list(b) for a, b in zip(got, want, strict=True))
    return {"equal": equal, "of": len(shares), "same_until": sum(shares) / max(1, len(shares))}


def round_floats(value: Any) -> Any:
    """`value` with every float in its dicts and lists rounded to five significant digits."""
    if isinstance(value, dict):
        return {key: round_floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [round_floats(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def speedups(texts: Sequence[Measurement], rounds: Sequence[Measurement]) -> list[Measurement]:
    """Milliseconds per token and speed-up over plain rounds of the same batch size and mode, where τ is known."""
    tau = {row["method"]: row["tau"] for row in texts}
    ms = {(r["method"], r.get("rows", 1), r["mode"]): r["round_ms"]["median"] for r in rounds}
    found = []
    for (method, rows, mode), value in ms.items():
        base = ms.get(("plain", rows, mode))
        if method in tau and base is not None:
            each = value / tau[method]
            found.append(
                {
                    "method": method, "rows": rows, "mode": mode, "tau": tau[method], "round_ms": value,
                    "ms_per_token": each, "tokens_per_s": 1e3 * rows / each, "speedup": base / each,
                }
            )  # fmt: skip
    return round_floats(found)  # type: ignore[no-any-return]


def combine_speedups(stages: dict[str, Any]) -> list[Measurement]:
    """`speedups` of the stages "rounds" and "compiled", and of transformers' assisted generation over generate."""
    rows = {name: entry["rows"] for name, entry in stages.items()}
    timed = [*rows.get("rounds", []), *rows.get("compiled", [])]
    for row in rows.get("transformers", []):  # a step of generate counts as a plain round
        arm, ms = row["arm"], row.get("round_ms")
        arm, ms = ("plain", row["ms"]) if arm == "generate" else (arm, ms)
        timed += [{"method": arm, "mode": "transformers", "round_ms": ms}] if ms else []
    return speedups(rows.get("texts", []), timed)


def find_problems(result: dict[str, Any]) -> list[str]:
    """Errors of a run, a line each: failed stages, host waits in a round, texts that differ and should not."""
    stages, found = result["stages"], []
    for name, entry in stages.items():
        if entry["error"] is not None and not entry["cut"]:
            found.append(f"{name} failed: {entry['error'].strip().splitlines()[-1]}")
    for row in stages.get("host", {"rows": []})["rows"]:
        if row["method"] == "planted" and row["waits"] == 0:
            found.append("host: the planted wait was not detected, so no wait would be")
        if row["method"] != "planted" and row["waits"] > 0:
            found.append(f"host: {row['method']} waits at {', '.join(row['where'])}")
    for name in ("texts", "graph_texts"):
        for row in stages.get(name, {"rows": []})["rows"]:
            differ, until = row["of"] - row["equal"], row["same_until"]
            if differ and (result["dtype"] == "float32" or until < MIN_EQUAL_SHARE):
                found.append(
                    f"{name}: {differ} of {row['method']} differ, after {until:.0%} of their length"
                )
    return found
