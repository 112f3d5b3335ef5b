"""`--dry_run true`: runs two training steps of a run on the real models, and saves and loads the draft once.

The estimates of train/planning/estimates.py come first, so they are shown even if the target does not fit. Then one
step runs on the longest samples (memory) and one on an ordinary batch (time), and the draft, still almost untrained,
is saved and loaded as the finished one will be. Nothing is kept.
"""

import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from decode.checkpoints.draft_folder import METADATA_FILE
from decode.common.progress import format_bytes
from decode.drafts.registry import DRAFT_FAMILIES, load_draft
from decode.model.loading import Target
from train.data import batching
from train.data.sample_store import SampleRow
from train.families.base import TrainableDraft
from train.planning.estimates import TABLE_WIDTH
from train.settings.training import LoopConfig
from train.trainer import collective
from train.trainer.acceptance_eval import AcceptanceEval
from train.trainer.loop import Training, out_of_memory_advice, train_step, window_means
from train.trainer.settings import DistillConfig
from train.trainer.throughput import peak_memory_bytes, report_out_of_memory


def try_export(
    s: DistillConfig, trainable: TrainableDraft, target: Target, acceptance_eval: AcceptanceEval
) -> dict[str, float]:
    """Saves the draft to a temporary folder, loads it as decoding does, and measures it if the run will measure.

    To be called after the steps, since Medusa-2 merges its adapters when it saves.
    """
    with tempfile.TemporaryDirectory(prefix="draftsmith-") as folder:
        trainable.save(Path(folder))
        family = DRAFT_FAMILIES[s.draft.family].saved_name
        metadata = {"family": family, "tokenizer_hash": target.fingerprint}
        (Path(folder) / METADATA_FILE).write_text(json.dumps(metadata))
        draft = load_draft(folder, target, dtype=s.target_dtype)
        measured = acceptance_eval.measure(draft) if s.loop.eval_every else {}
        size = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    return {**measured, "draft_bytes": float(size)}


def try_steps(
    training: Training, rows: Sequence[SampleRow], s: LoopConfig, every: int = 0
) -> dict[str, float]:
    """Two steps, the first on the longest of `rows`: seconds and tokens per second of the second, and peak memory.

    `every`: steps between two rounds of on-policy generation, of which one runs before the second step; 0: none.
    """
    device = training.accelerator.device
    lengths = [
        (len(row["input_ids"]), batching.supervised_token_count([row]), i)
        for i, row in enumerate(rows)
    ]
    longest = [rows[i] for *_, i in sorted(lengths)[-s.batch_size :]]
    loop = replace(s, steps=max(2, s.steps))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    generation_seconds = 0.0
    with (
        tempfile.TemporaryDirectory(prefix="draftsmith-") as folder,
        report_out_of_memory(out_of_memory_advice(loop)),
    ):
        train_step(replace(training, select_batch=lambda _: longest), loop, 0, Path(folder))
        if every:  # generates the round's rows, which the step below then reads
            began = time.perf_counter()
            training.select_batch(1)
            generation_seconds = time.perf_counter() - began
        began = time.perf_counter()
        result = train_step(training, loop, 1, Path(folder))
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    per_step = generation_seconds / min(every, loop.steps) if every else 0.0
    return {
        **({"writing_seconds": generation_seconds} if every else {}),
        "seconds": seconds,
        "loss": window_means(result.sums)["loss"],
        "tokens_per_second": sum(len(row["input_ids"]) for row in result.rows) / seconds,
        "learned_per_second": result.sums["tokens"] / seconds,
        "hours": (seconds + per_step) * s.steps / 3600,
        "peak_bytes": float(peak_memory_bytes(device)),
    }


@contextlib.contextmanager
def shared_temp_folder(wait: Callable[[], None]) -> Iterator[str]:
    """A temporary folder for all processes of this machine; `wait` is a barrier over them before it is deleted."""
    with tempfile.TemporaryDirectory(prefix="draftsmith-") as folder:
        yield collective.broadcast(folder)
        wait()


def print_measurements(
    console: Console, measured: dict[str, float], steps: int, cuda: bool
) -> None:
    """Prints what `try_steps` and `try_export` measured."""
    title = "two steps, the first on the longest samples"
    table = Table("measured", "", title=title, min_width=TABLE_WIDTH)
    table.add_row("the second step", f"{measured['seconds']:,.2f} s")
    table.add_row("tokens a second", f"{measured['tokens_per_second']:,.0f}")
    table.add_row("learned tokens a second", f"{measured['learned_per_second']:,.0f}")
    if "writing_seconds" in measured:
        table.add_row("the draft writing one round", f"{measured['writing_seconds']:,.2f} s")
    name = "peak memory of the GPU" if cuda else "peak memory of the process"
    table.add_row(name, format_bytes(measured["peak_bytes"]))
    table.add_row("draft on disk", format_bytes(measured["draft_bytes"]))
    if "accept/tau" in measured:
        table.add_row("τ of the draft as yet", f"{measured['accept/tau']:.2f}")
    table.add_section()
    table.add_row(f"{steps:,} steps at that rate", f"{measured['hours']:,.2f} h")
    console.print(table)
    console.print("Measurements and checkpoints come on top. Nothing was kept.")
