"""What vLLM wants of drafts, by the source of 0.32.0, and run there (scripts/engine_compat/corruption_study.py). 0.33.0 by notes.

Its EAGLE loaders report no missing tensor, refuse unknown ones, and skip unknown biases; Medusa's does the reverse.
"""

from collections.abc import Iterator
from typing import Any

from scripts.engine_compat.rules import causal, eagle, medusa
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
    require_value,
    unsupported,
    vocab_size_mismatch,
)

NEWEST = "0.32.0"
"""The version that is meant unless another is asked for: the newest that these rules were run against."""

EAGLE3_PY = "vllm/model_executor/models/llama_eagle3.py, 0.32.0"
EAGLE1_PY = "vllm/model_executor/models/llama_eagle.py, 0.32.0"
LLAMA_PY = "vllm/model_executor/models/llama.py, 0.32.0"
MEDUSA_PY = "vllm/model_executor/models/medusa.py, 0.32.0"
CONFIG_PY = "vllm/transformers_utils/configs/eagle.py, 0.32.0"
MEDUSA_CONFIG_PY = "vllm/transformers_utils/configs/medusa.py, 0.32.0"
SPECULATORS_PY = "vllm/transformers_utils/configs/speculators/, 0.32.0"
RUNNER_PY = "vllm/v1/worker/gpu_model_runner.py (_get_eagle3_aux_layers_from_config), 0.32.0"
SPECULATIVE = "vllm/config/speculative.py, 0.32.0"
WEIGHTS_PY = "vllm/model_executor/models/utils.py (AutoWeightsLoader), 0.32.0"
LOADER_PY = "vllm/model_executor/model_loader/default_loader.py (track_weights_loading), 0.32.0"

ARCHITECTURES = {
    "eagle1": ("EagleLlamaForCausalLM",),
    "eagle3": (
        "Eagle3LlamaForCausalLM",
        "LlamaForCausalLMEagle3",
        "Eagle3Qwen2_5vlForCausalLM",
        "Eagle3Qwen3vlForCausalLM",
    ),
}
"""Registered names whose class is the Llama layer of these heads."""


def wrong_architecture(d: DraftFiles) -> Iterator[str]:
    """The name that becomes of `architectures` when the method is given."""
    if d.nested:
        return  # decided by the type of its layer
    names = [str(name) for name in d.get("architectures", [])]
    if d.family == "eagle3":
        found = [n if "Eagle3" in (n[:6], n[-6:]) else f"Eagle3{n}" for n in names]
    else:
        found = [n if n.startswith("Eagle") else f"Eagle{n}" for n in names]
    if not set(found) & set(ARCHITECTURES[d.family]):
        yield f"architectures {names} become {found}: none is registered for these heads"


def wrong_nested_config(d: DraftFiles) -> Iterator[str]:
    """What the speculators format must have."""
    if not d.nested:
        return
    if "model_type" in d.raw:
        yield f"model_type {d.raw['model_type']!r} hides the nested settings: leave it out"
    if d.raw.get("speculators_model_type") != "eagle3":
        yield f"speculators_model_type is {d.raw.get('speculators_model_type')!r} and not 'eagle3'"
    if d.config.get("model_type", "llama") != "llama":
        yield f"transformer_layer_config is of type {d.config['model_type']!r}: Llama's layer is what these heads have"
    said: Any = d.raw.get("speculators_config") or {}
    methods: Any = said.get("proposal_methods") or [{}]
    if "speculative_tokens" not in methods[0]:
        yield "speculators_config.proposal_methods[0].speculative_tokens is missing"
    if "name_or_path" not in (said.get("verifier") or {}):
        yield "speculators_config.verifier.name_or_path is missing"


def implicit_norm_flag(d: DraftFiles) -> Iterator[str]:
    if d.nested and "norm_before_residual" not in d.raw:
        yield "norm_before_residual is not said: it is taken for true here, and for false in a flat config"


def skipped_norm_weights(d: DraftFiles) -> Iterator[str]:
    """Weights of a norm that the flag turns off."""
    if "input_norm.weight" in d.tensors and not eagle.norm_flag(d, "norm_before_fc"):
        yield "input_norm.weight is skipped: norm_before_fc is not true"


def unknown_tensors(d: DraftFiles) -> Iterator[str]:
    return (w for w in eagle.unknown_tensors(d) if not w.startswith("input_norm"))


def implicit_draft_vocab_size(d: DraftFiles) -> Iterator[str]:
    """Absent it is vocab_size; the output matrix says what it was."""
    head = d.tensors.get("lm_head.weight")
    if (
        d.config.get("draft_vocab_size") is None
        and head is not None
        and len(head) != d.get("vocab_size")
    ):
        yield f"draft_vocab_size is not said: it is taken for vocab_size, and lm_head has {len(head)} rows"


