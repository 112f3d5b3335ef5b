"""What floor.py does: it times the products of a model's linear layers by several kernels, which every pass takes at
least, and the decoder's rounds."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from decode.common import files, provenance
from decode.common.errors import UserError
from decode.common.run_dir import check_file
from decode.common.typed_json import to_json
from decode.drafts.base import Draft, Proposal
from decode.engine.engine import SpeculativeEngine
from decode.engine.round import PhaseTimes
from decode.model import attention
from decode.model.linear import PackedLinear
from decode.model.loading import Target, adopt_tokenizer, load_target
from decode.model.quantized.int4 import Int4Linear
from decode.model.quantized.layers import QuantizedLinear
from decode.model.quantized.vnni import is_available
from decode.model.quantized.w8a8 import W8A8Linear
from eval.benchmark.timing import synchronize
from eval.metrics.bootstrap import MS_PER_SECOND
from eval.metrics.roofline import measure_bandwidth
from eval.tasks.loading import load_fitting_prompts
from scripts.lab.settings import FloorConfig

MOST_VERIFIED = 16
"""Rows up to which one text is verified; more rows are a batch of texts."""
Product = Callable[[Tensor], Tensor]
Layer = nn.Linear | W8A8Linear | Int4Linear


def linear_layers(model: nn.Module) -> list[Layer]:
    """The linear layers that a token passes, the LM head among them. UserError for a model without any."""
    found = [module for module in model.modules() if isinstance(module, Layer)]
    if not found:
        raise UserError("the target has no linear layer of torch: its products cannot be timed")
    return found


def bytes_of(layer: Layer) -> int:
    """Bytes of its weight that a product reads."""
    if isinstance(layer, Int4Linear):
        return layer.packed.nbytes
    each = 1 if isinstance(layer, W8A8Linear) else layer.weight.element_size()
    return each * numbers_of(layer)


def numbers_of(layer: Layer) -> int:
    return layer.in_features * layer.out_features


def few_bits_product(layer: Layer) -> Product:
    """That of the layer's own numbers with inputs of `input_dtype`."""
    ops = torch.ops.draftsmith
    if isinstance(layer, Int4Linear):
        return lambda x: ops.int4_product(x, layer.packed, layer.out_features)
    assert isinstance(layer, W8A8Linear)
    return lambda x: ops.int8_product(x, layer.values, layer.scale, layer.offset)


def input_dtype(layer: Layer) -> torch.dtype:
    """What its kernels are given: those of eight bits take inputs that are rounded already."""
    if isinstance(layer, W8A8Linear):
        return torch.uint8
    return torch.float32 if isinstance(layer, Int4Linear) else layer.weight.dtype


def kernels(layer: Layer) -> dict[str, Callable[[Any], Product]]:
    """{name: how it multiplies by layers like this one}: torch's way, and on a CPU the decoder's. In few bits only
    those of whole numbers: rotating and rounding the inputs of eight bits is not in it."""
    if isinstance(layer, QuantizedLinear):
        return {"few bits": few_bits_product}
    device = layer.weight.device
    linear = {"linear": lambda layer: lambda x: nn.functional.linear(x, layer.weight, layer.bias)}
    if device.type != "cpu":
        return linear
    packed = lambda layer: layer if isinstance(layer, PackedLinear) else PackedLinear(layer)  # noqa: E731
    return {**linear, "packed": packed}


def fastest_ms(work: Callable[[], Any], repeats: int, device: torch.device) -> float:
    """Milliseconds of `work`: the fastest of `repeats` turns, after one that does not count."""
    seconds = []
    for _ in range(repeats + 1):
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return MS_PER_SECOND * min(seconds[1:])


@torch.inference_mode()
def time_products(
    layers: Sequence[Layer], rows: Sequence[int], repeats: int
) -> dict[str, list[float]]:
    """{kernel: milliseconds of one product with every layer, for each of these numbers of rows}."""
    first = layers[0]
    device = next(first.parameters()).device
    found: dict[str, list[float]] = {}
    kinds = {(layer.in_features, input_dtype(layer)) for layer in layers}
    for name, kernel in kernels(first).items():
        products = [((layer.in_features, input_dtype(layer)), kernel(layer)) for layer in layers]
        found[name] = []
        for count in rows:
            inputs = {
                (width, own): torch.ones(count, width, device=device, dtype=own)
                for width, own in kinds
            }
            multiply = lambda: [product(inputs[x]) for x, product in products]  # noqa: B023, E731
            found[name].append(fastest_ms(multiply, repeats, device))
    return found


