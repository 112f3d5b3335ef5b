"""Training throughput of every draft family: tokens per second, peak memory, and where a step's time goes.

    python scripts/lab/bench_training.py                       # two target sizes that fit a CPU
    python scripts/lab/bench_training.py --sizes '[llama-8b]' --dtype bfloat16   # on a GPU
    python scripts/lab/bench_training.py --lengths '[2048,8192]' --sizes '[12x256]' --families '[eagle3]'

Targets have random weights of the given shape, rows have no padding, half of each row is supervised. Each pair of
family and size runs in a process of its own, because peak memory is measured per process. With `lengths` a batch is one
sample, trained by each of `attention`, and each cell has the estimate of train/planning beside what was measured; one
that fails for lack of memory is listed without numbers. Stopped, the same command goes on (OUT.cells). The last line is
JSON.
"""

import itertools
import json
import resource
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig

from decode.common import provenance
from decode.common.command import run_command
from decode.common.errors import UserError
from decode.common.ranges import Count, CountOrZero
from decode.common.run_dir import check_file
from decode.common.typed_json import to_json
from decode.model.attention import METHODS, training_attention
from decode.model.loading import NUMBER_TYPES, Target, find_dtype, pick_device
from decode.model.runner import ModelRunner
from eval.benchmark.timing import synchronize
from scripts.lab.cells import (
    BenchSettings,
    Cell,
    cells_beside,
    finish,
    measure_apart,
    run_cells,
)
from scripts.lab.floor_work import sample_rows
from train.data.batching import Batch, collate
from train.families.base import FamilyContext, TrainableDraft
from train.families.registry import family_settings
from train.families.settings.base import FamilySettings
from train.planning.resources import memory_breakdown
from train.planning.shape_run import ShapeRun, StepWorkload
from train.trainer.settings import DistillConfig
from train.trainer.throughput import peak_memory_bytes

SIZES: dict[str, dict[str, int]] = {
    "12x256": {
        "hidden_size": 256, "num_hidden_layers": 12, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 704, "vocab_size": 4096, "rows": 8, "length": 192, "draft_vocab": 2048,
    },
    "12x512": {
        "hidden_size": 512, "num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 4,
        "intermediate_size": 1408, "vocab_size": 16384, "rows": 4, "length": 192, "draft_vocab": 4096,
    },
    "llama-8b": {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 14336, "vocab_size": 128256, "rows": 4, "length": 2048, "draft_vocab": 32000,
    },
    "llama-1b": {
        "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 8192, "vocab_size": 128256, "rows": 4, "length": 2048, "draft_vocab": 32000,
    },
}  # fmt: skip
"""Fields of the target's LlamaConfig; rows and length of a batch; size of the draft's vocabulary."""
GPU_LENGTHS = (2048, 8192, 32768)
BATCH_KEYS = ("rows", "length", "draft_vocab")


@dataclass
class BenchTrainingConfig(BenchSettings):
    sizes: list[str] = field(default_factory=lambda: ["12x256", "12x512"])
    """Target shapes, keys of SIZES; 12x256 is that of the bundled target."""
    families: list[str] = field(default_factory=lambda: ["causal", "medusa", "eagle1", "eagle3"])
    """Draft families to measure."""
    steps: Count = 3
    """Timed steps, after one warm-up step."""
    lengths: list[Count] = field(default_factory=list)
    """Tokens of the one sample of a batch; empty: the batches of SIZES."""
    attention: list[str] = field(default_factory=lambda: ["dense", "blockwise"])
    """Ways to attend to compare for each of `lengths`, as in draft.attention; without `lengths` it is auto."""
    activation_checkpointing: bool = False
    """draft.activation_checkpointing of what is measured and estimated."""
    memory_gb: CountOrZero = 0
    """A process that wants more memory than this fails and is listed as such; 0: no limit. Only on a CPU."""
    device: str = "auto"
    dtype: str = "float32"
    """Data type of the target; drafts train in fp32."""
    one: bool = False
    """Measure only the first family at the first size, in this process, and print its JSON (used internally)."""


def batch_shape(size: str, s: BenchTrainingConfig) -> dict[str, int]:
    """SIZES[size], with a batch of one sample of the first of `s.lengths` if there are any."""
    if not s.lengths:
        return SIZES[size]
    length = s.lengths[0]
    return SIZES[size] | {"rows": 1, "length": length, "max_position_embeddings": length}


def llama_config(shape: dict[str, int]) -> LlamaConfig:
    fields: dict[str, Any] = {k: v for k, v in shape.items() if k not in BATCH_KEYS}
    return LlamaConfig(**fields)