RULES = (
    *COMMON_RULES,
    Rule("dtype", ALL_FAMILIES, IGNORED, f"{SPECULATIVE}: the draft takes the target's dtype", dtype_mismatch),
    Rule("vocabulary", ("causal", *EAGLE_FAMILIES), REFUSED, SPECULATIVE, vocab_size_mismatch),
    # EAGLE
    Rule("architecture", EAGLE_FAMILIES, REFUSED, CONFIG_PY, wrong_architecture),
    Rule("nested-config", ("eagle3",), REFUSED, SPECULATORS_PY, wrong_nested_config),
    Rule("nested-norm-flag", ("eagle3",), SILENT, SPECULATORS_PY, implicit_norm_flag),
    Rule("shapes", EAGLE_FAMILIES, REFUSED, EAGLE3_PY, eagle.wrong_shapes),
    Rule("missing-tensor", EAGLE_FAMILIES, SILENT, f"{EAGLE3_PY}: load_weights returns nothing to compare", eagle.missing_tensors),
    Rule("unknown-tensor", EAGLE_FAMILIES, REFUSED, WEIGHTS_PY, unknown_tensors),
    Rule("skipped-tensor", ("eagle3",), SILENT, EAGLE3_PY, skipped_norm_weights),
    Rule("dropped-bias", EAGLE_FAMILIES, SILENT, WEIGHTS_PY, eagle.dropped_biases),
    Rule("bias-flags", EAGLE_FAMILIES, SILENT, LLAMA_PY, eagle.unfilled_bias_flags),
    Rule("activation", EAGLE_FAMILIES, REFUSED, LLAMA_PY, require_value("hidden_act", "silu")),
    Rule("layers", EAGLE_FAMILIES, SILENT, EAGLE3_PY, eagle.wrong_layer_count),
    Rule("rope", EAGLE_FAMILIES, SILENT, f"{LLAMA_PY}: rope_parameters", eagle.rope_mismatch),
    Rule("norm-flags", ("eagle3",), SILENT, EAGLE3_PY, eagle.changed_norm_flags),
    Rule("draft-vocabulary", ("eagle3",), REFUSED, EAGLE3_PY, implicit_draft_vocab_size),
    Rule("map-missing", ("eagle3",), SILENT, EAGLE3_PY, eagle.map_missing),
    Rule("map-superfluous", ("eagle3",), REFUSED, EAGLE3_PY, eagle.unneeded_map),
    Rule("map", ("eagle3",), SILENT, EAGLE3_PY, eagle.map_wrong),
    Rule("map-dtype", ("eagle3",), SILENT, EAGLE3_PY, eagle.map_dtype),
    Rule("members-dtype", ("eagle3",), IGNORED, f"{EAGLE3_PY}: t2d is skipped", eagle.t2d_dtype),
    Rule("taps", ("eagle3",), SILENT, RUNNER_PY, eagle.wrong_vllm_aux_layers),
    Rule("taps-disagree", ("eagle3",), SILENT, RUNNER_PY, eagle.conflicting_aux_layers),
    Rule("target-width", ("eagle3",), REFUSED, EAGLE3_PY, eagle.target_width_mismatch),
    # Medusa
    Rule(
        "removed",
        ("medusa",),
        REFUSED,
        "vLLM 0.33.0 has no Medusa",
        unsupported("vLLM has no Medusa from 0.33.0 on: serve it with 0.32 or older"),
        since="0.33",
    ),
    Rule("missing-tensor", ("medusa",), REFUSED, LOADER_PY, medusa.missing_tensors),
    Rule("unknown-tensor", ("medusa",), SILENT, MEDUSA_PY, medusa.unknown_tensors),
    Rule("dropped-bias", ("medusa",), SILENT, MEDUSA_PY, medusa.dropped_biases),
    Rule("shared-projection", ("medusa",), SILENT, MEDUSA_PY, medusa.dropped_projections),
    Rule("shapes", ("medusa",), REFUSED, MEDUSA_PY, medusa.wrong_shapes),
    Rule("sizes", ("medusa",), REFUSED, f"{MEDUSA_CONFIG_PY}: 4096 unless said", medusa.hidden_size_mismatch),
    Rule("truncated-vocabulary", ("medusa",), REFUSED, MEDUSA_PY, medusa.missing_token_map),
    Rule("renamed-settings", ("medusa",), SILENT, MEDUSA_CONFIG_PY, medusa.ambiguous_keys),
    Rule("vocabulary", ("medusa",), REFUSED, MEDUSA_PY, medusa.vocab_rows_mismatch),
    Rule("old-names", ("medusa",), REFUSED, f"{MEDUSA_PY}: _remap_old_checkpoint_key", medusa.numbered_tensors, before="0.32"),
    # causal
    *causal.RULES,
    Rule("missing-tensor", ("causal",), REFUSED, LOADER_PY, causal.missing_tensors),
    Rule("shapes", ("causal",), REFUSED, LOADER_PY, causal.wrong_shapes),
    Rule("tied", ("causal",), SILENT, LLAMA_PY, causal.dropped_lm_head),
    Rule("tokenizer", ("causal",), SILENT, f"{SPECULATIVE}: sizes are compared, tokens are not", causal.wrong_tokenizer),
)  # fmt: skip
