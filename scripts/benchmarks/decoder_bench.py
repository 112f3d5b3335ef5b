"""This project's decoder beside transformers' own and vLLM's, on the same prompts: milliseconds a token.

    python scripts/benchmarks/decoder_bench.py                          # bundled target, the quickstart's draft
    python scripts/benchmarks/decoder_bench.py --compiled false         # minutes faster: nothing is compiled
    python scripts/benchmarks/decoder_bench.py --target T --drafts '[assets/eagle3-smollm2]' --vllm_python P

Greedy, batch 1, whole requests, prefill included. Each decoder is warmed up; then all of them decode each prompt in
turn, so that a slowdown of the machine affects all of them; vLLM's run before the others, in a process of their own.
The table shows the median over prompts, the range of the middle half, and which share of the time reading the target's
weights once a token takes at the measured memory bandwidth: with drafts it may be above 100 %. Two more measurements
follow: the throughput of larger batches, and how well the speed-up at K = 3, 4, 5 is predicted from rounds at K = 2
and 6 on other prompts. The last line of the output is JSON.
"""

import json
import statistics
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
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
from decode.engine.engine import SpeculativeEngine
from decode.engine.records import collect_outputs
from decode.model.encoder_decoder.plain_passes import generation_settings, prepare_generate
from decode.model.loading import Target, load_model, load_target
from eval.benchmark import vllm_client
from eval.metrics.roofline import measure_bandwidth
from eval.tasks.loading import Task, load_task_prompts
from eval.tuning.prediction_check import check_predictions, print_predictions
from eval.tuning.selection import summarize_predictions
from scripts.benchmarks.floors.products import linear_layers


@dataclass
class DecoderBenchConfig:
    target: str = "assets/target"
    drafts: list[str] = field(default_factory=lambda: ["outputs/bundled/drafts/causal"])
    """Folders of drafts of different families; scripts/quickstart.sh --bundled trains the default one. transformers
    takes the causal ones as its assistants."""
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
    vllm_python: str = ""
    """Interpreter of an environment with vLLM, whose decoders are timed as well; compiled as ours are. Empty: none."""
    device: str = "auto"
    dtype: str = "float32"
    out: str = ""
    """File for the JSON of the last line; empty: none."""


class HFDecoder:
    """transformers' `generate` with the given options, greedy, batch 1, ended by the ids `eos` alone."""

    def __init__(
        self,
        model: Any,
        eos: Collection[int],
        max_new_tokens: int,
        assistant: Any = None,
        **options: Any,
    ):
        prepare_generate(model)
        self.model, self.assistant = model, assistant
        self.settings = generation_settings(model, eos, max_new_tokens, **options)

    def decode(self, prompt: list[int]) -> list[int]:
        """The new token ids of one prompt."""
        ids = torch.tensor([prompt], device=self.model.device)
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=self.settings,
            assistant_model=self.assistant,
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


def hf_decoders(
    s: DecoderBenchConfig, target: Target, drafts: Mapping[str, Draft]
) -> dict[str, Decoder]:
    """transformers' own ways to decode with the same models: plain, assisted, prompt lookup, and compiled."""
    device, eos, n = str(target.decoder.device), target.eos, s.max_new_tokens
    model = load_model(s.target, "target", device, s.dtype)
    decoders: dict[str, Decoder] = {
        "generate": HFDecoder(model, eos, n),
        "lookup": HFDecoder(model, eos, n, prompt_lookup_num_tokens=s.k, max_matching_ngram_size=3),
    }
    for folder, draft in drafts.items():
        if draft.name == "causal":
            assistant = load_model(folder, "draft", device, s.dtype)
            prepare_generate(assistant)
            assistant.generation_config.num_assistant_tokens = s.k
            assistant.generation_config.num_assistant_tokens_schedule = "constant"
            assistant.generation_config.assistant_confidence_threshold = 0.0  # always K tokens
            decoders["assisted"] = HFDecoder(model, eos, n, assistant)
    if s.compiled:
        static = load_model(s.target, "target", device, s.dtype)
        static.forward = torch.compile(static.forward)
        decoders["static_compile"] = HFDecoder(static, eos, n, cache_implementation="static")
    return decoders


