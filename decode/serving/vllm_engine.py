"""vLLM. Its rules are from the source of 0.32.0 and were run there (docs/results/served_damage.json), those of 0.33.0
from notes.

Its EAGLE loaders do not report missing tensors, refuse unknown ones and skip unknown biases; the Medusa loader does the
reverse.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from decode.serving import checks
from decode.serving.engine import Served, ServedDraft, ServingEngine, shell_script
from decode.serving.rules import ALL_FAMILIES, IGNORED, REFUSED, SILENT, DraftFiles, Rule

EAGLE3_PY = "vllm/model_executor/models/llama_eagle3.py, 0.32.0"
EAGLE1_PY = "vllm/model_executor/models/llama_eagle.py, 0.32.0"
LLAMA_PY = "vllm/model_executor/models/llama.py, 0.32.0"
MEDUSA_PY = "vllm/model_executor/models/medusa.py, 0.32.0"
EAGLE_CONFIG_PY = "vllm/transformers_utils/configs/eagle.py, 0.32.0"
MEDUSA_CONFIG_PY = "vllm/transformers_utils/configs/medusa.py, 0.32.0"
SPECULATORS_PY = "vllm/transformers_utils/configs/speculators/, 0.32.0"
RUNNER_PY = "vllm/v1/worker/gpu_model_runner.py (_get_eagle3_aux_layers_from_config), 0.32.0"
SPECULATIVE = "vllm/config/speculative.py, 0.32.0"
WEIGHTS_PY = "vllm/model_executor/models/utils.py (AutoWeightsLoader), 0.32.0"
LOADER_PY = "vllm/model_executor/model_loader/default_loader.py (track_weights_loading), 0.32.0"

CONTEXT_PY = "vllm/v1/worker/gpu_model_runner.py (effective_drafter_max_model_len)"
DFLASH_PY = "vllm/model_executor/models/qwen3_dflash.py, 0.32.0"
DSPARK_PY = "vllm/model_executor/models/qwen3_dspark.py, 0.32.0"
ALGOS_PY = "vllm/transformers_utils/configs/speculators/algos.py, 0.32.0"
RUNNERS_PY = "vllm/config/vllm.py, 0.32.0"
PROPOSER_PY = "vllm/v1/spec_decode/llm_base_proposer.py, 0.32.0"
MTP_PY = "vllm/model_executor/models/deepseek_mtp.py and glm4_moe_mtp.py, 0.32.0"

LMS = ("causal", "pard")
EAGLES = ("eagle1", "eagle3", "peagle")
EAGLE3 = ("eagle3", "peagle")
DFLASH = ("dflash", "dspark")
ARCHITECTURES = {
    "eagle1": ("EagleLlamaForCausalLM",),
    **dict.fromkeys(
        EAGLE3,
        (
            "Eagle3LlamaForCausalLM",
            "LlamaForCausalLMEagle3",
            "Eagle3Qwen2_5vlForCausalLM",
            "Eagle3Qwen3vlForCausalLM",
        ),
    ),
}
"""Names in vLLM's model registry whose class has the Llama layer of these heads."""
DFLASH_ARCHITECTURES = {
    "dflash": ("DFlashDraftModel",),
    "dflash2": ("DFlash2DraftModel",),
    "dspark": ("DSparkDraftModel", "Qwen3DSparkModel"),
}


def wrong_architecture(d: DraftFiles) -> Iterator[str]:
    """The registry name that vLLM derives from `architectures` when the method is given."""
    if d.is_speculators_format:
        return  # the type of its layer decides
    names = [str(name) for name in d.get("architectures", [])]
    if d.family in EAGLE3:
        derived = [n if "Eagle3" in (n[:6], n[-6:]) else f"Eagle3{n}" for n in names]
    else:
        derived = [n if n.startswith("Eagle") else f"Eagle{n}" for n in names]
    if not set(derived) & set(ARCHITECTURES[d.family]):
        yield f"architectures {names} become {derived}: none is registered for these heads"


