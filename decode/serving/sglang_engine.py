"""SGLang. Its rules are from notes on 0.5.23, and from its source where a file is named; they were not run here.

It drops unknown tensors and reports no missing one, so that nearly every mistake is silent.
"""

from collections.abc import Iterator

from decode.serving import checks
from decode.serving.engine import (
    Served,
    ServedDraft,
    ServingEngine,
    shell_script,
)
from decode.serving.rules import COVERED_EVERYWHERE, IGNORED, REFUSED, SILENT, DraftFiles, Rule

EAGLE3_PY = "python/sglang/srt/models/llama_eagle3.py"
EAGLE1_PY = "python/sglang/srt/models/llama_eagle.py"
CONTEXT_PY = "python/sglang/srt/configs/model_config.py (_derive_context_length)"
DOMINO_PY = "python/sglang/srt/speculative/domino_utils.py and dflash_utils.py, after pull requests 36899 and 37069"
NOTES = "SGLang 0.5.23"

EAGLES = ("eagle1", "eagle3")
ARCHITECTURES = {
    "eagle1": "LlamaForCausalLMEagle",
    "eagle3": "LlamaForCausalLMEagle3",
    "domino": "DFlashDraftModel",  # SpecForge's scripts/gates/normalize_dflash_export.py writes it
}


def wrong_architecture(d: DraftFiles) -> Iterator[str]:
    names = d.get("architectures", [])
    if ARCHITECTURES[d.family] not in names:
        yield f"architectures {names} do not contain {ARCHITECTURES[d.family]}"


def wrong_aux_layers(d: DraftFiles) -> Iterator[str]:
    """SGLang reads only the key in `eagle_config`, plus one, else the default layers."""
    if d.target_layers is not None:
        _, outputs = checks.named_layers(d)
        ids = tuple(i + 1 for i in outputs or ())
        yield from checks.wrong_aux_layers(d, ids or checks.default_aux_layers(d.target_layers))


def unserved_correction(d: DraftFiles) -> Iterator[str]:
    """Settings of a Domino with which the server does not start."""
    nested = d.get("dflash_config", {})
    if nested.get("pure_draft_prefix_len") != 1:
        yield f"pure_draft_prefix_len is {nested.get('pure_draft_prefix_len')} and must be 1"
    if not isinstance(nested.get("shift_label"), bool):
        yield "shift_label is not set: write true or false"


