"""What a GGUF's model computes: against the model that the file was made from, and tokens that llama.cpp gave for the
same file."""

import json
import os
from collections.abc import Callable
from functools import cache as cache_results
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from huggingface_hub import constants
from packaging.version import Version
from torch import Tensor

from decode.common.errors import UserError
from decode.engine.engine import decode
from decode.model.loading import Target, load_model, load_target
from tests.gguf_writer import (
    CASES,
    ENDING,
    GOLDEN,
    HEAD_DIM,
    NEW_TOKENS,
    PROMPTS,
    Case,
    case_model,
    divisors,
    llamacpp_tokens,
    write_case,
)

TOKENS = json.loads(GOLDEN.read_text())
SERVER = os.environ.get("LLAMA_SERVER", "")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Target]:
    """The target of a case's file, which is written and converted once for all tests."""
    folder = tmp_path_factory.mktemp("written")

    @cache_results
    def target(name: str) -> Target:
        skip_unbuilt_vocabulary(CASES[name].arch)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(constants, "HF_HOME", str(folder / "cache"))
            return load_target(str(write_case(folder / f"{name}.gguf", CASES[name])), "cpu")

    return target


def skip_unbuilt_vocabulary(arch: str) -> None:
    """Byte-level vocabularies, as these files have, of Gemma and Phi-3: transformers 5.17 cannot build them, and the
    file is refused; 5.24 can."""
    if arch.startswith(("gemma", "phi3")) and Version(transformers.__version__) < Version("5.24"):
        pytest.skip("this version of transformers builds no such byte-level vocabulary")


YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 8.0,
    "rope.scaling.original_context_length": 64,
}
KEYS_LLAMACPP_IGNORES: dict[str, tuple[dict[str, float], dict[str, float]]] = {
    "betas": ({"beta_fast": 16.0, "beta_slow": 3.0}, {"beta_fast": 16.0, "beta_slow": 3.0}),
    "own attention factor": ({"attn_factor": 1.4}, {"attention_factor": 1.4}),
    # (1 + 0.1 ln 8) ÷ (1 + 0.5 · 0.1 ln 8)
    "log multiplier": ({"log_multiplier": 0.5}, {"attention_factor": 1.20794 / 1.10397}),
}
"""Keys that llama.cpp's converter writes for any model and llama.cpp reads for some: for all they mean the same."""


@pytest.mark.parametrize("name", KEYS_LLAMACPP_IGNORES)
def test_all_keys_of_yarn_are_followed(name: str, tmp_path: Path) -> None:
    keys, wanted = KEYS_LLAMACPP_IGNORES[name]
    case = Case(keys=YARN | {f"rope.scaling.yarn_{key}": value for key, value in keys.items()})
    model = load_model(str(write_case(tmp_path / "tiny.gguf", case)), "target", "cpu", "float32")
    rope = model.config.rope_parameters
    assert (rope["rope_type"], rope["factor"]) == ("yarn", 8.0)
    assert {key: rope.get(key) for key in wanted} == pytest.approx(wanted, rel=1e-5)


def logits(model: Any, ids: list[int]) -> Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


def tokens(target: Target, count: int = NEW_TOKENS) -> list[list[int]]:
    return [decode(target, None, [ids], max_new_tokens=count)[0].output_ids for ids in PROMPTS]


@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_are_those_of_llamacpp(name: str, written: Callable[[str], Target]) -> None:
    """Catches what the test below would share: a key that means something else than we think it does."""
    target = written(name)
    for found, wanted in zip(tokens(target), TOKENS[name], strict=True):
        assert found[: len(wanted)] == wanted
        assert len(wanted) == NEW_TOKENS or wanted[-1] in (0, ENDING)  # 0 is <|endoftext|>


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("other limits", "any divisors")])  # fmt: skip
def test_the_model_is_the_one_that_the_file_was_made_from(
    name: str, written: Callable[[str], Target]
) -> None:
    """Catches weights that are lost or put elsewhere, rows in another order, a lost bias and a RoPE read as another."""
    original = case_model(CASES[name])
    model = written(name).runner.model
    wanted = original.state_dict()
    assert model.state_dict().keys() == wanted.keys()
    for parameter, value in model.state_dict().items():
        exact = "gemma" not in CASES[name].arch or "norm" not in parameter
        assert torch.allclose(value, wanted[parameter], rtol=0, atol=0 if exact else 1e-6)
    ids = max(PROMPTS, key=len)
    found, there = logits(model, ids), logits(original, ids)
    assert torch.allclose(found, there, atol=1e-3 * float(there.std()))


def test_the_golden_tokens_tell_the_kinds_of_rope_apart() -> None:
    """Catches golden tokens that any RoPE would give."""
    kinds = ["default", "llama3", "yarn", "linear", "any divisors"]
    assert len({json.dumps(TOKENS[kind]) for kind in kinds}) == len(kinds)
    assert TOKENS["none"] == TOKENS["divisors of one"] == TOKENS["default"]


@pytest.mark.skipif(not SERVER, reason="LLAMA_SERVER names no llama-server")
@pytest.mark.parametrize("name", ["default", "llama3", "yarn", "linear"])
def test_llamacpp_still_gives_the_golden_tokens(name: str, tmp_path: Path) -> None:
    path = write_case(tmp_path / "tiny.gguf", CASES[name])
    assert llamacpp_tokens(SERVER, path, PROMPTS, NEW_TOKENS) == TOKENS[name]


