"""What scripts/benchmarks/gpu_bench.py measures with: bytes and rooflines, clocks, and who waits for whom.

Times are milliseconds, sizes bytes, bandwidths bytes a second. On CUDA the clock is a pair of events around several
runs, so that the queue is never empty between them; elsewhere it is the host's.
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
"""One measurement; what was repeated is a `summary`."""
MODES = {
    "eager": "one kernel after another, launched by Python",
    "captured": "the same kernels in one CUDA graph a round",
    "compiled": "inductor's kernels, launched by Python",
    "graph": "inductor's kernels in one CUDA graph a round",
}

# ---- bytes ----


def weight_bytes(shape: LlamaShape, each: int = 2) -> int:
    """Bytes of weights that one pass reads: all but an input embedding of its own, of which it reads a row a token."""
    attention = shape.hidden * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    layer = attention + 3 * shape.hidden * shape.intermediate + 2 * shape.hidden
    return each * (shape.layers * layer + shape.hidden + shape.vocab * shape.hidden)


def kv_bytes(shape: LlamaShape, each: int = 2) -> int:
    """Bytes of keys and values that a token of context holds."""
    return each * 2 * shape.layers * shape.kv_heads * shape.head_dim


def floor_ms(
    shape: LlamaShape, context: int, bandwidth: float, rows: int = 1, each: int = 2
) -> float:
    """Milliseconds that reading weights and context must take: no plain step of so many rows is faster."""
    return 1e3 * (weight_bytes(shape, each) + rows * context * kv_bytes(shape, each)) / bandwidth


def roofline_share(floor: float, measured: float) -> float:
    """Of the roofline that is reached; 1 is the floor itself."""
    return floor / measured


# ---- clocks ----


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median, middle half and count."""
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
    """Milliseconds of one `run`: the mean of `inner` in a row, `repeats` times; `before` each row, not timed.

    One row that does not count comes first.
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
    """What `run` returns and the milliseconds until the device has finished it."""
    start = time.perf_counter()
    value = run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return value, 1e3 * (time.perf_counter() - start)


def measure_bandwidth(device: torch.device, size: int, repeats: int) -> dict[str, float]:
    """Bytes a second of a copy (read and write counted) and of a sum (read only), over `size` random bytes."""
    source = torch.rand(size // 4, device=device)
    sink = torch.empty_like(source)
    copied = time_ms(lambda: sink.copy_(source), device, repeats, 3)["median"]
    summed = time_ms(source.sum, device, repeats, 3)["median"]
    return {"copy": 2e3 * size / copied, "read": 1e3 * size / summed}


@contextmanager
def record_syncs(found: list[str]) -> Iterator[None]:
    """Appends where within it the host waited for the device, as far as torch can tell; on CUDA only."""
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
    """Within it, a wait of the host for the device that torch can tell is an error; on CUDA only."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- what rows say ----

MIN_EQUAL_SHARE = (
    0.3  # of a text; near-ties in bf16 part texts of some dozens of tokens later than this
)


def compare_texts(got: Sequence[Sequence[int]], want: Sequence[Sequence[int]]) -> Measurement:
    """How many texts are equal, and the mean share of a text before the first difference."""
    shares = []
    for a, b in zip(got, want, strict=True):
        first = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(b))
        shares.append(min(1.0, min(first, len(a)) / max(1, len(b))))
    equal = sum(list(a) == list(b) for a, b in zip(got, want, strict=True))
    return {"equal": equal, "of": len(shares), "same_until": sum(shares) / max(1, len(shares))}


def round_floats(value: Any) -> Any:
    """Floats to five digits, all the way down."""
    if isinstance(value, dict):
        return {key: round_floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [round_floats(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def speedups(texts: Sequence[Measurement], rounds: Sequence[Measurement]) -> list[Measurement]:
    """Milliseconds a token and speed-up over plain rounds of the same batch and mode, where τ is known."""
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
    """`speedups` of all stages that hold rounds; transformers' assisted generation over its own generate."""
    rows = {name: entry["rows"] for name, entry in stages.items()}
    timed = [*rows.get("rounds", []), *rows.get("compiled", [])]
    for row in rows.get("transformers", []):  # a token of generate is a plain round
        arm, ms = row["arm"], row.get("round_ms")
        arm, ms = ("plain", row["ms"]) if arm == "generate" else (arm, ms)
        timed += [{"method": arm, "mode": "transformers", "round_ms": ms}] if ms else []
    return speedups(rows.get("texts", []), timed)


def find_problems(result: dict[str, Any]) -> list[str]:
    """What must not be: stages that failed, waits in a round, texts that must be equal and are not."""
    stages, found = result["stages"], []
    for name, entry in stages.items():
        if entry["error"] is not None and not entry["cut"]:
            found.append(f"{name} failed: {entry['error'].strip().splitlines()[-1]}")
    for row in stages.get("host", {"rows": []})["rows"]:
        if row["method"] == "planted" and row["waits"] == 0:
            found.append("host: a planted wait was not seen, so that none would be")
        if row["method"] != "planted" and row["waits"] > 0:
            found.append(f"host: {row['method']} waits at {', '.join(row['where'])}")
    for name in ("texts", "graph_texts"):
        for row in stages.get(name, {"rows": []})["rows"]:
            differ, until = row["of"] - row["equal"], row["same_until"]
            if differ and (result["dtype"] == "float32" or until < MIN_EQUAL_SHARE):
                found.append(f"{name}: {differ} of {row['method']} differ, after {until:.0%}")
    return found
