"""What a step of the target could take at best on this machine, and how near this project's decoder comes to it.

    python scripts/lab/floor.py                                   # bundled target
    python scripts/lab/floor.py --target T --dtype bfloat16 --out floor.json

A step that computes R rows (a text's R tokens to verify, or R texts) reads every weight once and does 2 operations for
each weight and row. For each R the table has

  roofline: the larger of weights ÷ memory bandwidth and operations ÷ the highest rate that any product below reached
  product: the target's linear layers alone, one after the other, by the fastest of these kernels: linear
    (torch.nn.functional.linear), packed (decode/model/linear.py), on a CPU also int8 (weights in 8 bits,
    torch._weight_int8pack_mm), which is listed and not counted as this dtype's floor
  engine: a whole round of the decoder without its draft's part: attention, norms, sampling and bookkeeping included.
    Up to 16 rows one text is verified (K = R - 1 drafted tokens), beyond it R texts are decoded plainly
  first: seconds of the first request of R rows. With --mode compiled its code is made or, the second time, read from
    the disk (set TORCHINDUCTOR_CACHE_DIR to an empty folder to time it from cold)

A second table has the work around decoding, each with the time that its matrix products take at least:

  sampling: a round of --sampled_rows texts at temperature 1. Vocabulary work is what follows the logits: temperature,
    softmax, the draw, the check for NaN; also timed with top-p 0.9
  features: a pass of the target that fills the feature store with the states that EAGLE-3 reads. Its floor is the
    products of the target's layers at as many rows; no logits are computed
  training: a step of an EAGLE-3 head of 8,192 tokens and three steps with the live target, in mixed bf16 where --dtype
    is bfloat16. Its floor is the operations of its products, forward and backward (train/planning), at the rate of the
    target's layers in the pass of features

Weights come from memory: all layers are multiplied in turn, which is more than a cache holds, if the target is larger
than that. Run it on an idle machine. The last line is JSON.
"""

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from rich.console import Console
from rich.table import Table
from torch import Tensor

from decode.common import provenance
from decode.common.command import run_command
from decode.common.errors import UserError
from decode.common.ranges import Count, CountOrZero, at_least
from decode.common.run_dir import check_file
from decode.common.target_settings import TargetSettings
from decode.common.typed_json import to_json
from decode.drafts.base import Draft, Proposal
from decode.engine.engine import SpeculativeEngine
from decode.engine.round import PhaseTimes
from decode.model import attention
from decode.model.loading import Target, load_target
from decode.verification.sampling import SamplingParams
from eval.metrics.roofline import measure_bandwidth
from eval.tasks.loading import Task, load_fitting_prompts
from scripts.lab.cells import BenchSettings, Cell, cells_beside, finish, run_cells
from scripts.lab.floor_work import (
    MS,
    body_layers,
    extraction_ms,
    floor_ms,
    linear_layers,
    sample_rows,
    time_products,
    training_flops,
    training_ms,
    vocabulary_ms,
)

MOST_VERIFIED = 16
"""Rows up to which one text is verified; more rows are a batch of texts."""


@dataclass
class FloorConfig(BenchSettings, TargetSettings):
    mode: str = "eager"
    """The decoder's mode: eager, compiled or graph."""
    split_kv: bool = False
    """On a GPU: decode with decode/model/split_kv_attention.py instead of SDPA with a dense mask."""
    rows: list[Count] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32, 64])
    """Rows of a step."""
    repeats: Count = 7
    """Products of each kind; the fastest counts, after one that does not."""
    tasks: list[Task] = field(default_factory=lambda: [Task("code", limit=16)])
    """The prompts that the decoder continues, repeated where a batch has more rows."""
    max_new_tokens: Count = 32
    """Tokens decoded for each prompt."""
    sampled_rows: list[Count] = field(default_factory=lambda: [32, 64])
    """Rows of a sampled step."""
    samples: CountOrZero = 4
    """Samples of a pass of features and of a step of training; 0: neither is timed."""
    sample_tokens: Annotated[int, at_least(2)] = 256
    """Tokens of each of these samples, the second half of which is an answer."""


