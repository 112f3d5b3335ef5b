"""What floor.py times: the products of a model's linear layers by several kernels, which every pass takes at least, and
the work around decoding: what follows the logits, a pass of features, a training step of a head."""

import time
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor, nn

from decode.common.errors import UserError
from decode.drafts.base import Proposal
from decode.engine.round import StepConfig, verify
from decode.model.hidden_states import HiddenStateSpec
from decode.model.layer_stack import layer_stack
from decode.model.linear import PackedLinear
from decode.model.loading import Target
from decode.verification.sampling import CounterRNG, SamplingParams, has_finite_logits
from eval.benchmark.timing import synchronize
from eval.metrics.bootstrap import MS_PER_SECOND
from train.data.batching import collate
from train.data.sample_store import SampleRow
from train.families.base import FamilyContext
from train.families.settings.eagle import Eagle3Settings
from train.planning.shape_run import ShapeRun, made_up_rows
from train.teacher.feature_codec import hidden_state_schema
from train.teacher.feature_extraction import extract_features
from train.teacher.live import LiveTeacher
from train.trainer.settings import DistillConfig

Product = Callable[[Tensor], Tensor]


def linear_layers(model: nn.Module) -> list[nn.Linear]:
    """The linear layers that a token passes, the LM head among them. UserError for a model without any."""
    found = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not found:
        raise UserError("the target has no linear layer of torch: its products cannot be timed")
    return found


def int8_product(layer: nn.Linear) -> Product:
    """By weights rounded to 8 bits, one scale for each output."""
    weight = layer.weight.detach().float()
    scale = weight.abs().amax(1).clamp_min(1e-12) / 127
    rounded = (weight / scale[:, None]).round().to(torch.int8)
    scale = scale.to(torch.bfloat16)
    return lambda x: torch._weight_int8pack_mm(x, rounded, scale)


def kernels(device: torch.device) -> dict[str, Callable[[nn.Linear], Product]]:
    """{name: how it multiplies by a layer}: torch's way, and on a CPU the decoder's and that by rounded weights."""
    linear = {"linear": lambda layer: lambda x: nn.functional.linear(x, layer.weight, layer.bias)}
    if device.type != "cpu":
        return linear
    packed = lambda layer: layer if isinstance(layer, PackedLinear) else PackedLinear(layer)  # noqa: E731
    return {**linear, "packed": packed, "int8": int8_product}


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
    layers: Sequence[nn.Linear], rows: Sequence[int], repeats: int
) -> dict[str, list[float]]:
    """{kernel: milliseconds of one product with every layer, for each of these numbers of rows}."""
    device = layers[0].weight.device
    found: dict[str, list[float]] = {}
    widths = {layer.weight.shape[1] for layer in layers}
    for name, kernel in kernels(device).items():
        products = [(layer.weight.shape[1], kernel(layer)) for layer in layers]
        dtype = torch.bfloat16 if name == "int8" else layers[0].weight.dtype
        found[name] = []
        for count in rows:
            inputs = {w: torch.randn(count, w, device=device, dtype=dtype) for w in widths}
            multiply = lambda: [product(inputs[w]) for w, product in products]  # noqa: B023, E731
            found[name].append(fastest_ms(multiply, repeats, device))
    return found


def floor_ms(layers: Sequence[nn.Linear], rows: int, repeats: int) -> float:
    """Milliseconds of the layers' products of `rows` rows by the fastest kernel that rounds no weights."""
    times = time_products(layers, [rows], repeats)
    return min(ms for name, (ms,) in times.items() if name != "int8")


def body_layers(model: Any) -> list[nn.Linear]:
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


def training_step(target: Target, rows: list[SampleRow]) -> Callable[[], torch.Tensor]:
    """An optimiser step of an EAGLE-3 head on these samples with the live target as teacher; it returns the loss."""
    device = target.runner.device
    torch.manual_seed(0)
    settings = DistillConfig(draft=head_settings(target))
    trained = settings.draft.build(FamilyContext(settings, target, rows, str(device)))
    parameters = [p for p in trained.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)
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
