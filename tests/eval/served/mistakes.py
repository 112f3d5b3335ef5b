"""The mistakes that exporters of drafts are known to make: each with what must find it.

A row says what a mistake does to the files of a good draft, which rule of each engine finds it (scripts/check_draft.py)
and which suspect of an audit names it (scripts/audit.py).
"""

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from decode.checkpoints import importers, layouts
from decode.checkpoints.draft_folder import read_metadata
from decode.checkpoints.layouts import Tensors
from decode.common.target_record import TargetRecord
from decode.serving.export import to_speculators
from eval.served.reading import Edit, combine, edit_tensors, remove_file, rename, set_config


@dataclass(frozen=True)
class Mistake:
    """One mistake in the files of a draft."""

    edit: Edit
    rules: Mapping[str, str]
    """{engine: name of the rule that must find it}; an engine that is left out serves the draft as it was trained.
    llama.cpp gets what scripts/export.py makes of the files, so that `decoder` may be the one."""
    suspect: str = ""  # what the audit suspects; empty: no other reading of the files explains it


def every(rule: str, *, but: tuple[str, ...] = (), **otherwise: str) -> dict[str, str]:
    """The same rule in the engines of EAGLE-3, some of which serve EAGLE-1 and small LMs too: not in those of `but`,
    and not in those that have another one."""
    engines = ("vllm", "sglang", "trtllm", "llamacpp")
    return {engine: rule for engine in engines if engine not in but} | otherwise


def every_lm(rule: str) -> dict[str, str]:
    return every(rule, transformers=rule)


# ---- edits ----


def nest_config(folder: Path) -> None:
    """Rewrites EAGLE-3 heads in the speculators format."""
    target = (read_metadata(str(folder)).target or TargetRecord()).name
    checkpoint = importers.read_checkpoint(str(folder))
    with tempfile.TemporaryDirectory() as scratch:
        layouts.write_checkpoint(Path(scratch), *to_speculators(checkpoint, target, 4))
        for file in Path(scratch).iterdir():
            shutil.copyfile(file, folder / file.name)


def set_rope_theta(theta: float) -> Edit:
    return set_config(rope_parameters={"rope_type": "default", "rope_theta": theta})


def drop(name: str) -> Edit:
    return edit_tensors(lambda tensors: tensors.pop(name))


def add(name: str, like: str) -> Edit:
    return edit_tensors(lambda t: t.update({name: torch.ones_like(t[like])}))


def cast(name: str, dtype: torch.dtype) -> Edit:
    return edit_tensors(lambda t: t.update({name: t[name].to(dtype)}))


def set_nan(name: str) -> Edit:
    return edit_tensors(lambda t: t[name].view(-1)[:1].fill_(float("nan")))


def shift_ids(t: Tensors) -> None:
    """Moves each draft id to the next token; without room at the end of the vocabulary, some to the previous one."""
    d2t, ids = t["d2t"], t["d2t"] + torch.arange(len(t["d2t"]))
    free = int(t["t2d"].numel()) - int(ids[-1]) - 1
    t["d2t"] = d2t + 1 if free else d2t - (ids > int(ids[0])).long() * (d2t > 0).long()


def set_aux_layers(count: int, top: int | None, output: int | None) -> Edit:
    """The default hidden-state layers of a target of `count` layers, moved by `top` under the key of states that enter
    a layer and by `output` under that of states that leave one; None leaves the key as it is."""
    key, layers = "eagle_aux_hidden_state_layer_ids", layouts.default_aux_layers(count)
    changes: dict[str, Any] = {}
    if top is not None:
        changes[key] = [i + top for i in layers]
    if output is not None:
        changes["eagle_config"] = {key: [i + output for i in layers]}
    return set_config(**changes)


offsets_to_ids = edit_tensors(lambda t: t.update(d2t=t["d2t"] + torch.arange(len(t["d2t"]))))
drop_last_row = edit_tensors(lambda t: t.update({"lm_heads.0.weight": t["lm_heads.0.weight"][:-1]}))
set_fc_bias = edit_tensors(lambda t: t["fc.bias"].fill_(1))
Q = "midlayer.self_attn.q_proj"
add_query_bias = edit_tensors(lambda t: t.update({f"{Q}.bias": torch.ones(len(t[f"{Q}.weight"]))}))
no_rope = set_config(rope_parameters=None, rope_theta=None, rope_scaling=None)


# ---- tables ----

