"""What floor.py does: it times the products of a model's linear layers by several kernels, which every pass takes at
least, the decoder's rounds, and work around them: what follows the logits, a pass of features, a step of training."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from decode.common import files, provenance
from decode.common.errors import UserError
from decode.common.run_dir import check_file
from decode.common.typed_json import Omitted, from_json, to_json
from decode.drafts.base import Draft, Proposal
from decode.engine.engine import SpeculativeEngine
from decode.engine.round import PhaseTimes, StepConfig, verify
from decode.model import attention
from decode.model.hidden_states import HiddenStateSpec
from decode.model.layer_stack import layer_stack
from decode.model.linear import PackedLinear
from decode.model.loading import Target, adopt_tokenizer, load_target
from decode.model.quantized.int4 import Int4Linear
from decode.model.quantized.layers import QuantizedLinear
from decode.model.quantized.vnni import is_available
from decode.model.quantized.w8a8 import W8A8Linear
from decode.verification.sampling import CounterRNG, SamplingParams, has_finite_logits
from eval.benchmark.timing import synchronize
from eval.metrics.bootstrap import MS_PER_SECOND
from eval.metrics.roofline import measure_bandwidth
from eval.tasks.loading import load_fitting_prompts
from scripts.lab.cells import Cell, cells_beside, run_cells
from scripts.lab.settings import FloorConfig
from train.data.batching import collate
from train.data.sample_store import SampleRow
from train.families.base import FamilyContext
from train.families.settings.eagle import Eagle3Settings
from train.planning.shape_run import ShapeRun, made_up_rows
from train.settings.training import LoopConfig
from train.teacher.feature_codec import hidden_state_schema
from train.teacher.feature_extraction import extract_features
from train.teacher.live import LiveTeacher
from train.trainer.loop import build_optimizers
from train.trainer.settings import DistillConfig

MOST_VERIFIED = 16
"""Rows up to which one text is verified; more rows are a batch of texts."""
PLAIN = SamplingParams()
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


def rounded_weight_product(layer: nn.Linear) -> Product:
    """By weights rounded to 8 bits, one scale for each output."""
    weight = layer.weight.detach().float()
    scale = weight.abs().amax(1).clamp_min(1e-12) / 127
    rounded = (weight / scale[:, None]).round().to(torch.int8)
    scale = scale.to(torch.bfloat16)
    return lambda x: torch._weight_int8pack_mm(x, rounded, scale)


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
    """{name: how it multiplies by layers like this one}: torch's way, and on a CPU the decoder's and that by rounded
    weights. In few bits only those of whole numbers: rotating and rounding the inputs of eight bits is not in it."""
    if isinstance(layer, QuantizedLinear):
        return {"few bits": few_bits_product}
    device = layer.weight.device
    linear = {"linear": lambda layer: lambda x: nn.functional.linear(x, layer.weight, layer.bias)}
    if device.type != "cpu":
        return linear
    packed = lambda layer: layer if isinstance(layer, PackedLinear) else PackedLinear(layer)  # noqa: E731
    return {**linear, "packed": packed, "int8": rounded_weight_product}


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
                (width, own): torch.ones(
                    count, width, device=device, dtype=torch.bfloat16 if name == "int8" else own
                )
                for width, own in kinds
            }
            multiply = lambda: [product(inputs[x]) for x, product in products]  # noqa: B023, E731
            found[name].append(fastest_ms(multiply, repeats, device))
    return found


def floor_ms(layers: Sequence[Layer], rows: int, repeats: int) -> float:
    """Milliseconds of the layers' products of `rows` rows by the fastest kernel that rounds no weights."""
    times = time_products(layers, [rows], repeats)
    return min(ms for name, (ms,) in times.items() if name != "int8")


def body_layers(model: Any) -> list[Layer]:
    """The linear layers of the model's layer stack: all but the LM head."""
    return linear_layers(layer_stack(model))


@torch.inference_mode()
def vocabulary_ms(
    target: Target, prompts: Sequence[list[int]], rows: int, sampling: SamplingParams, repeats: int
) -> float:
    """Milliseconds of what a round does with the logits of `rows` rows, which are those after the prompts."""
    runner = target.runner
    texts = [prompt[-64:] for prompt in prompts[:rows]]
    length = torch.tensor([len(text) for text in texts], device=runner.device)
    tokens = torch.zeros(len(texts), int(length.max()), dtype=torch.long)
    for line, text in zip(tokens, texts, strict=True):
        line[: len(text)] = torch.tensor(text)
    runner.allocate(len(texts), tokens.shape[1] + 1)
    logits = runner.prefill(tokens.to(runner.device), length)
    logits = logits[torch.arange(rows) % len(texts)][:, None]
    none = Proposal(torch.zeros(rows, 0, dtype=torch.long, device=runner.device), None)
    rng = CounterRNG(torch.arange(rows, device=runner.device))
    config = StepConfig(1, sampling, rng)

    def after_logits() -> None:
        verify(none, logits, config)
        has_finite_logits(logits)

    return fastest_ms(after_logits, repeats, runner.device)


