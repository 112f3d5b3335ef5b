"""This project's decoder beside transformers' own, in one process on the same prompts: milliseconds a token.

    python scripts/benchmarks/decoder_bench.py                          # bundled target, the quickstart's draft
    python scripts/benchmarks/decoder_bench.py --compiled false         # minutes faster: nothing is compiled

Greedy, batch 1, whole requests, prefill included. Each decoder is warmed up; then all of them decode each prompt in
turn, so that a slowdown of the machine affects all of them. The table shows the median over prompts and the range of
the middle half. Two more measurements follow: the throughput of larger batches, and how well the speed-up at
K = 3, 4, 5 is predicted from rounds at K = 2 and 6 on other prompts. The last line of the output is JSON.
"""

import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
from rich.console import Console
from rich.table import Table

from decode.common import files, provenance
from decode.common.command import run_command
from decode.common.errors import UserError
from decode.common.ranges import Count, CountOrZero, DraftLength
from decode.common.run_dir import check_file
from decode.drafts.base import Draft
from decode.drafts.lookups.ngram import NgramDraft
from decode.drafts.registry import load_draft
from decode.engine.engine import SpeculativeEngine, row_seeds
from decode.engine.records import DecodeRecord, collect_outputs
from decode.model.loading import Target, load_model, load_target
from eval.benchmark.methods import PLAIN_DECODING, Method
from eval.benchmark.timing import TimingContext, decode_batch
from eval.tasks.loading import Task, TaskPrompt, load_task_prompts
from eval.tuning.selection import cross_validated_predictions, summarize_predictions
from eval.tuning.sweep import rounds_only


@dataclass
class DecoderBenchConfig:
    target: str = "assets/target"
    draft: str = "outputs/bundled/drafts/causal"
    """Directory of a causal draft; scripts/quickstart.sh --bundled trains the default one."""
    tasks: list[Task] = field(
        default_factory=lambda: [Task("code", limit=4), Task("prose", limit=4), Task("arithmetic", limit=4)]
    )  # fmt: skip
    k: DraftLength = 4
    """Tokens drafted per round, here and in transformers' assisted generation and prompt lookup."""
    max_new_tokens: Count = 64
    compiled: bool = True
    """Also time compiled decoders, this project's and transformers'; compilation takes minutes."""
    batches: list[Count] = field(default_factory=lambda: [1, 2, 4, 8, 16])
    """Batch sizes whose throughput is measured."""
    race: bool = True
    """Time the decoders side by side; false leaves only the prediction."""
    predict: bool = True
    """Also predict speed-ups and compare them with measured ones."""
    predict_limit: CountOrZero = 24
    """Prompts per task for the prediction; half of them calibrate it, and acceptance varies much between prompts."""
    device: str = "auto"
    dtype: str = "float32"
    out: str = ""
    """File for the JSON of the last line; empty: none."""


