"""The rules of SGLang: from notes on 0.5.23, and from its source where a file is named. They were not run here.

It drops unknown tensors and reports no missing one, so that nearly every mistake is silent.
"""

from collections.abc import Iterator

from decode.serving import family_rules as family
from decode.serving.engine import Served, ServingEngine
from decode.serving.rules import (
    COMMON_RULES,
    COVERED_EVERYWHERE,
    EAGLE_FAMILIES,
    IGNORED,
    REFUSED,
    SILENT,
    ContextAtLeastTargets,
    DraftFiles,
    RequireKeys,
    RequireValue,
    Rule,
    Unsupported,
    dtype_mismatch,
    vocab_size_mismatch,
)

EAGLE3_PY = "python/sglang/srt/models/llama_eagle3.py"
EAGLE1_PY = "python/sglang/srt/models/llama_eagle.py"
CONTEXT_PY = "python/sglang/srt/configs/model_config.py (_derive_context_length)"
NOTES = "SGLang 0.5.23"

ARCHITECTURES = {"eagle1": "LlamaForCausalLMEagle", "eagle3": "LlamaForCausalLMEagle3"}


def wrong_architecture(d: DraftFiles) -> Iterator[str]:
    names = d.get("architectures", [])
    if ARCHITECTURES[d.family] not in names:
        yield f"architectures {names} do not contain {ARCHITECTURES[d.family]}"


def missing_fc_bias(d: DraftFiles) -> Iterator[str]:
    """EAGLE-1's fc always has a bias in SGLang, which stays random where none is loaded."""
    if "fc.bias" not in d.tensors:
        yield "fc.bias is missing and stays random: save zeros"


def dropped_layer_biases(d: DraftFiles) -> Iterator[str]:
    return (what for what in family.dropped_biases(d) if not what.startswith("fc.bias"))


def unread_layer_names(d: DraftFiles) -> Iterator[str]:
    """Names of the layer that some older versions do not load."""
    if any(name.startswith("layers.0.") for name in d.name_in_file.values()):
        yield "tensors of the layer are named layers.0: some older versions drop them, all versions read midlayer"


