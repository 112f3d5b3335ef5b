"""A vLLM server of the target, started for one sampling and ended with it. vLLM lives in an environment of its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eval.benchmark.vllm_client import find_interpreter, model_path
from train.sampling.config import SampleConfig
from train.servers.server_process import free_port, running_server


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
    """The command line: one model under its own name, and no sampling settings but those of the requests."""
    model = model_path(s.target, s.revision)
    revision = ["--revision", s.revision] if s.revision and not Path(model).exists() else []
    return [
        *(find_interpreter(s.vllm_python), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", model, "--served-model-name", "target", "--dtype", s.dtype, *revision),
        *("--host", "127.0.0.1", "--port", str(port), "--generation-config", "vllm"),
        *("--max-num-seqs", str(s.concurrency * processes), *s.vllm_args),
    ]
