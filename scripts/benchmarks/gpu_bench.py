"""All measurements of speed that need a GPU, in one command of less than ten minutes.

    python scripts/benchmarks/gpu_bench.py --out docs/results/gpu.json  # the bundled target at the size of Llama-3.1-8B
    python scripts/benchmarks/gpu_bench.py --shape self-test            # the same path in a minute: try this one first
    python scripts/benchmarks/gpu_bench.py --stages '[plain, compiled]' # some stages only

The models are the bundled ones, enlarged (scripts/benchmarks/widen_llama.py): they have the cost of large models and
the texts of the small ones. Two kinds of weights are used, never for the same figure. Widened weights give the texts
and τ (tokens per round). Most of them are zeros, which a GPU multiplies faster, so every time, bandwidth and v(T)
comes from random weights of the same shapes; a round's cost does not depend on what is accepted. `speedups` combines
both: ms per token = ms per round ÷ τ.

Stages, in order: texts (τ, and whether texts equal those of plain decoding), bandwidth (copy, read), plain (ms per
token, fraction of the roofline), verify (v(T), the cost of verifying T tokens), compiled (compiled rounds, as CUDA
graphs, through the engine), overhead (a round minus its model passes), host (waits for the device in a round), rounds
(every method and batch size), transformers (its generate), graph_texts (texts of CUDA graphs). A stage ends when its
time is over; the file is written after every row.

Without a GPU, or with --shape self-test, the models are tiny and the figures meaningless: that only tests the code.
Exit code 1 if a stage failed, a text is wrong or a round waits for the device. The last line is JSON.
"""

import dataclasses
import json
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
import transformers
from rich.console import Console
from rich.table import Table

from decode.common import files, provenance
from decode.common.cli import to_dict
from decode.common.command import run_command
from decode.common.errors import UserError
from decode.common.ranges import Count, DraftLength, above
from decode.common.run_dir import check_file
from decode.drafts.causal import CausalDraft
from decode.drafts.registry import load_draft
from decode.engine.compile import COMPILE_OPTIONS
from decode.engine.engine import decode
from decode.model.loading import NUMBER_TYPES, find_dtype, load_target, pick_device
from decode.model.names import check_name
from decode.model.runner import ModelRunner
from eval.tasks.loading import Task, load_task_prompts
from scripts.benchmarks.gpu_harness import BenchSizes, GpuHarness
from scripts.benchmarks.gpu_stages import STAGES
from scripts.benchmarks.gpu_timers import (
    MODES,
    Measurement,
    combine_speedups,
    find_problems,
    round_floats,
)
from scripts.benchmarks.widen_llama import SHAPES, LlamaShape, widen

SELF_TEST_SHAPES = {
    "target": LlamaShape(320, 13, 8, 4, 64, 704, 4352, tied=False),
    "draft": LlamaShape(288, 2, 4, 4, 64, 704, 4352, tied=True),
}
GRACE_SECONDS = 20.0
"""A stage is interrupted in the middle of a row (a compilation, say) when it exceeds its time by this much."""
FIGURE_NOTES = {
    "texts, graph_texts": "widened weights: tau and texts; no time in them means anything",
    "plain, verify, compiled, overhead, host, rounds, transformers": "random weights: times; the texts mean nothing",
    "speedups": "both: ms a token = ms a round (random weights) / tau (widened weights)",
    "share": "of the roofline: time to read all weights but an untied input embedding, and the live context's K/V, at "
    "the given bandwidth, over the time measured",
}


