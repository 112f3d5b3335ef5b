"""What vLLM wants of drafts, by the source of 0.32.0, and run there (scripts/damage_drafts.py). 0.33.0 by notes.

Its EAGLE loaders report no missing tensor, refuse unknown ones, and skip unknown biases; Medusa's does the reverse.
"""

from collections.abc import Iterator
from typing import Any

from scripts.rules import causal, eagle, medusa
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
)

NEWEST = "0.32.0"
"""The version that is meant unless another is asked for: the newest that these rules were run against."""

EAGLE3_PY = "vllm/model_executor/models/llama_eagle3.py, 0.32.0"
EAGLE1_PY = "vllm/model_executor/models/llama_eagle.py, 0.32.0"
LLAMA_PY = "vllm/model_executor/models/llama.py, 0.32.0"
MEDUSA_PY = "vllm/model_executor/models/medusa.py, 0.32.0"
CONFIG_PY = "vllm/transformers_utils/configs/eagle.py, 0.32.0"
MEDUSA_CONFIG = "vllm/transformers_utils/configs/medusa.py, 0.32.0"
NESTED_PY = "vllm/transformers_utils/configs/speculators/, 0.32.0"
RUNNER_PY = "vllm/v1/worker/gpu_model_runner.py (_get_eagle3_aux_layers_from_config), 0.32.0"
SPECULATIVE = "vllm/config/speculative.py, 0.32.0"
WEIGHTS_PY = "vllm/model_executor/models/utils.py (AutoWeightsLoader), 0.32.0"
LOADER_PY = "vllm/model_executor/model_loader/default_loader.py (track_weights_loading), 0.32.0"

CLASSES = {
    "eagle1": ("EagleLlamaForCausalLM",),
    "eagle3": (
        "Eagle3LlamaForCausalLM",
        "LlamaForCausalLMEagle3",
        "Eagle3Qwen2_5vlForCausalLM",
        "Eagle3Qwen3vlForCausalLM",
    ),
}
"""Registered names whose class is the Llama layer of these heads."""


def architecture(d: Draft) -> Iterator[str]:
    """The name that becomes of `architectures` when the method is given."""
    if d.nested:
        return  # decided by the type of its layer
    names = [str(name) for name in d.get("architectures", [])]
    if d.family == "eagle3":
        found = [n if "Eagle3" in (n[:6], n[-6:]) else f"Eagle3{n}" for n in names]
    else:
        found = [n if n.startswith("Eagle") else f"Eagle{n}" for n in names]
    if not set(found) & set(CLASSES[d.family]):
        yield f"architectures {names} become {found}: none is registered for these heads"


def nested(d: Draft) -> Iterator[str]:
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


def unsaid_flag(d: Draft) -> Iterator[str]:
    if d.nested and "norm_before_residual" not in d.raw:
        yield "norm_before_residual is not said: it is taken for true here, and for false in a flat config"


def skipped_norm(d: Draft) -> Iterator[str]:
    """Weights of a norm that the flag turns off."""
    if "input_norm.weight" in d.tensors and not eagle.flag(d, "norm_before_fc"):
        yield "input_norm.weight is skipped: norm_before_fc is not true"


def strangers(d: Draft) -> Iterator[str]:
    return (w for w in eagle.strangers(d) if not w.startswith("input_norm"))


def draft_vocabulary(d: Draft) -> Iterator[str]:
    """Absent it is vocab_size; the output matrix says what it was."""
    head = d.tensors.get("lm_head.weight")
    if (
        d.config.get("draft_vocab_size") is None
        and head is not None
        and len(head) != d.get("vocab_size")
    ):
        yield f"draft_vocab_size is not said: it is taken for vocab_size, and lm_head has {len(head)} rows"


