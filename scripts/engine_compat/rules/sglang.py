"""What SGLang wants of drafts, by notes on 0.5.23 and by its source where a file is named. Not run here.

It drops unknown tensors and reports no missing one: nearly everything that is wrong is silent.
"""

from collections.abc import Iterator

from scripts.engine_compat.rules import causal, eagle
from scripts.engine_compat.rules.checkpoint import (
    ALL_FAMILIES,
    COMMON_RULES,
    EAGLE_FAMILIES,
    IGNORED,
    REFUSED,
    SILENT,
    DraftFiles,
    Rule,
    dtype_mismatch,
    require_keys,
    require_value,
    unsupported,
    vocab_size_mismatch,
)

NEWEST = "0.5.23"
EAGLE3_PY = "python/sglang/srt/models/llama_eagle3.py"
EAGLE1_PY = "python/sglang/srt/models/llama_eagle.py"
NOTES = "SGLang 0.5.23"

ARCHITECTURES = {"eagle1": "LlamaForCausalLMEagle", "eagle3": "LlamaForCausalLMEagle3"}


def wrong_architecture(d: DraftFiles) -> Iterator[str]:
    names = d.get("architectures", [])
    if ARCHITECTURES[d.family] not in names:
        yield f"architectures {names} do not name {ARCHITECTURES[d.family]}"


def nested_config(d: DraftFiles) -> Iterator[str]:
    if d.nested:
        yield "the nested config of speculators is not read: export it with --format flat"


def norm_before_residual(d: DraftFiles) -> Iterator[str]:
    if eagle.norm_flag(d, "norm_before_residual"):
        yield "norm_before_residual is not known: the residual is taken before the norm"


def missing_fc_bias(d: DraftFiles) -> Iterator[str]:
    """Its fc of EAGLE-1 always has a bias, left at random where none is loaded."""
    if "fc.bias" not in d.tensors:
        yield "fc.bias is missing and stays random: save zeros"


def dropped_layer_biases(d: DraftFiles) -> Iterator[str]:
    return (what for what in eagle.dropped_biases(d) if not what.startswith("fc.bias"))


def unread_layer_names(d: DraftFiles) -> Iterator[str]:
    if any(name.startswith("layers.0.") for name in d.name_in_file.values()):
        yield "tensors of the layer are named layers.0: some older versions drop them, midlayer is read by all"


def ignored_aux_layer_ids(d: DraftFiles) -> Iterator[str]:
    """Ids under vLLM's key alone."""
    nested_ids = (d.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if d.config.get("eagle_aux_hidden_state_layer_ids") and not nested_ids:
        yield "eagle_aux_hidden_state_layer_ids is ignored without eagle_config: default layers are tapped"


RULES = (
    *COMMON_RULES,
    Rule("dtype", ALL_FAMILIES, IGNORED, "--dtype of the server decides", dtype_mismatch),
    Rule("vocabulary", ("causal", *EAGLE_FAMILIES), REFUSED, NOTES, vocab_size_mismatch),
    Rule(
        "medusa",
        ("medusa",),
        REFUSED,
        f"{NOTES} has no Medusa among its algorithms",
        unsupported("SGLang has no Medusa: serve it with vLLM 0.32 or older"),
    ),
    Rule("architecture", EAGLE_FAMILIES, REFUSED, EAGLE3_PY, wrong_architecture),
    Rule("nested-config", ("eagle3",), REFUSED, EAGLE3_PY, nested_config),
    Rule("norm-before-residual", ("eagle3",), SILENT, EAGLE3_PY, norm_before_residual),
    Rule("norm-flags", ("eagle3",), SILENT, EAGLE3_PY, eagle.changed_norm_flags),
    Rule("shapes", EAGLE_FAMILIES, REFUSED, EAGLE3_PY, eagle.wrong_shapes),
    Rule("missing-tensor", EAGLE_FAMILIES, SILENT, f"{EAGLE3_PY}: load_weights", eagle.missing_tensors),
    Rule("unknown-tensor", EAGLE_FAMILIES, SILENT, f"{EAGLE3_PY}: load_weights", eagle.unknown_tensors),
    Rule("layer-name", ("eagle3",), SILENT, f"{EAGLE3_PY} at 03d5a77", unread_layer_names, before="0.5.23"),
    Rule("dropped-bias", EAGLE_FAMILIES, SILENT, EAGLE3_PY, dropped_layer_biases),
    Rule("bias-flags", EAGLE_FAMILIES, SILENT, EAGLE3_PY, eagle.unfilled_bias_flags),
    Rule("fc-bias", ("eagle1",), SILENT, EAGLE1_PY, missing_fc_bias),
    Rule("activation", EAGLE_FAMILIES, REFUSED, EAGLE3_PY, require_value("hidden_act", "silu")),
    Rule("layers", EAGLE_FAMILIES, SILENT, EAGLE3_PY, eagle.wrong_layer_count),
    Rule("tied", ("eagle3",), SILENT, EAGLE3_PY, require_value("tie_word_embeddings", False, False)),
    Rule("rope", EAGLE_FAMILIES, SILENT, EAGLE3_PY, eagle.rope_mismatch),
    Rule("rope-keys", EAGLE_FAMILIES, SILENT, "older versions read rope_theta", require_keys("rope_theta")),
    Rule("draft-vocabulary", ("eagle3",), REFUSED, EAGLE3_PY, require_keys("draft_vocab_size")),
    Rule("map-missing", ("eagle3",), SILENT, EAGLE3_PY, eagle.map_missing),
    Rule("map-superfluous", ("eagle3",), IGNORED, EAGLE3_PY, eagle.unneeded_map),
    Rule("map", ("eagle3",), SILENT, EAGLE3_PY, eagle.map_wrong),
    Rule("map-dtype", ("eagle3",), SILENT, EAGLE3_PY, eagle.map_dtype),
    Rule("members-dtype", ("eagle3",), IGNORED, f"{EAGLE3_PY}: t2d is skipped", eagle.t2d_dtype),
    Rule("taps", ("eagle3",), SILENT, f"{NOTES}: eagle_config alone is read", eagle.wrong_sglang_aux_layers),
    Rule("taps-unread", ("eagle3",), SILENT, f"{NOTES}: eagle_config alone is read", ignored_aux_layer_ids),
    Rule("taps-disagree", ("eagle3",), SILENT, NOTES, eagle.conflicting_aux_layers),
    Rule("target-width", ("eagle3",), REFUSED, EAGLE3_PY, eagle.target_width_mismatch),
    *causal.RULES,
    Rule("missing-tensor", ("causal",), SILENT, NOTES, causal.missing_tensors),
    Rule("shapes", ("causal",), REFUSED, NOTES, causal.wrong_shapes),
    Rule("tied", ("causal",), SILENT, NOTES, causal.dropped_lm_head),
    Rule("tokenizer", ("causal",), REFUSED, f"{NOTES}: STANDALONE compares get_vocab()", causal.wrong_tokenizer),
)  # fmt: skip
