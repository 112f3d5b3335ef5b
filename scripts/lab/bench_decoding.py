"""Sampling throughput on a CPU: this project's engine beside transformers', in generated tokens a second.

    python scripts/lab/bench_decoding.py                           # bundled target and prompts
    python scripts/lab/bench_decoding.py --target T --prompts outputs/prompts/prompts.jsonl --dtype bfloat16 \\
      --out sampling.json

The engines (--engines), all at temperature 1 without top-k or top-p, on the same prompts with the same stop tokens:
  ours: the engine of train/sample.py, in which a row that is done takes the next prompt
  ours-compiled: the same with --mode compiled
  generate: transformers' generate on padded batches of prompts that are sorted by length
  generate_batch: transformers' continuous batching

A token counts if it was generated, up to an answer's first EOS and that included; padding and what is generated behind
an EOS do not. All engines have --threads threads. They answer all prompts in turn, in reversed order every other time.
Loading and a short warm-up are not timed, and prefixes are not cached, because every turn has the same prompts. The
mean lengths of answers, and the shares that ended with EOS, should agree: all sample from one distribution. Stopped,
the same command goes on (OUT.cells). The last line is JSON.
"""

import logging
import statistics
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
from rich.console import Console
from rich.table import Table
from transformers import ContinuousBatchingConfig, GenerationConfig

from decode.common import provenance
from decode.common.command import run_command
from decode.common.errors import UserError
from decode.common.journal import Journal
from decode.common.ranges import Count, CountOrZero, Seed
from decode.common.run_dir import check_file
from decode.common.typed_json import to_json
from decode.engine.engine import SpeculativeEngine, row_seeds
from decode.engine.records import collect_outputs
from decode.engine.warm_up import run_first_rounds
from decode.model.loading import Target, load_model, load_target
from decode.verification.sampling import SamplingParams
from scripts.lab.cells import BenchSettings, Cell, cells_beside, finish, run_cells
from train.data.conversations import encode_prompt
from train.data.sources import PromptSource, read_prompts

EngineName = Literal["ours", "ours-compiled", "generate", "generate_batch"]
WARM_UP_TOKENS = 8
PREFILL_TOKENS = 512
"""Tokens of one pass of transformers' continuous batching, which attends from each of them to those of all rows."""
PAGE = 256
"""Tokens of a page of its cache, as in its default configuration."""


@dataclass
class BenchDecodingConfig(BenchSettings):
    target: str = "assets/target"
    """The target model: a folder, a GGUF file or a Hub name."""
    prompts: str = ""
    """A file of prompts, such as the prompts.jsonl of train/write_prompts.py; empty: the bundled training prompts."""
    count: Count = 256
    """Prompts to answer; where there are fewer, they are answered several times."""
    max_new_tokens: Count = 256
    """Tokens of the longest answer. Prompts that leave less room in the target's context are left out."""
    batches: list[Count] = field(default_factory=lambda: [32, 64])
    """Numbers of prompts that are decoded at once."""
    engines: list[EngineName] = field(
        default_factory=lambda: ["ours", "generate", "generate_batch"]
    )
    dtype: str = "float32"
    """float32 or bfloat16."""
    threads: CountOrZero = 0
    """Threads of every engine; 0: as many as torch takes by itself."""
    repeats: Count = 3
    """Turns of each engine at each batch size."""
    seed: Seed = 0


Answers = list[list[int]]
"""Token ids, in the order of the prompts."""


Run = dict[str, float]
"""What one turn of an engine generated (`count_run`)."""


@dataclass(frozen=True)
class EngineSpeed:
    """An engine at one number of rows: medians and ranges over its turns."""

    engine: str
    batch: int
    tokens_per_second: float
    least: float
    most: float
    over_generate: float | None
    """Its speed ÷ generate's of the same turn."""
    tokens_per_answer: float
    ended: float
    runs: list[Run]


@dataclass(frozen=True)
class SamplingEngine:
    sample: Callable[[Sequence[list[int]], int, int], Answers]
    """(prompts, most tokens of an answer, seed) -> an answer to each prompt."""
    warm_up: Callable[[list[list[int]]], None] = lambda prompts: None
    """What it needs beside a few short answers before it is timed on batches of these prompts."""


def answer_length(ids: Sequence[int], eos: Collection[int], limit: int) -> int:
    """Generated tokens of an answer: those up to its first EOS, which counts, and `limit` at most."""
    ends = (at for at, token in enumerate(ids[:limit], 1) if token in eos)
    return next(ends, min(len(ids), limit))


