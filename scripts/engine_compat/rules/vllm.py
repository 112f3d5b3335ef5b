"""The rules of vLLM, from the source of 0.32.0 and run there (corruption_study.py); 0.33.0 from notes.

Its EAGLE loaders do not report missing tensors, refuse unknown ones and skip unknown biases; the Medusa loader does the
reverse.
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
    RequireValue,
    Rule,
    Unsupported,
    dtype_mismatch,
    vocab_size_mismatch,
)

DEFAULT_VERSION = "0.32.0"
"""The newest version that these rules were run against."""

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
"""Names in vLLM's model registry whose class has the Llama layer of these heads."""


def wrong_architecture(d: DraftFiles) -> Iterator[str]:
    """The registry name that vLLM derives from `architectures` when the method is given."""
    if d.is_speculators_format:
        return  # the type of its layer decides
    names = [str(name) for name in d.get("architectures", [])]
    if d.family == "eagle3":
        derived = [n if "Eagle3" in (n[:6], n[-6:]) else f"Eagle3{n}" for n in names]
    else:
        derived = [n if n.startswith("Eagle") else f"Eagle{n}" for n in names]
    if not set(derived) & set(ARCHITECTURES[d.family]):
        yield f"architectures {names} become {derived}: none is registered for these heads"


def wrong_nested_config(d: DraftFiles) -> Iterator[str]:
    """Settings that vLLM needs in the speculators format."""
    if not d.is_speculators_format:
        return
    if "model_type" in d.raw_config:
        yield f"model_type {d.raw_config['model_type']!r} hides the nested settings: leave it out"
    if d.raw_config.get("speculators_model_type") != "eagle3":
        yield f"speculators_model_type is {d.raw_config.get('speculators_model_type')!r} and not 'eagle3'"
    if d.config.get("model_type", "llama") != "llama":
        yield f"transformer_layer_config is of type {d.config['model_type']!r}: these heads have Llama's layer"
    speculators: Any = d.raw_config.get("speculators_config") or {}
    methods: Any = speculators.get("proposal_methods") or [{}]
    if "speculative_tokens" not in methods[0]:
        yield "speculators_config.proposal_methods[0].speculative_tokens is missing"
    if "name_or_path" not in (speculators.get("verifier") or {}):
        yield "speculators_config.verifier.name_or_path is missing"


def implicit_norm_flag(d: DraftFiles) -> Iterator[str]:
    """A nested config without norm_before_residual, whose default differs from that of a flat one."""
    if d.is_speculators_format and "norm_before_residual" not in d.raw_config:
        yield "norm_before_residual is not set: the default is true here, and false in a flat config"


def skipped_norm_weights(d: DraftFiles) -> Iterator[str]:
    """Weights of a norm that its flag turns off."""
    if "input_norm.weight" in d.tensors and not eagle.norm_flag(d, "norm_before_fc"):
        yield "input_norm.weight is skipped: norm_before_fc is not true"


def unknown_tensors(d: DraftFiles) -> Iterator[str]:
    """Unknown tensors other than input_norm, which is skipped."""
    return (w for w in eagle.unknown_tensors(d) if not w.startswith("input_norm"))


def implicit_draft_vocab_size(d: DraftFiles) -> Iterator[str]:
    """No draft_vocab_size, which then defaults to vocab_size, while lm_head has fewer rows."""
    head = d.tensors.get("lm_head.weight")
    if (
        d.config.get("draft_vocab_size") is None
        and head is not None
        and len(head) != d.get("vocab_size")
    ):
        yield f"draft_vocab_size is not set: the engine takes vocab_size, and lm_head has {len(head)} rows"


RULES = (
    *COMMON_RULES,
    Rule("dtype", ALL_FAMILIES, IGNORED, f"{SPECULATIVE}: the draft gets the target's dtype", dtype_mismatch),
    Rule("vocabulary", ("causal", *EAGLE_FAMILIES), REFUSED, SPECULATIVE, vocab_size_mismatch),
    # EAGLE
    Rule("architecture", EAGLE_FAMILIES, REFUSED, CONFIG_PY, wrong_architecture),
    Rule("nested-config", ("eagle3",), REFUSED, SPECULATORS_PY, wrong_nested_config),
    Rule("nested-norm-flag", ("eagle3",), SILENT, SPECULATORS_PY, implicit_norm_flag),
    Rule("shapes", EAGLE_FAMILIES, REFUSED, EAGLE3_PY, eagle.wrong_shapes),
    Rule("missing-tensor", EAGLE_FAMILIES, SILENT, f"{EAGLE3_PY}: reports nothing", eagle.missing_tensors),
    Rule("unknown-tensor", EAGLE_FAMILIES, REFUSED, WEIGHTS_PY, unknown_tensors),
    Rule("skipped-tensor", ("eagle3",), SILENT, EAGLE3_PY, skipped_norm_weights),
    Rule("dropped-bias", EAGLE_FAMILIES, SILENT, WEIGHTS_PY, eagle.dropped_biases),
    Rule("bias-flags", EAGLE_FAMILIES, SILENT, LLAMA_PY, eagle.unfilled_bias_flags),
    Rule("activation", EAGLE_FAMILIES, REFUSED, LLAMA_PY, RequireValue("hidden_act", "silu")),
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
        Unsupported("vLLM has no Medusa from 0.33.0 on: serve it with 0.32 or older"),
        since="0.33",
    ),
    Rule("missing-tensor", ("medusa",), REFUSED, LOADER_PY, medusa.missing_tensors),
    Rule("unknown-tensor", ("medusa",), SILENT, MEDUSA_PY, medusa.unknown_tensors),
    Rule("dropped-bias", ("medusa",), SILENT, MEDUSA_PY, medusa.dropped_biases),
    Rule("shared-projection", ("medusa",), SILENT, MEDUSA_PY, medusa.dropped_projections),
    Rule("shapes", ("medusa",), REFUSED, MEDUSA_PY, medusa.wrong_shapes),
    Rule("sizes", ("medusa",), REFUSED, f"{MEDUSA_CONFIG_PY}: 4096 by default", medusa.hidden_size_mismatch),
    Rule("truncated-vocabulary", ("medusa",), REFUSED, MEDUSA_PY, medusa.missing_token_map),
    Rule("renamed-settings", ("medusa",), SILENT, MEDUSA_CONFIG_PY, medusa.ambiguous_keys),
    Rule("vocabulary", ("medusa",), REFUSED, MEDUSA_PY, medusa.vocab_rows_mismatch),
    Rule("old-names", ("medusa",), REFUSED, f"{MEDUSA_PY}: old keys", medusa.numbered_tensors, before="0.32"),
    # causal
    *causal.RULES,
    Rule("missing-tensor", ("causal",), REFUSED, LOADER_PY, causal.missing_tensors),
    Rule("shapes", ("causal",), REFUSED, LOADER_PY, causal.wrong_shapes),
    Rule("tied", ("causal",), SILENT, LLAMA_PY, causal.dropped_lm_head),
    Rule("tokenizer", ("causal",), SILENT, f"{SPECULATIVE}: only sizes are compared", causal.wrong_tokenizer),
)  # fmt: skip
