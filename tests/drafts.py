"""A draft's folder and reports about it as training and evaluation leave them, made up: for tests of publishing."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from decode.checkpoints.draft_folder import METADATA_FILE, draft_sha256
from decode.common.typed_json import from_json
from decode.engine.records import DecodeRecord
from eval.results.report import MethodResult, NotCompared
from train.hub.evidence import Evidence

SEED = 0


def draft(folder: Path, family: str = "eagle3", **changes: Any) -> Path:
    """A draft directory with what training leaves beside it. Its weights are no draft's."""
    folder.mkdir(parents=True)
    config: dict[str, Any] = {
        "model_type": "llama", "vocab_size": 4096, "max_position_embeddings": 768,
    }  # fmt: skip
    if family == "medusa":
        config["num_heads"] = 3
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"fc.weight": torch.ones(2, 3)}, folder / "model.safetensors", {"format": "pt"})
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    (folder / "metrics.jsonl").write_text("{}\n")
    (folder / "checkpoints" / "step-000002").mkdir(parents=True)
    (folder / "checkpoints" / "step-000002" / "random_states_0.pkl").write_bytes(b"\x80\x04.")
    (folder / "wandb").mkdir()
    facts = {
        "family": family,
        "target": {"name": "org/target", "revision": None},
        "tokenizer_hash": "33c2eb365440cc00",
        "training": {
            "target": "org/target", "data": "outputs/samples",
            "draft": {"family": family, "init": ""}, "loss": "forward_kl",
            "loop": {"steps": 312, "lr": 0.0023}, "check": {"prompts": 6, "k": 5},
            "out": str(folder), "overwrite": False,
        },
        "samples": 2917,
        "processes": 1,
        "data_manifest": {
            "target": "org/target",
            "sampling": {"temperature": 1.0, "max_new_tokens": 96},
            "counts": {"asked": 3011, "answered": 2999, "failed": 12},
            "chat_template_hash": None,
        },
        "measured_in_training": {"accept/tau": 1.6757, "accept/alpha": 0.4339},
        "argv": ["train/distill.py", "--out", str(folder)],
        "git": "484a9eb4872de3f5cf111c91f2d764b3cd5eee92+dirty",
        "versions": {"python": "3.11.7", "torch": "2.13.0+cpu"},
        "hardware": {"device": "AMD EPYC", "gpus": 0, "threads": 2},
        "draft_sha256": draft_sha256(str(folder)),
    }  # fmt: skip
    (folder / METADATA_FILE).write_text(json.dumps(facts | changes))
    return folder


def sha_of(folder: Path) -> str:
    return json.loads((folder / METADATA_FILE).read_text())["draft_sha256"]


def entry(sha: str | None, name: str, task: str = "all", **changes: Any) -> dict[str, Any]:
    """One method of a report, K = 4, greedy."""
    shift = len(task) / 100
    fields = {
        "name": name,
        "draft": None if sha is None else "drafts/x",
        "draft_sha256": sha,
        "k": 4,
        "tree": None,
        "temperature": 0.0,
        "batch_size": 1,
        "task": task,
        "prompts": 37,
        "tau": 2.3451 + shift,
        "tau_ci": [2.1111 + shift, 2.5672 + shift],
        "alpha": 0.6124 + shift,
        "alpha_ci": [0.5871 + shift, 0.6342 + shift],
        "alpha_by_position": [0.7113, 0.6224 + shift, 0.5331, None],
        "alpha_by_position_ci": [[0.7003, 0.7205], [0.6006, 0.6407], [0.5008, 0.5609], None],
        "acceptance_rate": 0.4481,
        "acceptance_rate_ci": [0.42, 0.47],
        "counts": {"rounds": 400, "drafted": 1600, "accepted": 538},
        "latency_ms": {"p50": 12.34, "p95": 23.45, "first_token": 57.64},
        "tokens_per_second": 123.45,
        "tokens_per_second_ci": [119.87, 126.01],
        "ms_per_token": 8.1,
        "predicted_speedup": None,
        "phase_ms": None,
        "verification": "greedy",
        "speedup": 1.4142 + shift,
        "speedup_ci": [1.3107 + shift, 1.5208 + shift],
        "mode": "eager",
        "dtype": "float32",
        "lossy": False,
        "lossless": {
            "greedy_identical": True, "prompts": 37, "identical": 37, "ties": [], "failures": [],
        },
    }  # fmt: skip
    return fields | changes


