"""A vLLM server of the target, started for one sampling and ended with it. vLLM lives in an environment of its own."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from decode.serving.running.server_process import free_port, running_server, vllm_command
from train.sampling.config import SampleConfig


@contextmanager
def target_server(s: SampleConfig, processes: int) -> Iterator[str]:
    """The address of the API of a server of `s.target` for so many client processes; it ends with the block.

    UserError with the end of its log if it does not start, or not within `s.start_timeout` seconds.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}/v1"
    command = server_command(s, port, processes)
    with running_server(command, f"{url}/models", s.start_timeout, "vLLM", VLLM_NO_USAGE_STATS="1"):
        yield url


def server_command(s: SampleConfig, port: int, processes: int) -> list[str]:
    """The command line: one model under its own name, and no sampling settings but those of the requests.

    Requests have seeds. On a CPU vLLM 0.32 ends with an error when the prompt of such a request is prefilled in pieces
    ("CPU Generator does not use offset"), so it reads prompts whole there.
    """
    whole_prompts = [] if torch.cuda.is_available() else ["--no-enable-chunked-prefill"]
    return [
        *vllm_command(s.vllm_python, s.target, s.revision, s.dtype, "127.0.0.1", port),
        *("--generation-config", "vllm", *whole_prompts),
        *("--max-num-seqs", str(s.concurrency * processes), *s.vllm_args),
    ]
