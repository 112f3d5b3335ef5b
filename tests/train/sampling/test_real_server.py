"""A real vLLM server: its greedy answers are those of the local engine, token by token."""

import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests import worlds
from tests.train.sampling.test_server_sampling import summary
from tests.train.test_sample_command import rows_of

VLLM = os.environ.get("VLLM_PYTHON", "")
TARGET = worlds.ROOT / "assets" / "target"
PORT = 8391
SERVED = ["--served-model-name", "target", "--dtype", "float32", "--enforce-eager"]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("vllm") / "log"
    command = [VLLM, "-m", "vllm.entrypoints.openai.api_server", "--model", str(TARGET), *SERVED]
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(PORT)],
            cwd=log.parent,
            env={**os.environ, **env},
            stdout=file,
            stderr=file,
        )
    try:
        address = f"http://127.0.0.1:{PORT}/v1"
        end = time.monotonic() + worlds.PATIENCE
        while process.poll() is None and time.monotonic() < end:
            with suppress(OSError), urllib.request.urlopen(f"{address}/models", timeout=5):
                break
            time.sleep(1)
        assert process.poll() is None, log.read_text()[-2000:]
        yield address
    finally:
        process.terminate()
        process.wait()


@pytest.mark.slow
@pytest.mark.skipif(not VLLM, reason="VLLM_PYTHON names no interpreter with vLLM")
@pytest.mark.parametrize("engine", ["openai", "vllm"])
def test_greedy_answers_of_vllm_are_the_local_engine_s(
    engine: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Bug: vLLM reads another prompt, its ids lack the EOS token, or defaults of its own change what is sampled."""
    settings = [
        "--target", TARGET, "--sources", "[{kind: bundled, path: all, limit: 16}]", "--max_new_tokens", 48,
        "--sampling.temperature", 0, "--device", "cpu",
    ]  # fmt: skip
    own = ["--vllm_python", VLLM, "--vllm_args", "[--enforce-eager]"]
    where = own if engine == "vllm" else ["--url", request.getfixturevalue("url")]
    served = ["--engine", engine, *where, "--concurrency", 8, "--out", tmp_path / "served"]
    assert summary(worlds.call("train/sample.py", *settings, *served))["answered"] == 16
    assert worlds.call("train/sample.py", *settings, "--out", tmp_path / "local").code == 0
    served_rows, local = rows_of(tmp_path / "served"), rows_of(tmp_path / "local")
    equal = [name for name in local if served_rows[name] == local[name]]
    assert len(equal) == len(local) == 16
    assert {row[2] for row in local.values()} == {"eos", "length"}
