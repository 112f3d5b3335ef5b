"""llama.cpp. Its rules are from the source of 0.6.0-dev (November 2026) and were run there (llamacpp_parity.py).

HEADS is how a family of heads is written as GGUF: gguf_heads.py writes what it lists, and HEAD_RULES refuse what it
does not. llama.cpp itself reports few mistakes: most wrong files load and get fewer tokens accepted.
"""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from decode.checkpoints.eagle_layouts import NORM_FLAGS
from decode.checkpoints.layouts import VOCAB_MAPS
from decode.model.formats.gguf_architectures import HEAD_NORMS, LAYER
from decode.serving import checks
from decode.serving.engine import Served, ServedDraft, ServingEngine, shell_script
from decode.serving.rules import IGNORED, REFUSED, SILENT, DraftFiles, Rule

EAGLE3_CPP = "src/models/eagle3.cpp"
DFLASH_CPP = "src/models/dflash.cpp"
GRAPH_CPP = "src/llama-graph.cpp (t_layer_inp)"
LOADER_CPP = "src/llama-model-loader.cpp"
SPECULATIVE_CPP = "common/speculative.cpp"

EAGLE3, DFLASH = ("eagle3",), ("dflash", "dspark")

LAYER_TENSORS, HEAD_NORM_TENSORS = (
    {f"layers.N.{ours}.weight": f"blk.N.{stored}.weight" for stored, ours in names.items()}
    for names in (LAYER, HEAD_NORMS)
)
SHARED_TENSORS = {
    "fc.weight": "fc.weight",
    "norm.weight": "output_norm.weight",
    "embed_tokens.weight": "token_embd.weight",  # where there is none, the target's
    "lm_head.weight": "output.weight",  # the same
}
EAGLE3_TENSORS = {
    **SHARED_TENSORS,
    **LAYER_TENSORS,
    "input_norm.weight": "enc.output_norm.weight",
    "layers.N.hidden_norm.weight": "blk.N.attn_norm_2.weight",
}
DFLASH_TENSORS = {
    **SHARED_TENSORS,
    **LAYER_TENSORS,
    **HEAD_NORM_TENSORS,
    "hidden_norm.weight": "enc.output_norm.weight",
}
DSPARK_TENSORS = {
    **DFLASH_TENSORS,
    "markov_head.markov_w1.weight": "markov_w1.weight",
    "markov_head.markov_w2.weight": "markov_w2.weight",
    "confidence_head.proj.weight": "conf_proj.weight",
    "confidence_head.proj.bias": "conf_proj.bias",
}


@dataclass(frozen=True)
class HeadFormat:
    """How the heads of a family are written as GGUF. `d2t` and `rope_freqs.weight` are computed, not copied."""

    architecture: str  # `general.architecture`, with which the names of keys begin
    tensors: Mapping[str, str]  # GGUF's name for each of our tensors; N is a layer's number
    norm_flags: tuple[str, ...] = ()  # the norm flags of config.json that are keys
    alternates: bool = False
    """In the rows of queries and keys the two halves of a rotation alternate."""


HEADS = {
    "eagle3": HeadFormat(
        "eagle3",
        EAGLE3_TENSORS,
        norm_flags=("norm_before_residual", "norm_before_fc"),
        alternates=True,
    ),
    "dflash": HeadFormat("dflash", DFLASH_TENSORS),
    "dspark": HeadFormat("dflash", DSPARK_TENSORS),
}
"""By family. A file of DSpark is known by its `markov_w1.weight`."""

STATE_TARGETS = (
    *("llama", "mistral", "mixtral"),  # one graph
    *("qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen4_exp"),
    *("gpt_oss", "gemma4", "deepseek_v4", "minimax", "minimax_m2", "mimo_v2_flash"),
    *("nemotron_h", "lfm2", "lfm2_moe", "nanbeige", "hunyuan_vl", "bailing_hybrid"),
    "muse_glimmer",
)
"""model_type, without `_text`, of the targets whose graphs hand out hidden states."""
ROPE_TYPES = ("default", "linear", "llama3")  # types of RoPE that are frequencies alone


def gguf_name(family: str, name: str) -> str | None:
    """GGUF's name for a tensor of these heads; None if their GGUF has no such tensor."""
    layer = re.match(r"layers\.(\d+)\.", name)
    general = name if layer is None else name.replace(layer[0], "layers.N.", 1)
    stored = HEADS[family].tensors.get(general)
    return stored if stored is None or layer is None else stored.replace(".N.", f".{layer[1]}.")