def ignored_aux_layer_ids(d: DraftFiles) -> Iterator[str]:
    """Layer ids under vLLM's key only."""
    nested_ids = (d.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if d.config.get("eagle_aux_hidden_state_layer_ids") and not nested_ids:
        yield "eagle_aux_hidden_state_layer_ids is ignored without eagle_config: the default layers are read"


def wrong_aux_layers(d: DraftFiles) -> Iterator[str]:
    """SGLang reads only the key in `eagle_config`, plus one, else the default layers."""
    if d.target_layers is not None:
        _, outputs = family.named_layers(d)
        ids = tuple(i + 1 for i in outputs or ())
        yield from family.wrong_aux_layers(d, ids or family.default_aux_layers(d.target_layers))


RULES = (
    *COMMON_RULES,
    Rule("dtype", COVERED_EVERYWHERE, IGNORED, "--dtype of the server decides", dtype_mismatch),
    Rule("vocabulary", ("causal", *EAGLE_FAMILIES), REFUSED, NOTES, vocab_size_mismatch),
    Rule("context", ("causal", *EAGLE_FAMILIES), REFUSED, CONTEXT_PY, ContextAtLeastTargets(
        "the server starts with --context-length of at most that alone, or with "
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1, and then few tokens are accepted beyond it"
    )),
    Rule(
        "medusa",
        ("medusa",),
        REFUSED,
        f"{NOTES} has no Medusa among its algorithms",
        Unsupported("SGLang has no Medusa: serve it with vLLM 0.32 or older"),
    ),
    Rule("architecture", EAGLE_FAMILIES, REFUSED, EAGLE3_PY, wrong_architecture),
    Rule("nested-config", ("eagle3",), REFUSED, EAGLE3_PY, family.speculators_config),
    Rule("norm-before-residual", ("eagle3",), SILENT, EAGLE3_PY, family.norm_before_residual),
    Rule("norm-flags", ("eagle3",), SILENT, EAGLE3_PY, family.changed_norm_flags),
    Rule("shapes", EAGLE_FAMILIES, REFUSED, EAGLE3_PY, family.wrong_shapes),
    Rule("missing-tensor", EAGLE_FAMILIES, SILENT, f"{EAGLE3_PY}: load_weights", family.missing_tensors),
    Rule("unknown-tensor", EAGLE_FAMILIES, SILENT, f"{EAGLE3_PY}: load_weights", family.unknown_tensors),
    Rule("layer-name", ("eagle3",), SILENT, f"{EAGLE3_PY} at 03d5a77", unread_layer_names, before="0.5.23"),
    Rule("dropped-bias", EAGLE_FAMILIES, SILENT, EAGLE3_PY, dropped_layer_biases),
    Rule("bias-flags", EAGLE_FAMILIES, SILENT, EAGLE3_PY, family.unfilled_bias_flags),
    Rule("fc-bias", ("eagle1",), SILENT, EAGLE1_PY, missing_fc_bias),
    Rule("activation", EAGLE_FAMILIES, REFUSED, EAGLE3_PY, RequireValue("hidden_act", "silu")),
    Rule("layers", EAGLE_FAMILIES, SILENT, EAGLE3_PY, family.wrong_layer_count),
    Rule("tied", ("eagle3",), SILENT, EAGLE3_PY, RequireValue("tie_word_embeddings", False, False)),
    Rule("rope", EAGLE_FAMILIES, SILENT, EAGLE3_PY, family.rope_mismatch),
    Rule("rope-keys", EAGLE_FAMILIES, SILENT, "older versions read rope_theta", RequireKeys(("rope_theta",))),
    Rule("draft-vocabulary", ("eagle3",), REFUSED, EAGLE3_PY, RequireKeys(("draft_vocab_size",))),
    Rule("map-missing", ("eagle3",), SILENT, EAGLE3_PY, family.map_missing),
    Rule("map-superfluous", ("eagle3",), IGNORED, EAGLE3_PY, family.unneeded_map),
    Rule("map", ("eagle3",), SILENT, EAGLE3_PY, family.map_wrong),
    Rule("map-dtype", ("eagle3",), SILENT, EAGLE3_PY, family.map_dtype),
    Rule("members-dtype", ("eagle3",), IGNORED, f"{EAGLE3_PY}: t2d is skipped", family.t2d_dtype),
    Rule("taps", ("eagle3",), SILENT, f"{NOTES}: eagle_config alone is read", wrong_aux_layers),
    Rule("taps-unread", ("eagle3",), SILENT, f"{NOTES}: eagle_config alone is read", ignored_aux_layer_ids),
    Rule("taps-disagree", ("eagle3",), SILENT, NOTES, family.conflicting_aux_layers),
    Rule("target-width", ("eagle3",), REFUSED, EAGLE3_PY, family.target_width_mismatch),
    Rule(
        "parallel",
        ("pard",),
        SILENT,
        f"{NOTES} has no parallel drafting",
        Unsupported("SGLang has no parallel drafting: it would run this model token by token, without masks"),
    ),
    *family.CAUSAL_RULES,
    Rule("missing-tensor", ("causal",), SILENT, NOTES, family.missing_tensors),
    Rule("shapes", ("causal",), REFUSED, NOTES, family.wrong_shapes),
    Rule("tied", ("causal",), SILENT, NOTES, family.dropped_lm_head),
    Rule("tokenizer", ("causal",), REFUSED, f"{NOTES}: STANDALONE compares get_vocab()", family.wrong_tokenizer),
)  # fmt: skip

SGLANG = ServingEngine(
    "SGLang",
    version="0.5.23",
    versions="0.5",
    methods={  # --speculative-algorithm
        "causal": Served("STANDALONE"),
        "eagle1": Served("EAGLE"),
        "eagle3": Served("EAGLE3"),
        "dflash": Served("DFLASH"),
        "dspark": Served("DSPARK"),
    },
    rules=RULES,
)
