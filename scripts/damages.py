"""Mistakes that exporters of drafts are known to make: what each does to a folder, and which rules must see it."""

from dataclasses import dataclass

import torch

from scripts.draft_edits import (
    Edit,
    add,
    as_ids,
    both,
    cast,
    config,
    drop,
    layer_setting,
    nan,
    nested,
    next_token,
    one_bias,
    query_bias,
    rename,
    rope_base,
    taps,
    tensors,
)


@dataclass(frozen=True)
class Damage:
    """One mistake: of which family, what it does to a folder, and the rules of each engine that must see it."""

    family: str
    edit: Edit
    seen: dict[str, str]
    """The rule's name by engine; an engine that is left out reads the folder as it was meant."""
    served: bool = True
    """Shown in vLLM by the command: what it refuses is told by one or two examples."""


def everywhere(rule: str, *, but: tuple[str, ...] = ()) -> dict[str, str]:
    return {engine: rule for engine in ("vllm", "sglang", "trtllm") if engine not in but}


def of_lm(rule: str) -> dict[str, str]:
    return everywhere(rule) | {"transformers": rule}


def damages(layers: int) -> dict[str, Damage]:
    """All of them, for a target of so many layers."""
    mid = "midlayer"
    e3 = {
        "a matrix is missing": Damage(
            "eagle3", drop(f"{mid}.self_attn.o_proj.weight"), everywhere("missing-tensor")
        ),
        "the last norm is missing": Damage("eagle3", drop("norm.weight"), everywhere("missing-tensor")),
        "a tensor is renamed": Damage(
            "eagle3", rename("fc.weight", "fusion.weight"), everywhere("unknown-tensor")
        ),
        "a second layer": Damage(
            "eagle3",
            add(layers__1__mlp__up_proj__weight=f"{mid}.mlp.up_proj.weight"),
            everywhere("unknown-tensor"),
            served=False,
        ),
        "a layer too many is said": Damage(
            "eagle3", config(num_hidden_layers=2), everywhere("layers"), served=False
        ),
        "d2t holds ids": Damage("eagle3", tensors(as_ids), everywhere("map")),
        "d2t is one token off": Damage("eagle3", tensors(next_token), everywhere("map")),
        "d2t is missing": Damage("eagle3", drop("d2t"), everywhere("map-missing")),
        "d2t in bfloat16": Damage("eagle3", cast("d2t", torch.bfloat16), everywhere("map-dtype")),
        "t2d in int64": Damage(
            "eagle3", cast("t2d", torch.int64), everywhere("members-dtype", but=("trtllm",)), served=False
        ),
        "taps of the other convention": Damage(
            "eagle3", taps(layers, -1, None), {"vllm": "taps", "sglang": "taps-unread"}
        ),
        "taps counted from 1 for SGLang": Damage(
            "eagle3",
            taps(layers, 0, 0), everywhere("taps-disagree") | {"sglang": "taps"},
            served=False,
        ),
        "taps that differ by two": Damage(
            "eagle3", taps(layers, 0, -2), everywhere("taps-disagree"), served=False
        ),
        "taps for SGLang alone": Damage("eagle3", taps(layers, None, -1), {"vllm": "taps"}),
        "norm_before_residual": Damage(
            "eagle3",
            config(norm_before_residual=True),
            everywhere("norm-before-residual") | {"vllm": "norm-flags"},
        ),
        "norm_output": Damage("eagle3", config(norm_output=True), everywhere("norm-flags")),
        "norm_before_fc": Damage(
            "eagle3",
            config(norm_before_fc=True),
            everywhere("missing-tensor") | {"trtllm": "norm-before-fc"},
        ),
        "fc_norm": Damage("eagle3", config(fc_norm=True), everywhere("missing-tensor")),
        "draft_vocab_size is missing": Damage(
            "eagle3", config(draft_vocab_size=None), everywhere("draft-vocabulary"), served=False
        ),
        "draft_vocab_size is wrong": Damage(
            "eagle3", config(draft_vocab_size=17), everywhere("shapes"), served=False
        ),
        "vocab_size is the draft's": Damage(
            "eagle3", config(vocab_size=17), everywhere("vocabulary"), served=False
        ),
        "head_dim": Damage("eagle3", config(head_dim=2), everywhere("shapes"), served=False),
        "K/V heads": Damage("eagle3", config(num_key_value_heads=1), everywhere("shapes"), served=False),
        "rope_parameters": Damage("eagle3", rope_base(1e6), everywhere("rope")),
        "no rope keys": Damage(
            "eagle3",
            config(rope_parameters=None, rope_theta=None, rope_scaling=None),
            {"vllm": "rope", "sglang": "rope-keys", "trtllm": "rope-keys"},
            served=False,
        ),
        "another base, said twice": Damage(
            "eagle3", both(rope_base(1e6), config(rope_theta=1e6)), everywhere("rope"), served=False
        ),
        "attention_bias": Damage("eagle3", config(attention_bias=True), everywhere("bias-flags")),
        "a bias of the layer": Damage(
            "eagle3",
            tensors(query_bias),
            everywhere("dropped-bias"),
            served=False,
        ),
        "attention_bias is missing": Damage(
            "eagle3", config(attention_bias=None), {"trtllm": "settings"}, served=False
        ),
        "a norm that no flag turns on": Damage(
            "eagle3",
            add(input_norm__weight="norm.weight"),
            everywhere("unknown-tensor") | {"vllm": "skipped-tensor"},
            served=False,
        ),
        "tied embeddings": Damage(
            "eagle3", config(tie_word_embeddings=True), {"sglang": "tied"}, served=False
        ),
        "another activation": Damage("eagle3", config(hidden_act="gelu"), everywhere("activation"), served=False),
        "another width of target": Damage(
            "eagle3", config(target_hidden_size=8), everywhere("target-width"), served=False
        ),
        "another architecture": Damage(
            "eagle3",
            config(architectures=["MistralForCausalLM"]),
            {"vllm": "architecture", "sglang": "architecture"},
            served=False,
        ),
        "not a number": Damage("eagle3", nan("fc.weight"), everywhere("finite"), served=False),
        "another dtype is said": Damage("eagle3", config(dtype="float64"), everywhere("dtype"), served=False),
        "integers for weights": Damage(
            "eagle3", cast("fc.weight", torch.int8), everywhere("floating"), served=False
        ),
        "nested, flag unsaid": Damage(
            "eagle3",
            both(nested, config(norm_before_residual=None)),
            everywhere("nested-config") | {"vllm": "nested-norm-flag"},
        ),
        "nested, model_type on top": Damage(
            "eagle3",
            both(nested, config(model_type="llama")),
            everywhere("nested-config"),
            served=False,
        ),
        "nested, layer of another kind": Damage(
            "eagle3", both(nested, layer_setting("model_type", "qwen3")), everywhere("nested-config"), served=False
        ),
        "nested, without tokens to draft": Damage(
            "eagle3", both(nested, config(speculators_config={})), everywhere("nested-config"), served=False
        ),
        "nested, maps of a whole vocabulary": Damage(
            "eagle3",
            both(nested, config(draft_vocab_size=None), drop("lm_head.weight")),
            everywhere("map-superfluous") | {"trtllm": "nested-config"},
            served=False,
        ),
    }  # fmt: skip
    layer = "layers.0"
    e1 = {
        "a first norm": Damage(
            "eagle1",
            add(layers__0__input_layernorm__weight=f"{layer}.post_attention_layernorm.weight"),
            everywhere("unknown-tensor", but=("trtllm",)),
        ),
        "a head of its own": Damage(
            "eagle1",
            add(lm_head__weight="fc.weight"),
            everywhere("unknown-tensor", but=("trtllm",)),
            served=False,
        ),
        "fc with a bias": Damage("eagle1", tensors(one_bias), {"vllm": "dropped-bias"}),
        "fc without its zeros": Damage("eagle1", drop("fc.bias"), {"sglang": "fc-bias"}, served=False),
        "bias": Damage("eagle1", config(bias=True), everywhere("bias-flags", but=("trtllm",))),
        "a matrix is missing (1)": Damage(
            "eagle1",
            drop(f"{layer}.mlp.down_proj.weight"),
            everywhere("missing-tensor", but=("trtllm",)),
        ),
        "one architecture for both (1)": Damage(
            "eagle1", config(architectures=["LlamaForCausalLM"]), {"sglang": "architecture"}, served=False
        ),
    }  # fmt: skip
    md = {
        "medusa_fc_bias is missing": Damage(
            "medusa", config(medusa_fc_bias=None), {"vllm": "dropped-bias"}
        ),
        "original_lm_head": Damage(
            "medusa", config(original_lm_head=True), {"vllm": "shared-projection"}
        ),
        "a projection is missing": Damage(
            "medusa", drop("lm_heads.1.weight"), {"vllm": "missing-tensor"}
        ),
        "a block is renamed": Damage(
            "medusa",
            rename("blocks.1.layers.0.weight", "blocks.1.linear.weight"),
            {"vllm": "unknown-tensor"},
            served=False,
        ),
        "hidden_size is missing": Damage("medusa", config(hidden_size=None), {"vllm": "sizes"}, served=False),
        "hidden_size is wrong": Damage("medusa", config(hidden_size=8), {"vllm": "shapes"}, served=False),
        "a setting that is renamed": Damage(
            "medusa", config(num_attention_heads=1), {"vllm": "renamed-settings"}, served=False
        ),
        "truncated_vocab_size": Damage(
            "medusa", config(truncated_vocab_size=8), {"vllm": "truncated-vocabulary"}, served=False
        ),
        "rows of another vocabulary": Damage(
            "medusa",
            tensors(lambda t: t.update({"lm_heads.0.weight": t["lm_heads.0.weight"][:-1]})),
            {"vllm": "vocabulary"},
            served=False,
        ),
    }  # fmt: skip
    lm = {
        "another vocabulary": Damage(
            "causal", config(vocab_size=17), of_lm("vocabulary"), served=False
        ),
        "a norm is missing": Damage(
            "causal", drop("model.norm.weight"), of_lm("missing-tensor"), served=False
        ),
        "an extra tensor": Damage(
            "causal", add(model__extra__weight="model.norm.weight"), of_lm("unknown-tensor"), served=False
        ),
        "no tokenizer": Damage(
            "causal", lambda folder: (folder / "tokenizer_config.json").unlink(), of_lm("tokenizer"), served=False
        ),
        "another width (LM)": Damage(
            "causal", config(intermediate_size=8), of_lm("shapes"), served=False
        ),
        "tied, with a matrix of its own": Damage(
            "causal",
            both(config(tie_word_embeddings=True), add(lm_head__weight="model.embed_tokens.weight")),
            of_lm("tied"),
            served=False,
        ),
        "not a number (LM)": Damage("causal", nan("model.norm.weight"), of_lm("finite"), served=False),
        "integers for weights (LM)": Damage(
            "causal", cast("model.norm.weight", torch.int8), of_lm("floating"), served=False
        ),
        "another dtype is said (LM)": Damage("causal", config(dtype="float64"), of_lm("dtype"), served=False),
        "no rope keys (LM)": Damage(
            "causal", config(rope_parameters=None, rope_theta=None), of_lm("rope"), served=False
        ),
    }  # fmt: skip
    return e3 | e1 | md | lm