def sample_rows(prompts: Sequence[list[int]], count: int, length: int) -> list[SampleRow]:
    """`count` samples of `length` tokens of the prompts, repeated; the second half of each is an answer."""
    tokens = cycle([token for prompt in prompts for token in prompt])
    return [
        SampleRow(
            id=str(i), source="floor", origin="target", input_ids=list(islice(tokens, length)),
            loss_spans=[[length // 2, length]], finish_reason="length",
        )
        for i in range(count)
    ]  # fmt: skip


def head_settings(target: Target) -> Eagle3Settings:
    """An EAGLE-3 head as configs/smollm2/eagle3.yaml has it, which reads a low, a middle and a high layer."""
    layers = len(layer_stack(target.runner.model))
    taps = sorted({min(2, layers - 1), layers // 2, max(0, layers - 3)})
    return Eagle3Settings(vocab=min(8192, target.runner.vocab_size), steps=3, taps=taps)


def extraction_ms(target: Target, rows: Sequence[SampleRow]) -> float:
    """Milliseconds of a pass that packs EAGLE-3's hidden states and the final ones of these samples."""
    taps = HiddenStateSpec(tuple(head_settings(target).taps))
    live = LiveTeacher(target, taps)
    final = HiddenStateSpec(final=True)
    kinds = [hidden_state_schema(spec, live.hidden) for spec in (taps, final)]
    return fastest_ms(lambda: extract_features(live, 0, rows, kinds), 2, target.runner.device)


def training_flops(target: Target, rows: Sequence[SampleRow]) -> float:
    """Operations of a training step on these samples, those of the live target included."""
    length = len(rows[0]["input_ids"])
    run = ShapeRun(DistillConfig(draft=head_settings(target)), target.runner.model.config)
    return len(rows) * run.step(made_up_rows(1, length, length // 2, run.vocab), False).flops


def new_head(target: Target, rows: list[SampleRow]) -> Any:
    """An EAGLE-3 head in training that has learned nothing, with the live target as teacher."""
    torch.manual_seed(0)
    settings = DistillConfig(draft=head_settings(target))
    return settings.draft.build(FamilyContext(settings, target, rows, str(target.runner.device)))


def training_step(target: Target, rows: list[SampleRow]) -> Callable[[], torch.Tensor]:
    """An optimiser step of a new EAGLE-3 head on these samples; it returns the loss."""
    device, trained = target.runner.device, new_head(target, rows)
    (optimizer,) = build_optimizers(trained, LoopConfig(lr=1e-4))
    batch = collate(rows, pad_id=0).to(device)
    mixed = target.runner.model.dtype == torch.bfloat16  # bf16 products of fp32 weights

    def step() -> torch.Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=mixed):
            loss = trained.loss(trained.model, batch)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


# ---- the command ----


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

    layers = linear_layers(target.runner.model)
    plain, nucleus = SamplingParams(1.0), SamplingParams(1.0, top_p=0.9)
    for rows in s.sampled_rows:
        floor = floor_ms(layers, rows, s.repeats)
        took, _ = round_ms(target, s, prompts, rows, plain)
        parts = [vocabulary_ms(target, prompts, rows, x, s.repeats) for x in (plain, nucleus)]
        add("sampling", rows, floor, took, *parts)
    if s.samples:
        samples = sample_rows(prompts, s.samples, s.sample_tokens)
        body = body_layers(target.runner.model)
        tokens = s.samples * s.sample_tokens
        floor = floor_ms(body, tokens, 2)
        rate = 2 * tokens * sum(map(numbers_of, body)) / floor
        add("features", tokens, floor, extraction_ms(target, samples))
        flops = training_flops(target, samples)
        step = training_step(target, samples)
        took = fastest_ms(step, 2, target.runner.device)
        add("training", tokens, flops / rate, took)
    return found


def measure_floor(s: FloorConfig) -> None:
    """Times steps and the work around them beside their floors, and prints both tables."""
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
    if s.split_kv:
        attention.use_split_kv(True)
    SpeculativeEngine(target, mode=s.mode)  # UserError here rather than after the first cell

    def cell(name: str, measure: Callable[[], object]) -> Cell:
        return Cell(name, lambda _: {"found": to_json(measure())})

    cells = [
        cell("bandwidth", lambda: measure_bandwidth(target.runner.device)),
        *(cell(f"engine-{rows}", partial(round_ms, target, s, prompts, rows)) for rows in s.rows),
        cell("products", lambda: time_products(layers, s.rows, s.repeats)),
        cell("batches", lambda: measure_batches(target, s, prompts)),
    ]
    with cells_beside(s.out, s) as kept:
        found = (x["found"] for (x,) in run_cells(cells, kept).values())
        bandwidth, *rounds, products, batches = found
        steps = summarize(s.rows, weights, weight_bytes, bandwidth, products, rounds)
        print_tables(weight_bytes, bandwidth, steps, from_json(list[FloorWork], batches))
        files.write_result(s.out, {
            "target": target.name, "dtype": s.dtype, "mode": s.mode,
            "split_kv": attention.SETTINGS.split_kv, "prompts": len(prompts),
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