class RepeatDraft(Draft):
    """Drafts the last token K times, so that every round verifies K + 1 tokens and drafting takes no time."""

    name = "repeat"

    def propose(self, history: Tensor, length: Tensor, k: int) -> Proposal:
        return Proposal(history.gather(1, (length - 1)[:, None]).expand(-1, k), None)


def round_ms(
    target: Target,
    s: FloorConfig,
    prompts: Sequence[list[int]],
    rows: int,
    sampling: SamplingParams = SamplingParams(),  # noqa: B008 (frozen)
) -> tuple[float, float]:
    """(mean milliseconds of the decoder's round of `rows` rows, without what its draft takes; seconds of its very first
    request, in which code is compiled).

    Sampled rows are always texts, each decoded plainly.
    """
    one_text = rows <= MOST_VERIFIED and sampling.greedy
    draft = RepeatDraft() if one_text and rows > 1 else None
    engine = SpeculativeEngine(target, draft, k=max(1, rows - 1), mode=s.mode, sampling=sampling)
    together = [prompts[i % len(prompts)] for i in range(rows)]
    batches = [[prompt] for prompt in prompts] if one_text else [together]
    first_request = 0.0
    for batch in batches:  # every shape once, so that nothing is compiled while the clock runs
        start = time.perf_counter()
        list(engine.speculate(batch, max_new_tokens=s.max_new_tokens))
        first_request = first_request or time.perf_counter() - start
    phases = PhaseTimes()
    for batch in batches:
        list(engine.speculate(batch, max_new_tokens=s.max_new_tokens, phases=phases))
    return MS * (phases.total - phases.draft) / phases.rounds, first_request


@dataclass(frozen=True)
class FloorStep:
    """A step of so many rows; times in milliseconds, `of_roofline` and `of_product` are shares of 1."""

    rows: int
    roofline: float
    product: float
    kernel: str
    engine: float
    of_roofline: float
    of_product: float
    int8: float | None
    first_request_s: float


def summarize(
    rows: Sequence[int],
    weights: int,
    weight_bytes: int,
    bandwidth: float,
    products: dict[str, list[float]],
    engine: Sequence[tuple[float, float]],
) -> list[FloorStep]:
    """A step for each number of rows; `engine` has what `round_ms` says of it."""
    exact = {name: times for name, times in products.items() if name != "int8"}
    flops = [2 * weights * count for count in rows]
    peak = max(n / ms for times in exact.values() for n, ms in zip(flops, times, strict=True))
    found = []
    for i, (count, (took, first)) in enumerate(zip(rows, engine, strict=True)):
        roofline = max(MS * weight_bytes / bandwidth, flops[i] / peak)
        kernel = min(exact, key=lambda name: exact[name][i])
        product = exact[kernel][i]
        int8 = products["int8"][i] if "int8" in products else None
        shares = roofline / took, product / took
        found.append(FloorStep(count, roofline, product, kernel, took, *shares, int8, first))
    return found


def measure_batches(
    target: Target, s: FloorConfig, prompts: Sequence[list[int]]
) -> list[dict[str, Any]]:
    """One dict for sampling at each number of rows, features and training; times in milliseconds, shares of 1."""
    layers = linear_layers(target.runner.model)
    found: list[dict[str, Any]] = []
    plain, nucleus = SamplingParams(1.0), SamplingParams(1.0, top_p=0.9)
    for rows in s.sampled_rows:
        vocabulary = vocabulary_ms(target, prompts, rows, plain, s.repeats)
        found.append(
            {
                "work": "sampling", "tokens": rows, "floor": floor_ms(layers, rows, s.repeats),
                "took": round_ms(target, s, prompts, rows, plain)[0], "vocabulary": vocabulary,
                "vocabulary_top_p": vocabulary_ms(target, prompts, rows, nucleus, s.repeats),
            }
        )  # fmt: skip
    if s.samples:
        samples = sample_rows(prompts, s.samples, s.sample_tokens)
        body = body_layers(target.runner.model)
        tokens = s.samples * s.sample_tokens
        floor = floor_ms(body, tokens, 2)
        rate = 2 * tokens * sum(layer.weight.numel() for layer in body) / floor
        found.append(
            {"work": "features", "tokens": tokens, "floor": floor, "took": extraction_ms(target, samples)}
        )  # fmt: skip
        flops = training_flops(target, samples)
        found.append(
            {"work": "training", "tokens": tokens, "floor": flops / rate, "took": training_ms(target, samples)}
        )  # fmt: skip
    for x in found:
        x["of_floor"] = x["floor"] / x["took"]
        x["tokens_per_second"] = MS * x["tokens"] / x["took"]
    return found