RULES = (
    *COMMON,
    Rule("dtype", ALL, IGNORED, f"{SPECULATIVE}: the draft takes the target's dtype", other_dtype),
    Rule("vocabulary", ("causal", *EAGLE), REFUSED, SPECULATIVE, no_vocabulary),
    # EAGLE
    Rule("architecture", EAGLE, REFUSED, CONFIG_PY, architecture),
    Rule("nested-config", ("eagle3",), REFUSED, NESTED_PY, nested),
    Rule("nested-norm-flag", ("eagle3",), SILENT, NESTED_PY, unsaid_flag),
    Rule("shapes", EAGLE, REFUSED, EAGLE3_PY, eagle.wrong_shapes),
    Rule("missing-tensor", EAGLE, SILENT, f"{EAGLE3_PY}: load_weights returns nothing to compare", eagle.lacking),
    Rule("unknown-tensor", EAGLE, REFUSED, WEIGHTS_PY, strangers),
    Rule("skipped-tensor", ("eagle3",), SILENT, EAGLE3_PY, skipped_norm),
    Rule("dropped-bias", EAGLE, SILENT, WEIGHTS_PY, eagle.biases),
    Rule("bias-flags", EAGLE, SILENT, LLAMA_PY, eagle.bias_said),
    Rule("activation", EAGLE, REFUSED, LLAMA_PY, config_says("hidden_act", "silu")),
    Rule("layers", EAGLE, SILENT, EAGLE3_PY, eagle.layers),
    Rule("rope", EAGLE, SILENT, f"{LLAMA_PY}: rope_parameters", eagle.rope),
    Rule("norm-flags", ("eagle3",), SILENT, EAGLE3_PY, eagle.flags_changed),
    Rule("draft-vocabulary", ("eagle3",), REFUSED, EAGLE3_PY, draft_vocabulary),
    Rule("map-missing", ("eagle3",), SILENT, EAGLE3_PY, eagle.map_missing),
    Rule("map-superfluous", ("eagle3",), REFUSED, EAGLE3_PY, eagle.map_superfluous),
    Rule("map", ("eagle3",), SILENT, EAGLE3_PY, eagle.map_wrong),
    Rule("map-dtype", ("eagle3",), SILENT, EAGLE3_PY, eagle.map_dtype),
    Rule("members-dtype", ("eagle3",), IGNORED, f"{EAGLE3_PY}: t2d is skipped", eagle.members_dtype),
    Rule("taps", ("eagle3",), SILENT, RUNNER_PY, eagle.vllm_taps),
    Rule("taps-disagree", ("eagle3",), SILENT, RUNNER_PY, eagle.taps_disagree),
    Rule("target-width", ("eagle3",), REFUSED, EAGLE3_PY, eagle.target_width),
    # Medusa
    Rule(
        "removed",
        ("medusa",),
        REFUSED,
        "vLLM 0.33.0 has no Medusa",
        never("vLLM has no Medusa from 0.33.0 on: serve it with 0.32 or older"),
        since="0.33",
    ),
    Rule("missing-tensor", ("medusa",), REFUSED, LOADER_PY, medusa.lacking),
    Rule("unknown-tensor", ("medusa",), SILENT, MEDUSA_PY, medusa.strangers),
    Rule("dropped-bias", ("medusa",), SILENT, MEDUSA_PY, medusa.biases),
    Rule("shared-projection", ("medusa",), SILENT, MEDUSA_PY, medusa.projections),
    Rule("shapes", ("medusa",), REFUSED, MEDUSA_PY, medusa.wrong_shapes),
    Rule("sizes", ("medusa",), REFUSED, f"{MEDUSA_CONFIG}: 4096 unless said", medusa.sizes),
    Rule("truncated-vocabulary", ("medusa",), REFUSED, MEDUSA_PY, medusa.truncated),
    Rule("renamed-settings", ("medusa",), SILENT, MEDUSA_CONFIG, medusa.renamed),
    Rule("vocabulary", ("medusa",), REFUSED, MEDUSA_PY, medusa.vocabulary),
    Rule("old-names", ("medusa",), REFUSED, f"{MEDUSA_PY}: _remap_old_checkpoint_key", medusa.numbered, before="0.32"),
    # causal
    *causal.RULES,
    Rule("missing-tensor", ("causal",), REFUSED, LOADER_PY, causal.lacking),
    Rule("shapes", ("causal",), REFUSED, LOADER_PY, causal.wrong_shapes),
    Rule("tied", ("causal",), SILENT, LLAMA_PY, causal.untied),
    Rule("tokenizer", ("causal",), SILENT, f"{SPECULATIVE}: sizes are compared, tokens are not", causal.tokens),
)  # fmt: skip