# ---- the command ----


class RepeatDraft(Draft):
    """Drafts the last token K times, so that every round verifies K + 1 tokens and drafting takes no time."""

    name = "repeat"

    def propose(self, history: Tensor, length: Tensor, k: int) -> Proposal:
        return Proposal(history.gather(1, (length - 1)[:, None]).expand(-1, k), None)


def round_ms(
    target: Target, s: FloorConfig, prompts: Sequence[list[int]], rows: int
) -> tuple[float, float]:
    """(mean milliseconds of the decoder's round of `rows` rows, without what its draft takes; seconds of its very first
    request, in which code is compiled)."""
    one_text = rows <= MOST_VERIFIED
    draft = RepeatDraft() if one_text and rows > 1 else None
    engine = SpeculativeEngine(target, draft, k=max(1, rows - 1), mode=s.mode)
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
    flops = [2 * weights * count for count in rows]
    peak = max(n / ms for times in products.values() for n, ms in zip(flops, times, strict=True))
    found = []
    for i, (count, (took, first)) in enumerate(zip(rows, engine, strict=True)):
        roofline = max(MS_PER_SECOND * weight_bytes / bandwidth, flops[i] / peak)
        kernel = min(products, key=lambda name: products[name][i])
        product = products[kernel][i]
        shares = roofline / took, product / took
        found.append(FloorStep(count, roofline, product, kernel, took, *shares, first))
    return found


def measure_floor(s: FloorConfig) -> None:
    """Times steps beside their floors, and prints their table."""
    if not s.rows:
        raise UserError("rows is empty: give at least one number")
    check_file(s.out)
    if s.dtype in ("w8a8", "w4a8") and not is_available():
        raise UserError(
            f"dtype {s.dtype} has a floor where the CPU has products of eight bits (AVX512-VNNI) alone"
        )
    adopt_tokenizer(s.target, s.tokenizer, s.revision)
    target = load_target(s.target, s.device, s.dtype, s.revision)
    prompts = [item.prompt_ids for item in load_fitting_prompts(s.tasks, target)]
    layers = linear_layers(target.runner.model)
    weights = sum(map(numbers_of, layers))
    weight_bytes = sum(map(bytes_of, layers))
    SpeculativeEngine(target, mode=s.mode)  # UserError before anything is measured
    bandwidth = measure_bandwidth(target.runner.device)
    rounds = [round_ms(target, s, prompts, rows) for rows in s.rows]
    products = time_products(layers, s.rows, s.repeats)
    steps = summarize(s.rows, weights, weight_bytes, bandwidth, products, rounds)
    print_table(weight_bytes, bandwidth, steps)
    files.write_result(s.out, {
        "target": target.name, "dtype": s.dtype, "mode": s.mode,
        "split_kv": attention.SETTINGS.split_kv, "prompts": len(prompts),
        "context": statistics.mean(map(len, prompts)) + s.max_new_tokens / 2, "weight_bytes": weight_bytes,
        "bandwidth": bandwidth, "products": products, "steps": list(map(asdict, steps)),
        **to_json(provenance.collect()),
    })  # fmt: skip


def print_table(weight_bytes: int, bandwidth: float, steps: Sequence[FloorStep]) -> None:
    console = Console(stderr=True, width=110)
    console.print(
        f"{weight_bytes / 1e6:.0f} MB of weights; {bandwidth / 1e9:.1f} GB/s; milliseconds a step"
    )
    table = Table("rows", "roofline", "product", "engine", "of roofline", "of product", "first, s")
    for x in steps:
        table.add_row(
            str(x.rows), f"{x.roofline:.1f}", f"{x.product:.1f} ({x.kernel})", f"{x.engine:.1f}",
            f"{x.of_roofline:.0%}", f"{x.of_product:.0%}", f"{x.first_request_s:.1f}",
        )  # fmt: skip
    console.print(table)
