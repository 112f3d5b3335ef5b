"""Tiny random models with recurrent layers, one of each architecture that transformers has."""

import copy
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from decode.drafts.base import Draft, Proposal
from decode.model.loading import Target, build_runner
from decode.verification.sampling import SamplingParams, warp
from tests.tiny import COMMON, GROUPED, VOCAB

LINEAR = ["linear_attention", "full_attention", "linear_attention"]
CONV = {"layer_types": ["conv", "full_attention", "conv"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4} | {
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "layer_types": LINEAR,
}  # fmt: skip
SHARED_EXPERT = EXPERTS | {"shared_expert_intermediate_size": 24}
MAMBA = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 3, "state_size": 8}
MAMBA2 = {"mamba_n_heads": 4, "mamba_d_state": 8, "mamba_expand": 2, "mamba_chunk_size": 4}
UNCLAMPED = {"time_step_min": 1e-30}
"""Else transformers' own passes over one token and over several are of two models (`unclamp_time_steps`)."""
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
KIMI = (
    GROUPED
    | EXPERTS
    | LATENT
    | {"num_key_value_heads": 4, "n_shared_experts": 1, "layer_types": LINEAR}
)

HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": GROUPED | DELTA | SHARED_EXPERT,
    "qwen3_5_text": GROUPED | DELTA,
    "qwen3_5_moe_text": GROUPED | DELTA | SHARED_EXPERT,
    "olmo_hybrid": GROUPED | DELTA,
    "kimi_linear": KIMI | {"linear_head_dim": 8, "linear_num_heads": 4},
    "bailing_hybrid": KIMI
    | {"n_group": 2, "topk_group": 1, "num_mtp_layers": 0, "first_k_dense_replace": 1},
    "lfm2": GROUPED | CONV | {"block_multiple_of": 8},
    "lfm2_moe": GROUPED | CONV | EXPERTS | {"num_dense_layers": 1},
    "lfm3": GROUPED
    | {"layer_types": ["conv", "full_attention", "sliding_attention"], "sliding_window": 8},
    "nemotron_h": GROUPED
    | {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]}
    | {"mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2}
    | {"n_routed_experts": 4, "moe_intermediate_size": 24, "chunk_size": 4}
    | {"moe_shared_expert_intermediate_size": 24, **UNCLAMPED},
    "falcon_h1": GROUPED | MAMBA2 | {"mamba_d_ssm": 32, "mamba_d_head": 8},
    "bamba": GROUPED | MAMBA2 | {"attn_layer_indices": [1]},
    "granitemoehybrid": GROUPED
    | MAMBA2
    | {"layer_types": LINEAR, "num_local_experts": 4, "shared_intermediate_size": 24},
    "zamba2": COMMON
    | {"intermediate_size": 48, "mamba_d_state": 8, "n_mamba_heads": 4, "mamba_ngroups": 2}
    | {"layers_block_type": ["linear_attention", "hybrid", "hybrid"], "chunk_size": 4}
    | {"num_mem_blocks": 1, "adapter_rank": 4, "mamba_headdim": 16, **UNCLAMPED},
    "mamba2": MAMBA | {"num_heads": 4, "head_dim": 16, "n_groups": 2, "chunk_size": 4},
    "zaya": GROUPED
    | {
        "tie_word_embeddings": False, "num_experts": 4, "moe_intermediate_size": 24,
        "router_hidden_size": 16,
    },
}  # fmt: skip
"""Settings by model type, of those that are decoded."""
ELSEWHERE = "states are not in transformers' cache"
ONE_BY_ONE = "several tokens at once as if nothing stood before them"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "mamba": (MAMBA | {"time_step_rank": 4}, ONE_BY_ONE),
    "falcon_mamba": (MAMBA | {"time_step_rank": 4}, ONE_BY_ONE),
    "jamba": (
        GROUPED
        | {"num_experts": 4, "attn_layer_period": 3, "attn_layer_offset": 1, "mamba_d_state": 8},
        ONE_BY_ONE,
    ),
    "zamba": (
        COMMON
        | {"intermediate_size": 48, "num_key_value_heads": 4, "mamba_d_state": 8}
        | {"layers_block_type": ["linear_attention", "hybrid", "hybrid"]},
        ONE_BY_ONE,
    ),
    "recurrent_gemma": (GROUPED | {"lru_width": 32}, f"({ELSEWHERE}|other logits in steps)"),
    "rwkv": ({"hidden_size": 32, "num_hidden_layers": 3, "attention_hidden_size": 32}, ELSEWHERE),
    "xlstm": ({"hidden_size": 32, "num_hidden_layers": 3, "num_heads": 4}, ELSEWHERE),
    "minimax": (GROUPED | {"layer_types": LINEAR, "num_local_experts": 4}, "cache of its own"),
    "inkling_text": (
        GROUPED
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        | {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8}
        | {"sliding_window_size": 8, "rel_extent": 16, "d_rel": 4},
        "bias by position",
    ),
    "qwen4_exp_text": (
        GROUPED
        | DELTA
        | SHARED_EXPERT
        | {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8}
        | {"indexer_budget": 8, "indexer_compress_ratio": 2},
        "caches keys and values in a way that is not known",
    ),
}
"""Those that are not: settings, and a part of the reason."""


