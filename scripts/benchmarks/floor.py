"""What a step of the target could take at best on this machine, and how near this project's decoder comes to it.

    python scripts/benchmarks/floor.py                                   # bundled target
    python scripts/benchmarks/floor.py --target T --dtype bfloat16 --out floor.json

A step that computes R rows (a text's R tokens to verify, or R texts) reads every weight once and does 2 operations for
each weight and row. For each R the table has

  roofline: the larger of weights ÷ memory bandwidth and operations ÷ the highest rate that any product below reached
  product: the target's linear layers alone, one after the other, by the fastest of these kernels: linear
    (torch.nn.functional.linear), packed (decode/model/linear_layers.py), on a CPU also int8 (weights in 8 bits,
    torch._weight_int8pack_mm), which is listed and not counted as this dtype's floor
  engine: a whole round of the decoder without its draft's part: attention, norms, sampling and bookkeeping included.
    Up to 16 rows one text is verified (K = R - 1 drafted tokens), beyond it R texts are decoded plainly

Weights come from memory: all layers are multiplied in turn, which is more than a cache holds, if the target is larger
than that. Run it on an idle machine. The last line is JSON.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from decode.common import files, provenance
from decode.common.command import run_command
from decode.common.errors import UserError
from decode.common.ranges import Count
from decode.common.run_dir import check_file
from decode.drafts.base import Draft, Proposal
from decode.engine.engine import SpeculativeEngine
from decode.engine.round import PhaseTimes
from decode.model.linear_layers import PackedLinear
from decode.model.loading import Target, load_target
from eval.benchmark.timing import synchronize
from eval.metrics.roofline import measure_bandwidth
from eval.tasks.loading import Task, load_fitting_prompts

MS = 1000.0
MOST_VERIFIED = 16
"""Rows up to which one text is verified; more rows are a batch of texts."""


@dataclass
class FloorConfig:
    target: str = "assets/target"
    revision: str | None = None
    """Commit, tag or branch of a Hub target."""
    dtype: str = "float32"
    device: str = "auto"
    mode: str = "eager"
    """The decoder's mode: eager, compiled or graph."""
    rows: list[Count] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32, 64])
    """Rows of a step."""
    repeats: Count = 7
    """Products of each kind; the fastest counts, after one that does not."""
    tasks: list[Task] = field(default_factory=lambda: [Task("code", limit=16)])
    """The prompts that the decoder continues, repeated where a batch has more rows."""
    max_new_tokens: Count = 32
    """Tokens decoded for each prompt."""
    out: str = ""
    """File for the JSON of the last line; empty: none."""


Product = Callable[[Tensor], Tensor]


class RepeatDraft(Draft):
    """Drafts the last token K times, so that every round verifies K + 1 tokens and drafting takes no time."""

    name = "repeat"

    def propose(self, history: Tensor, length: Tensor, k: int) -> Proposal:
        return Proposal(history.gather(1, (length - 1)[:, None]).expand(-1, k), None)


def linear_layers(model: nn.Module) -> list[nn.Linear]:
    """The linear layers that a token passes, the LM head among them. UserError for a model without any."""
    found = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not found:
        raise UserError("the target has no linear layer of torch: its products cannot be timed")
    return found


def usual_product(layer: nn.Linear) -> Product:
    """By torch.nn.functional.linear."""
    return lambda x: nn.functional.linear(x, layer.weight, layer.bias)


def packed_product(layer: nn.Linear) -> Product:
    """As the decoder does."""
    return layer if isinstance(layer, PackedLinear) else PackedLinear(layer)


def int8_product(layer: nn.Linear) -> Product:
    """By weights rounded to 8 bits, one scale for each output."""
    weight = layer.weight.detach().float()
    scale = weight.abs().amax(1).clamp_min(1e-12) / 127
    rounded = (weight / scale[:, None]).round().to(torch.int8)
    scale = scale.to(torch.bfloat16)
    return lambda x: torch._weight_int8pack_mm(x, rounded, scale)


def kernels(device: torch.device) -> dict[str, Callable[[nn.Linear], Product]]:
    """{name: how it multiplies by a layer}."""
    if device.type != "cpu":
        return {"linear": usual_product}
    return {"linear": usual_product, "packed": packed_product, "int8": int8_product}


@torch.inference_mode()
def product_ms(
    layers: Sequence[nn.Linear],
    products: Sequence[Product],
    rows: int,
    repeats: int,
    dtype: torch.dtype,
) -> float:
    """Milliseconds of one product of `rows` rows with every layer: the fastest of `repeats` turns."""
    device = layers[0].weight.device
    widths = {layer.weight.shape[1] for layer in layers}
    inputs = {width: torch.randn(rows, width, device=device, dtype=dtype) for width in widths}
    seconds = []
    for _ in range(repeats + 1):
        synchronize(device)
        start = time.perf_counter()
        for layer, product in zip(layers, products, strict=True):
            product(inputs[layer.weight.shape[1]])
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return MS * min(seconds[1:])


