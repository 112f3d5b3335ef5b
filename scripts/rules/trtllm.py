"""What TensorRT-LLM wants of drafts, by the source of its PyTorch backend. Not run here."""

from collections.abc import Iterator

from scripts.rules import causal, eagle, medusa
from scripts.rules.draft import (
    ALL,
    COMMON,
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

NEWEST = "1.2"
SOURCE = "tensorrt_llm/_torch/models/modeling_speculative.py at 00679c6 (2026)"
DRAFT = "tensorrt_llm: DraftTargetDecodingConfig"


def residual(d: Draft) -> Iterator[str]:
    if eagle.flag(d, "norm_before_residual"):
        yield "norm_before_residual is not known: the residual is taken before the norm"


def fused_norm(d: Draft) -> Iterator[str]:
    """Read from eagle_config alone."""
    if d.get("norm_before_fc", False) and not (d.get("eagle_config") or {}).get("norm_before_fc"):
        yield "norm_before_fc is ignored outside eagle_config"


def nested(d: Draft) -> Iterator[str]:
    if d.nested:
        yield "the nested config of speculators is not read: export it with --format flat"


def captured(d: Draft) -> Iterator[str]:
    """Layers to capture are an option of the server, not of the checkpoint."""
    if d.target is None:
        return
    count = d.target.config["num_hidden_layers"]
    wanted = eagle.intended(d)
    if wanted is not None and wanted != eagle.default(count):
        yield f"taps are not the default ones: pass eagle3_layers_to_capture {[i - 1 for i in wanted]}"


EAGLE3 = ("eagle3",)
RULES = (
    *COMMON,
    Rule("dtype", ALL, SILENT, f"{SOURCE}: torch_dtype makes the modules", other_dtype),
    Rule("vocabulary", ("causal", "eagle3"), REFUSED, SOURCE, no_vocabulary),
    Rule("eagle1", ("eagle1",), REFUSED, SOURCE, never("the PyTorch backend has no EAGLE-1 of a Llama layer")),
    Rule("nested-config", EAGLE3, REFUSED, SOURCE, nested),
    Rule("settings", EAGLE3, REFUSED, SOURCE, present("attention_bias", "torch_dtype", "num_hidden_layers")),
    Rule("norm-before-residual", EAGLE3, SILENT, SOURCE, residual),
    Rule("norm-before-fc", EAGLE3, SILENT, SOURCE, fused_norm),
    Rule("norm-flags", EAGLE3, SILENT, SOURCE, eagle.flags_changed),
    Rule("shapes", EAGLE3, REFUSED, SOURCE, eagle.wrong_shapes),
    Rule("missing-tensor", EAGLE3, SILENT, SOURCE, eagle.lacking),
    Rule("unknown-tensor", EAGLE3, SILENT, SOURCE, eagle.strangers),
    Rule("dropped-bias", EAGLE3, SILENT, SOURCE, eagle.biases),
    Rule("bias-flags", EAGLE3, SILENT, SOURCE, eagle.bias_said),
    Rule("activation", EAGLE3, SILENT, SOURCE, config_says("hidden_act", "silu")),
    Rule("layers", EAGLE3, SILENT, SOURCE, eagle.layers),
    Rule("rope", EAGLE3, SILENT, SOURCE, eagle.rope),
    Rule("rope-keys", EAGLE3, SILENT, f"{SOURCE}: RopeParams.from_config", present("rope_theta")),
    Rule("draft-vocabulary", EAGLE3, SILENT, f"{SOURCE}: _ensure_draft_vocab_size", present("draft_vocab_size")),
    Rule("map-missing", EAGLE3, SILENT, SOURCE, eagle.map_missing),
    Rule("map", EAGLE3, SILENT, SOURCE, eagle.map_wrong),
    Rule("map-dtype", EAGLE3, SILENT, SOURCE, eagle.map_dtype),
    Rule("taps", EAGLE3, SILENT, "eagle3_layers_to_capture of the server", captured),
    Rule("taps-disagree", EAGLE3, SILENT, SOURCE, eagle.taps_disagree),
    Rule("target-width", EAGLE3, REFUSED, SOURCE, eagle.target_width),
    Rule("layout", ("medusa",), REFUSED, "TensorRT-LLM examples/medusa, from notes", medusa.not_numbered),
    *causal.RULES,
    Rule("missing-tensor", ("causal",), SILENT, DRAFT, causal.lacking),
    Rule("shapes", ("causal",), REFUSED, DRAFT, causal.wrong_shapes),
    Rule("tied", ("causal",), SILENT, DRAFT, causal.untied),
    Rule("tokenizer", ("causal",), SILENT, f"{DRAFT}: tokens are not compared", causal.tokens),
)  # fmt: skip