EAGLE3 = {
    "a matrix is missing": Mistake(drop("midlayer.self_attn.o_proj.weight"), every("missing-tensor"), "tensors"),
    "the last norm is missing": Mistake(drop("norm.weight"), every("missing-tensor"), "tensors"),
    "a tensor is renamed": Mistake(rename("fc.weight", "fusion.weight"), every("unknown-tensor"), "tensors"),
    "a second layer": Mistake(
        add("layers.1.mlp.up_proj.weight", "midlayer.mlp.up_proj.weight"),
        every("unknown-tensor", llamacpp="decoder"), "tensors",
    ),
    "num_hidden_layers is 2": Mistake(set_config(num_hidden_layers=2), every("layers")),
    "d2t holds ids": Mistake(offsets_to_ids, every("map"), "vocabulary map"),
    "d2t is one token off": Mistake(edit_tensors(shift_ids), every("map"), "vocabulary map"),
    "d2t is missing": Mistake(drop("d2t"), every("map-missing"), "vocabulary map"),
    "d2t in bfloat16": Mistake(cast("d2t", torch.bfloat16), every("map-dtype"), "vocabulary map"),
    "t2d in int64": Mistake(cast("t2d", torch.int64), every("members-dtype", but=("trtllm", "llamacpp"))),
    "norm_before_residual": Mistake(
        set_config(norm_before_residual=True),
        every("norm-before-residual", vllm="norm-flags", llamacpp="norm-flags"), "norms",
    ),
    "norm_output": Mistake(set_config(norm_output=True), every("norm-flags", llamacpp="unwritten-norm"), "norms"),
    "norm_before_fc": Mistake(
        set_config(norm_before_fc=True), every("missing-tensor", trtllm="norm-before-fc"), "norms"
    ),
    "fc_norm": Mistake(set_config(fc_norm=True), every("missing-tensor", trtllm="unread-norms"), "norms"),
    "draft_vocab_size is missing": Mistake(
        set_config(draft_vocab_size=None), every("draft-vocabulary", llamacpp="shapes")
    ),
    "draft_vocab_size is wrong": Mistake(set_config(draft_vocab_size=17), every("shapes")),
    "vocab_size is the draft's": Mistake(set_config(vocab_size=17), every("vocabulary")),
    "head_dim": Mistake(set_config(head_dim=2), every("shapes")),
    "K/V heads": Mistake(set_config(num_key_value_heads=1), every("shapes")),
    "rope_parameters": Mistake(set_rope_theta(1e6), every("rope"), "rope"),
    "no rope keys": Mistake(no_rope, every("rope", sglang="rope-keys", trtllm="rope-keys")),
    "another rope_theta under both keys": Mistake(
        combine(set_rope_theta(1e6), set_config(rope_theta=1e6)), every("rope"), "rope"
    ),
    "attention_bias": Mistake(set_config(attention_bias=True), every("bias-flags"), "biases"),
    "a bias of the layer": Mistake(add_query_bias, every("dropped-bias", llamacpp="unknown-tensor"), "biases"),
    "attention_bias is missing": Mistake(set_config(attention_bias=None), {"trtllm": "settings"}),
    "a norm that no flag turns on": Mistake(
        add("input_norm.weight", "norm.weight"),
        every("unknown-tensor", vllm="skipped-tensor", llamacpp="decoder"), "norms",
    ),
    "tied embeddings": Mistake(set_config(tie_word_embeddings=True), {"sglang": "tied"}),
    "another activation": Mistake(set_config(hidden_act="gelu"), every("activation")),
    "another width of target": Mistake(set_config(target_hidden_size=8), every("target-width")),
    "another architecture": Mistake(
        set_config(architectures=["MistralForCausalLM"]), {"vllm": "architecture", "sglang": "architecture"}
    ),
    "NaN": Mistake(set_nan("fc.weight"), every("finite")),
    "another dtype": Mistake(set_config(dtype="float64"), every("dtype")),
    "int8 weights": Mistake(cast("fc.weight", torch.int8), every("floating")),
    "nested, flag unsaid": Mistake(
        combine(nest_config, set_config(norm_before_residual=None)),
        every("nested-config", vllm="nested-norm-flag", llamacpp="norm-flags"), "norms",
    ),
    "nested, model_type on top": Mistake(
        combine(nest_config, set_config(model_type="llama")), every("nested-config", but=("llamacpp",))
    ),
    "nested, layer of another kind": Mistake(
        combine(nest_config, set_config("transformer_layer_config", model_type="qwen3")),
        every("nested-config", llamacpp="decoder"),
    ),
    "nested, without tokens to draft": Mistake(
        combine(nest_config, set_config(speculators_config={})), every("nested-config", but=("llamacpp",))
    ),
    "nested, maps of a whole vocabulary": Mistake(
        combine(nest_config, set_config(draft_vocab_size=None), drop("lm_head.weight")),
        every("map-superfluous", trtllm="nested-config"),
    ),
}  # fmt: skip
NOT_TRT = ("trtllm",)
EAGLE1 = {
    "a first norm": Mistake(
        add("layers.0.input_layernorm.weight", "layers.0.post_attention_layernorm.weight"),
        every("unknown-tensor", but=NOT_TRT), "tensors",
    ),
    "a head of its own": Mistake(add("lm_head.weight", "fc.weight"), every("unknown-tensor", but=NOT_TRT)),
    "fc with a bias": Mistake(set_fc_bias, {"vllm": "dropped-bias"}, "biases"),
    "fc without its zeros": Mistake(drop("fc.bias"), {"sglang": "fc-bias"}),
    "bias": Mistake(set_config(bias=True), every("bias-flags", but=NOT_TRT), "biases"),
    "a matrix is missing (1)": Mistake(
        drop("layers.0.mlp.down_proj.weight"), every("missing-tensor", but=NOT_TRT), "tensors"
    ),
    "one architecture for both (1)": Mistake(
        set_config(architectures=["LlamaForCausalLM"]), {"sglang": "architecture"}
    ),
}  # fmt: skip
MEDUSA = {
    name: Mistake(edit, {"vllm": rule}, suspect)
    for name, edit, rule, suspect in (
        ("medusa_fc_bias is missing", set_config(medusa_fc_bias=None), "dropped-bias", "biases"),
        ("original_lm_head", set_config(original_lm_head=True), "shared-projection", "matrices"),
        ("a projection is missing", drop("lm_heads.1.weight"), "missing-tensor", "tensors"),
        (
            "a block is renamed", rename("blocks.1.layers.0.weight", "blocks.1.linear.weight"),
            "unknown-tensor", "tensors",
        ),
        ("hidden_size is missing", set_config(hidden_size=None), "sizes", ""),
        ("hidden_size is wrong", set_config(hidden_size=8), "shapes", ""),
        ("a setting that is renamed", set_config(num_attention_heads=1), "renamed-settings", ""),
        ("truncated_vocab_size", set_config(truncated_vocab_size=8), "truncated-vocabulary", ""),
        ("a projection with a row less", drop_last_row, "vocabulary", ""),
    )
}  # fmt: skip
CAUSAL = {
    "another vocabulary": Mistake(set_config(vocab_size=17), every_lm("vocabulary")),
    "a norm is missing": Mistake(drop("model.norm.weight"), every_lm("missing-tensor"), "tensors"),
    "an extra tensor": Mistake(
        add("model.extra.weight", "model.norm.weight"), every_lm("unknown-tensor"), "tensors"
    ),
    "no tokenizer": Mistake(remove_file("tokenizer_config.json"), every_lm("tokenizer")),
    "another width (LM)": Mistake(set_config(intermediate_size=8), every_lm("shapes")),
    "tied, with another lm_head": Mistake(
        combine(set_config(tie_word_embeddings=True), add("lm_head.weight", "model.embed_tokens.weight")),
        every("tied", but=("llamacpp",), transformers="tied"), "matrices",
    ),
    "NaN (LM)": Mistake(set_nan("model.norm.weight"), every_lm("finite")),
    "int8 weights (LM)": Mistake(cast("model.norm.weight", torch.int8), every_lm("floating")),
    "another dtype (LM)": Mistake(set_config(dtype="float64"), every_lm("dtype")),
    "no rope keys (LM)": Mistake(set_config(rope_parameters=None, rope_theta=None), every_lm("rope")),
}  # fmt: skip


def mistakes(layers: int) -> dict[str, dict[str, Mistake]]:
    """{family: {name: mistake}} for a target of so many layers; no name occurs twice."""
    taps = {
        name: Mistake(set_aux_layers(layers, *moved), rules, "taps")
        for name, moved, rules in (
            ("taps of the other convention", (-1, None), {"vllm": "taps", "sglang": "taps-unread"}),
            ("taps counted from 1 for SGLang", (0, 0), every("taps-disagree", sglang="taps")),
            ("taps that differ by two", (0, -2), every("taps-disagree")),
            ("taps for SGLang alone", (None, -1), {"vllm": "taps"}),
        )
    }
    return {"eagle3": EAGLE3 | taps, "eagle1": EAGLE1, "medusa": MEDUSA, "causal": CAUSAL}
