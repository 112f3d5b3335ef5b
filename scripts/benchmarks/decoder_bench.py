"""Our decoder beside transformers' own, in one process on the same prompts: milliseconds a token.

    python scripts/benchmarks/decoder_bench.py                          # bundled target, the quickstart's draft
    python scripts/benchmarks/decoder_bench.py --compiled false         # minutes faster: nothing is compiled

Greedy, batch 1, whole requests, prefill included. Arms take turns prompt by prompt, so that drift of the machine
hits all alike; each is warmed up first. The table shows the median over prompts and the middle half. Then the
throughput of batches, and how well the speed-up at K = 3, 4, 5 is predicted from rounds at K = 2 and 6 on other
prompts. The last line is JSON.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
from rich.console import Console
from rich.table import Table

from decode.common import files, run_dir
from decode.common.cli import run_command
from decode.common.errors import UserError
from decode.drafts.base import Draft
from decode.drafts.ngram import NgramDraft
from decode.drafts.registry import load_draft
from decode.engine.engine import SpeculativeEngine, collect_outputs
from decode.model.loading import Target, load_model, load_target
from eval.metrics.records import DecodeRecord
from eval.tasks.loading import Task, TaskPrompt, load_task_prompts
from eval.tuning import sweep
from eval.tuning.selection import cross_validated_predictions, summarize_predictions
from eval.tuning.sweep import PLAIN_DECODING, SweepContext, build_engine, time_batch

DecodeFn = Callable[[list[int]], list[int]]
"""Prompt in, new tokens out."""


@dataclass
class DecoderBenchConfig:
    target: str = "assets/target"
    draft: str = "outputs/quickstart/drafts/causal"
    """A causal draft; the quickstart makes this one."""
    tasks: list[Task] = field(
        default_factory=lambda: [Task("code", limit=4), Task("prose", limit=4), Task("arithmetic", limit=4)]
    )  # fmt: skip
    k: int = 4
    """Tokens drafted a round, by us and by transformers."""
    max_new_tokens: int = 64
    compiled: bool = True
    """Also what is compiled, ours and theirs; minutes of compilation."""
    batches: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16])
    """Batch sizes whose throughput is measured."""
    race: bool = True
    """Time the decoders side by side; false leaves the prediction alone."""
    predict: bool = True
    """Also predict speed-ups and compare."""
    predict_limit: int = 24
    """Prompts a task for that: half of them calibrate, and acceptance differs much from prompt to prompt."""
    device: str = "auto"
    dtype: str = "float32"
    out: str = ""
    """File for the JSON of the last line; empty writes none."""


def hf_decoders(s: DecoderBenchConfig, target: Target) -> dict[str, DecodeFn]:
    """transformers' own ways to decode the same models, called as people call them."""
    device = str(target.decoder.device)
    model = load_model(s.target, "target", device, s.dtype)
    draft = load_model(s.draft, "draft", device, s.dtype)
    draft.generation_config.num_assistant_tokens = s.k
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0  # as many drafts as ours

    def arm(model: Any, **how: Any) -> DecodeFn:
        def run(prompt: list[int]) -> list[int]:
            ids = torch.tensor([prompt], device=device)
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=s.max_new_tokens,
                pad_token_id=0,
                **how,
            )
            return out[0, len(prompt) :].tolist()

        return run

    arms = {
        "generate": arm(model),
        "assisted": arm(model, assistant_model=draft),
        "lookup": arm(model, prompt_lookup_num_tokens=s.k, max_matching_ngram_size=3),
    }
    if s.compiled:
        static = load_model(s.target, "target", device, s.dtype)
        static.forward = torch.compile(static.forward)
        arms["static_compile"] = arm(static, cache_implementation="static")
    return arms


def our_decoders(s: DecoderBenchConfig, target: Target, draft: Draft) -> dict[str, DecodeFn]:
    def arm(draft: Draft | None, mode: str) -> DecodeFn:
        engine = SpeculativeEngine(target, draft, k=s.k, mode=mode)

        def run(prompt: list[int]) -> list[int]:
            records = engine.speculate([prompt], max_new_tokens=s.max_new_tokens)
            return collect_outputs([prompt], records)[0].output_ids

        return run

    drafts = {"plain": None, "causal": draft, "ngram": NgramDraft()}
    modes = ["eager", "compiled"] if s.compiled else ["eager"]
    return {f"{name}_{mode}": arm(drafts[name], mode) for name in drafts for mode in modes}


