"""Secrets are found by their form, and ordinary text is left alone: vocabularies, code, checksums, names of models."""

import base64
import random
import re
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from decode.common import secret_patterns
from decode.common.command import run_command
from decode.common.errors import UserError
from decode.common.secret_patterns import find_secret, redact
from tests.planted_secrets import MARKED, SECRETS, secret_part
from tests.worlds import ROOT
from train.trainer.tracking import Tracker


@pytest.mark.parametrize("name", SECRETS)
def test_every_form_is_found(name: str) -> None:
    """Catches a form that passes alone, in a sentence, or in JSON, and an error that repeats it."""
    secret = SECRETS[name]
    for text in (secret, f"made with {secret} in it", f'{{"x": "{secret}"}}'):
        assert find_secret(text, strict=True) is not None, text
    if name in MARKED:
        assert find_secret(f"x = '{secret}'\n") is not None
        assert secret_part(secret) not in redact(f"401 for {secret}: try again")


@pytest.mark.parametrize(
    "text",
    [
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
        "RedHatAI/Llama-3.3-70B-Instruct-speculator.eagle3",
        "Qwen/Qwen3-30B-A3B-Instruct-2507-FP8",
        "Qwen3VLMoeForConditionalGeneration",
        "NVIDIA H100 80GB HBM3, Intel(R) Xeon(R) Platinum 8480C @ 2.00GHz",
        "outputs/quickstart/drafts/eagle3-2048-of-20260101",
        "model.layers.11.self_attn.q_proj.weight_scale_inv",
        "{{ message['content'] }}<|im_end|> token: 3, pad_token: <pad>, eos_token = '</s>'",
        "K = 4 drafted tokens a round; the secret of speed, its key: fewer passes of the target",
        "task-oriented-dialogue-generation-2025, sk-toggleable__label-arrow, pypi-attestations-of",
        "http://user:pass@host and https://huggingface.co/org/name/tree",
        "commit 54ea1f0549a8+dirty, 0.7169459962756052, 1e-05",
        "M10.25 33.125L44.5 20.75L80.125 9.5 fill='#4269d0' d='M0 0'",
    ],
)
def test_ordinary_text_is_no_secret(text: str) -> None:
    """Catches an alarm at names, weights, templates and numbers."""
    assert find_secret(text, strict=True) is None
    assert redact(text) == text


def test_code_and_vocabularies_are_no_secrets() -> None:
    """Catches an alarm at what models write and at their tokenizers, and minutes of search in a large one."""
    charsmap = base64.b64encode(random.Random(0).randbytes(300_000)).decode()
    large = "\n".join([(ROOT / "assets/target/tokenizer.json").read_text(), charsmap]) * 2
    start = time.perf_counter()
    assert find_secret(large) is None
    assert time.perf_counter() - start < 10
    for module in (re, base64, secret_patterns, pytest, random):
        assert find_secret(Path(str(module.__file__)).read_text()) is None


def test_secrets_of_the_environment_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a key of no known form that the process itself holds, or that a login saved."""
    monkeypatch.setenv("MY_SERVICE_API_KEY", "plain-password-1")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    netrc = tmp_path / "netrc"
    netrc.write_text("machine api.wandb.ai login user password plain-password-2\n")
    monkeypatch.setenv("NETRC", str(netrc))
    for number in (1, 2):
        assert find_secret(f"x plain-password-{number} y") is not None
        assert redact(f"x plain-password-{number} y") == "x *** y"
    assert find_secret("false") is None


def test_messages_keep_what_is_no_secret() -> None:
    """Catches a message whose advice, path or commit is starred out with the secret."""
    commit = "ccbfa456bfe89422e53c87af09f467dd2deb39c2"
    assert redact(f"hub/models/snapshots/{commit}/config.json does not exist: check the path") == (
        f"hub/models/snapshots/{commit}/config.json does not exist: check the path"
    )
    assert redact("api_key: give one in the file") == "api_key: give one in the file"
    assert redact(f"a {SECRETS['GitHub']} b {SECRETS['URL']}") == "a *** b ***/x.git"


@dataclass
class SecretFreeSettings:
    """Settings of a command that takes none."""


def test_the_line_that_ends_a_command_has_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a token that a library puts into its error, in a line that goes into logs."""

    def main(_: SecretFreeSettings) -> None:
        raise UserError(
            f"401 for https://host/?{SECRETS['token']} with {SECRETS['bearer']}: log in"
        )

    with pytest.raises(SystemExit):
        run_command(main, SecretFreeSettings, "", argv=[])
    line = capsys.readouterr().err
    assert line == "error: 401 for https://host/?*** with ***: log in\n"


def test_the_warning_that_wandb_failed_has_no_secret(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches a key in an error of W&B, which is logged."""

    def fail() -> None:
        raise ValueError(f"invalid key {SECRETS['W&B, v1']}")

    tracker = Tracker(tmp_path, "project", {}, "disabled")
    tracker._call(fail)
    assert "invalid key ***" in caplog.text