def wrong_dflash_architecture(d: DraftFiles) -> Iterator[str]:
    """`architectures` and `model_type` by which the class of DFlash or its kin is found."""
    if d.is_speculators_format:
        return
    wanted = DFLASH_ARCHITECTURES[d.family]
    names = d.get("architectures", [])
    if not set(names) & set(wanted):
        yield f"architectures {names} do not contain {' or '.join(wanted)}"
    if d.get("model_type") != "qwen3":
        yield f"model_type is {d.get('model_type')}: the layers are Qwen3's"


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


def unknown_tensors(d: DraftFiles) -> Iterator[str]:
    return (w for w in checks.unknown_tensors(d) if not w.startswith("input_norm"))


def implicit_draft_vocab_size(d: DraftFiles) -> Iterator[str]:
    rows, named = len(d.tensors.get("lm_head.weight", ())), d.config.get("draft_vocab_size")
    if named is None and rows not in (0, d.get("vocab_size")):
        yield f"draft_vocab_size is not set: the engine takes vocab_size, and lm_head has {rows} rows"


def aux_layers(d: DraftFiles, count: int) -> tuple[int, ...]:
    """The layers that vLLM reads: its own key, else SGLang's key without an offset, else the default."""
    top, outputs = checks.named_layers(d)
    return tuple(sorted(set(top or outputs or ()))) or checks.default_aux_layers(count)


def wrong_aux_layers(d: DraftFiles) -> Iterator[str]:
    if d.target_layers is not None:
        yield from checks.wrong_aux_layers(d, aux_layers(d, d.target_layers))


MTP_MODEL_TYPES = ("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa")
"""Targets for which vLLM reads MTP layers in DeepSeek's layout."""


def unknown_mtp_target(d: DraftFiles) -> Iterator[str]:
    if d.get("model_type") not in MTP_MODEL_TYPES:
        known = ", ".join(MTP_MODEL_TYPES)
        yield f"model_type is {d.get('model_type')}: MTP layers in DeepSeek's layout are read for {known}"


def missing_mtp_tensors(d: DraftFiles) -> Iterator[str]:
    """The layer's own tensors, at the number behind the target's last layer."""
    number = d.get("num_hidden_layers", 0)
    names = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight")
    yield from checks.require_tensors(d, [f"model.layers.{number}.{name}" for name in names])
    if not d.get("num_nextn_predict_layers", 0):
        yield "num_nextn_predict_layers is not set: the engine looks for no such layer"


# ---- Medusa ----


def dropped_medusa_biases(d: DraftFiles) -> Iterator[str]:
    dropped = sum(name.endswith(".bias") for name in d.tensors)
    if dropped and not d.get("medusa_fc_bias", False):
        yield f"medusa_fc_bias is not true: {dropped} biases are dropped"


def dropped_projections(d: DraftFiles) -> Iterator[str]:
    projections = sum(name.startswith("lm_heads.") for name in d.tensors)
    if d.get("original_lm_head", False) and projections > 1:
        yield f"original_lm_head is true: of {projections} projections one is used for all heads"


def hidden_size_mismatch(d: DraftFiles) -> Iterator[str]:
    """hidden_size that is absent, which vLLM takes for 4096, or is not the target's."""
    if "hidden_size" not in d.config:
        yield "hidden_size is not set: the engine takes 4096"
    if d.target is not None and d.get("hidden_size", 4096) != d.target.config["hidden_size"]:
        yield f"hidden_size is {d.get('hidden_size', 4096)} and the target's {d.target.config['hidden_size']}"


def missing_token_map(d: DraftFiles) -> Iterator[str]:
    size, vocab = d.config.get("truncated_vocab_size"), d.get("vocab_size")
    if size is not None and size != vocab and "token_map" not in d.tensors:
        yield f"truncated_vocab_size is {size} of {vocab} and there is no token_map"