def time_decoders(
    arms: dict[str, DecodeFn], prompts: Sequence[list[int]], console: Console
) -> dict[str, list[float]]:
    """{arm: milliseconds a token for each prompt}. UserError when an arm says something else than the first."""
    for name, arm in arms.items():
        start = time.perf_counter()
        arm(prompts[0])
        arm(prompts[-1])  # another length: what compiles for each shows here
        console.print(f"warmed up {name} in {time.perf_counter() - start:.1f} s")
    times: dict[str, list[float]] = {name: [] for name in arms}
    differ: dict[str, int] = dict.fromkeys(arms, 0)
    for prompt in prompts:
        want: list[int] | None = None
        for name, arm in arms.items():
            start = time.perf_counter()
            text = arm(prompt)
            times[name].append(1000 * (time.perf_counter() - start) / len(text))
            want = text if want is None else want
            differ[name] += text != want
    for name, count in differ.items():
        if count:
            console.print(f"{name}: {count} of {len(prompts)} texts differ from the first arm's")
    return times


def measure_throughput(
    s: DecoderBenchConfig, target: Target, draft: Draft, prompts: Sequence[list[int]]
) -> dict[str, dict[str, float]]:
    """{batch: {method: tokens/s}} in eager mode, every batch full from start to end."""
    found: dict[str, dict[str, float]] = {}
    for rows in s.batches:
        many = [prompts[i % len(prompts)] for i in range(max(rows, len(prompts)) // rows * rows)]
        speeds = {}
        for name, each in (("plain", None), ("causal", draft), ("ngram", NgramDraft())):
            engine = SpeculativeEngine(target, each, k=s.k)
            collect_outputs(many[:rows], engine.speculate(many[:rows], max_new_tokens=4))
            start = time.perf_counter()
            out = collect_outputs(
                many, engine.speculate(many, rows=rows, max_new_tokens=s.max_new_tokens)
            )
            seconds = time.perf_counter() - start
            speeds[name] = sum(len(o.output_ids) for o in out) / seconds
        found[str(rows)] = speeds
    return found


def check_predictions(
    s: DecoderBenchConfig, target: Target, draft: Draft, items: Sequence[TaskPrompt]
) -> list[dict[str, Any]]:
    """Speed-ups of rounds (prefill aside) at K = 3, 4, 5 on one half of the prompts, predicted from the other.

    Rounds of all K and plain ones are interleaved prompt by prompt; a prediction sees only K = 2, K = 6 and plain
    on the calibration half.
    """
    load = SweepContext(target, {"causal": draft}, items, s.max_new_tokens)
    arms = {k: sweep.Setting("causal", k) for k in (2, 3, 4, 5, 6)} | {0: PLAIN_DECODING}
    engines = {k: build_engine(load, arm, load.sampling(0.0)) for k, arm in arms.items()}
    seen: dict[int, list[DecodeRecord]] = {k: [] for k in arms}
    named = [replace(item, domain="") for item in items]  # samples go by task
    for at, item in enumerate(named):
        for k, arm in arms.items():
            seen[k] += time_batch(load, engines[k], arm, [item], at, s.max_new_tokens)
    rows = []
    for name in ["all", *dict.fromkeys(sample.task for sample in seen[0])]:
        own = {k: [x for x in samples if name in ("all", x.task)] for k, samples in seen.items()}
        rows += [
            {"task": name, **cell}
            for cell in cross_validated_predictions(own, (2, 6))
            if cell["k"] in (3, 4, 5)
        ]
    return rows


def print_times(console: Console, times: dict[str, list[float]]) -> dict[str, float]:
    """Prints the table and returns the medians."""
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
    arms = {f"hf {name}": arm for name, arm in hf_decoders(s, target).items()}
    arms |= {f"ours {name}": arm for name, arm in our_decoders(s, target, draft).items()}
    medians = print_times(console, time_decoders(arms, prompts, console))
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
            f"no draft at {s.draft!r}: run bash scripts/quickstart.sh or give --draft assets/draft"
        )
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
    result |= {"k": s.k, "prompts": len(prompts), **run_dir.provenance()}
    line = json.dumps(result)
    if s.out:
        files.write_atomically(Path(s.out), line + "\n")
    print(line)


if __name__ == "__main__":
    run_command(main, DecoderBenchConfig, __doc__)