def refilling_engine(
    target: Target, rows: int, max_new_tokens: int, mode: str = "eager"
) -> SamplingEngine:
    """This project's engine as train/sample.py runs it: a row that is done takes the next prompt."""
    sampling = SamplingParams(temperature=1.0)
    engine = SpeculativeEngine(target, None, k=1, sampling=sampling, mode=mode)

    def sample(prompts: Sequence[list[int]], limit: int, seed: int) -> Answers:
        seeds = row_seeds(seed, len(prompts))
        records = engine.speculate(list(prompts), rows=rows, max_new_tokens=limit, seeds=seeds)
        return [output.output_ids for output in collect_outputs(prompts, records)]

    # Compiled code is of the buffers' size, so short answers alone do not compile it.
    return SamplingEngine(sample, lambda prompts: run_first_rounds(engine, prompts, max_new_tokens))


def sampling_config(eos: Sequence[int], max_new_tokens: int) -> GenerationConfig:
    """Plain sampling at temperature 1, as transformers' generate takes it."""
    return GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(eos) or None,
        pad_token_id=eos[0] if eos else 0,
    )


def pad_left(prompts: Sequence[list[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, attention mask), both [B, T]: each prompt at the end of its row."""
    width = max(map(len, prompts))
    ids = [[pad] * (width - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids), torch.tensor(mask)


def padded_engine(model: Any, eos: Sequence[int], rows: int) -> SamplingEngine:
    """transformers' generate: `rows` prompts after `rows` prompts, each batch until its longest answer is done."""

    def sample(prompts: Sequence[list[int]], limit: int, seed: int) -> Answers:
        torch.manual_seed(seed)
        config = sampling_config(eos, limit)
        answers = []
        for first in range(0, len(prompts), rows):
            ids, mask = pad_left(prompts[first : first + rows], config.pad_token_id)
            out = model.generate(ids, attention_mask=mask, generation_config=config)
            for row in out[:, ids.shape[1] :].tolist():
                answers.append(row[: answer_length(row, eos, limit)])
        return answers

    return SamplingEngine(sample)


def continuous_engine(
    model: Any, eos: Sequence[int], rows: int, longest: int, first_seed: int
) -> SamplingEngine:
    """transformers' generate_batch: continuous batching with a paged cache, which has room for all rows.

    `longest` is the number of tokens of the longest prompt with its answer. The model keeps the cache of the first
    call. The random numbers go on from call to call: only `first_seed` counts.
    """
    batching = ContinuousBatchingConfig(
        page_size=PAGE,
        num_blocks=rows * (-(-longest // PAGE) + 1),
        max_batch_tokens=max(rows, PREFILL_TOKENS),
        max_requests_per_batch=rows,
        allow_block_sharing=False,  # each turn has the same prompts
        seed=first_seed,
    )
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)

    def sample(prompts: Sequence[list[int]], limit: int, seed: int) -> Answers:
        out = model.generate_batch(
            list(prompts),
            generation_config=sampling_config(eos, limit),
            continuous_batching_config=batching,
            persistent_manager=True,
            max_new_tokens=limit,
        )
        errors = [one.error for one in out.values() if one.error is not None]
        if errors or len(out) != len(prompts):
            reason = errors[0] if errors else "its thread ended"
            raise UserError(f"generate_batch failed ({reason}): leave it out of --engines")
        return [list(one.generated_tokens) for one in out.values()]

    return SamplingEngine(sample)


def load_prompt_ids(s: BenchDecodingConfig, target: Target) -> list[list[int]]:
    """Token ids of `s.count` prompts, sorted by length. UserError if none leaves room for its answer."""
    kind: Literal["file", "bundled"] = "file" if s.prompts else "bundled"
    source = PromptSource(kind, s.prompts or "all", limit=s.count)
    encoded = [encode_prompt(target.tokenizer, prompt) for prompt in read_prompts([source], s.seed)]
    room = target.runner.context - s.max_new_tokens
    fitting = [ids for ids in encoded if len(ids) <= room]
    if not fitting:
        raise UserError(
            f"no prompt of {source.path} leaves room for {s.max_new_tokens} tokens in the context of {target.name}, "
            f"which holds {target.runner.context}: lower --max_new_tokens"
        )
    return sorted((fitting[i % len(fitting)] for i in range(s.count)), key=len)


def start_engines(
    s: BenchDecodingConfig, target: Target, model: Any, rows: int, longest: int
) -> dict[str, SamplingEngine]:
    """{name: engine} of `s.engines` for batches of `rows`; `model` is the target as transformers loads it.

    `longest` is the number of tokens of the longest prompt with its answer.
    """
    eos = sorted(target.eos)
    start: dict[EngineName, Callable[[], SamplingEngine]] = {
        "ours": partial(refilling_engine, target, rows, s.max_new_tokens),
        "ours-compiled": partial(refilling_engine, target, rows, s.max_new_tokens, "compiled"),
        "generate": partial(padded_engine, model, eos, rows),
        "generate_batch": partial(continuous_engine, model, eos, rows, longest, s.seed),
    }
    return {name: start[name]() for name in s.engines}


def count_run(answers: Answers, seconds: float, eos: Collection[int], limit: int) -> Run:
    """What one turn generated: tokens and tokens a second, answers, and those that ended with EOS."""
    lengths = [answer_length(ids, eos, limit) for ids in answers]
    ended = sum(ids[length - 1] in eos for ids, length in zip(answers, lengths, strict=True))
    return {
        "tokens": sum(lengths),
        "seconds": seconds,
        "tokens_per_second": sum(lengths) / seconds,
        "answers": len(lengths),
        "ended": ended,
    }


def take_turns(
    s: BenchDecodingConfig,
    engines: Mapping[str, SamplingEngine],
    prompts: Sequence[list[int]],
    rows: int,
    eos: Collection[int],
    console: Console,
    journal: Journal | None = None,
) -> dict[str, list[Run]]:
    """{engine: a `count_run` for each of its turns}, after a warm-up on the shortest and the longest prompts.

    What the journal has is not measured again, and no engine is warmed up before one is measured.
    """

    @cache
    def warm_up() -> None:
        for engine in engines.values():
            for some in (prompts[:rows], prompts[-rows:]):
                engine.sample(some, min(s.max_new_tokens, WARM_UP_TOKENS), s.seed)
            engine.warm_up(list(prompts[-rows:]))

    def measure(name: str, turn: int) -> Run:
        warm_up()
        start = time.perf_counter()
        answers = engines[name].sample(prompts, s.max_new_tokens, s.seed + 1 + turn)
        run = count_run(answers, time.perf_counter() - start, eos, s.max_new_tokens)
        speed = run["tokens_per_second"]
        console.print(f"batch {rows}, turn {turn + 1}, {name}: {speed:,.0f} tokens/s")
        return run

    cells = [Cell(f"{name}-{rows}", partial(measure, name)) for name in engines]
    runs = run_cells(cells, journal, s.repeats)
    return {name: runs[f"{name}-{rows}"] for name in engines}


def summarize_runs(rows: int, runs: Mapping[str, list[Run]]) -> list[EngineSpeed]:
    cells = []
    for name, each in runs.items():
        speeds = [run["tokens_per_second"] for run in each]
        base = [run["tokens_per_second"] for run in runs.get("generate", [])]
        ratios = [speed / other for speed, other in zip(speeds, base, strict=False)]
        answers = sum(run["answers"] for run in each)
        cells.append(
            EngineSpeed(
                engine=name,
                batch=rows,
                tokens_per_second=statistics.median(speeds),
                least=min(speeds),
                most=max(speeds),
                over_generate=statistics.median(ratios) if ratios else None,
                tokens_per_answer=sum(run["tokens"] for run in each) / answers,
                ended=sum(run["ended"] for run in each) / answers,
                runs=each,
            )
        )
    return cells


def print_cells(console: Console, cells: Sequence[EngineSpeed]) -> None:
    """Prints a table with a line for each cell."""
    table = Table(
        "batch", "engine", "tokens/s", "range", "× generate", "length", "ended",
        title="sampling at temperature 1",
    )  # fmt: skip
    for x in cells:
        table.add_row(
            str(x.batch), x.engine, f"{x.tokens_per_second:,.0f}", f"{x.least:,.0f} – {x.most:,.0f}",
            "–" if x.over_generate is None else f"{x.over_generate:.2f}",
            f"{x.tokens_per_answer:.1f}", f"{100 * x.ended:.0f} %",
        )  # fmt: skip
    console.print(table)


def main(s: BenchDecodingConfig) -> None:
    if not s.batches or not s.engines:
        raise UserError("batches or engines is empty: give at least one of each")
    check_file(s.out, [s.prompts])
    console = Console(stderr=True)
    if s.threads > 0:
        torch.set_num_threads(s.threads)
    target = load_target(s.target, "cpu", s.dtype)
    model: Any = None
    if {"generate", "generate_batch"} & set(s.engines):  # not ours, whose attention is replaced
        model = load_model(s.target, "target", "cpu", s.dtype)
        model.generation_config = GenerationConfig()  # its settings would be mixed into a call's
    prompts = load_prompt_ids(s, target)
    longest = len(prompts[-1]) + s.max_new_tokens
    cells: list[EngineSpeed] = []
    with cells_beside(s.out, s) as journal:
        for rows in s.batches:
            engines = start_engines(s, target, model, rows, longest)
            try:
                runs = take_turns(s, engines, prompts, rows, target.eos, console, journal)
            finally:
                if "generate_batch" in engines:
                    model.destroy_cached_continuous_batching_manager()
            cells += summarize_runs(rows, runs)
        print_cells(console, cells)
        lengths = [len(prompt) for prompt in prompts]
        settings = {name: value for name, value in vars(s).items() if name != "out"}
        about = {"median": statistics.median(lengths), "most": lengths[-1]}
        result = {"cells": list(map(asdict, cells)), "settings": settings, "prompt_tokens": about}
        finish(s.out, {**result, **to_json(provenance.collect())})


if __name__ == "__main__":
    run_command(main, BenchDecodingConfig, __doc__)