def ambiguous_keys(d: DraftFiles) -> Iterator[str]:
    """vLLM takes any key with num and heads, or num and layers, for the count, and the last one wins."""
    for kind, known in (("heads", "num_heads"), ("layers", "num_hidden_layers")):
        keys = [key for key in d.raw_config if "num" in key and kind in key]
        values = {d.raw_config[key] for key in keys}
        if len(values) > 1:
            yield f"{', '.join(keys)} all become {known}, and they differ"


def vocab_rows_mismatch(d: DraftFiles) -> Iterator[str]:
    """Rows of the projections against the target's vocabulary size, which vLLM uses as vocab_size."""
    if d.target is None:
        return
    vocab = d.target.config["vocab_size"]
    for name, value in d.tensors.items():
        if "lm_head" in name and len(value) != vocab:
            yield f"{d.name_in_file[name]} has {len(value)} rows and the target's vocabulary {vocab}"


NUMBERED = re.compile(r"(medusa_heads?\.)?\d+\.\d+\.")
"""How names of tensors begin in the layout of FasterDecoding."""

RULES = (
    Rule("dtype", ALL_FAMILIES, IGNORED, f"{SPECULATIVE}: the draft gets the target's dtype", checks.dtype_mismatch),
    Rule("vocabulary", (*LMS, *EAGLES, *DFLASH, "dflash2"), REFUSED, SPECULATIVE, checks.vocab_size_mismatch),
    Rule("context", (*LMS, *EAGLES, *DFLASH), SILENT, CONTEXT_PY, checks.context_at_least_targets(
        "nothing is drafted for a whole batch in which one text has come within K tokens of it"
    )),
    # EAGLE
    Rule("architecture", EAGLES, REFUSED, EAGLE_CONFIG_PY, wrong_architecture),
    Rule("nested-config", ("eagle3",), REFUSED, SPECULATORS_PY, wrong_nested_config),
    Rule("nested-norm-flag", ("eagle3",), SILENT, SPECULATORS_PY, checks.when(
        lambda d: d.is_speculators_format and "norm_before_residual" not in d.raw_config,
        "norm_before_residual is not set: the default is true here, and false in a flat config",
    )),
    Rule("shapes", EAGLES, REFUSED, EAGLE3_PY, checks.wrong_shapes),
    Rule("missing-tensor", EAGLES, SILENT, f"{EAGLE3_PY}: reports nothing", checks.missing_tensors),
    Rule("unknown-tensor", EAGLES, REFUSED, WEIGHTS_PY, unknown_tensors),
    Rule("skipped-tensor", EAGLE3, SILENT, EAGLE3_PY, checks.when(
        lambda d: "input_norm.weight" in d.tensors and not checks.norm_flag(d, "norm_before_fc"),
        "input_norm.weight is skipped: norm_before_fc is not true",
    )),
    Rule("dropped-bias", EAGLES, SILENT, WEIGHTS_PY, checks.dropped_biases),
    Rule("bias-flags", EAGLES, SILENT, LLAMA_PY, checks.unfilled_bias_flags),
    Rule("activation", EAGLES, REFUSED, LLAMA_PY, checks.require_value("hidden_act", "silu")),
    Rule("layers", EAGLES, SILENT, EAGLE3_PY, checks.wrong_layer_count),
    Rule("rope", EAGLES, SILENT, f"{LLAMA_PY}: rope_parameters", checks.rope_mismatch),
    Rule("norm-flags", EAGLE3, SILENT, EAGLE3_PY, checks.changed_norm_flags),
    Rule("draft-vocabulary", EAGLE3, REFUSED, EAGLE3_PY, implicit_draft_vocab_size),
    Rule("map-missing", EAGLE3, SILENT, EAGLE3_PY, checks.map_missing),
    Rule("map-superfluous", EAGLE3, REFUSED, EAGLE3_PY, checks.unneeded_map),
    Rule("map", EAGLE3, SILENT, EAGLE3_PY, checks.map_wrong),
    Rule("map-dtype", EAGLE3, SILENT, EAGLE3_PY, checks.map_dtype),
    Rule("members-dtype", EAGLE3, IGNORED, f"{EAGLE3_PY}: t2d is skipped", checks.t2d_dtype),
    Rule("taps", EAGLE3, SILENT, RUNNER_PY, wrong_aux_layers),
    Rule("taps-disagree", EAGLE3, SILENT, RUNNER_PY, checks.conflicting_aux_layers),
    Rule("target-width", EAGLE3, REFUSED, EAGLE3_PY, checks.target_width_mismatch),
    # blocks
    Rule("mask-token", ("pard", "peagle", *DFLASH, "dflash2"), REFUSED, PROPOSER_PY, checks.no_mask_token),
    Rule("mask-state", ("peagle",), REFUSED, EAGLE3_PY, lambda d: checks.require_tensors(d, ["mask_hidden"])),
    Rule("architecture", (*DFLASH, "dflash2"), REFUSED, SPECULATIVE, wrong_dflash_architecture),
    Rule("runner", ("dflash2",), IGNORED, RUNNERS_PY, checks.unsupported(
        "method dflash serves it in the runner V2 alone, which needs Triton: on a CPU it is refused"
    )),
    Rule("unserved", ("domino",), REFUSED, "issue 46707 (open) and pull request 47627 (closed)", checks.unsupported(
        "vLLM has no Domino: it takes neither the tensors of the correction nor DominoDraftModel"
    )),
    Rule("shapes", DFLASH, REFUSED, DFLASH_PY, checks.wrong_shapes),
    Rule("missing-tensor", DFLASH, SILENT, f"{DFLASH_PY}: reports nothing", checks.missing_tensors),
    Rule("unknown-tensor", DFLASH, REFUSED, WEIGHTS_PY, checks.unknown_tensors),
    Rule("nested-causality", DFLASH, SILENT, ALGOS_PY, checks.when(
        lambda d: d.is_speculators_format and not d.get("sliding_window_non_causal", False)
        and set(d.get("layer_types") or ["full_attention"]) != {"sliding_attention"},
        "sliding_window_non_causal is not true: every layer becomes causal, and those with full attention were trained "
        "both ways",
    )),
    Rule("causality", DFLASH, SILENT, DFLASH_PY, checks.causal_blocks),
    Rule("anchor", ("dflash",), SILENT, "vllm/v1/spec_decode/dflash.py, 0.32.0", checks.wrong_anchor),
    Rule("taps", DFLASH, SILENT, RUNNER_PY, checks.wrong_block_layers),
    Rule("map", DFLASH, SILENT, DFLASH_PY, checks.map_wrong),
    Rule("map-dtype", DFLASH, SILENT, DFLASH_PY, checks.map_dtype),
    Rule("corrector", ("dspark",), REFUSED, DSPARK_PY, checks.require_value("markov_head_type", "vanilla", "vanilla")),
    Rule("corrector-size", ("dspark",), REFUSED, DSPARK_PY, checks.require_keys("markov_rank")),
    # MTP layers
    Rule("mtp-target", ("mtp",), REFUSED, SPECULATIVE, unknown_mtp_target),
    Rule("missing-tensor", ("mtp",), SILENT, MTP_PY, missing_mtp_tensors),
    # Medusa
    Rule("removed", ("medusa",), REFUSED, "vLLM 0.33.0 has no Medusa", checks.unsupported(
        "vLLM has no Medusa from 0.33.0 on: serve it with 0.32 or older"
    ), since="0.33"),
    Rule("missing-tensor", ("medusa",), REFUSED, LOADER_PY, checks.missing_medusa_tensors),
    Rule("unknown-tensor", ("medusa",), SILENT, MEDUSA_PY, checks.unknown_medusa_tensors),
    Rule("dropped-bias", ("medusa",), SILENT, MEDUSA_PY, dropped_medusa_biases),
    Rule("shared-projection", ("medusa",), SILENT, MEDUSA_PY, dropped_projections),
    Rule("shapes", ("medusa",), REFUSED, MEDUSA_PY, checks.wrong_shapes),
    Rule("sizes", ("medusa",), REFUSED, f"{MEDUSA_CONFIG_PY}: 4096 by default", hidden_size_mismatch),
    Rule("truncated-vocabulary", ("medusa",), REFUSED, MEDUSA_PY, missing_token_map),
    Rule("renamed-settings", ("medusa",), SILENT, MEDUSA_CONFIG_PY, ambiguous_keys),
    Rule("vocabulary", ("medusa",), REFUSED, MEDUSA_PY, vocab_rows_mismatch),
    Rule("old-names", ("medusa",), REFUSED, f"{MEDUSA_PY}: old keys", checks.when(
        lambda d: any(map(NUMBERED.match, d.name_in_file.values())),
        "tensors are numbered: export it with --format flat",
    ), before="0.32"),
    # causal
    *(replace(rule, families=LMS) for rule in checks.CAUSAL_RULES),
    Rule("missing-tensor", LMS, REFUSED, LOADER_PY, checks.missing_tensors),
    Rule("shapes", LMS, REFUSED, LOADER_PY, checks.wrong_shapes),
    Rule("tied", LMS, SILENT, LLAMA_PY, checks.dropped_lm_head),
    Rule("tokenizer", LMS, SILENT, (
        f"{SPECULATIVE}: only sizes are compared; use_heterogeneous_vocab (PR 38174) drafts shared tokens, greedily"
    ), checks.wrong_tokenizer),
)  # fmt: skip