def tiny_hybrid(
    arch: str, seed: int = 0, std: float = 0.25, dtype: torch.dtype = torch.float32, **changes: Any
) -> Any:
    """A random model in eval mode whose states matter. Skips the test where transformers does not have it."""
    if arch not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {arch}")
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    own = HYBRIDS[arch] if arch in HYBRIDS else REFUSED[arch][0]
    settings = {"vocab_size": VOCAB, **own, "initializer_range": std, **ids, **changes}
    config = AutoConfig.for_model(arch, **settings)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        with torch.no_grad():
            for value in model.parameters():
                if value.ndim > 1:  # decays, steps and norms stay as they are
                    torch.nn.init.normal_(value, std=std)
    return model.to(dtype).eval()


def hybrid_target(model: Any, eos: tuple[int, ...] = ()) -> Target:
    """A target over a copy of the model, which itself stays a plain HF model to compare with."""
    return Target(build_runner(copy.deepcopy(model)), None, "tiny", None, "f", frozenset(eos))


def generated(model: Any, prompt: list[int], tokens: int) -> list[int]:
    """The greedy answer of transformers' own `generate`, which reads the answer token by token."""
    ids = torch.tensor([prompt])
    out = copy.deepcopy(model).generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens,
        pad_token_id=0,
    )  # fmt: skip
    return out[0, len(prompt) :].tolist()


@torch.no_grad()
def plain_law(model: Any, prompt: list[int], length: int, sampling: SamplingParams) -> torch.Tensor:
    """[V ** length] from plain passes of the model, without a cache, over the prompt and every prefix of the answer."""
    mass, texts = torch.ones(1, dtype=torch.float64), [prompt]
    for _ in range(length):
        logits = model(input_ids=torch.tensor(texts), use_cache=False).logits[:, -1]
        probs = warp(logits, sampling)
        mass = (mass[:, None] * probs.double()).flatten()
        texts = [[*text, token] for text in texts for token in range(probs.shape[1])]
    return mass


class PartlyRight(Draft):
    """Drafts the first tokens of known answers, 0 to k of them as the text before has it, and wrong ones behind."""

    name, runs = "partly right", "host"

    def __init__(self, answers: dict[tuple[int, ...], list[int]]):
        self.answers = answers
        self.texts: dict[int, list[int]] = {}

    def on_commit(self, row: int, tokens: list[int]) -> None:
        if tuple(tokens[:-1]) in self.answers:  # a prompt and its first token
            self.texts[row] = [*tokens[:-1], *self.answers[tuple(tokens[:-1])]]

    def propose(self, history: torch.Tensor, length: torch.Tensor, k: int) -> Proposal:
        chains = []
        for row, at in enumerate(length.tolist()):
            known = [*self.texts[row], *[0] * 3 * k][at : at + k]
            right = int(history[row, at - 1] + at) % (k + 1)
            chains.append([x if i < right else (x + 1) % VOCAB for i, x in enumerate(known)])
        return Proposal(torch.tensor(chains), None)