def all_drafts(drafts: Iterable[Draft]) -> dict[str, Draft | None]:
    """{name of a family: draft}, with plain decoding before them and n-grams behind them."""
    return {"plain": None, **{draft.name: draft for draft in drafts}, "ngram": NgramDraft()}


def our_decoders(
    s: DecoderBenchConfig, target: Target, drafts: Mapping[str, Draft]
) -> dict[str, Decoder]:
    """{"plain_eager", "plain_compiled", "causal_eager", …}: this project's engine with each draft and mode."""
    modes = ["eager", "compiled"] if s.compiled else ["eager"]
    return {
        f"{name}_{mode}": EngineDecoder(
            SpeculativeEngine(target, draft, k=s.k, mode=mode), s.max_new_tokens
        )
        for name, draft in all_drafts(drafts.values()).items()
        for mode in modes
    }


def time_vllm(
    s: DecoderBenchConfig, prompts: Sequence[list[int]], drafts: Mapping[str, Draft]
) -> dict[str, list[float]]:
    """{"plain", "ngram", …: milliseconds per token of each prompt}. UserError with vLLM's message if it fails."""
    lookup = {
        "method": "ngram",
        "num_speculative_tokens": s.k,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 2,
    }
    served = {
        draft.name: vllm_client.speculative_config(folder, s.k) for folder, draft in drafts.items()
    }
    configs: dict[str, dict[str, Any] | None] = {"plain": None, **served, "ngram": lookup}
    jobs = [
        vllm_client.build_job(
            s.target,
            prompts,
            speculative=config,
            max_new_tokens=s.max_new_tokens,
            max_model_len=vllm_client.context_length(prompts, s.k, s.max_new_tokens),
            dtype=s.dtype,
            eager=not s.compiled,
        )
        for config in configs.values()
    ]
    times = {}
    for name, done in zip(configs, vllm_client.run_jobs(s.vllm_python, jobs), strict=True):
        if "error" in done:
            raise UserError(f"vLLM failed with {name}: {done['error'][:1000]}")
        times[name] = [1000 * x["seconds"] / len(x["ids"][0]) for x in done["answers"]]
    return times


def warm_up(
    decoders: dict[str, Decoder], prompts: Sequence[list[int]], console: Console
) -> dict[str, float]:
    """{decoder: seconds of its first two requests}, in which it compiles what it compiles."""
    seconds = {}
    for name, decoder in decoders.items():
        start = time.perf_counter()
        decoder.decode(prompts[0])
        decoder.decode(prompts[-1])  # of another length: some decoders compile for each length
        seconds[name] = time.perf_counter() - start
        console.print(f"warmed up {name} in {seconds[name]:.1f} s")
    return seconds


