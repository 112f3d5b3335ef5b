"""Training throughput of every draft family: tokens per second, peak memory, and where a step's time goes.

    python scripts/benchmarks/train_bench.py                       # two target sizes that fit a CPU
    python scripts/benchmarks/train_bench.py --sizes '[llama-8b]' --dtype bfloat16   # on a GPU

Targets have random weights of the given shape, rows have no padding, half of each row is supervised. Each pair of
family and size runs in a process of its own, because peak memory is measured per process. The last line is JSON.
"""

import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig

from decode.common import files, provenance
from decode.common.command import run_command
from decode.common.errors import UserError
from decode.common.ranges import Count
from decode.common.run_dir import check_file
from decode.model.loading import NUMBER_TYPES, Target, find_dtype, pick_device
from decode.model.runner import ModelRunner
from train.data.batching import Batch, collate
from train.data.sample_store import SampleRow
from train.distill import DistillConfig
from train.families.base import FamilyContext, TrainableDraft
from train.families.config import DraftConfig
from train.families.registry import family_trainer

SIZES: dict[str, dict[str, int]] = {
    # LlamaConfig of the target; rows and length of a batch; size of the draft vocabulary
    "12x256": {"hidden_size": 256, "num_hidden_layers": 12, "num_attention_heads": 4}
    | {"num_key_value_heads": 2, "intermediate_size": 704, "vocab_size": 4096}
    | {"rows": 8, "length": 192, "draft_vocab": 2048},
    "12x512": {"hidden_size": 512, "num_hidden_layers": 12, "num_attention_heads": 8}
    | {"num_key_value_heads": 4, "intermediate_size": 1408, "vocab_size": 16384}
    | {"rows": 4, "length": 192, "draft_vocab": 4096},
    "llama-8b": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
    | {"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256}
    | {"rows": 4, "length": 2048, "draft_vocab": 32000},
    "llama-1b": {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32}
    | {"num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 128256}
    | {"rows": 4, "length": 2048, "draft_vocab": 32000},
}
BATCH_KEYS = ("rows", "length", "draft_vocab")


@dataclass
class TrainBenchConfig:
    sizes: list[str] = field(default_factory=lambda: ["12x256", "12x512"])
    """Target shapes, keys of SIZES; 12x256 is that of the bundled target."""
    families: list[str] = field(default_factory=lambda: ["causal", "medusa", "eagle1", "eagle3"])
    """Draft families to measure."""
    steps: Count = 3
    """Timed steps, after one warm-up step."""
    device: str = "auto"
    dtype: str = "float32"
    """Data type of the target; drafts train in fp32."""
    out: str = ""
    """File for the JSON of the last line; empty: none."""
    one: bool = False
    """Measure only the first family at the first size, in this process, and print its JSON (used internally)."""


def random_target(shape: dict[str, int], device: str, dtype: str) -> Target:
    """A Llama of that shape with random weights and no tokenizer."""
    config = LlamaConfig(**{k: v for k, v in shape.items() if k not in BATCH_KEYS})  # type: ignore[arg-type]
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=find_dtype(dtype))
    return Target(ModelRunner(model.eval()), None, "random", None, "", frozenset())


def random_rows(shape: dict[str, int]) -> list[SampleRow]:
    """One batch of random token ids below the draft vocabulary's size; the second half of each row is supervised."""
    generator = torch.Generator().manual_seed(0)
    length = shape["length"]
    ids = torch.randint(shape["draft_vocab"], (shape["rows"], length), generator=generator)
    return [
        SampleRow(
            id=str(i), source="random", origin="target", input_ids=line.numpy(),
            loss_spans=[[length // 2, length]], finish_reason="length",
        )
        for i, line in enumerate(ids)
    ]  # fmt: skip


class StepProfiler:
    """Seconds of the parts of a training step: named sections, and forward calls of modules by hooks.

    On CUDA every measurement waits for the device.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.seconds: dict[str, float] = {}
        self.depth: dict[str, int] = {}

    def now(self) -> float:
        """Seconds, after all work of the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Adds the seconds spent inside to `name`."""
        start = self.now()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + self.now() - start

    def attach(self, name: str, modules: Any) -> None:
        """Adds the seconds of these modules' forward calls to `name`; calls inside another one count once."""
        started = [0.0]

        def enter(module: Any, args: Any) -> None:
            self.depth[name] = self.depth.get(name, 0) + 1
            if self.depth[name] == 1:
                started[0] = self.now()

        def leave(module: Any, args: Any, output: Any) -> None:
            self.depth[name] -= 1
            if self.depth[name] == 0:
                self.seconds[name] = self.seconds.get(name, 0.0) + self.now() - started[0]

        for module in modules:
            module.register_forward_pre_hook(enter)
            module.register_forward_hook(leave)


def measure_cell(family: str, size: str, s: TrainBenchConfig) -> dict[str, Any]:
    """Throughput, peak memory and shares of the step time of one family at one target size."""
    torch.manual_seed(0)
    shape = SIZES[size]
    device = pick_device(s.device)
    target = random_target(shape, device, s.dtype)
    draft = DraftConfig(family=family)
    if family == "causal":
        draft.layers = [0, 1]
    else:
        draft.vocab = shape["draft_vocab"]
    rows = random_rows(shape)
    settings = DistillConfig(draft=draft, loss="forward_kl")
    trainee = family_trainer(family).build(FamilyContext(settings, target, rows, device))
    trained = [p for p in trainee.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    batch = collate(rows, pad_id=0).to(device)
    train_step(trainee, batch, optimizer)
    plain = StepProfiler(target.decoder.device)
    with plain.section("step"):
        for _ in range(s.steps):
            train_step(trainee, batch, optimizer)
    shares = StepProfiler(target.decoder.device)
    shares.attach("target", [target.decoder.model])
    shares.attach("draft", [m for m in trainee.model.modules() if m is not trainee.model])
    with shares.section("forward"):
        sums = trainee.loss(trainee.model, batch)
    forward = {name: shares.seconds.get(name, 0.0) for name in ("forward", "target", "draft")}
    with shares.section("backward"):
        sums["loss"].backward()
    with shares.section("optimiser"):
        optimizer.step()
    total = sum(shares.seconds[name] for name in ("forward", "backward", "optimiser"))
    tokens = batch.input_ids.numel()
    peak = (
        torch.cuda.max_memory_allocated()
        if device.startswith("cuda")
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )
    return {
        "family": family,
        "size": size,
        "trained_parameters": sum(p.numel() for p in trained),
        "tokens_per_second": s.steps * tokens / plain.seconds["step"],
        "peak_bytes": peak,
        "shares": {
            "target": forward["target"] / total,
            "draft": forward["draft"] / total,
            "loss": (forward["forward"] - forward["target"] - forward["draft"]) / total,
            "backward": shares.seconds["backward"] / total,
            "optimiser": shares.seconds["optimiser"] / total,
        },
    }


def train_step(trainee: TrainableDraft, batch: Batch, optimizer: torch.optim.Optimizer) -> None:
    """One optimiser step on one batch."""
    trainee.loss(trainee.model, batch)["loss"].backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def main(s: TrainBenchConfig) -> None:
    check_file(s.out)
    pick_device(s.device)  # UserErrors here rather than in every run
    find_dtype(s.dtype, NUMBER_TYPES)
    if not s.families or not s.sizes:
        raise UserError("families or sizes is empty: give at least one of each")
    for family in s.families:
        family_trainer(family)  # UserError for an unknown one
    for size in s.sizes:
        if size not in SIZES:
            raise UserError(f"no size {size!r}; there are {', '.join(SIZES)}")
    if s.one:
        print(json.dumps(measure_cell(s.families[0], s.sizes[0], s)))
        return
    console = Console(stderr=True)
    table = Table(
        "target", "family", "trained", "tokens/s", "peak GB", "target", "draft", "loss", "backward",
        "optimiser",
    )  # fmt: skip
    cells = []
    for size in s.sizes:
        for family in s.families:
            command = [
                sys.executable, __file__, "--one", "true", "--sizes", json.dumps([size]),
                "--families", json.dumps([family]), "--steps", str(s.steps),
                "--device", s.device, "--dtype", s.dtype,
            ]  # fmt: skip
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            cell = json.loads(done.stdout.strip().splitlines()[-1])
            cells.append(cell)
            table.add_row(
                size, family, f"{cell['trained_parameters'] / 1e6:.1f} M",
                f"{cell['tokens_per_second']:,.0f}", f"{cell['peak_bytes'] / 1e9:.2f}",
                *(f"{100 * share:.0f} %" for share in cell["shares"].values()),
            )  # fmt: skip
    console.print(table)
    result = {
        "cells": cells,
        "shapes": {size: SIZES[size] for size in s.sizes},
        "dtype": s.dtype,
        **provenance.collect(),
    }
    line = json.dumps(result)
    if s.out:
        files.write_atomically(Path(s.out), line + "\n")
    print(line)


if __name__ == "__main__":
    run_command(main, TrainBenchConfig, __doc__)
