"""Tiny random models, so that every architecture's real code runs in milliseconds without a download."""

import copy
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from decode.model.loading import Target
from decode.model.runner import ModelRunner

VOCAB, WINDOW = 97, 8

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
GATED = COMMON | {"intermediate_size": 48}
GROUPED = GATED | {"num_key_value_heads": 2, "head_dim": 8}
SLIDING = GROUPED | {"sliding_window": WINDOW}
WINDOWED = SLIDING | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
GEMMA = WINDOWED | {"query_pre_attn_scalar": 8, "tie_word_embeddings": False}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16} | {
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
}  # fmt: skip


def rope(kind: str, **more: float) -> dict[str, Any]:
    """A config with this RoPE, made for 16 positions at first where it asks for that."""
    made_for = {} if kind == "default" else {"original_max_position_embeddings": 16}
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **made_for, **more}}


ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "llama+llama3": GROUPED | rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0),
    "llama+yarn": GROUPED | rope("yarn", factor=4.0),
    "qwen2": GROUPED,
    "qwen2+window": WINDOWED | {"use_sliding_window": True},
    "qwen3": GROUPED,
    "qwen3_moe": GROUPED
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "mistral": SLIDING,
    "mixtral": GROUPED | EXPERTS,
    "gemma": GROUPED,
    "gemma2": GEMMA | {"attn_logit_softcapping": 2.0},
    "gemma3_text": GEMMA,
    "gemma4_text": SLIDING
    | {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}
    | {"num_kv_shared_layers": 1, "hidden_size_per_layer_input": 4, "global_head_dim": 16}
    | {"vocab_size_per_layer_input": VOCAB, "tie_word_embeddings": False},
    "phi": GATED,
    "phi3": SLIDING,
    "phi3+longrope": GROUPED
    | rope("longrope", short_factor=[1.0, 1.5, 2.0, 2.5], long_factor=[4.0, 5.0, 6.0, 7.0])
    | {"original_max_position_embeddings": 48},
    "gpt_neox": GATED,
    "gpt2": COMMON,
    "opt": COMMON | {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "olmo2": GROUPED,
    "olmo3": WINDOWED,
    "cohere": GROUPED,
    "cohere2": WINDOWED,
    "starcoder2": SLIDING,
    "granite": GROUPED
    | {"attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 0.5},
    "smollm3": GROUPED | {"no_rope_layers": [1, 0, 1]},
    "stablelm": GATED | {"num_key_value_heads": 2},
    "gpt_oss": WINDOWED | EXPERTS | rope("default"),
    "deepseek_v3": GATED
    | MLA
    | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    | {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4},
}
"""Settings by model type; what follows a + tells variants of one type apart."""
GPTJ: dict[str, Any] = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_inner": 48, "rotary_dim": 8}
GPTJ |= {"vocab_size": VOCAB, "n_positions": 64}
if Version(transformers.__version__) >= Version("5.24"):  # computed attention by themselves before
    ARCHITECTURES |= {"gptj": GPTJ, "codegen": GPTJ}

FEW = ["llama", "gemma3_text", "gpt_oss", "gpt2"]
"""For tests of what does not depend on the architecture: plain, windows, sinks with experts, learned positions."""


def tiny_config(arch: str, std: float = 0.25, **changes: Any) -> PretrainedConfig:
    """A config of that model type with 3 layers of width 32, a window of 8 where it has one, and no EOS."""
    spread = {"init_std": std} if arch == "opt" else {"initializer_range": std}
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    settings = {**ARCHITECTURES[arch], **spread, **ids, **changes}
    return AutoConfig.for_model(arch.split("+")[0], **settings)


def tiny_model(
    arch: str, seed: int = 0, std: float = 0.25, dtype: torch.dtype = torch.float32, **changes: Any
) -> Any:
    """A random model in eval mode; std 0.25 is wide enough that its text is varied and its argmax clear."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_config(arch, std, **changes), dtype=dtype)
        for name, value in model.named_parameters():
            if value.ndim == 1 and "norm" not in name and "ln" not in name:
                torch.nn.init.normal_(value, std=std)  # biases and sinks start at zero or undefined
    return model.to(dtype).eval()


def tiny_target(model: Any, eos: tuple[int, ...] = ()) -> Target:
    """A target over a copy of the model, which itself stays a plain HF model to compare with."""
    runner = ModelRunner(copy.deepcopy(model))
    return Target(runner, None, "tiny", None, "fingerprint", frozenset(eos))


def noisy(model: Any, noise: float, seed: int = 1) -> Any:
    """A copy whose weights moved a little: as a draft it is right now and then, which tests both branches."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in draft.parameters():
            value += noise * torch.randn(value.shape, generator=generator, dtype=value.dtype)
    return draft


def tiny_prompts(*lengths: int, seed: int = 0, vocab: int = VOCAB) -> list[list[int]]:
    """Random prompts of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in lengths]


def reference(model: Any) -> Any:
    """A copy that runs transformers' own attention; eager where its sdpa ignores softcap or sinks."""
    own = copy.deepcopy(model)
    eager = own.config.model_type in ("gemma2", "gpt_oss")
    own.set_attn_implementation("eager" if eager else "sdpa")
    return own