# ---- how it is started ----


def speculative_config(family: str, draft: str, k: int) -> dict[str, Any]:
    """--speculative-config for a draft of this family, which has a method here."""
    served = VLLM.methods[family]
    return {"model": draft, "method": served.method, "num_speculative_tokens": k, **served.options}


def serving_files(d: ServedDraft) -> dict[str, str]:
    """A `vllm serve` command."""
    revision = ["--revision", d.revision] if d.revision else []
    words = ["vllm", "serve", d.target, *revision]
    words += ["--speculative-config", json.dumps(speculative_config(d.family, d.repo, d.k))]
    if d.template:
        words += ["--default-chat-template-kwargs", json.dumps(d.template)]
    return {"vllm.sh": shell_script(words)}


def triton_files(d: ServedDraft) -> dict[str, str]:
    """A model repository for Triton's vLLM backend, which passes model.json to vLLM."""
    name = f"triton/draftsmith_{d.family}"
    model: dict[str, object] = {"model": d.target}
    model |= {"revision": d.revision} if d.revision else {}
    model |= {"speculative_config": speculative_config(d.family, d.repo, d.k)}
    config = 'backend: "vllm"\ninstance_group [\n  {\n    count: 1\n    kind: KIND_MODEL\n  }\n]\n'
    model_json = json.dumps(model, indent=2) + "\n"
    return {f"{name}/config.pbtxt": config, f"{name}/1/model.json": model_json}


V1 = "0.32, in its runner V1"
EAGLE_OPTIONS = {"draft_tensor_parallel_size": 1}
VLLM = ServingEngine(
    "vLLM",
    version="0.32.0",
    versions="0.32 and 0.33",
    methods={  # `method` in speculative_config: from the draft's path it would guess wrongly
        "causal": Served("draft_model"),
        "pard": Served("draft_model", {"parallel_drafting": True}, V1),
        "medusa": Served("medusa", versions="up to 0.32, which was the last with Medusa"),
        "eagle1": Served("eagle", EAGLE_OPTIONS),
        "eagle3": Served("eagle3", EAGLE_OPTIONS),
        "peagle": Served("eagle3", {"parallel_drafting": True, **EAGLE_OPTIONS}, V1),
        "dflash": Served("dflash"),
        "dflash2": Served("dflash", versions="0.32, in its runner V2, which needs Triton"),
        "dspark": Served("dspark"),
        "mtp": Served("mtp"),
    },
    rules=RULES,
    files=serving_files,
)
TRITON = replace(
    VLLM,
    name="Triton",
    files=triton_files,
    note="tritonserver --model-repository serving/triton, with vLLM inside: {versions}",
    no_method="the vLLM inside it has no method for drafts of family {family}",
)