def time_products(layers: Sequence[nn.Linear], s: FloorConfig) -> dict[str, list[float]]:
    """{kernel: milliseconds for each of s.rows}."""
    found = {}
    for name, kernel in kernels(layers[0].weight.device).items():
        products = [kernel(layer) for layer in layers]
        dtype = torch.bfloat16 if name == "int8" else layers[0].weight.dtype
        found[name] = [product_ms(layers, products, rows, s.repeats, dtype) for rows in s.rows]
    return found


def round_ms(target: Target, s: FloorConfig, prompts: Sequence[list[int]], rows: int) -> float:
    """Mean milliseconds of the decoder's round of `rows` rows, without what its draft takes."""
    one_text = rows <= MOST_VERIFIED
    draft = RepeatDraft() if one_text and rows > 1 else None
    engine = SpeculativeEngine(target, draft, k=max(1, rows - 1), mode=s.mode)
    together = [prompts[i % len(prompts)] for i in range(rows)]
    batches = [[prompt] for prompt in prompts] if one_text else [together]
    for batch in batches:  # every shape once, so that nothing is compiled while the clock runs
        list(engine.speculate(batch, max_new_tokens=s.max_new_tokens))
    phases = PhaseTimes()
    for batch in batches:
        list(engine.speculate(batch, max_new_tokens=s.max_new_tokens, phases=phases))
    return MS * (phases.total - phases.draft) / phases.rounds


def summarize(
    rows: Sequence[int],
    weights: int,
    weight_bytes: int,
    bandwidth: float,
    products: dict[str, list[float]],
    engine: Sequence[float],
) -> list[dict[str, Any]]:
    """One dict for each number of rows; times in milliseconds, `of_roofline` and `of_product` are shares of 1."""
    exact = {name: times for name, times in products.items() if name != "int8"}
    flops = [2 * weights * count for count in rows]
    peak = max(n / ms for times in exact.values() for n, ms in zip(flops, times, strict=True))
    found = []
    for i, count in enumerate(rows):
        roofline = max(MS * weight_bytes / bandwidth, flops[i] / peak)
        kernel = min(exact, key=lambda name: exact[name][i])
        product = exact[kernel][i]
        found.append(
            {
                "rows": count, "roofline": roofline, "product": product, "kernel": kernel, "engine": engine[i],
                "of_roofline": roofline / engine[i], "of_product": product / engine[i],
                "int8": products["int8"][i] if "int8" in products else None,
            }
        )  # fmt: skip
    return found


def main(s: FloorConfig) -> None:
    if not s.rows:
        raise UserError("rows is empty: give at least one number")
    check_file(s.out)
    target = load_target(s.target, s.device, s.dtype, s.revision)
    model, device = target.decoder.model, target.decoder.device
    prompts = [item.prompt_ids for item in load_fitting_prompts(s.tasks, target)]
    layers = linear_layers(model)
    weights = sum(layer.weight.numel() for layer in layers)
    weight_bytes = sum(layer.weight.nbytes for layer in layers)
    bandwidth = measure_bandwidth(device)
    engine = [round_ms(target, s, prompts, rows) for rows in s.rows]
    products = time_products(layers, s)
    steps = summarize(s.rows, weights, weight_bytes, bandwidth, products, engine)
    console = Console(stderr=True)
    console.print(
        f"{weight_bytes / 1e6:.0f} MB of weights; {bandwidth / 1e9:.1f} GB/s; milliseconds a step"
    )
    table = Table(
        "rows", "roofline", "product", "engine", "of roofline", "of product", "int8 product"
    )
    for x in steps:
        int8 = "–" if x["int8"] is None else f"{x['int8']:.1f}"
        table.add_row(
            str(x["rows"]), f"{x['roofline']:.1f}", f"{x['product']:.1f} ({x['kernel']})", f"{x['engine']:.1f}",
            f"{x['of_roofline']:.0%}", f"{x['of_product']:.0%}", int8,
        )  # fmt: skip
    console.print(table)
    facts = {
        "target": target.name, "dtype": s.dtype, "mode": s.mode, "prompts": len(prompts),
        "context": statistics.mean(map(len, prompts)) + s.max_new_tokens / 2, "weight_bytes": weight_bytes,
        "bandwidth": bandwidth, "products": products, "steps": steps, **provenance.collect(),
    }  # fmt: skip
    line = json.dumps(facts)
    if s.out:
        files.write_atomically(Path(s.out), line + "\n")
    print(line)


if __name__ == "__main__":
    run_command(main, FloorConfig, __doc__)