@dataclass
class GpuBenchConfig:
    target: str = "assets/target"
    draft: str = "outputs/bundled/drafts/causal"
    """A causal draft for it; scripts/quickstart.sh --bundled trains the default one, assets/draft is not distilled."""
    shape: str = "llama-3.1-8b"
    """Shape of the widened target: llama-3.1-8b, llama-3.2-3b or self-test."""
    draft_shape: str = "llama-3.2-1b"
    """Shape of the widened draft."""
    tasks: list[Task] = field(
        default_factory=lambda: [Task("code", limit=4), Task("prose", limit=4), Task("arithmetic", limit=4)]
    )  # fmt: skip
    max_new_tokens: Count = 64
    stages: list[str] = field(default_factory=lambda: list(STAGES))
    """Stages to run; they always run in the same order."""
    minutes: Annotated[float, above(0)] = 9.5
    """Time limit of the whole command."""
    compiled: bool | None = None
    """Also measure compiled rounds; by default on a GPU only."""
    inductor: dict[str, Any] = field(default_factory=dict)
    """Further options for inductor, such as {coordinate_descent_tuning: true}."""
    context: Count = 512
    """Tokens of context per row, except in the stage verify."""
    contexts: list[Count] = field(default_factory=lambda: [512, 8192])
    """Contexts of the stage verify."""
    widths: list[Count] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32, 64])
    """Values of T in the stage verify."""
    ks: list[DraftLength] = field(default_factory=lambda: [2, 3, 4, 5, 6])
    """Lengths of drafted chains."""
    k: DraftLength = 4
    """Length of the chain where only one is measured; one of ks."""
    batches: list[Count] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32, 64])
    """Batch sizes of the stage rounds."""
    repeats: Count = 10
    """Samples of each time."""
    inner: Count = 5
    """Rounds per sample."""
    bandwidth: Annotated[float, above(0)] = 4.8
    """Specified memory bandwidth of the GPU in TB/s, for the roofline."""
    device: str = "auto"
    dtype: str = "bfloat16"
    """Data type on a GPU; on a CPU it is float32, where all texts must be equal."""
    out: str = ""
    """File for the JSON, such as docs/results/gpu.json; empty: none."""