RULES = (
    Rule("dtype", COVERED_EVERYWHERE, IGNORED, "--dtype of the server decides", checks.dtype_mismatch),
    Rule("vocabulary", ("causal", *EAGLES), REFUSED, NOTES, checks.vocab_size_mismatch),
    Rule("context", ("causal", *EAGLES), REFUSED, CONTEXT_PY, checks.context_at_least_targets(
        "the server starts with --context-length of at most that alone, or with "
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1, and then few tokens are accepted beyond it"
    )),
    Rule("medusa", ("medusa",), REFUSED, f"{NOTES} has no Medusa among its algorithms", checks.unsupported(
        "SGLang has no Medusa: serve it with vLLM 0.32 or older"
    )),
    Rule("architecture", (*EAGLES, "domino"), REFUSED, f"{EAGLE3_PY} and dflash.py: EntryClass", wrong_architecture),
    Rule("nested-config", ("eagle3",), REFUSED, EAGLE3_PY, checks.speculators_config),
    Rule("norm-before-residual", ("eagle3",), SILENT, EAGLE3_PY, checks.norm_before_residual),
    Rule("norm-flags", ("eagle3",), SILENT, EAGLE3_PY, checks.changed_norm_flags),
    Rule("shapes", EAGLES, REFUSED, EAGLE3_PY, checks.wrong_shapes),
    Rule("missing-tensor", EAGLES, SILENT, f"{EAGLE3_PY}: load_weights", checks.missing_tensors),
    Rule("unknown-tensor", EAGLES, SILENT, f"{EAGLE3_PY}: load_weights", checks.unknown_tensors),
    Rule("layer-name", ("eagle3",), SILENT, f"{EAGLE3_PY} at 03d5a77", checks.when(
        lambda d: any(name.startswith("layers.0.") for name in d.name_in_file.values()),
        "tensors of the layer are named layers.0: some older versions drop them, all versions read midlayer",
    ), before="0.5.23"),
    Rule("dropped-bias", EAGLES, SILENT, EAGLE3_PY, lambda d: (
        what for what in checks.dropped_biases(d) if not what.startswith("fc.bias")
    )),
    Rule("bias-flags", EAGLES, SILENT, EAGLE3_PY, checks.unfilled_bias_flags),
    Rule("fc-bias", ("eagle1",), SILENT, EAGLE1_PY, checks.when(
        lambda d: "fc.bias" not in d.tensors, "fc.bias is missing and stays random: save zeros"
    )),
    Rule("activation", EAGLES, REFUSED, EAGLE3_PY, checks.require_value("hidden_act", "silu")),
    Rule("layers", EAGLES, SILENT, EAGLE3_PY, checks.wrong_layer_count),
    Rule("tied", ("eagle3",), SILENT, EAGLE3_PY, checks.require_value("tie_word_embeddings", False, False)),
    Rule("rope", EAGLES, SILENT, EAGLE3_PY, checks.rope_mismatch),
    Rule("rope-keys", EAGLES, SILENT, "older versions read rope_theta", checks.require_keys("rope_theta")),
    Rule("draft-vocabulary", ("eagle3",), REFUSED, EAGLE3_PY, checks.require_keys("draft_vocab_size")),
    Rule("map-missing", ("eagle3",), SILENT, EAGLE3_PY, checks.map_missing),
    Rule("map-superfluous", ("eagle3",), IGNORED, EAGLE3_PY, checks.unneeded_map),
    Rule("map", ("eagle3",), SILENT, EAGLE3_PY, checks.map_wrong),
    Rule("map-dtype", ("eagle3",), SILENT, EAGLE3_PY, checks.map_dtype),
    Rule("members-dtype", ("eagle3",), IGNORED, f"{EAGLE3_PY}: t2d is skipped", checks.t2d_dtype),
    Rule("taps", ("eagle3",), SILENT, f"{NOTES}: eagle_config alone is read", wrong_aux_layers),
    Rule("taps-unread", ("eagle3",), SILENT, f"{NOTES}: eagle_config alone is read", checks.when(
        lambda d: checks.named_layers(d)[0] and not checks.named_layers(d)[1],
        "eagle_aux_hidden_state_layer_ids is ignored without eagle_config: the default layers are read",
    )),
    Rule("taps-disagree", ("eagle3",), SILENT, NOTES, checks.conflicting_aux_layers),
    Rule("target-width", ("eagle3",), REFUSED, EAGLE3_PY, checks.target_width_mismatch),
    Rule("parallel", ("pard",), SILENT, f"{NOTES} has no parallel drafting", checks.unsupported(
        "SGLang has no parallel drafting: it would run this model token by token, without masks"
    )),
    Rule("correction", ("domino",), REFUSED, DOMINO_PY, unserved_correction),
    Rule("runner", ("domino",), IGNORED, DOMINO_PY, checks.unsupported(
        "algorithm DFLASH serves it from September 2026 on, with CUDA and bfloat16 alone; it drafts block_size - 1 "
        "tokens, the most probable of 2,048 candidates, of all with --speculative-domino-candidate-pool-size 0"
    )),
    *checks.CAUSAL_RULES,
    Rule("missing-tensor", ("causal",), SILENT, NOTES, checks.missing_tensors),
    Rule("shapes", ("causal",), REFUSED, NOTES, checks.wrong_shapes),
    Rule("tied", ("causal",), SILENT, NOTES, checks.dropped_lm_head),
    Rule("tokenizer", ("causal",), REFUSED, f"{NOTES}: STANDALONE compares get_vocab()", checks.wrong_tokenizer),
)  # fmt: skip


# ---- how it is started ----


def speculative_flags(k: int) -> list[tuple[str, int]]:
    """For chains of K tokens. The number of draft tokens counts the root as well."""
    sizes = {"num-steps": k, "eagle-topk": 1, "num-draft-tokens": k + 1}
    return [(f"--speculative-{name}", value) for name, value in sizes.items()]


def serving_files(d: ServedDraft) -> dict[str, str]:
    words = ["python", "-m", "sglang.launch_server", "--model", d.target]
    words += ["--speculative-algorithm", SGLANG.method(d.family)]
    words += ["--speculative-draft-model-path", d.repo]
    words += [str(word) for flag in speculative_flags(d.k) for word in flag]
    return {"sglang.sh": shell_script(words, d.revision)}


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
        "domino": Served("DFLASH", versions="0.5, from September 2026 on, with CUDA and bfloat16"),
    },
    rules=RULES,
    files=serving_files,
    note="{versions}; its number of draft tokens counts the root: one more than vLLM's",
    captures_embedding=False,
)