def no_hidden_states(d: DraftFiles) -> Iterator[str]:
    """A target whose graph does not hand out the states that heads read."""
    if d.target is None:
        return
    kind = str(d.target.config.get("model_type"))
    if kind.removesuffix("_text") not in STATE_TARGETS:
        yield (
            f"llama.cpp hands out no hidden states of targets of type {kind}: llama-server starts and aborts at its "
            "first request"
        )


def unwritten_tensors(d: DraftFiles) -> Iterator[str]:
    """Tensors that a GGUF of these heads does not have, biases among them."""
    for name in sorted(set(d.tensors) - set(VOCAB_MAPS)):
        own = name.removeprefix("model.")
        known = gguf_name(d.family, own) or "rotary_emb." in own or own.startswith("verifier_")
        if not known:
            yield f"llama.cpp's {d.family} has no tensor for {d.name_in_file[name]}"


def unwritten_norms(d: DraftFiles) -> Iterator[str]:
    """Norm flags that llama.cpp's graph does not know, and its own converter drops."""
    for flag in NORM_FLAGS:
        if checks.norm_flag(d, flag) and flag not in HEADS[d.family].norm_flags:
            yield f"llama.cpp's {d.family} has no {flag}: it would compute as if that were false"


def wrong_state_count(d: DraftFiles) -> Iterator[str]:
    fc, width = d.tensors.get("fc.weight"), d.get("target_hidden_size", d.get("hidden_size"))
    if fc is not None and width and fc.shape[1] != 3 * width:
        yield f"fc reads {fc.shape[1] // width} hidden states of the target, and llama.cpp gives it exactly 3"


def wrong_activation(d: DraftFiles) -> Iterator[str]:
    name = d.get("hidden_act", d.get("hidden_activation", "silu"))
    if name not in ("silu", "swish"):
        yield f"its activation is {name}: llama.cpp computes silu, and gelu from a table of its own"