def draft_config(family: str, shape: dict[str, int], s: BenchTrainingConfig) -> FamilySettings:
    """The draft of a cell."""
    sizes = {"layers": [0, 1]} if family == "causal" else {"vocab": shape["draft_vocab"]}
    again = s.activation_checkpointing
    return family_settings(family)().having(activation_checkpointing=again, **sizes)


def estimated_bytes(family: str, size: str, s: BenchTrainingConfig, mixed: bool) -> int:
    """What train/planning estimates for a step, in bf16 (`mixed`) or fp32; nothing is allocated."""
    shape = batch_shape(size, s)
    dtype, draft = "bfloat16" if mixed else "float32", draft_config(family, shape, s)
    run = ShapeRun(DistillConfig(draft=draft, target_dtype=dtype), llama_config(shape))
    rows, length = shape["rows"], shape["length"]
    load = StepWorkload(rows, length, length / 2, length, length // 2, micro_batch=rows)
    return sum(memory_breakdown(run, load, mixed).values())


def random_target(shape: dict[str, int], device: str, dtype: str) -> Target:
    """A Llama of that shape with random weights and no tokenizer."""
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(llama_config(shape), dtype=find_dtype(dtype))
    return Target(ModelRunner(model.eval()), None, "random", None, "", frozenset())


class StepProfiler:
    """Seconds of the parts of a training step: named sections, and forward calls of modules by hooks.

    On CUDA every measurement waits for the device.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.seconds: dict[str, float] = defaultdict(float)

    def now(self) -> float:
        synchronize(self.device)
        return time.perf_counter()

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Adds the seconds spent inside to `name`."""
        start = self.now()
        yield
        self.seconds[name] += self.now() - start

    def attach(self, name: str, modules: Iterable[torch.nn.Module]) -> None:
        """Adds the seconds of these modules' forward calls to `name`; calls inside another one count once."""
        open_calls: list[float] = []

        def enter(*_: Any) -> None:
            open_calls.append(0.0 if open_calls else self.now())

        def leave(*_: Any) -> None:
            if start := open_calls.pop():
                self.seconds[name] += self.now() - start

        for module in modules:
            module.register_forward_pre_hook(enter)
            module.register_forward_hook(leave)


def measure_cell(family: str, size: str, s: BenchTrainingConfig) -> dict[str, Any]:
    """Throughput, peak memory and shares of the step time of one family at one target size."""
    torch.manual_seed(0)
    shape = batch_shape(size, s)
    device = pick_device(s.device)
    target = random_target(shape, device, s.dtype)
    draft = draft_config(family, shape, s)
    ids = torch.randint(shape["draft_vocab"], (shape["rows"] * shape["length"],)).tolist()
    rows = sample_rows([ids], shape["rows"], shape["length"])
    settings = DistillConfig(draft=draft, loss="forward_kl")
    trainee = draft.build(FamilyContext(settings, target, rows, device))
    trained = [p for p in trainee.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    batch = collate(rows, pad_id=0).to(device)
    train_step(trainee, batch, optimizer)
    clock = StepProfiler(target.runner.device)
    times = [clock.now()]
    for _ in range(s.steps):
        train_step(trainee, batch, optimizer)
        times.append(clock.now())
    # One may stall.
    seconds = statistics.median(end - start for start, end in itertools.pairwise(times))
    shares = StepProfiler(target.runner.device)
    shares.attach("target", [target.runner.model])
    shares.attach("draft", [m for m in trainee.model.modules() if m is not trainee.model])
    with shares.section("forward"):
        sums = trainee.loss(trainee.model, batch)
    # Recomputed layers run once more in backward: what they take there is not the forward's.
    target_s, draft_s, forward_s = (shares.seconds[x] for x in ("target", "draft", "forward"))
    with shares.section("backward"):
        sums["loss"].backward()
    with shares.section("optimiser"):
        optimizer.step()
    total = sum(shares.seconds[name] for name in ("forward", "backward", "optimiser"))
    tokens = batch.input_ids.numel()
    return {
        "family": family,
        "size": size,
        "trained_parameters": sum(p.numel() for p in trained),
        "tokens_per_second": tokens / seconds,
        "seconds_per_step": seconds,
        "peak_bytes": peak_memory_bytes(target.runner.device),
        "shares": {
            "target": target_s / total,
            "draft": draft_s / total,
            "loss": (forward_s - target_s - draft_s) / total,
            "backward": shares.seconds["backward"] / total,
            "optimiser": shares.seconds["optimiser"] / total,
        },
    }


def train_step(trainee: TrainableDraft, batch: Batch, optimizer: torch.optim.Optimizer) -> None:
    """One optimiser step on one batch."""
    trainee.loss(trainee.model, batch)["loss"].backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def main(s: BenchTrainingConfig) -> None:
    check_file(s.out)
    pick_device(s.device)  # UserErrors here rather than in every run
    find_dtype(s.dtype, NUMBER_TYPES)
    if not s.families or not s.sizes:
        raise UserError("families or sizes is empty: give at least one of each")
    for family in s.families:
        family_settings(family)  # UserError for an unknown one
    for size in s.sizes:
        if size not in SIZES:
            raise UserError(f"no size {size!r}; there are {', '.join(SIZES)}")
    for method in s.attention:
        if method not in METHODS:
            raise UserError(f"no attention {method!r}; there are {', '.join(METHODS)}")
    if s.one:
        if s.memory_gb:
            resource.setrlimit(resource.RLIMIT_DATA, (s.memory_gb * 10**9,) * 2)
        with training_attention(s.attention[0] if s.lengths else "auto"):
            print(json.dumps(measure_cell(s.families[0], s.sizes[0], s)))
        return
    cases = [(n, how) for n in s.lengths for how in s.attention] or [(0, "auto")]
    cells = []
    for size, family, (length, how) in itertools.product(s.sizes, s.families, cases):
        one = replace(s, lengths=[length] if length else [], attention=[how])
        name = f"{size}-{family}-{length}-{how}" if length else f"{size}-{family}"
        cells.append(Cell(name, partial(measured_apart, family, size, one)))
    with cells_beside(s.out, s) as kept:
        report(s, [cell for (cell,) in run_cells(cells, kept).values()])


def report(s: BenchTrainingConfig, cells: list[dict[str, Any]]) -> None:
    """Prints the table and writes the result."""
    table = Table(
        "target", "family", "length", "attention", "tokens/s", "s/step", "peak GB", "estimate", "draft", "loss",
        "backward",
    )  # fmt: skip
    for cell in cells:
        names = (cell["size"], cell["family"], str(cell["length"]), cell["attention"])
        table.add_row(*names, *cell_numbers(cell))
    Console(stderr=True, width=110).print(table)
    shapes = {size: SIZES[size] for size in s.sizes}
    about = {"shapes": shapes, "gpu_estimates": gpu_estimates(s), "dtype": s.dtype}
    finish(s.out, {"cells": cells, **about, **to_json(provenance.collect())})


def measured_apart(family: str, size: str, s: BenchTrainingConfig, _: int) -> object:
    """`measure_cell` in a process of its own; without its numbers if with `lengths` that process fails, for lack of
    memory."""
    cell: dict[str, object] = {"family": family, "size": size, "attention": s.attention[0]}
    cell |= {"length": batch_shape(size, s)["length"]}
    cell |= {"estimated_bytes": estimated_bytes(family, size, s, mixed=False)}
    try:
        return cell | measure_apart(__file__, s, families=[family], sizes=[size])
    except UserError as error:
        if not s.lengths:
            raise
        sys.stderr.write(f"{family}, {size}, {cell['length']} tokens: {error}\n")
        return cell


def cell_numbers(cell: dict[str, Any]) -> list[str]:
    """What the table says of a cell beside its settings."""
    estimate = f"{cell['estimated_bytes'] / 1e9:.2f}"
    if "peak_bytes" not in cell:
        return ["-", "-", "did not fit", estimate]
    shares = [f"{100 * cell['shares'][name]:.0f} %" for name in ("draft", "loss", "backward")]
    peak, step = f"{cell['peak_bytes'] / 1e9:.2f}", f"{cell['seconds_per_step']:.2f}"
    return [f"{cell['tokens_per_second']:,.0f}", step, peak, estimate, *shares]


def gpu_estimates(s: BenchTrainingConfig) -> list[dict[str, Any]]:
    """Estimated bytes on a GPU in bf16 for an 8B target, for each family and long length, one sample at a time."""
    found = []
    for family, length, again in itertools.product(
        s.families, GPU_LENGTHS if s.lengths else (), (False, True)
    ):
        one = replace(s, lengths=[length], activation_checkpointing=again)
        count = estimated_bytes(family, "llama-8b", one, mixed=True)
        names = {"size": "llama-8b", "family": family, "length": length}
        found.append(names | {"activation_checkpointing": again, "estimated_bytes": count})
    return found


if __name__ == "__main__":
    run_command(main, BenchTrainingConfig, __doc__)