def batch_table(found: Sequence[dict[str, Any]]) -> Table:
    """The table of `measure_batches`."""
    table = Table(
        "work", "tokens", "floor", "took", "of floor", "tokens/s", "vocabulary", "with top-p"
    )
    for x in found:
        shares = ["–", "–"]
        if "vocabulary" in x:
            shares = [
                f"{x[name]:.1f} ({x[name] / x['took']:.0%})"
                for name in ("vocabulary", "vocabulary_top_p")
            ]
        table.add_row(
            x["work"], f"{x['tokens']:,}", f"{x['floor']:,.1f}", f"{x['took']:,.1f}", f"{x['of_floor']:.0%}",
            f"{x['tokens_per_second']:,.0f}", *shares,
        )  # fmt: skip
    return table


def main(s: FloorConfig) -> None:
    if not s.rows:
        raise UserError("rows is empty: give at least one number")
    check_file(s.out)
    target = load_target(s.target, s.device, s.dtype, s.revision)
    model, device = target.runner.model, target.runner.device
    prompts = [item.prompt_ids for item in load_fitting_prompts(s.tasks, target)]
    layers = linear_layers(model)
    weights = sum(layer.weight.numel() for layer in layers)
    weight_bytes = sum(layer.weight.nbytes for layer in layers)
    if s.split_kv:
        attention.use_split_kv(True)
    SpeculativeEngine(target, mode=s.mode)  # UserError here rather than after the first cell

    def one_round(rows: int, _: int) -> tuple[float, float]:
        return round_ms(target, s, prompts, rows)

    cells = [
        Cell("bandwidth", lambda _: {"bytes_per_second": measure_bandwidth(device)}),
        *(Cell(f"engine-{rows}", partial(one_round, rows)) for rows in s.rows),
        Cell("products", lambda _: dict(time_products(layers, s.rows, s.repeats))),
        Cell("batches", lambda _: {"found": measure_batches(target, s, prompts)}),
    ]
    with cells_beside(s.out, s) as kept:
        (bandwidth,), *engine, (products,), (batches,) = run_cells(cells, kept).values()
        speed, rounds = bandwidth["bytes_per_second"], [one for (one,) in engine]
        steps = summarize(s.rows, weights, weight_bytes, speed, products, rounds)
        print_tables(weight_bytes, speed, steps, batches["found"])
        finish(s.out, {
            "target": target.name, "dtype": s.dtype, "mode": s.mode, "split_kv": s.split_kv, "prompts": len(prompts),
            "context": statistics.mean(map(len, prompts)) + s.max_new_tokens / 2, "weight_bytes": weight_bytes,
            "bandwidth": speed, "products": products, "steps": list(map(asdict, steps)),
            "batches": batches["found"], **to_json(provenance.collect()),
        })  # fmt: skip


def print_tables(
    weight_bytes: int,
    bandwidth: float,
    steps: Sequence[FloorStep],
    batches: Sequence[dict[str, Any]],
) -> None:
    """Prints the tables of `summarize` and of `measure_batches`."""
    console = Console(stderr=True, width=110)
    console.print(
        f"{weight_bytes / 1e6:.0f} MB of weights; {bandwidth / 1e9:.1f} GB/s; milliseconds a step"
    )
    table = Table(
        "rows", "roofline", "product", "engine", "of roofline", "of product", "int8 product", "first, s"
    )  # fmt: skip
    for x in steps:
        int8 = "–" if x.int8 is None else f"{x.int8:.1f}"
        table.add_row(
            str(x.rows), f"{x.roofline:.1f}", f"{x.product:.1f} ({x.kernel})", f"{x.engine:.1f}",
            f"{x.of_roofline:.0%}", f"{x.of_product:.0%}", int8, f"{x.first_request_s:.1f}",
        )  # fmt: skip
    console.print(table)
    console.print(batch_table(batches))


if __name__ == "__main__":
    run_command(main, FloorConfig, __doc__)
