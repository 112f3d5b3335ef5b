"""What SGLang wants of drafts, by notes on 0.5.23 and by its source where a file is named. Not run here.

It drops unknown tensors and reports no missing one: nearly everything that is wrong is silent.
"""

from collections.abc import Iterator

from scripts.rules import causal, eagle
from scripts.rules.draft import (
    ALL,
    COMMON,
    EAGLE,
    IGNORED,
    REFUSED,
    SILENT,
    Draft,
    Rule,
    config_says,
    never,
    no_vocabulary,
    other_dtype,
    present,
)

NEWEST = "0.5.23"
EAGLE3_PY = "python/sglang/srt/models/llama_eagle3.py"
EAGLE1_PY = "python/sglang/srt/models/llama_eagle.py"
NOTES = "SGLang 0.5.23"

CLASSES = {"eagle1": "LlamaForCausalLMEagle", "eagle3": "LlamaForCausalLMEagle3"}


def architecture(d: Draft) -> Iterator[str]:
    names = d.get("architectures", [])
    if CLASSES[d.family] not in names:
        yield f"architectures {names} do not name {CLASSES[d.family]}"


def nested(d: Draft) -> Iterator[str]:
    if d.nested:
        yield "the nested config of speculators is not read: export it with --format flat"


def residual(d: Draft) -> Iterator[str]:
    if eagle.flag(d, "norm_before_residual"):
        yield "norm_before_residual is not known: the residual is taken before the norm"


def fc_bias(d: Draft) -> Iterator[str]:
    """Its fc of EAGLE-1 always has a bias, left at random where none is loaded."""
    if "fc.bias" not in d.tensors:
        yield "fc.bias is missing and stays random: save zeros"


def layer_biases(d: Draft) -> Iterator[str]:
    return (what for what in eagle.biases(d) if not what.startswith("fc.bias"))


def late_name(d: Draft) -> Iterator[str]:
    if any(name.startswith("layers.0.") for name in d.named.values()):
        yield "tensors of the layer are named layers.0: some older versions drop them, midlayer is read by all"


def unused_ids(d: Draft) -> Iterator[str]:
    """Ids under vLLM's key alone."""
    nested_ids = (d.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if d.config.get("eagle_aux_hidden_state_layer_ids") and not nested_ids:
        yield "eagle_aux_hidden_state_layer_ids is ignored without eagle_config: default layers are tapped"


RULES = (
    *COMMON,
    Rule("dtype", ALL, IGNORED, "--dtype of the server decides", other_dtype),
    Rule("vocabulary", ("causal", *EAGLE), REFUSED, NOTES, no_vocabulary),
    Rule(
        "medusa",
        ("medusa",),
        REFUSED,
        f"{NOTES} has no Medusa among its algorithms",
        never("SGLang has no Medusa: serve it with vLLM 0.32 or older"),
    ),
    Rule("architecture", EAGLE, REFUSED, EAGLE3_PY, architecture),
    Rule("nested-config", ("eagle3",), REFUSED, EAGLE3_PY, nested),
    Rule("norm-before-residual", ("eagle3",), SILENT, EAGLE3_PY, residual),
    Rule("norm-flags", ("eagle3",), SILENT, EAGLE3_PY, eagle.flags_changed),
    Rule("shapes", EAGLE, REFUSED, EAGLE3_PY, eagle.wrong_shapes),
    Rule("missing-tensor", EAGLE, SILENT, f"{EAGLE3_PY}: load_weights", eagle.lacking),
    Rule("unknown-tensor", EAGLE, SILENT, f"{EAGLE3_PY}: load_weights", eagle.strangers),
    Rule("layer-name", ("eagle3",), SILENT, f"{EAGLE3_PY} at 03d5a77", late_name, before="0.5.23"),
    Rule("dropped-bias", EAGLE, SILENT, EAGLE3_PY, layer_biases),
    Rule("bias-flags", EAGLE, SILENT, EAGLE3_PY, eagle.bias_said),
    Rule("fc-bias", ("eagle1",), SILENT, EAGLE1_PY, fc_bias),
    Rule("activation", EAGLE, REFUSED, EAGLE3_PY, config_says("hidden_act", "silu")),
    Rule("layers", EAGLE, SILENT, EAGLE3_PY, eagle.layers),
    Rule("tied", ("eagle3",), SILENT, EAGLE3_PY, config_says("tie_word_embeddings", False, False)),
    Rule("rope", EAGLE, SILENT, EAGLE3_PY, eagle.rope),
    Rule("rope-keys", EAGLE, SILENT, "older versions read rope_theta", present("rope_theta")),
    Rule("draft-vocabulary", ("eagle3",), REFUSED, EAGLE3_PY, present("draft_vocab_size")),
    Rule("map-missing", ("eagle3",), SILENT, EAGLE3_PY, eagle.map_missing),
    Rule("map-superfluous", ("eagle3",), IGNORED, EAGLE3_PY, eagle.map_superfluous),
    Rule("map", ("eagle3",), SILENT, EAGLE3_PY, eagle.map_wrong),
    Rule("map-dtype", ("eagle3",), SILENT, EAGLE3_PY, eagle.map_dtype),
    Rule("members-dtype", ("eagle3",), IGNORED, f"{EAGLE3_PY}: t2d is skipped", eagle.members_dtype),
    Rule("taps", ("eagle3",), SILENT, f"{NOTES}: eagle_config alone is read", eagle.sglang_taps),
    Rule("taps-unread", ("eagle3",), SILENT, f"{NOTES}: eagle_config alone is read", unused_ids),
    Rule("taps-disagree", ("eagle3",), SILENT, NOTES, eagle.taps_disagree),
    Rule("target-width", ("eagle3",), REFUSED, EAGLE3_PY, eagle.target_width),
    *causal.RULES,
    Rule("missing-tensor", ("causal",), SILENT, NOTES, causal.lacking),
    Rule("shapes", ("causal",), REFUSED, NOTES, causal.wrong_shapes),
    Rule("tied", ("causal",), SILENT, NOTES, causal.untied),
    Rule("tokenizer", ("causal",), REFUSED, f"{NOTES}: STANDALONE compares get_vocab()", causal.tokens),
)  # fmt: skip
