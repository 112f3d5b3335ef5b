"""The mistakes that exporters of drafts are known to make: each with what must find it.

A row says what a mistake does to the files of a good draft, which rule of each engine finds it (scripts/check_draft.py)
and which suspect of an audit names it (scripts/audit.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from decode.serving.edits import (
    Edit,
    NestConfig,
    RemoveFile,
    TensorEdit,
    add,
    add_query_bias,
    cast,
    combine,
    drop,
    drop_last_row,
    offsets_to_ids,
    rename,
    set_aux_layers,
    set_config,
    set_fc_bias,
    set_layer_config,
    set_nan,
    set_rope_theta,
    shift_ids,
)

EVERY = ("vllm", "sglang", "trtllm", "llamacpp")
"""The engines that serve EAGLE-3 heads."""


@dataclass(frozen=True)
class Mistake:
    """One mistake in the files of a draft."""

    edit: Edit
    rules: Mapping[str, str]
    """{engine: name of the rule that must find it}; an engine that is left out serves the draft as it was trained.
    llama.cpp gets what scripts/export.py makes of the files, so that `decoder` may be the one."""
    suspect: str = ""
    """What the audit suspects; empty: no other reading of the files explains it."""


def every(rule: str, *, but: tuple[str, ...] = (), **otherwise: str) -> dict[str, str]:
    """The same rule in all engines, except for the engines `but` and for those that have another one."""
    return {engine: rule for engine in EVERY if engine not in but} | otherwise


def every_lm(rule: str) -> dict[str, str]:
    """The same rule in all engines, which serve causal drafts."""
    return every(rule, transformers=rule)


EAGLE3 = {
    "a matrix is missing": Mistake(
        drop("midlayer.self_attn.o_proj.weight"), every("missing-tensor"), "tensors"
    ),
    "the last norm is missing": Mistake(drop("norm.weight"), every("missing-tensor"), "tensors"),
    "a tensor is renamed": Mistake(
        rename("fc.weight", "fusion.weight"), every("unknown-tensor"), "tensors"
    ),
    "a second layer": Mistake(
        add("layers.1.mlp.up_proj.weight", "midlayer.mlp.up_proj.weight"),
        every("unknown-tensor", llamacpp="decoder"),
        "tensors",
    ),
    "num_hidden_layers is 2": Mistake(set_config(num_hidden_layers=2), every("layers")),
    "d2t holds ids": Mistake(TensorEdit(offsets_to_ids), every("map"), "vocabulary map"),
    "d2t is one token off": Mistake(TensorEdit(shift_ids), every("map"), "vocabulary map"),
    "d2t is missing": Mistake(drop("d2t"), every("map-missing"), "vocabulary map"),
    "d2t in bfloat16": Mistake(cast("d2t", torch.bfloat16), every("map-dtype"), "vocabulary map"),
    "t2d in int64": Mistake(
        cast("t2d", torch.int64), every("members-dtype", but=("trtllm", "llamacpp"))
    ),
    "norm_before_residual": Mistake(
        set_config(norm_before_residual=True),
        every("norm-before-residual", vllm="norm-flags", llamacpp="norm-flags"),
        "norms",
    ),
    "norm_output": Mistake(
        set_config(norm_output=True), every("norm-flags", llamacpp="unwritten-norm"), "norms"
    ),
    "norm_before_fc": Mistake(
        set_config(norm_before_fc=True), every("missing-tensor", trtllm="norm-before-fc"), "norms"
    ),
    "fc_norm": Mistake(set_config(fc_norm=True), every("missing-tensor"), "norms"),
    "draft_vocab_size is missing": Mistake(
        set_config(draft_vocab_size=None), every("draft-vocabulary", llamacpp="shapes")
    ),
    "draft_vocab_size is wrong": Mistake(set_config(draft_vocab_size=17), every("shapes")),
    "vocab_size is the draft's": Mistake(set_config(vocab_size=17), every("vocabulary")),
    "head_dim": Mistake(set_config(head_dim=2), every("shapes")),
    "K/V heads": Mistake(set_config(num_key_value_heads=1), every("shapes")),
    "rope_parameters": Mistake(set_rope_theta(1e6), every("rope"), "rope"),
    "no rope keys": Mistake(
        set_config(rope_parameters=None, rope_theta=None, rope_scaling=None),
        every("rope", sglang="rope-keys", trtllm="rope-keys"),
    ),
    "another rope_theta under both keys": Mistake(
        combine(set_rope_theta(1e6), set_config(rope_theta=1e6)), every("rope"), "rope"
    ),
    "attention_bias": Mistake(set_config(attention_bias=True), every("bias-flags"), "biases"),
    "a bias of the layer": Mistake(
        TensorEdit(add_query_bias), every("dropped-bias", llamacpp="unknown-tensor"), "biases"
    ),
    "attention_bias is missing": Mistake(set_config(attention_bias=None), {"trtllm": "settings"}),
    "a norm that no flag turns on": Mistake(
        add("input_norm.weight", "norm.weight"),
        every("unknown-tensor", vllm="skipped-tensor", llamacpp="decoder"),
        "norms",
    ),
    "tied embeddings": Mistake(set_config(tie_word_embeddings=True), {"sglang": "tied"}),
    "another activation": Mistake(set_config(hidden_act="gelu"), every("activation")),
    "another width of target": Mistake(set_config(target_hidden_size=8), every("target-width")),
    "another architecture": Mistake(
        set_config(architectures=["MistralForCausalLM"]),
        {"vllm": "architecture", "sglang": "architecture"},
    ),
    "NaN": Mistake(set_nan("fc.weight"), every("finite")),
    "another dtype": Mistake(set_config(dtype="float64"), every("dtype")),
    "int8 weights": Mistake(cast("fc.weight", torch.int8), every("floating")),
    "nested, flag unsaid": Mistake(
        combine(NestConfig(), set_config(norm_before_residual=None)),
        every("nested-config", vllm="nested-norm-flag", llamacpp="norm-flags"),
        "norms",
    ),
    "nested, model_type on top": Mistake(
        combine(NestConfig(), set_config(model_type="llama")),
        every("nested-config", but=("llamacpp",)),
    ),
    "nested, layer of another kind": Mistake(
        combine(NestConfig(), set_layer_config(model_type="qwen3")),
        every("nested-config", llamacpp="decoder"),
    ),
    "nested, without tokens to draft": Mistake(
        combine(NestConfig(), set_config(speculators_config={})),
        every("nested-config", but=("llamacpp",)),
    ),
    "nested, maps of a whole vocabulary": Mistake(
        combine(NestConfig(), set_config(draft_vocab_size=None), drop("lm_head.weight")),
        every("map-superfluous", trtllm="nested-config"),
    ),
}
EAGLE1 = {
    "a first norm": Mistake(
        add("layers.0.input_layernorm.weight", "layers.0.post_attention_layernorm.weight"),
        every("unknown-tensor", but=("trtllm",)),
        "tensors",
    ),
    "a head of its own": Mistake(
        add("lm_head.weight", "fc.weight"), every("unknown-tensor", but=("trtllm",))
    ),
    "fc with a bias": Mistake(TensorEdit(set_fc_bias), {"vllm": "dropped-bias"}, "biases"),
    "fc without its zeros": Mistake(drop("fc.bias"), {"sglang": "fc-bias"}),
    "bias": Mistake(set_config(bias=True), every("bias-flags", but=("trtllm",)), "biases"),
    "a matrix is missing (1)": Mistake(
        drop("layers.0.mlp.down_proj.weight"), every("missing-tensor", but=("trtllm",)), "tensors"
    ),
    "one architecture for both (1)": Mistake(
        set_config(architectures=["LlamaForCausalLM"]), {"sglang": "architecture"}
    ),
}
MEDUSA = {
    "medusa_fc_bias is missing": Mistake(
        set_config(medusa_fc_bias=None), {"vllm": "dropped-bias"}, "biases"
    ),
    "original_lm_head": Mistake(
        set_config(original_lm_head=True), {"vllm": "shared-projection"}, "matrices"
    ),
    "a projection is missing": Mistake(
        drop("lm_heads.1.weight"), {"vllm": "missing-tensor"}, "tensors"
    ),
    "a block is renamed": Mistake(
        rename("blocks.1.layers.0.weight", "blocks.1.linear.weight"),
        {"vllm": "unknown-tensor"},
        "tensors",
    ),
    "hidden_size is missing": Mistake(set_config(hidden_size=None), {"vllm": "sizes"}),
    "hidden_size is wrong": Mistake(set_config(hidden_size=8), {"vllm": "shapes"}),
    "a setting that is renamed": Mistake(
        set_config(num_attention_heads=1), {"vllm": "renamed-settings"}
    ),
    "truncated_vocab_size": Mistake(
        set_config(truncated_vocab_size=8), {"vllm": "truncated-vocabulary"}
    ),
    "a projection with a row less": Mistake(
        drop_last_row("lm_heads.0.weight"), {"vllm": "vocabulary"}
    ),
}
CAUSAL = {
    "another vocabulary": Mistake(set_config(vocab_size=17), every_lm("vocabulary")),
    "a norm is missing": Mistake(drop("model.norm.weight"), every_lm("missing-tensor"), "tensors"),
    "an extra tensor": Mistake(
        add("model.extra.weight", "model.norm.weight"), every_lm("unknown-tensor"), "tensors"
    ),
    "no tokenizer": Mistake(RemoveFile("tokenizer_config.json"), every_lm("tokenizer")),
    "another width (LM)": Mistake(set_config(intermediate_size=8), every_lm("shapes")),
    "tied, with another lm_head": Mistake(
        combine(
            set_config(tie_word_embeddings=True),
            add("lm_head.weight", "model.embed_tokens.weight"),
        ),
        every("tied", but=("llamacpp",), transformers="tied"),
        "matrices",
    ),
    "NaN (LM)": Mistake(set_nan("model.norm.weight"), every_lm("finite")),
    "int8 weights (LM)": Mistake(cast("model.norm.weight", torch.int8), every_lm("floating")),
    "another dtype (LM)": Mistake(set_config(dtype="float64"), every_lm("dtype")),
    "no rope keys (LM)": Mistake(
        set_config(rope_parameters=None, rope_theta=None), every_lm("rope")
    ),
}


def mistakes(layers: int) -> dict[str, dict[str, Mistake]]:
    """{family: {name: mistake}} for a target of so many layers; no name occurs twice."""
    taps = {
        "taps of the other convention": Mistake(
            set_aux_layers(layers, -1, None), {"vllm": "taps", "sglang": "taps-unread"}, "taps"
        ),
        "taps counted from 1 for SGLang": Mistake(
            set_aux_layers(layers, 0, 0), every("taps-disagree", sglang="taps"), "taps"
        ),
        "taps that differ by two": Mistake(
            set_aux_layers(layers, 0, -2), every("taps-disagree"), "taps"
        ),
        "taps for SGLang alone": Mistake(
            set_aux_layers(layers, None, -1), {"vllm": "taps"}, "taps"
        ),
    }
    return {"eagle3": EAGLE3 | taps, "eagle1": EAGLE1, "medusa": MEDUSA, "causal": CAUSAL}
