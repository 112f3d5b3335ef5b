"""Which engine answers the prompts of train/sample.py, and settings that belong to another one.

No GPU has run `auto`'s choice of vLLM yet (docs/gpu_checks.md); vLLM's server itself answers on a CPU in the tests.
"""

import importlib.util
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
from accelerate.utils import parse_flag_from_env

from decode.common.errors import UserError
from decode.common.target_settings import QUANTIZED_DTYPES
from decode.model.loading import load_config
from decode.serving.running import vllm_client
from train.data import sample_store
from train.sampling.config import SampleConfig

VLLM_DTYPE = "vllm-"
"""Begins the dtype of a target that vLLM computed: its answers are not mixed with ours."""
ROWS = 256
"""Requests of a process that are open at once: as many as vLLM decodes together by default."""
OURS = "--engine draftsmith answers here"


def settle_engine(s: SampleConfig) -> SampleConfig:
    """The settings with an engine in place of `auto`: vLLM on a GPU where it is installed and these settings are for
    it, ours elsewhere. On a GPU one line on stderr says which, and why it is ours. What is in `out` goes on with the
    engine that it was begun with."""
    if s.engine != "auto":
        return s
    uses_gpu = s.device.partition(":")[0] in ("auto", "cuda") and torch.cuda.is_available()
    if not uses_gpu or s.origin == "text" or parse_flag_from_env("ACCELERATE_USE_CPU"):
        return replace(
            s, engine="local"
        )  # `check_engine` refuses settings of vLLM that nothing would read
    python = find_vllm(s.vllm_python)
    why = why_ours(s) or ("" if python else "no vLLM is installed (VLLM_PYTHON, .venv-vllm)")
    if os.environ.get("RANK", "0") == "0":
        chosen = f"ours, since {why}" if why else f"vLLM, by {python}; {OURS}"
        sys.stderr.write(f"engine auto: {chosen}\n")
    rows = max(s.concurrency, ROWS)
    if why:
        return replace(s, engine="local", vllm_python="", vllm_args=[])
    return replace(s, engine="vllm", vllm_python=python, concurrency=rows)


def find_vllm(asked: str) -> str:
    """The interpreter of an environment with vLLM: that which is named (`find_interpreter`), or this one; "" without
    any. UserError for one that was asked for and is not there."""
    try:
        python = vllm_client.find_interpreter(asked)
    except UserError:
        if asked:
            raise
        python = ""
    if python and vllm_client.has_vllm(python):
        return python
    return sys.executable if importlib.util.find_spec("vllm") else ""


def why_ours(s: SampleConfig) -> str:
    """Why these settings are for our engine; "" if vLLM can follow them."""
    held = [then for then in sample_store.targets_in(Path(s.out)) if then is not None]
    begun = any(not str(then.dtype).startswith(VLLM_DTYPE) for then in held)
    return next(
        (
            reason
            for reason, applies in {
                "the answers that are there are its own": begun,
                "a draft is given": s.draft != "none",
                f"mode {s.mode} is its own": s.mode != "auto",
                f"dtype {s.dtype} is its own": s.dtype in QUANTIZED_DTYPES,
                f"placement.kind is {s.placement.kind}": s.placement.kind != "single",
                "the target is an encoder-decoder": is_encoder_decoder(s),
            }.items()
            if applies
        ),
        "",
    )


def is_encoder_decoder(s: SampleConfig) -> bool:
    return bool(load_config(s.target, "target", s.revision).is_encoder_decoder)


def copies_of_target(s: SampleConfig, processes: int) -> int:
    """How often vLLM's server loads the target: on the GPU of each process, but once where `vllm_args` say how."""
    return 1 if s.vllm_args else max(1, min(processes, torch.cuda.device_count()))


def check_engine(s: SampleConfig) -> None:
    """UserError for settings of one engine that are given with another."""
    is_text = s.origin == "text"
    for is_wrong, line in (
        (s.engine != "openai" and (s.url or s.model),
         "--url and --model are of a server: add --engine openai, or drop them"),
        (s.engine != "vllm" and (s.vllm_python or s.vllm_args),
         "--vllm_python and --vllm_args: add --engine vllm, or drop them"),
        (s.served and is_text, f"--origin text asks nobody for answers: drop --engine {s.engine}"),
        (s.served and s.draft != "none",
         "--draft is for the local engine: give the draft to the server, or drop it"),
        (s.mode != "auto" and (s.served or is_text), "--mode is of the local engine: drop it"),
        (s.served and is_encoder_decoder(s),
         f"--engine {s.engine} serves causal targets: drop it for an encoder-decoder"),
        (s.placement.kind != "single" and (s.served or is_text),
         "placement is of a target that is loaded here: leave its kind at single"),
    ):  # fmt: skip
        if is_wrong:
            raise UserError(line)
    if s.engine == "vllm":
        vllm_client.find_interpreter(s.vllm_python)  # or a UserError