def time_decoders(
    decoders: dict[str, Decoder], prompts: Sequence[list[int]], console: Console
) -> dict[str, list[float]]:
    """{decoder: milliseconds per token of each prompt}. Prints how many texts differ from the first decoder's."""
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
    s: DecoderBenchConfig, target: Target, drafts: Iterable[Draft], prompts: Sequence[list[int]]
) -> dict[str, dict[str, float]]:
    """{batch size: {method: tokens/s}} in eager mode; the number of prompts is a multiple of the batch size."""
    throughput: dict[str, dict[str, float]] = {}
    for rows in s.batches:
        batch = [prompts[i % len(prompts)] for i in range(max(rows, len(prompts)) // rows * rows)]
        speeds = {}
        for name, each in all_drafts(drafts).items():
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


def print_times(
    console: Console, times: dict[str, list[float]], floor_ms: float
) -> dict[str, float]:
    """Prints milliseconds per token, speed-up over transformers' generate and share of the floor; returns medians."""
    table = Table(
        "decoder", "ms/token", "middle half", "× generate", "of floor", title="greedy, batch 1"
    )
    base = statistics.median(times["hf generate"])
    medians = {}
    for name, values in times.items():
        low, middle, high = statistics.quantiles(values, n=4)
        medians[name] = middle
        table.add_row(
            name, f"{middle:.2f}", f"{low:.2f} – {high:.2f}", f"{base / middle:.2f}", f"{floor_ms / middle:.0%}"
        )  # fmt: skip
    console.print(table)
    return medians


def compare_decoders(
    s: DecoderBenchConfig,
    target: Target,
    drafts: Mapping[str, Draft],
    prompts: Sequence[list[int]],
    console: Console,
) -> dict[str, Any]:
    """{"hf", "ours", "vllm": medians, "floor_ms", "bandwidth", "warm_up_seconds", "throughput"}; prints tables."""
    vllm = time_vllm(s, prompts, drafts) if s.vllm_python else {}
    bandwidth = measure_bandwidth(target.decoder.device)
    weights = sum(layer.weight.nbytes for layer in linear_layers(target.decoder.model))
    floor_ms = 1000 * weights / bandwidth
    console.print(
        f"{weights / 1e6:.0f} MB of weights at {bandwidth / 1e9:.1f} GB/s: {floor_ms:.2f} ms a token"
    )
    decoders = {f"hf {name}": each for name, each in hf_decoders(s, target, drafts).items()}
    decoders |= {f"ours {name}": each for name, each in our_decoders(s, target, drafts).items()}
    warm_up_seconds = warm_up(decoders, prompts, console)
    times = time_decoders(decoders, prompts, console)
    times |= {f"vllm {name}": each for name, each in vllm.items()}
    medians = print_times(console, times, floor_ms)
    result: dict[str, Any] = {
        "floor_ms": floor_ms,
        "bandwidth": bandwidth,
        "warm_up_seconds": warm_up_seconds,
    }
    result |= {
        side: {
            name.removeprefix(f"{side} "): value
            for name, value in medians.items()
            if name.startswith(side)
        }
        for side in ("hf", "ours", "vllm")
    }
    result["throughput"] = measure_throughput(s, target, drafts.values(), prompts)
    names = (f"{name} tok/s" for name in all_drafts(drafts.values()))
    table = Table("batch", *names, title="eager, greedy")
    for rows, speeds in result["throughput"].items():
        table.add_row(rows, *(f"{speed:.0f}" for speed in speeds.values()))
    console.print(table)
    return result


def load_drafts(s: DecoderBenchConfig, target: Target) -> dict[str, Draft]:
    """{folder: draft}. UserError unless each is a saved draft of another family."""
    for folder in s.drafts:
        if not (Path(folder) / "config.json").is_file():
            raise UserError(
                f"no draft at {folder!r}: run bash scripts/quickstart.sh --bundled or give --drafts '[assets/draft]'"
            )
    drafts = {folder: load_draft(folder, target, dtype=s.dtype) for folder in s.drafts}
    if not drafts or len({draft.name for draft in drafts.values()}) < len(s.drafts):
        raise UserError("drafts: give one or more, each of another family")
    return drafts


def main(s: DecoderBenchConfig) -> None:
    if s.race and not s.batches:
        raise UserError("batches is empty: give at least one batch size, or --race false")
    if s.vllm_python:
        vllm_client.find_interpreter(s.vllm_python)
    check_file(s.out)
    console = Console(stderr=True)
    target = load_target(s.target, s.device, s.dtype)
    drafts = load_drafts(s, target)
    items = [item for task in s.tasks for item in load_task_prompts(task, target)]
    prompts = [item.prompt_ids for item in items]
    result: dict[str, Any] = compare_decoders(s, target, drafts, prompts, console) if s.race else {}
    if s.predict:
        more = [replace(task, limit=s.predict_limit) for task in s.tasks]
        items = [item for task in more for item in load_task_prompts(task, target)]
        first = drafts[s.drafts[0]]
        rows = check_predictions(target, first, items, s.max_new_tokens)
        print_predictions(console, rows)
        result["prediction"] = summarize_predictions(rows)
    result |= {"k": s.k, "prompts": len(prompts), **provenance.collect()}
    line = json.dumps(result)
    if s.out:
        files.write_atomically(Path(s.out), line + "\n")
    print(line)


if __name__ == "__main__":
    run_command(main, DecoderBenchConfig, __doc__)
