"""What gpu_smoke.py does: every mode of the decoder, waits inside rounds, and a training step."""

import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from decode.common import files, provenance
from decode.common.run_dir import check_file
from decode.common.typed_json import to_json
from decode.drafts.base import Draft
from decode.drafts.registry import load_draft
from decode.engine.engine import SpeculativeEngine
from decode.engine.records import collect_outputs
from decode.model.loading import Target, load_target
from eval.benchmark.timing import synchronize
from eval.settings.evaluation import Task
from eval.tasks.loading import load_task_prompts
from scripts.lab.floor_work import sample_rows, training_step
from scripts.lab.settings import GpuSmokeConfig

SAME_KERNELS = {"captured": "eager", "graph": "compiled"}
"""{mode that replays CUDA graphs: the mode that launches the same kernels one by one}."""


def modes(device: torch.device, compiled: bool) -> list[str]:
    """The decoder's modes on this device, each of SAME_KERNELS after the one that it is compared with."""
    found = ["eager", "captured"] + (["compiled", "graph"] if compiled else [])
    return [mode for mode in found if device.type == "cuda" or mode not in SAME_KERNELS]


def find_waits(device: torch.device, work: Callable[[], Any]) -> list[str]:
    """Places (file:line) in `work` where torch saw the host wait for the device; on a CPU it looks for none."""
    watch = torch.cuda.set_sync_debug_mode if device.type == "cuda" else lambda mode: None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        watch("warn")
        try:
            work()
        finally:
            watch("default")
    waits = (w for w in caught if "called a synchronizing" in str(w.message))
    return sorted({f"{w.filename}:{w.lineno}" for w in waits})


def decode_in(
    mode: str, target: Target, draft: Draft | None, prompts: list[list[int]], s: GpuSmokeConfig
) -> dict[str, Any]:
    """{ids, tokens_per_second, waits} of the prompts in one mode."""
    engine = SpeculativeEngine(target, draft, k=s.k, mode=mode)
    seconds, ids = 0.0, list[list[int]]()
    for _ in range(2):  # the first turn loads, compiles and captures
        synchronize(target.runner.device)
        start = time.perf_counter()
        rounds = engine.speculate(prompts, rows=s.rows, max_new_tokens=s.max_new_tokens)
        ids = [record.output_ids for record in collect_outputs(prompts, rounds)]
        synchronize(target.runner.device)
        seconds = time.perf_counter() - start
    records = engine.speculate(prompts[: s.rows], rows=s.rows, max_new_tokens=s.max_new_tokens)
    for _ in range(3 * s.rows):  # first tokens come from prefill, which may upload its prompts
        next(records, None)
    waits = find_waits(target.runner.device, lambda: [next(records, None) for _ in range(8)])
    return {"ids": ids, "tokens_per_second": sum(map(len, ids)) / seconds, "waits": waits}


def measure(s: GpuSmokeConfig, target: Target, draft: Draft) -> dict[str, Any]:
    """{decoding: a row for each draft and mode, training: losses, problems: a line each}."""
    tasks = [Task(name, limit=s.rows) for name in ("code", "prose")]
    prompts = [item.prompt_ids for task in tasks for item in load_task_prompts(task, target)]
    device, rows, problems, losses = target.runner.device, list[Any](), list[str](), list[float]()
    if device.type == "cuda" and not find_waits(device, torch.zeros(1, device=device).item):
        problems.append("waits: a planted wait was not seen, so no wait would be")
    for name, own in (("plain", None), (draft.name, draft)):
        ids: dict[str, list[list[int]]] = {}
        for mode in modes(device, s.compiled):
            try:
                found = decode_in(mode, target, own, prompts, s)
            except Exception as error:  # the other modes are tried all the same
                problems.append(f"{name}, {mode}: {type(error).__name__}: {error}")
                continue
            ids[mode], base = found.pop("ids"), SAME_KERNELS.get(mode, "eager")
            same = sum(a == b for a, b in zip(ids[mode], ids.get(base, []), strict=False))
            same_as = {"same_as": base, "same": same, "of": len(prompts)}
            rows.append({"draft": name, "mode": mode, **same_as, **found})
            if mode in SAME_KERNELS and same < len(prompts):
                problems.append(f"{name}, {mode}: {same} of {len(prompts)} texts are {base}'s")
            problems += [f"{name}, {mode}: the host waits at {place}" for place in found["waits"]]
    try:
        step = training_step(target, sample_rows(prompts, 2, 64))
        losses = [float(step()), float(step())]
        if not losses[1] < losses[0]:
            problems.append(f"training: the loss was {losses[0]} and is {losses[1]} after a step")
    except Exception as error:
        problems.append(f"training: {type(error).__name__}: {error}")
    return {"decoding": rows, "training": losses, "problems": problems}


def check_gpu(s: GpuSmokeConfig) -> None:
    """Prints what was measured, and its problems; exit code 1 if there are any."""
    check_file(s.out)
    # No text ends early: otherwise rounds may be over before their waits are looked for.
    target = replace(load_target(s.target, s.device, s.dtype), eos=frozenset())
    found = measure(s, target, load_draft(s.draft, target, dtype=s.dtype))
    files.write_result(s.out, {**found, "settings": vars(s), **to_json(provenance.collect())})
    sys.stderr.write("".join(f"PROBLEM {problem}\n" for problem in found["problems"]))
    sys.exit(1 if found["problems"] else 0)