class StageTimeout(Exception):
    """One row took much longer than its whole stage may take."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises StageTimeout inside once the seconds are over. Main thread only."""

    def interrupt(*_: Any) -> None:
        raise StageTimeout(f"interrupted after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def self_test_config(s: GpuBenchConfig) -> GpuBenchConfig:
    """The settings of the self-test: the smallest sizes that still run every line."""
    return dataclasses.replace(
        s,
        tasks=[dataclasses.replace(task, limit=1) for task in s.tasks],
        max_new_tokens=min(s.max_new_tokens, 8),
        context=min(s.context, 96),
        contexts=sorted({min(context, size) for context, size in zip(s.contexts, (64, 96), strict=False)}),
        widths=[width for width in s.widths if width <= 4],
        ks=sorted({s.ks[0], s.k}),
        batches=[rows for rows in s.batches if rows <= 2],
        repeats=min(s.repeats, 2),
        inner=min(s.inner, 2),
    )  # fmt: skip


def build_harness(s: GpuBenchConfig, self_test: bool) -> GpuHarness:
    """Loads the small models, decodes the reference texts with the target, and widens both."""
    device = pick_device(s.device)
    dtype = find_dtype(s.dtype if device.startswith("cuda") else "float32")
    small = load_target(s.target, "cpu")
    draft = load_draft(s.draft, small, "cpu")
    if not isinstance(draft, CausalDraft):
        raise UserError(f"draft {s.draft!r} is no language model: give a causal draft")
    prompts = [item.prompt_ids for task in s.tasks for item in load_task_prompts(task, small)]
    reference = decode(small, None, prompts, max_new_tokens=s.max_new_tokens)
    wide = []
    for name, decoder, shape in (
        ("target", small.decoder, s.shape),
        ("draft", draft.decoder, s.draft_shape),
    ):
        model = decoder.model
        model.config.max_position_embeddings = max(
            *s.contexts, s.context, model.config.max_position_embeddings
        ) + max(256, 2 * s.max_new_tokens)
        size = SELF_TEST_SHAPES[name] if self_test else SHAPES[shape]
        wide.append((ModelRunner(widen(model, size, device, dtype)), size))
    cuda = device.startswith("cuda")
    new = s.max_new_tokens
    sizes = BenchSizes(
        s.context, s.contexts, s.widths, s.batches, s.ks, s.k, new, new // 4, new,
        s.repeats, s.inner, (2**32 if cuda else 2**26), s.bandwidth * 1e12,
    )  # fmt: skip
    target = dataclasses.replace(small, decoder=wide[0][0])
    compiled = cuda if s.compiled is None else s.compiled
    return GpuHarness(
        sizes, target, wide[1][0], wide[0][1], prompts, [o.output_ids for o in reference], compiled
    )


def run_stage(name: str, harness: GpuHarness, seconds: float, save: Any) -> dict[str, Any]:
    """Runs a stage until it ends, its time is over or it fails; saves after each row.

    Returns {"seconds", "cut": whether its time was over, "error": traceback or None, "rows"}.
    """
    entry: dict[str, Any] = {"seconds": 0.0, "cut": False, "error": None, "rows": []}
    start = time.perf_counter()
    try:
        with time_limit(seconds + GRACE_SECONDS):
            for row in STAGES[name][0](harness):
                entry["seconds"] = time.perf_counter() - start
                entry["rows"].append(round_floats(row))
                save(entry)
                if entry["seconds"] > seconds:
                    entry["cut"] = True
                    break
    except Exception as error:  # the other stages still run
        entry["error"], entry["cut"] = traceback.format_exc(), isinstance(error, StageTimeout)
    entry["seconds"] = round(time.perf_counter() - start, 1)
    return entry


def print_table(console: Console, title: str, rows: Sequence[Measurement]) -> None:
    """Prints a table with a column per key; a summary is shown as its median and quartiles."""

    def cell(value: Any) -> str:
        if isinstance(value, dict):
            return f"{value['median']:.4g} ({value['low']:.4g}–{value['high']:.4g})"
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    names = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(*names, title=title)
    for row in rows:
        table.add_row(*(cell(row[name]) if name in row else "" for name in names))
    console.print(table)


def main(s: GpuBenchConfig) -> None:
    start = time.perf_counter()
    unknown = sorted(set(s.stages) - set(STAGES))
    if unknown:
        raise UserError(f"no stage {unknown[0]!r}; there are {', '.join(STAGES)}")
    if not (Path(s.draft) / "config.json").is_file():
        raise UserError(
            f"no draft at {s.draft!r}: run bash scripts/quickstart.sh --bundled or give --draft assets/draft"
        )
    if s.k not in s.ks:
        raise UserError(f"k {s.k} must be one of ks {s.ks}")
    for setting, shape in (("shape", s.shape), ("draft_shape", s.draft_shape)):
        if shape not in (*SHAPES, "self-test"):
            raise UserError(f"{setting} {shape!r}: choose among {', '.join(SHAPES)}, self-test")
    check_file(s.out)
    pick_device(s.device)
    find_dtype(s.dtype, NUMBER_TYPES)
    check_name(s.target, "target")
    console = Console(stderr=True, width=150)
    self_test = s.shape == "self-test" or not pick_device(s.device).startswith("cuda")
    if self_test:
        s = self_test_config(s)
    COMPILE_OPTIONS["cuda"].update(s.inductor)
    harness = build_harness(s, self_test)
    if self_test:
        console.print("SELF-TEST on tiny models: no figure below is a measurement of speed")
    result: dict[str, Any] = {
        "self_test": self_test, "figures": FIGURE_NOTES, "modes": MODES, "settings": to_dict(s),
        "dtype": str(harness.target.decoder.model.dtype).removeprefix("torch."), "argv": sys.argv,
        "git": provenance.git_sha(), "hardware": provenance.hardware(),
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda, "transformers": transformers.__version__},
        "ready_s": round(time.perf_counter() - start, 1), "stages": {}, "speedups": [],
    }  # fmt: skip

    def write() -> str:
        result["speedups"] = combine_speedups(result["stages"])
        result["problems"] = find_problems(result)
        result["seconds"] = round(time.perf_counter() - start, 1)
        line = json.dumps(result)
        if s.out:
            Path(s.out).parent.mkdir(parents=True, exist_ok=True)
            files.write_atomically(Path(s.out), line + "\n")
        return line

    for name in (name for name in STAGES if name in s.stages):
        left = 60 * s.minutes - (time.perf_counter() - start)

        def save(entry: dict[str, Any], name: str = name) -> None:
            result["stages"][name] = entry
            write()

        if left > 0:
            save(run_stage(name, harness, min(STAGES[name][1], left), save))
            entry = result["stages"][name]
            state = " CUT" if entry["cut"] else " FAILED" if entry["error"] else ""
            print_table(console, f"{name}: {entry['seconds']} s{state}", entry["rows"])
            if entry["error"]:
                console.print(entry["error"], markup=False)
    line = write()
    print_table(
        console, "speed-ups: rounds of random weights, τ of widened ones", result["speedups"]
    )
    for problem in result["problems"]:
        console.print(f"PROBLEM {problem}", markup=False)
    print(line)
    if result["problems"]:
        sys.exit(1)


if __name__ == "__main__":
    run_command(main, GpuBenchConfig, __doc__)
