"""Tiny models with fixed weights as GGUF files, written key by key and tensor by tensor, and llama.cpp's tokens.

`python -m tests.gguf_writer LLAMA_SERVER` writes tests/golden/gguf_tokens.json again: the greedy tokens that a
llama-server of llama.cpp gives for each of `CASES`, with keys and values in float32 and no flash attention.
"""

import json
import math
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from decode.serving.running.server_process import free_port
from tests.tiny import tiny_model
from tests.worlds import ROOT

GOLDEN = ROOT / "tests/golden/gguf_tokens.json"
PROMPTS = [
    [(7 * place * place + 11 * place + 5) % 4000 + 50 for place in range(length)]
    for length in (5, 40, 90)
]
NEW_TOKENS = 24
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
ENDING = 1
HEAD_DIM, THETA, CONTEXT = 16, 10000.0, 256
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
GEMMA = NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def divisors(factor: float, low: float, high: float, context: int) -> np.ndarray:
    """What Llama 3.1 divides the frequencies of a head by, written out from its reference code."""
    out = []
    for pair in range(HEAD_DIM // 2):
        wave = 2 * math.pi * THETA ** (2 * pair / HEAD_DIM)
        if wave < context / high:
            out.append(1.0)
        elif wave > context / low:
            out.append(factor)
        else:
            smooth = (context / wave - low) / (high - low)
            out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, dtype=np.float32)


@dataclass(frozen=True)
class Case:
    """A tiny model, and what its GGUF has besides the usual."""

    arch: str = "llama"
    changes: dict[str, Any] = field(default_factory=dict)
    """Fields of its config."""
    keys: dict[str, Any] = field(default_factory=dict)
    """Keys of the architecture."""
    tensors: dict[str, np.ndarray] = field(default_factory=dict)