def unwritten_rope(d: DraftFiles) -> Iterator[str]:
    rope = {**(d.get("rope_scaling") or {}), **(d.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_TYPES:
        yield f"its RoPE is of type {kind}: only {', '.join(ROPE_TYPES)} are written"


def sliding_window(d: DraftFiles) -> Iterator[str]:
    """A window: the graph of EAGLE-3 has none, and files that we write for blocks set none."""
    if d.get("sliding_window") and d.get("use_sliding_window", True):
        yield f"sliding_window is {d.get('sliding_window')}: it is written with full attention alone"


HEAD_RULES = (
    Rule("target-states", tuple(HEADS), REFUSED, GRAPH_CPP, no_hidden_states),
    Rule("unwritten-norm", EAGLE3, SILENT, EAGLE3_CPP, unwritten_norms),
    Rule("layers", EAGLE3, REFUSED, EAGLE3_CPP, checks.wrong_layer_count),
    Rule("states", EAGLE3, REFUSED, EAGLE3_CPP, wrong_state_count),
    Rule("anchor", ("dflash",), SILENT, f"{DFLASH_CPP}: DSpark alone", checks.wrong_anchor),
    Rule("unknown-tensor", tuple(HEADS), REFUSED, LOADER_CPP, unwritten_tensors),
    Rule("activation", tuple(HEADS), SILENT, f"{EAGLE3_CPP}, {DFLASH_CPP}", wrong_activation),
    Rule("rope-type", tuple(HEADS), SILENT, "this project's exporter", unwritten_rope),
    Rule("window", tuple(HEADS), SILENT, f"{EAGLE3_CPP}, {DFLASH_CPP}", sliding_window),
    Rule("eagle1", ("eagle1",), REFUSED, SPECULATIVE_CPP, checks.unsupported("llama.cpp has no EAGLE-1")),
    Rule("peagle", ("peagle",), REFUSED, EAGLE3_CPP, checks.unsupported(
        "llama.cpp has no P-EAGLE: its eagle3 drafts one token a pass, without mask_hidden"
    )),
    Rule("medusa", ("medusa",), REFUSED, SPECULATIVE_CPP, checks.unsupported("llama.cpp has no Medusa")),
    Rule("parallel", ("pard",), REFUSED, SPECULATIVE_CPP, checks.unsupported(
        "llama.cpp has no parallel drafting with a language model: it would run this one token by token, without masks"
    )),
    Rule("mtp", ("mtp",), REFUSED, SPECULATIVE_CPP, checks.unsupported(
        "an MTP layer is no head of its own in llama.cpp but part of its target's GGUF: convert the target with "
        "llama.cpp's convert_hf_to_gguf.py"
    )),
)  # fmt: skip
"""What no GGUF that is written here can say, or what no llama-server runs."""

RULES = (
    Rule("dtype", ("causal", *HEADS), IGNORED, "this project's exporter: --dtype", checks.dtype_mismatch),
    Rule("vocabulary", ("causal", *HEADS), REFUSED, f"{EAGLE3_CPP}, {DFLASH_CPP}", checks.vocab_size_mismatch),
    Rule("context", ("causal", *HEADS), SILENT, SPECULATIVE_CPP, checks.context_at_least_targets(
        "it drafts on beyond it, and few tokens are accepted there"
    )),
    *HEAD_RULES,
    Rule("shapes", EAGLE3, REFUSED, LOADER_CPP, checks.wrong_shapes),
    Rule("missing-tensor", EAGLE3, REFUSED, LOADER_CPP, checks.missing_tensors),
    Rule("norm-flags", EAGLE3, SILENT, EAGLE3_CPP, checks.changed_norm_flags),
    Rule("rope", EAGLE3, SILENT, EAGLE3_CPP, checks.rope_mismatch),
    Rule("bias-flags", EAGLE3, SILENT, EAGLE3_CPP, checks.unfilled_bias_flags),
    Rule("taps-disagree", EAGLE3, SILENT, "the files themselves", checks.conflicting_aux_layers),
    Rule("target-width", EAGLE3, REFUSED, EAGLE3_CPP, checks.target_width_mismatch),
    Rule("map-missing", EAGLE3, REFUSED, LOADER_CPP, checks.map_missing),
    Rule("map-superfluous", EAGLE3, REFUSED, LOADER_CPP, checks.unneeded_map),
    Rule("map", tuple(HEADS), SILENT, f"{EAGLE3_CPP}: set_rows by d2t", checks.map_wrong),
    Rule("map-dtype", tuple(HEADS), SILENT, f"{EAGLE3_CPP}: set_rows by d2t", checks.map_dtype),
    Rule("shapes", DFLASH, REFUSED, LOADER_CPP, checks.wrong_shapes),
    Rule("missing-tensor", DFLASH, REFUSED, LOADER_CPP, checks.missing_tensors),
    Rule("mask-token", DFLASH, SILENT, SPECULATIVE_CPP, checks.no_mask_token),
    Rule("causality", DFLASH, SILENT, DFLASH_CPP, checks.causal_blocks),
    Rule("taps", DFLASH, SILENT, SPECULATIVE_CPP, checks.wrong_block_layers),
    *checks.CAUSAL_RULES,
    Rule("missing-tensor", ("causal",), REFUSED, LOADER_CPP, checks.missing_tensors),
    Rule("shapes", ("causal",), REFUSED, LOADER_CPP, checks.wrong_shapes),
    Rule("tokenizer", ("causal",), REFUSED, (
        f"{SPECULATIVE_CPP}: draft-simple compares tokens; until the middle of 2026 it translated texts"
    ), checks.wrong_tokenizer),
)  # fmt: skip


# ---- how it is started ----


def serving_files(d: ServedDraft) -> dict[str, str]:
    """Commands that write draft and target as GGUF files, and one of llama-server."""
    served, export = LLAMACPP.methods[d.family], ["python", "scripts/export.py"]
    conversions = [
        [*export, d.repo, "--format", "gguf", "--target", d.target, "--out", "gguf/draft"],
        [*export, d.target, "--format", "gguf", "--dtype", "bfloat16", "--out", "gguf/target"],
    ]
    words = ["llama-server", "-m", "gguf/target/model.gguf", "-md", "gguf/draft/model.gguf"]
    words += ["--spec-type", served.method, "--spec-draft-n-max", str(d.k)]
    if d.template:
        words += ["--jinja", "--chat-template-kwargs", json.dumps(d.template)]
    lines = ["# once, in a checkout of draftsmith", *map(shlex.join, conversions), ""]
    return {"llamacpp.sh": "\n".join(lines) + shell_script([*words, *served.options], d.revision)}


HEADS_FOR = (
    "of November 2026, for targets whose hidden states it hands out: Llama, Qwen 3 and gpt-oss are among them, Qwen 2 "
    "is not"
)
LLAMACPP = ServingEngine(
    "llama.cpp",
    version="0.6.0",
    versions="of November 2026",
    methods={  # --spec-type, for drafts that scripts/export.py writes as GGUF
        "causal": Served("draft-simple"),
        # With sampling on the backend, requests at the same time get few tokens accepted.
        "eagle3": Served("draft-eagle3", {"--no-spec-draft-backend-sampling": True}, HEADS_FOR),
        "dflash": Served("draft-dflash", versions=HEADS_FOR),
        "dspark": Served("draft-dspark", versions=HEADS_FOR),
    },
    rules=RULES,
    files=serving_files,
    note="{versions}. scripts/export.py, from a checkout of draftsmith, writes GGUF files of drafts, and of Llama and "
    "Qwen 2 targets; a GGUF of the target from elsewhere will do if its tokenizer is the same",
)
