"""What a GGUF's model computes: against arithmetic that is written out here, the model that the file was made from, and
tokens that llama.cpp gave for the same file."""

import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache as cache_results
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import constants
from torch import Tensor

from decode.common.errors import UserError
from decode.engine.engine import decode
from decode.model.loading import Target, load_model, load_target
from decode.model.quantized.conversion import quantize_model
from decode.model.quantized.w8a8 import W8A8Linear
from decode.model.runner import ModelRunner
from tests.gguf_writer import (
    CASES,
    ENDING,
    GOLDEN,
    HEAD_DIM,
    NEW_TOKENS,
    PROMPTS,
    THETA,
    Case,
    case_model,
    divisors,
    llamacpp_tokens,
    write_case,
)

TOKENS = json.loads(GOLDEN.read_text())
SERVER = os.environ.get("LLAMA_SERVER", "")
LLAMAS = [name for name, case in CASES.items() if case.arch == "llama"]
KEYS_LLAMACPP_IGNORES: dict[str, Case] = {
    "betas": Case(
        keys={"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
        | {"rope.scaling.original_context_length": 200}
        | {"rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 3.0}
    ),
    "own attention factor": Case(
        keys={"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0}
        | {"rope.scaling.original_context_length": 64, "rope.scaling.yarn_attn_factor": 1.4}
    ),
    "log multiplier": Case(
        keys={"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0}
        | {"rope.scaling.original_context_length": 64, "rope.scaling.yarn_log_multiplier": 0.5}
    ),
}
"""Keys that llama.cpp's converter writes for any model and llama.cpp reads for some: for all they mean the same."""


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
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(constants, "HF_HOME", str(folder / "cache"))
            return load_target(str(write_case(folder / f"{name}.gguf", CASES[name])), "cpu")

    return target


def rotation(case: Case) -> tuple[Tensor, float]:
    """(the frequencies of a head [HEAD_DIM / 2], what cosines and sines are multiplied by) that the file means."""
    plain = [THETA ** (-2 * pair / HEAD_DIM) for pair in range(HEAD_DIM // 2)]
    keys = {key.removeprefix("rope.scaling."): value for key, value in case.keys.items()}
    factor = float(keys.get("factor", keys.get("rope.scale_linear", 1.0)))
    kind = keys.get("type", "linear")
    if "rope_freqs.weight" in case.tensors:
        over = case.tensors["rope_freqs.weight"].tolist()
        return torch.tensor([f / by for f, by in zip(plain, over, strict=True)]), 1.0
    if kind == "none":
        return torch.tensor(plain), 1.0
    if kind == "linear":
        return torch.tensor([f / factor for f in plain]), 1.0
    context = keys.get("original_context_length", 256)

    def pair_that_turns(times: float) -> float:
        """The pair of dimensions that makes so many turns within the context."""
        return HEAD_DIM * math.log(context / (times * 2 * math.pi)) / (2 * math.log(THETA))

    low = max(math.floor(pair_that_turns(keys.get("yarn_beta_fast", 32.0))), 0)
    high = min(math.ceil(pair_that_turns(keys.get("yarn_beta_slow", 1.0))), HEAD_DIM - 1)
    mixed = []
    for pair, frequency in enumerate(plain):
        slow = min(max((pair - low) / max(high - low, 0.001), 0.0), 1.0)
        mixed.append(slow * frequency / factor + (1 - slow) * frequency)
    times = 0.1 * math.log(factor) + 1
    if "yarn_log_multiplier" in keys:
        times /= 0.1 * keys["yarn_log_multiplier"] * math.log(factor) + 1
    return torch.tensor(mixed), keys.get("yarn_attn_factor", times) * keys.get("attn_factor", 1.0)


def written_out(case: Case, ids: list[int]) -> Tensor:
    """Logits [T, V] of a Llama by its published arithmetic, with the weights that the file was written from."""
    weights = {name: value.double() for name, value in case_model(case).state_dict().items()}
    frequencies, scale = rotation(case)
    angles = torch.arange(len(ids))[:, None].double() * frequencies.double()
    cos, sin = angles.cos() * scale, angles.sin() * scale

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weights[f"{name}.weight"]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", torch.zeros(1))

    def heads(x: Tensor, rotated: bool = True) -> Tensor:
        x = x.unflatten(-1, (-1, HEAD_DIM)).transpose(0, 1)  # [heads, T, HEAD_DIM]
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        return (turned if rotated else x).repeat_interleave(4 // len(x), dim=0)

    unseen = torch.full((len(ids), len(ids)), -torch.inf).triu(1)
    x = weights["model.embed_tokens.weight"][ids]
    for layer in range(2):
        at = f"model.layers.{layer}"
        y = norm(x, f"{at}.input_layernorm")
        q, k, v = (linear(y, f"{at}.self_attn.{part}_proj") for part in "qkv")
        scores = heads(q) @ heads(k).transpose(1, 2) / math.sqrt(HEAD_DIM) + unseen
        mixed = (scores.softmax(-1) @ heads(v, rotated=False)).transpose(0, 1).flatten(1)
        x = x + linear(mixed, f"{at}.self_attn.o_proj")
        y = norm(x, f"{at}.post_attention_layernorm")
        gate = torch.nn.functional.silu(linear(y, f"{at}.mlp.gate_proj"))
        x = x + linear(gate * linear(y, f"{at}.mlp.up_proj"), f"{at}.mlp.down_proj")
    return norm(x, "model.norm") @ weights["lm_head.weight"].T


def logits(model: Any, ids: list[int]) -> Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


def tokens(target: Target, count: int = NEW_TOKENS) -> list[list[int]]:
    return [decode(target, None, [ids], max_new_tokens=count)[0].output_ids for ids in PROMPTS]


@pytest.mark.parametrize("name", LLAMAS)
def test_logits_are_those_of_the_arithmetic(name: str, written: Callable[[str], Target]) -> None:
    """Catches a RoPE that is lost or read as another, rows in another order, a lost bias or another head."""
    case, model = CASES[name], written(name).runner.model
    for ids in PROMPTS:
        wanted = written_out(case, ids)
        assert torch.allclose(logits(model, ids).double(), wanted, atol=2e-3 * wanted.std())


@pytest.mark.parametrize("name", KEYS_LLAMACPP_IGNORES)
def test_all_keys_of_yarn_are_followed(name: str, tmp_path: Path) -> None:
    case = KEYS_LLAMACPP_IGNORES[name]
    model = load_model(str(write_case(tmp_path / "tiny.gguf", case)), "target", "cpu", "float32")
    wanted = written_out(case, PROMPTS[2])
    assert torch.allclose(logits(model, PROMPTS[2]).double(), wanted, atol=2e-3 * wanted.std())
    without = Case(keys={key: value for key, value in case.keys.items() if "yarn_" not in key})
    assert not torch.allclose(written_out(without, PROMPTS[2]), wanted, atol=0.05 * wanted.std())


@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_are_those_of_llamacpp(name: str, written: Callable[[str], Target]) -> None:
    """Catches what the two tests beside it would share: a key that means something else than we think it does."""
    target = written(name)
    for found, wanted in zip(tokens(target), TOKENS[name], strict=True):
        assert found[: len(wanted)] == wanted
        assert len(wanted) == NEW_TOKENS or wanted[-1] in (
            0,
            ENDING,
        )  # it ends at <|endoftext|> too


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("other limits", "any divisors")])  # fmt: skip
def test_the_model_is_the_one_that_the_file_was_made_from(
    name: str, written: Callable[[str], Target]
) -> None:
    """Catches weights that are lost or put elsewhere, in architectures that are not written out above."""
    original = case_model(CASES[name])
    model = written(name).runner.model
    wanted = original.state_dict()
    assert model.state_dict().keys() == wanted.keys()
    for parameter, value in model.state_dict().items():
        exact = "gemma" not in CASES[name].arch or "norm" not in parameter
        assert torch.allclose(value, wanted[parameter], rtol=0, atol=0 if exact else 1e-6)
    for ids in PROMPTS:
        found, there = logits(model, ids), logits(original, ids)
        assert torch.allclose(found, there, atol=1e-3 * float(there.std()))


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_a_file_is_loaded_in_w8a8(kind: str, tmp_path: Path) -> None:
    """Bug: a file's own rounding is taken for that of the dtype, or its target counts as one of other weights."""
    path = str(write_case(tmp_path / "tiny.gguf", CASES["qwen2"], kind=kind))
    target, model = load_target(path, "cpu", "w8a8"), load_model(path, "target", "cpu", "float32")
    record = target.describe()
    assert (record.weights, record.rounding) == (load_target(path).describe().weights, " in w8a8")
    layers = [part for part in target.runner.model.modules() if isinstance(part, W8A8Linear)]
    assert len(layers) == 2 * 4 + 1  # q, k and v are one, and gate and up
    for ids in PROMPTS:
        p, q = (logits(one, ids).softmax(-1) for one in (model, target.runner.model))
        assert (p - q).abs().sum(-1).mean() / 2 < 0.1
    quantize_model(model, "w8a8", "the same weights")
    assert tokens(target) == tokens(replace(target, runner=ModelRunner(model)))


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


@pytest.mark.parametrize(
    "keys",
    [
        {"expert_count": 0},
        {"rope.scaling.finetuned": False},
        {"attention.key_length": HEAD_DIM, "attention.value_length": HEAD_DIM},
        {"tensor_data_layout": "Meta AI original pth"},
    ],
)
def test_a_key_that_changes_nothing_does_no_harm(keys: dict[str, Any], tmp_path: Path) -> None:
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


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma3_text"])
def test_the_tensor_decides_on_the_head(arch: str, tied: bool, tmp_path: Path) -> None:
    """Catches a separate head that is replaced by the embedding, and an absent one that is drawn at random."""
    head = np.random.RandomState(3).standard_normal((4096, 64)).astype(np.float32)
    case = Case(arch, {"tie_word_embeddings": True})
    keys = {"attention.sliding_window": 8} if "gemma" in arch else {}
    tensors = {} if tied else {"output.weight": head}
    path = write_case(tmp_path / "tiny.gguf", case, keys=keys, tensors=tensors)
    model = load_model(str(path), "target", "cpu", "float32")
    wanted = case_model(case).model.embed_tokens.weight if tied else torch.from_numpy(head)
    assert torch.equal(model.get_output_embeddings().weight, wanted)
    assert model.config.tie_word_embeddings == tied
