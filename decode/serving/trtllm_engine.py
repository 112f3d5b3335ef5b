"""TensorRT-LLM. Its rules are from the source of its PyTorch backend; they were not run here."""

import json
from collections.abc import Iterator

from decode.checkpoints import layouts
from decode.serving import checks
from decode.serving.engine import Served, ServedDraft, ServingEngine, shell_script
from decode.serving.rules import COVERED_EVERYWHERE, REFUSED, SILENT, DraftFiles, Rule

SOURCE = "tensorrt_llm/_torch/models/modeling_speculative.py at 00679c6 (2026)"
CONTEXT_PY = "tensorrt_llm/_torch/pyexecutor/model_engine.py (_init_max_seq_len)"
DRAFT_TARGET_SOURCE = "tensorrt_llm: DraftTargetDecodingConfig"


def non_default_aux_layers(d: DraftFiles) -> Iterator[str]:
    wanted = checks.trained_aux_layers(d)
    if wanted and d.target_layers and wanted != checks.default_aux_layers(d.target_layers):
        yield f"the head does not read the default layers: pass eagle3_layers_to_capture {[i - 1 for i in wanted]}"


EAGLE3 = ("eagle3",)
RULES = (
    Rule("dtype", COVERED_EVERYWHERE, SILENT, f"{SOURCE}: torch_dtype is the dtype of the modules",
         checks.dtype_mismatch),
    Rule("vocabulary", ("causal", "eagle3"), REFUSED, SOURCE, checks.vocab_size_mismatch),
    Rule("context", ("causal", "eagle3"), REFUSED, CONTEXT_PY, checks.context_at_least_targets(
        "the server takes the smaller number for both and refuses longer requests"
    )),
    Rule("eagle1", ("eagle1",), REFUSED, SOURCE, checks.unsupported(
        "the PyTorch backend has no EAGLE-1 of a Llama layer"
    )),
    Rule("unserved", ("domino",), REFUSED, "pull request 15720 (closed)", checks.unsupported(
        "TensorRT-LLM has no Domino"
    )),
    Rule("nested-config", EAGLE3, REFUSED, SOURCE, checks.speculators_config),
    Rule("settings", EAGLE3, REFUSED, SOURCE,
         checks.require_keys("attention_bias", "torch_dtype", "num_hidden_layers")),
    Rule("norm-before-residual", EAGLE3, SILENT, SOURCE, checks.norm_before_residual),
    Rule("norm-before-fc", EAGLE3, SILENT, SOURCE, checks.when(
        lambda d: d.get("norm_before_fc", False) and not (d.get("eagle_config") or {}).get("norm_before_fc"),
        "norm_before_fc is ignored outside eagle_config",
    )),
    Rule("norm-flags", EAGLE3, SILENT, SOURCE, checks.changed_norm_flags),
    Rule("unread-norms", EAGLE3, SILENT, SOURCE, checks.when(
        lambda d: checks.norm_flag(d, "fc_norm") or checks.norm_flag(d, "norm_output"),
        "fc_norm and norm_output are not implemented: it computes as if they were false",
    )),
    Rule("shapes", EAGLE3, REFUSED, SOURCE, checks.wrong_shapes),
    Rule("missing-tensor", EAGLE3, SILENT, SOURCE, checks.missing_tensors),
    Rule("unknown-tensor", EAGLE3, SILENT, SOURCE, checks.unknown_tensors),
    Rule("dropped-bias", EAGLE3, SILENT, SOURCE, checks.dropped_biases),
    Rule("bias-flags", EAGLE3, SILENT, SOURCE, checks.unfilled_bias_flags),
    Rule("activation", EAGLE3, SILENT, SOURCE, checks.require_value("hidden_act", "silu")),
    Rule("layers", EAGLE3, SILENT, SOURCE, checks.wrong_layer_count),
    Rule("rope", EAGLE3, SILENT, SOURCE, checks.rope_mismatch),
    Rule("rope-keys", EAGLE3, SILENT, f"{SOURCE}: RopeParams.from_config", checks.require_keys("rope_theta")),
    Rule("draft-vocabulary", EAGLE3, SILENT, f"{SOURCE}: _ensure_draft_vocab_size",
         checks.require_keys("draft_vocab_size")),
    Rule("map-missing", EAGLE3, SILENT, SOURCE, checks.map_missing),
    Rule("map", EAGLE3, SILENT, SOURCE, checks.map_wrong),
    Rule("map-dtype", EAGLE3, SILENT, SOURCE, checks.map_dtype),
    Rule("taps", EAGLE3, SILENT, "eagle3_layers_to_capture of the server", non_default_aux_layers),
    Rule("taps-disagree", EAGLE3, SILENT, SOURCE, checks.conflicting_aux_layers),
    Rule("target-width", EAGLE3, REFUSED, SOURCE, checks.target_width_mismatch),
    Rule("layout", ("medusa",), REFUSED, "TensorRT-LLM examples/medusa, from notes", checks.when(
        lambda d: any(name.startswith("blocks.") for name in d.name_in_file.values()),
        "tensors have vLLM's names: export it with --format medusa-legacy",
    )),
    *checks.CAUSAL_RULES,
    Rule("missing-tensor", ("causal",), SILENT, DRAFT_TARGET_SOURCE, checks.missing_tensors),
    Rule("shapes", ("causal",), REFUSED, DRAFT_TARGET_SOURCE, checks.wrong_shapes),
    Rule("tied", ("causal",), SILENT, DRAFT_TARGET_SOURCE, checks.dropped_lm_head),
    Rule("tokenizer", ("causal",), SILENT, f"{DRAFT_TARGET_SOURCE}: tokens are not compared", checks.wrong_tokenizer),
)  # fmt: skip


def serving_files(d: ServedDraft) -> dict[str, str]:
    """A command and its YAML of options."""
    served = TRTLLM.methods[d.family]
    lines = [f"{key}: {json.dumps(value)}" for key, value in served.options.items()]
    lines += ["speculative_config:", f"  decoding_type: {served.method}"]
    lines += [f"  max_draft_len: {d.k}", f"  speculative_model: {d.repo}"]
    if d.layers:  # it counts layers by their output
        lines.append(f"  eagle3_layers_to_capture: {list(layouts.capture_to_output(d.layers))}")
    words = ["trtllm-serve", d.target, "--backend", "pytorch"]
    words += ["--extra_llm_api_options", "serving/trtllm.yml"]
    return {"trtllm.yml": "\n".join(lines) + "\n", "trtllm.sh": shell_script(words, d.revision)}


TRTLLM = ServingEngine(
    "TensorRT-LLM",
    version="1.2",
    versions="1.x, PyTorch backend",
    methods={  # `decoding_type`; options are those of the whole file
        "causal": Served("DraftTarget", {"disable_overlap_scheduler": True}),
        "eagle3": Served("Eagle3"),
    },
    rules=RULES,
    files=serving_files,
    no_method="its PyTorch backend has no method for drafts of family {family}",
    captures_embedding=False,
)