def report(sha: str, *more: dict[str, Any]) -> dict[str, Any]:
    """A report of the draft on two tasks, of plain decoding, and `more`."""
    own = [entry(sha, "eagle3", task) for task in ("all", "code", "prose")]
    return {
        "schema": 1,
        "target": {"name": "org/target", "revision": None},
        "tasks": ["code@1", "prose@1"],
        "git": "ccbfa456bfe89422e53c87af09f467dd2deb39c2",
        "seed": 7,
        "versions": {"python": "3.11.7"},
        "hardware": {"device": "AMD EPYC", "gpus": 0, "threads": 2},
        "baseline": {"tokens_per_second": 59.8, "ms_per_token": 16.7},
        "methods": [entry(None, "plain", speedup=1.0, alpha=None), *own, *more],
    }


def measured(
    records: Sequence[DecodeRecord], k: int, plain: Sequence[DecodeRecord] | None = None,
    **facts: Any,
) -> MethodResult:  # fmt: skip
    """Of these records; what does not follow from them is made up."""
    known = {
        "name": "m", "draft": None, "tree": None, "temperature": 0.0, "batch_size": 1, "task": "all",
        "draft_sha256": None, "mode": "eager", "dtype": "float32", "verification": "greedy", "lossy": False,
        "predicted_speedup": None, "phase_ms": None, "lossless": NotCompared(None, 0),
    }  # fmt: skip
    return MethodResult.measure(records, records if plain is None else plain, k, 0, **known | facts)


def cell(**changes: Any) -> dict[str, Any]:
    """A measured, and with what it lacks a chosen setting of tuned.json."""
    fields = {
        "stage": "chains", "method": "eagle3", "setting": "K = 4", "k": 4, "tree": None, "temperature": 0.0,
        "batch_size": 1, "task": "all", "prompts": 31, "tau": 2.0, "alpha": 0.6, "speedup": 1.7, "ci": [1.6, 1.8],
        "rule": "exact", "held_out": 1.6888, "guide": None,
    }  # fmt: skip
    return fields | changes


def tuned(sha: str, ks: dict[str, int]) -> dict[str, Any]:
    """tuned.json of the draft and of n-grams: {domain: its fastest K}, 2 to 6 tried, greedy and at temperature 1."""
    cells, chosen = [], []
    for temperature in (0.0, 1.0):
        for task, best in ks.items():
            for k in range(2, 7):
                fields = cell(
                    k=k, setting=f"K = {k}", temperature=temperature, task=task,
                    speedup=1.7317 - abs(k - best) / 10, ci=[1.6191, 1.8428],
                )  # fmt: skip
                cells += [fields, fields | {"method": "ngram", "speedup": 9.0}]
                cells += [fields | {"batch_size": 8, "speedup": 9.0}]
                chosen += [fields] * (k == best)
    return {
        "schema": 1, "target": {"name": "org/target", "revision": None},
        "tasks": ["code@1", "prose@1"], "drafts": {"eagle3": sha},
        "git": "ccbfa456bfe89422e53c87af09f467dd2deb39c2",
        "hardware": {"device": "AMD EPYC", "gpus": 0, "threads": 2}, "chosen": chosen,
        "predictions": {"cells": [], "counted": 0, "median_error": None}, "cells": cells,
    }  # fmt: skip


def assisted(name: str, **changes: Any) -> dict[str, Any]:
    """The pooled element of transformers' assisted generation with this draft in a report's `engines`."""
    fields = {
        "engine": "hf-assisted", "name": name, "k": 4, "temperature": 0.0, "batch_size": 1, "task": "all",
        "prompts": 33, "in_turn": True, "tau": 2.4, "tokens_per_second": 99.5, "speedup": 1.11,
        "speedup_ci": [1.01, 1.22], "gain": 1.25, "gain_ci": [1.13, 1.37], "same_as_ours": 33, "failed": [],
    }  # fmt: skip
    return fields | changes


def referee(sha: str, **changes: Any) -> dict[str, Any]:
    """What scripts/referee.py says of a draft that vLLM decodes as we do."""
    counts = {"rounds": 30, "drafted": 120, "accepted": 40, "by_position": [20, 10, 8, 2]}
    fields = {
        "draft": "drafts/x", "draft_sha256": sha, "family": "eagle3", "vllm": "0.32.0", "k": 4, "prompts": 12,
        "same": 11, "ties": [{"task": "code", "id": "a", "gap": 0.0}], "differ": [],
        "totals": {"ours": counts, "vllm": counts},
    }  # fmt: skip
    return fields | changes


def evidence(**contents: Any) -> Evidence:
    """Of the contents of report.json, referee.json and the other files."""
    return from_json(Evidence, contents)