class HFDecoder:
    """transformers' `generate` with the given options, greedy, batch 1."""

    def __init__(self, model: Any, max_new_tokens: int, **options: Any):
        self.model, self.max_new_tokens, self.options = model, max_new_tokens, options

    def decode(self, prompt: list[int]) -> list[int]:
        """The new token ids of one prompt."""
        ids = torch.tensor([prompt], device=self.model.device)
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=self.max_new_tokens,
            pad_token_id=0,
            **self.options,
        )
        return out[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


@dataclass(frozen=True)
class EngineDecoder:
    """This project's engine, greedy, batch 1."""

    engine: SpeculativeEngine
    max_new_tokens: int

    def decode(self, prompt: list[int]) -> list[int]:
        """The new token ids of one prompt."""
        records = self.engine.speculate([prompt], max_new_tokens=self.max_new_tokens)
        return collect_outputs([prompt], records)[0].output_ids


Decoder = HFDecoder | EngineDecoder


def hf_decoders(s: DecoderBenchConfig, target: Target) -> dict[str, Decoder]:
    """transformers' own ways to decode with the same models: plain, assisted, prompt lookup, and compiled."""
    device, n = str(target.decoder.device), s.max_new_tokens
    model = load_model(s.target, "target", device, s.dtype)
    draft = load_model(s.draft, "draft", device, s.dtype)
    draft.generation_config.num_assistant_tokens = s.k
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0  # always drafts K tokens
    decoders: dict[str, Decoder] = {
        "generate": HFDecoder(model, n),
        "assisted": HFDecoder(model, n, assistant_model=draft),
        "lookup": HFDecoder(model, n, prompt_lookup_num_tokens=s.k, max_matching_ngram_size=3),
    }
    if s.compiled:
        static = load_model(s.target, "target", device, s.dtype)
        static.forward = torch.compile(static.forward)
        decoders["static_compile"] = HFDecoder(static, n, cache_implementation="static")
    return decoders


def our_decoders(s: DecoderBenchConfig, target: Target, draft: Draft) -> dict[str, Decoder]:
    """{"plain_eager", "plain_compiled", "causal_eager", …}: this project's engine with each draft and mode."""
    drafts = {"plain": None, "causal": draft, "ngram": NgramDraft()}
    modes = ["eager", "compiled"] if s.compiled else ["eager"]
    return {
        f"{name}_{mode}": EngineDecoder(
            SpeculativeEngine(target, drafts[name], k=s.k, mode=mode), s.max_new_tokens
        )
        for name in drafts
        for mode in modes
    }


def time_decoders(
    decoders: dict[str, Decoder], prompts: Sequence[list[int]], console: Console
) -> dict[str, list[float]]:
    """{decoder: milliseconds per token of each prompt}. Prints how many texts differ from the first decoder's."""
    for name, decoder in decoders.items():
        start = time.perf_counter()
        decoder.decode(prompts[0])
        decoder.decode(prompts[-1])  # of another length: some decoders compile for each length
        console.print(f"warmed up {name} in {time.perf_counter() - start:.1f} s")
    times: dict[str, list[float]] = {name: [] for name in decoders}
    different: dict[str, int] = dict.fromkeys(decoders, 0)
    for prompt in prompts:
        expected: list[int] | None = None
        for name, decoder in decoders.items():
            start = time.perf_counter()
            text = decoder.decode(prompt)
            times[name].append(1000 * (time.perf_counter() - start) / len(text))
            expected = text if expected is None else expected
            different[name] += text != expected
    for name, count in different.items():
        if count:
            console.print(
                f"{name}: {count} of {len(prompts)} texts differ from the first decoder's"
            )
    return times


def measure_throughput(
    s: DecoderBenchConfig, target: Target, draft: Draft, prompts: Sequence[list[int]]
) -> dict[str, dict[str, float]]:
    """{batch size: {method: tokens/s}} in eager mode; the number of prompts is a multiple of the batch size."""
    throughput: dict[str, dict[str, float]] = {}
    for rows in s.batches:
        batch = [prompts[i % len(prompts)] for i in range(max(rows, len(prompts)) // rows * rows)]
        speeds = {}
        for name, each in (("plain", None), ("causal", draft), ("ngram", NgramDraft())):
            engine = SpeculativeEngine(target, each, k=s.k)
            collect_outputs(batch[:rows], engine.speculate(batch[:rows], max_new_tokens=4))
            start = time.perf_counter()
            out = collect_outputs(
                batch, engine.speculate(batch, rows=rows, max_new_tokens=s.max_new_tokens)
            )
            seconds = time.perf_counter() - start
            speeds[name] = sum(len(o.output_ids) for o in out) / seconds
        throughput[str(rows)] = speeds
    return throughput


def check_predictions(
    s: DecoderBenchConfig, target: Target, draft: Draft, items: Sequence[TaskPrompt]
) -> list[dict[str, Any]]:
    """Speed-ups of rounds (without prefill) at K = 3, 4, 5 on one half of the prompts, predicted from the other half.

    All settings decode each prompt in turn; a prediction uses only rounds of K = 2, K = 6 and plain decoding on the
    calibration half. One entry for each task and for all of them.
    """
    context = TimingContext(target, items, s.max_new_tokens)
    settings = {k: Method("causal", draft, k) for k in (2, 3, 4, 5, 6)} | {0: PLAIN_DECODING}
    engines = {
        k: context.build_engine(setting, context.sampling(0.0)) for k, setting in settings.items()
    }
    records: dict[int, list[DecodeRecord]] = {k: [] for k in settings}
    without_domain = [replace(item, domain="") for item in items]  # records are grouped by task
    for index, item in enumerate(without_domain):
        for k, setting in settings.items():
            seeds = row_seeds(0, index + 1)[index:]
            timed = decode_batch(engines[k], setting, [item], seeds, s.max_new_tokens)
            records[k] += [rounds_only(record) for record in timed]
    rows = []
    for name in ["all", *dict.fromkeys(record.task for record in records[0])]:
        of_task = {k: [x for x in each if name in ("all", x.task)] for k, each in records.items()}
        rows += [
            {"task": name, **cell}
            for cell in cross_validated_predictions(of_task, (2, 6))
            if cell["k"] in (3, 4, 5)
        ]
    return rows


def print_times(console: Console, times: dict[str, list[float]]) -> dict[str, float]:
    """Prints milliseconds per token and speed-up over transformers' generate; returns the medians."""
    table = Table("decoder", "ms/token", "middle half", "× generate", title="greedy, batch 1")
    base = statistics.median(times["hf generate"])
    medians = {}
    for name, values in times.items():
        low, middle, high = statistics.quantiles(values, n=4)
        medians[name] = middle
        table.add_row(name, f"{middle:.2f}", f"{low:.2f} – {high:.2f}", f"{base / middle:.2f}")
    console.print(table)
    return medians


def compare_decoders(
    s: DecoderBenchConfig,
    target: Target,
    draft: Draft,
    prompts: Sequence[list[int]],
    console: Console,
) -> dict[str, Any]:
    """{"hf", "ours": medians, "throughput"}; prints their tables."""
    decoders = {f"hf {name}": each for name, each in hf_decoders(s, target).items()}
    decoders |= {f"ours {name}": each for name, each in our_decoders(s, target, draft).items()}
    medians = print_times(console, time_decoders(decoders, prompts, console))
    result: dict[str, Any] = {
        side: {
            name.removeprefix(f"{side} "): value
            for name, value in medians.items()
            if name.startswith(side)
        }
        for side in ("hf", "ours")
    }
    result["throughput"] = measure_throughput(s, target, draft, prompts)
    table = Table("batch", "plain tok/s", "causal tok/s", "ngram tok/s", title="eager, greedy")
    for rows, speeds in result["throughput"].items():
        table.add_row(rows, *(f"{speed:.0f}" for speed in speeds.values()))
    console.print(table)
    return result


def main(s: DecoderBenchConfig) -> None:
    if not (Path(s.draft) / "config.json").is_file():
        raise UserError(
            f"no draft at {s.draft!r}: run bash scripts/quickstart.sh --bundled or give --draft assets/draft"
        )
    if s.race and not s.batches:
        raise UserError("batches is empty: give at least one batch size, or --race false")
    check_file(s.out)
    console = Console(stderr=True)
    target = load_target(s.target, s.device, s.dtype)
    draft = load_draft(s.draft, target, dtype=s.dtype)
    items = [item for task in s.tasks for item in load_task_prompts(task, target)]
    prompts = [item.prompt_ids for item in items]
    result: dict[str, Any] = compare_decoders(s, target, draft, prompts, console) if s.race else {}
    if s.predict:
        more = [replace(task, limit=s.predict_limit) for task in s.tasks]
        rows = check_predictions(
            s, target, draft, [item for task in more for item in load_task_prompts(task, target)]
        )
        table = Table(
            "task", "K", "predicted", "measured", "error", "counted", title="causal, eager"
        )
        for row in rows:
            table.add_row(
                row["task"], str(row["k"]), f"{row['predicted']:.2f}", f"{row['measured']:.2f}",
                f"{100 * row['error']:.0f} %", "yes" if row["counted"] else "no: interval > ±10 %",
            )  # fmt: skip
        console.print(table)
        result["prediction"] = summarize_predictions(rows)
    result |= {"k": s.k, "prompts": len(prompts), **provenance.collect()}
    line = json.dumps(result)
    if s.out:
        files.write_atomically(Path(s.out), line + "\n")
    print(line)


if __name__ == "__main__":
    run_command(main, DecoderBenchConfig, __doc__)
