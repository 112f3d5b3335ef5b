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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

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
from decode.common.typed_json import Omitted, from_json, to_json
from decode.drafts.base import Draft, Proposal
from decode.engine.engine import SpeculativeEngine
from decode.engine.round import PhaseTimes
from decode.model import attention
from decode.model.loading import Target, load_target
from decode.verification.sampling import SamplingParams
from eval.metrics.bootstrap import MS_PER_SECOND
from eval.metrics.roofline import measure_bandwidth
from eval.tasks.loading import Task, load_fitting_prompts
from scripts.lab import floor_work
from scripts.lab.cells import BenchSettings, Cell, cells_beside, finish, run_cells

MOST_VERIFIED = 16
"""Rows up to which one text is verified; more rows are a batch of texts."""
PLAIN = SamplingParams()


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
    sampling: SamplingParams = PLAIN,
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
    seconds = []
    for batch in batches:  # every shape once, so that nothing is compiled while the clock runs
        start = time.perf_counter()
        list(engine.speculate(batch, max_new_tokens=s.max_new_tokens))
        seconds.append(time.perf_counter() - start)
    phases = PhaseTimes()
    for batch in batches:
        list(engine.speculate(batch, max_new_tokens=s.max_new_tokens, phases=phases))
    return MS_PER_SECOND * (phases.total - phases.draft) / phases.rounds, seconds[0]


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
    products: Mapping[str, Sequence[float]],
    engine: Sequence[tuple[float, float]],
) -> list[FloorStep]:
    """A step for each number of rows; `engine` has what `round_ms` says of it."""
    exact = {name: times for name, times in products.items() if name != "int8"}
    flops = [2 * weights * count for count in rows]
    peak = max(n / ms for times in exact.values() for n, ms in zip(flops, times, strict=True))
    found = []
    for i, (count, (took, first)) in enumerate(zip(rows, engine, strict=True)):
        roofline = max(MS_PER_SECOND * weight_bytes / bandwidth, flops[i] / peak)
        kernel = min(exact, key=lambda name: exact[name][i])
        product = exact[kernel][i]
        int8 = products["int8"][i] if "int8" in products else None
        shares = roofline / took, product / took
        found.append(FloorStep(count, roofline, product, kernel, took, *shares, int8, first))
    return found


@dataclass(frozen=True)
class FloorWork:
    """Sampling at a number of rows, a pass of features, or a training step; times in milliseconds."""

    work: str
    tokens: int
    floor: float
    took: float
    of_floor: float
    tokens_per_second: float
    vocabulary: Omitted[float] = None
    vocabulary_top_p: Omitted[float] = None


def measure_batches(
    target: Target, s: FloorConfig, prompts: Sequence[list[int]]
) -> list[FloorWork]:
    """Sampling at each number of rows, features and training."""
    found: list[FloorWork] = []

    def add(work: str, tokens: int, floor: float, took: float, *vocabulary: float) -> None:
        speed = MS_PER_SECOND * tokens / took
        found.append(FloorWork(work, tokens, floor, took, floor / took, speed, *vocabulary))

    layers = floor_work.linear_layers(target.runner.model)
    plain, nucleus = SamplingParams(1.0), SamplingParams(1.0, top_p=0.9)
    for rows in s.sampled_rows:
        floor = floor_work.floor_ms(layers, rows, s.repeats)
        took, _ = round_ms(target, s, prompts, rows, plain)
        parts = [
            floor_work.vocabulary_ms(target, prompts, rows, x, s.repeats) for x in (plain, nucleus)
        ]
        add("sampling", rows, floor, took, *parts)
    if s.samples:
        samples = floor_work.sample_rows(prompts, s.samples, s.sample_tokens)
        body = floor_work.body_layers(target.runner.model)
        tokens = s.samples * s.sample_tokens
        floor = floor_work.floor_ms(body, tokens, 2)
        rate = 2 * tokens * sum(layer.weight.numel() for layer in body) / floor
        add("features", tokens, floor, floor_work.extraction_ms(target, samples))
        flops = floor_work.training_flops(target, samples)
        step = floor_work.training_step(target, samples)
        took = floor_work.fastest_ms(step, 2, target.runner.device)
        add("training", tokens, flops / rate, took)
    return found


def main(s: FloorConfig) -> None:
    if not s.rows:
        raise UserError("rows is empty: give at least one number")
    check_file(s.out)
    target = load_target(s.target, s.device, s.dtype, s.revision)
    prompts = [item.prompt_ids for item in load_fitting_prompts(s.tasks, target)]
    layers = floor_work.linear_layers(target.runner.model)
    weights = sum(layer.weight.numel() for layer in layers)
    weight_bytes = sum(layer.weight.nbytes for layer in layers)
    if s.split_kv:
        attention.use_split_kv(True)
    SpeculativeEngine(target, mode=s.mode)  # UserError here rather than after the first cell

    def cell(name: str, measure: Callable[[], object]) -> Cell:
        return Cell(name, lambda _: {"found": to_json(measure())})

    cells = [
        cell("bandwidth", lambda: measure_bandwidth(target.runner.device)),
        *(cell(f"engine-{rows}", partial(round_ms, target, s, prompts, rows)) for rows in s.rows),
        cell("products", lambda: floor_work.time_products(layers, s.rows, s.repeats)),
        cell("batches", lambda: measure_batches(target, s, prompts)),
    ]
    with cells_beside(s.out, s) as kept:
        found = (x["found"] for (x,) in run_cells(cells, kept).values())
        bandwidth, *rounds, products, batches = found
        steps = summarize(s.rows, weights, weight_bytes, bandwidth, products, rounds)
        print_tables(weight_bytes, bandwidth, steps, from_json(list[FloorWork], batches))
        finish(s.out, {
            "target": target.name, "dtype": s.dtype, "mode": s.mode, "split_kv": s.split_kv, "prompts": len(prompts),
            "context": statistics.mean(map(len, prompts)) + s.max_new_tokens / 2, "weight_bytes": weight_bytes,
            "bandwidth": bandwidth, "products": products, "steps": list(map(asdict, steps)),
            "batches": batches, **to_json(provenance.collect()),
        })  # fmt: skip


def print_tables(
    weight_bytes: int, bandwidth: float, steps: Sequence[FloorStep], batches: Sequence[FloorWork]
) -> None:
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
    table = Table(
        "work", "tokens", "floor", "took", "of floor", "tokens/s", "vocabulary", "with top-p"
    )
    for y in batches:
        parts = (y.vocabulary, y.vocabulary_top_p)
        shares = ["–" if part is None else f"{part:.1f} ({part / y.took:.0%})" for part in parts]
        table.add_row(
            y.work, f"{y.tokens:,}", f"{y.floor:,.1f}", f"{y.took:,.1f}", f"{y.of_floor:.0%}",
            f"{y.tokens_per_second:,.0f}", *shares,
        )  # fmt: skip
    console.print(table)


if __name__ == "__main__":
    run_command(main, FloorConfig, __doc__)