def scaled(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": THETA, **more}}


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 64,
}
MADE_FOR = {"original_max_position_embeddings": 64}
WINDOW = {"attention.sliding_window": 8}
ODD = np.linspace(1, 5, HEAD_DIM // 2, dtype=np.float32)
LONG, SHORT = ODD * 2, ODD / 2 + 1
CASES = {
    "default": Case(),
    "llama3": Case(
        changes=scaled("llama3", **LLAMA3, **MADE_FOR),
        tensors={"rope_freqs.weight": divisors(8.0, 1.0, 4.0, 64)},
    ),
    "llama3 of another context": Case(
        changes=scaled("llama3", **LLAMA3 | {"factor": 32.0}, original_max_position_embeddings=900),
        tensors={"rope_freqs.weight": divisors(32.0, 1.0, 4.0, 900)},
    ),
    "other limits": Case(tensors={"rope_freqs.weight": divisors(8.0, 1.0, 8.0, 300)}),
    "any divisors": Case(tensors={"rope_freqs.weight": ODD}),
    "divisors of one": Case(tensors={"rope_freqs.weight": np.ones(8, dtype=np.float32)}),
    "yarn": Case(changes=scaled("yarn", factor=4.0, **MADE_FOR), keys=YARN),
    "yarn without a context": Case(
        changes=scaled("yarn", factor=4.0, original_max_position_embeddings=CONTEXT),
        keys={key: YARN[key] for key in ("rope.scaling.type", "rope.scaling.factor")},
    ),
    "yarn with a factor": Case(
        changes=scaled(
            "yarn", factor=4.0, attention_factor=1.7 * (1 + 0.1 * math.log(4)), **MADE_FOR
        ),
        keys=YARN | {"rope.scaling.attn_factor": 1.7},
    ),  # fmt: skip
    "linear": Case(
        changes=scaled("linear", factor=4.0),
        keys={"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    ),
    "factor alone": Case(changes=scaled("linear", factor=2.5), keys={"rope.scaling.factor": 2.5}),
    "old linear": Case(changes=scaled("linear", factor=3.0), keys={"rope.scale_linear": 3.0}),
    "none": Case(keys={"rope.scaling.type": "none", "rope.scaling.factor": 4.0}),
    "tied": Case(changes={"tie_word_embeddings": True}),
    "biases": Case(changes={"attention_bias": True}),
    "qwen2": Case("qwen2", {"tie_word_embeddings": True}),
    "qwen2 with yarn": Case("qwen2", scaled("yarn", factor=4.0, **MADE_FOR), YARN),
    "qwen3": Case("qwen3"),
    "gemma2": Case(
        "gemma2",
        {
            "tie_word_embeddings": True,
            "attn_logit_softcapping": 20.0,
            "final_logit_softcapping": 9.0,
        },
        WINDOW | {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 9.0},
    ),  # fmt: skip
    "gemma3": Case(
        "gemma3_text",
        {"tie_word_embeddings": True}
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": THETA, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            }
        },
        WINDOW
        | {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "rope.freq_base_swa": 500.0},
    ),  # fmt: skip
    "phi3": Case("phi3", {"sliding_window": None, "original_max_position_embeddings": CONTEXT}),
    "phi3 with longrope": Case(
        "phi3",
        {"sliding_window": None, "original_max_position_embeddings": CONTEXT}
        | scaled(
            "longrope", long_factor=LONG.tolist(), short_factor=SHORT.tolist(),
            attention_factor=1.1, original_max_position_embeddings=128,
        ),
        {"rope.scaling.attn_factor": 1.1, "rope.scaling.original_context_length": CONTEXT},
        {"rope_factors_long.weight": LONG, "rope_factors_short.weight": SHORT},
    ),  # fmt: skip
}  # fmt: skip
"""By a name that says what is special."""
LAYERS = {"gemma2": 3, "gemma3_text": 7}
"""So that layers of both kinds are there; others have two."""


def case_model(case: Case) -> Any:
    """The model of a case as transformers has it, with weights that no library's version changes."""
    count = LAYERS.get(case.arch, 2)
    layers = {}
    if case.arch in LAYERS:
        period = 2 if case.arch == "gemma2" else 6
        kinds = [
            "full_attention" if (at + 1) % period == 0 else "sliding_attention"
            for at in range(count)
        ]
        layers = {"layer_types": kinds, "query_pre_attn_scalar": HEAD_DIM}
    shape = {
        "vocab_size": 4096, "hidden_size": 64, "intermediate_size": 96, "head_dim": HEAD_DIM,
        "num_hidden_layers": count, "max_position_embeddings": CONTEXT,
    }  # fmt: skip
    model = tiny_model(case.arch, **shape | layers | case.changes)
    random = np.random.RandomState(7)
    with torch.no_grad():
        for name, value in sorted(model.named_parameters()):
            drawn = torch.from_numpy(random.standard_normal(value.shape).astype(np.float32))
            centre = 1.0 if "norm" in name and "gemma" not in case.arch else 0.0
            value.copy_(drawn * 0.2 + centre)
    return model


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection in GGUF's order, in which the two halves of a rotation alternate."""
    inner = weight.shape[1:]
    return weight.reshape(heads, 2, -1, *inner).swapaxes(1, 2).reshape(weight.shape)


def gguf_tensors(model: Any) -> dict[str, np.ndarray]:
    """The parameters of a model by their names in GGUF, as llama.cpp's converter stores them."""
    config, out = model.config, {}
    gemma = "gemma" in config.model_type
    for name, value in model.state_dict().items():
        array = value.float().numpy()
        stem, _, kind = name.rpartition(".")
        if stem == "lm_head" and config.tie_word_embeddings:
            continue
        if stem.startswith("model.layers."):
            _, _, layer, inner = stem.split(".", 3)
            part = (GEMMA if gemma else NAMES)[inner]
            if config.model_type == "llama" and part in ("attn_q", "attn_k"):
                query = part == "attn_q"
                heads = config.num_attention_heads if query else config.num_key_value_heads
                array = interleaved(array, heads)
            stem = f"blk.{layer}.{part}"
        else:
            stem = OUTER[stem]
        out[f"{stem}.{kind}"] = array + 1 if gemma and "norm" in stem else array
    return out


def gguf_keys(config: Any) -> dict[str, Any]:
    """The keys of the architecture that every file has."""
    rope = config.rope_parameters
    return {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.dimension_count": HEAD_DIM,
        "rope.freq_base": rope.get("full_attention", rope)["rope_theta"],
        "vocab_size": config.vocab_size,
    }


def write_case(path: Path, case: Case, **options: Any) -> Path:
    """The GGUF of a case; `options` are those of `write_file`, `keys` and `tensors` beside those of the case."""
    model = case_model(case)
    arch = case.arch.removesuffix("_text")
    keys = gguf_keys(model.config) | case.keys | options.pop("keys", {})
    tensors = gguf_tensors(model) | case.tensors | options.pop("tensors", {})
    return write_file(path, arch, keys, tensors, **options)


def write_file(
    path: Path, arch: str, keys: dict[str, Any], tensors: dict[str, np.ndarray], kind: str = "F32",
    pre: str = "gpt-2", skip: str = "", plain_keys: dict[str, Any] | None = None, parts: int = 0,
    vocabulary: dict[str, Any] | None = None,
) -> Path:  # fmt: skip
    """A GGUF with the bundled tokenizer, or with what the keys of `vocabulary` say: matrices are quantised as `kind`,
    tensors and keys that are called `skip` are left out. With `parts` it is split as llama.cpp's gguf-split does, and
    the path of the first part is returned."""
    kept = [(name, array) for name, array in tensors.items() if name.removesuffix(".weight") != skip]  # fmt: skip
    size = -(-len(kept) // max(parts, 1))
    first = path
    for number in range(max(parts, 1)):
        if parts:
            path = path.with_name(f"{first.stem}-{number + 1:05d}-of-{parts:05d}.gguf")
        writer = gguf.GGUFWriter(path, arch)
        if number == 0:
            _add_keys(writer, {f"{arch}.{key}": value for key, value in keys.items() if key != skip})  # fmt: skip
            _add_keys(writer, plain_keys or {})
            if vocabulary is None:
                _add_vocabulary(writer, pre)
            else:
                _add_keys(writer, {f"tokenizer.{key}": x for key, x in vocabulary.items()})
        else:
            del writer.kv_data[0]["general.architecture"]
        if parts:
            writer.add_uint16("split.no", number)
            writer.add_uint16("split.count", parts)
            writer.add_int32("split.tensors.count", len(kept))
        quantised = gguf.GGMLQuantizationType[kind]
        for name, array in kept[number * size : (number + 1) * size]:
            if array.ndim == 2 and kind != "F32":
                writer.add_tensor(name, gguf.quantize(array, quantised), raw_dtype=quantised)
            else:
                writer.add_tensor(name, array.astype(np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return first.with_name(f"{first.stem}-00001-of-{parts:05d}.gguf") if parts else path


def _add_keys(writer: gguf.GGUFWriter, keys: dict[str, Any]) -> None:
    for key, value in keys.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_string(key, value)


def _add_vocabulary(writer: gguf.GGUFWriter, pre: str) -> None:
    model = json.loads((ROOT / "assets/target/tokenizer.json").read_text())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    tokens += [f"[PAD{number}]" for number in range(len(tokens), 4096)]
    writer.add_license("apache-2.0")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if one.startswith(("<|", "[PAD")) else 1 for one in tokens])
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(ENDING)
    writer.add_chat_template(TEMPLATE)


def llamacpp_tokens(server: str, path: Path, prompts: list[list[int]], count: int) -> list[list[int]]:  # fmt: skip
    """The greedy tokens of llama.cpp after each prompt of ids."""
    port = free_port()
    exact = ["-ctk", "f32", "-ctv", "f32", "-fa", "off", "-np", "1", "-c", str(CONTEXT), "-t", "1"]
    command = [server, "-m", str(path), *exact, "--no-webui", "--offline", "--port", str(port)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            return [_completion(process, port, prompt, count) for prompt in prompts]
        finally:
            process.kill()
            process.wait()


def _completion(process: Any, port: int, prompt: list[int], count: int) -> list[int]:
    body = {"prompt": prompt, "n_predict": count, "temperature": 0, "samplers": ["temperature"]}
    data = json.dumps(body | {"cache_prompt": False, "return_tokens": True}).encode()
    for _ in range(600):
        if process.poll() is not None:
            raise RuntimeError(f"llama-server ended with {process.returncode}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/completion", data) as reply:
                return list(json.load(reply)["tokens"])
        except OSError:  # it still loads
            time.sleep(0.2)
    raise RuntimeError("llama-server does not answer")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        golden = {
            name: llamacpp_tokens(
                sys.argv[1], write_case(Path(folder) / "tiny.gguf", case), PROMPTS, NEW_TOKENS
            )
            for name, case in CASES.items()
        }
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")