def test_published_llama3_settings_are_found_again(written: Callable[[str], Target]) -> None:
    """Catches settings that compute the same and that a draft's exported config would not share with the original."""
    case = CASES["llama3 of another context"]
    config = written("llama3 of another context").runner.model.config
    wanted = case.changes["rope_parameters"]
    assert {key: config.rope_parameters[key] for key in wanted} == wanted


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"rope.scaling.type": "longrope"}, "rope.scaling.type = longrope"),
        ({"rope.scaling.attn_factor": 1.5}, "rope.scaling.attn_factor = 1.5"),
        ({"rope.dimension_count": 8}, "rope.dimension_count = 8"),
        ({"attention.scale": 0.5}, "llama.attention.scale = 0.5"),
        ({"logit_scale": 0.0625}, "llama.logit_scale = 0.0625"),
        ({"expert_count": 8, "expert_used_count": 2}, "llama.expert_count = 8"),
        ({"attention.causal": False}, "llama.attention.causal = False"),
        ({"attention.value_length": 8}, "llama.attention.value_length = 8"),
        ({"attention.head_count_kv": [2, 1]}, r"llama.attention.head_count_kv = \[2, 1\]"),
        ({"vocab_size": 5000}, "llama.vocab_size = 5000"),
        ({"rope.scaling.yarn_ext_factor": 0.5}, "llama.rope.scaling.yarn_ext_factor = 0.5"),
        ({"a.new.key": 3}, "llama.a.new.key = 3"),
    ],
)
def test_a_key_that_is_not_followed_is_named(
    keys: dict[str, Any], says: str, tmp_path: Path, cache: Path
) -> None:
    path = write_case(tmp_path / "tiny.gguf", Case(), keys=keys)
    with pytest.raises(UserError, match=says) as error:
        load_target(str(path), "cpu")
    assert "\n" not in str(error.value)
    assert not [file for file in cache.rglob("*") if file.is_file()]


def test_keys_that_change_nothing_do_no_harm(tmp_path: Path) -> None:
    keys = {
        "expert_count": 0,
        "rope.scaling.finetuned": False,
        "tensor_data_layout": "Meta AI original pth",
    }
    keys |= {"attention.key_length": HEAD_DIM, "attention.value_length": HEAD_DIM}
    path = write_case(tmp_path / "tiny.gguf", Case(), keys=keys)
    assert tokens(load_target(str(path), "cpu"), 6) == [row[:6] for row in TOKENS["default"]]


ROW = np.zeros(64, dtype=np.float32)


@pytest.mark.parametrize(
    ("name", "tensor", "says"),
    [
        ("default", {"blk.0.attn_q_norm.weight": ROW[:16]}, "tensor blk.0.attn_q_norm.weight"),
        ("default", {"blk.5.attn_norm.weight": ROW}, "tensor blk.5.attn_norm.weight"),
        ("default", {"output.bias": np.zeros(4096)}, "tensor output.bias"),
        ("default", {"token_types.weight": ROW}, "tensor token_types.weight"),
        ("qwen2", {"rope_freqs.weight": divisors(8.0, 1.0, 4.0, 64)}, "tensor rope_freqs.weight"),
        ("default", {"output_norm.weight": ROW[:32]}, r"output_norm.weight is \[32\].*\[64\]"),
        ("default", {"rope_freqs.weight": divisors(8.0, 1, 4, 64)[:4]}, r"rope_freqs.weight is \[4\].*\[8\]"),
    ],
)  # fmt: skip
def test_a_tensor_that_is_not_used_is_named(
    name: str, tensor: dict[str, np.ndarray], says: str, tmp_path: Path, cache: Path
) -> None:
    path = write_case(tmp_path / "tiny.gguf", CASES[name], tensors=tensor)
    with pytest.raises(UserError, match=says):
        load_target(str(path), "cpu")
    assert not [file for file in cache.rglob("*") if file.is_file()]


@pytest.mark.parametrize(
    "key",
    ["block_count", "context_length", "embedding_length", "feed_forward_length"]
    + ["attention.head_count", "attention.layer_norm_rms_epsilon"],
)
def test_no_model_without_the_keys_of_its_architecture(key: str, tmp_path: Path) -> None:
    """Catches a default of transformers, which is the shape of a 7B, in place of what the file lacks."""
    with pytest.raises(UserError, match=f"lacks the key llama.{key}"):
        load_target(str(write_case(tmp_path / "tiny.gguf", Case(), skip=key)), "cpu")


@pytest.mark.parametrize(
    ("arch", "tied"), [("llama", False), ("qwen2", True), ("qwen3", False), ("gemma3_text", True)]
)
def test_the_tensor_decides_on_the_head(arch: str, tied: bool, tmp_path: Path) -> None:
    """Catches a separate head that is replaced by the embedding, and an absent one that is drawn at random."""
    skip_unbuilt_vocabulary(arch)
    head = np.random.RandomState(3).standard_normal((4096, 64)).astype(np.float32)
    case = Case(arch, {"tie_word_embeddings": True})
    keys = {"attention.sliding_window": 8} if "gemma" in arch else {}
    tensors = {} if tied else {"output.weight": head}
    path = write_case(tmp_path / "tiny.gguf", case, keys=keys, tensors=tensors)
    model = load_model(str(path), "target", "cpu", "float32")
    wanted = case_model(case).model.embed_tokens.weight if tied else torch.from_numpy(head)
    assert torch.equal(model.get_output_embeddings().weight, wanted)
    assert model.config.tie_word_embeddings == tied
