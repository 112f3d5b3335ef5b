"""A draft's files in the layouts of other engines and trainers, or in ours.

The layouts, and which of them copy tensors bit for bit, are listed in scripts/export.py.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from decode.checkpoints import draft_vocab, eagle_layouts, importers, layouts
from decode.checkpoints.draft_folder import (
    check_vocabulary,
    draft_sha256,
    read_metadata,
    write_metadata,
)
from decode.checkpoints.importers import DraftCheckpoint, Tensors
from decode.common.errors import UserError
from decode.common.ranges import FloatName
from decode.common.run_dir import check_folder, replace_folder
from decode.common.target_record import TargetRecord
from decode.drafts.causal import load_ids
from decode.drafts.registry import draft_family
from decode.model import loading
from decode.model.formats.gguf_files import gguf_folder
from decode.model.formats.made_folders import copy_files, files_named
from decode.model.names import check_name
from decode.serving import gguf_export, gguf_heads, w8a8_export
from decode.serving.transplant import transplant

ExportedFiles = tuple[dict[str, Any], Tensors, str]
"""config.json, the tensors and the name of their file."""


def with_lm_head(checkpoint: DraftCheckpoint, target: str) -> DraftCheckpoint:
    """Medusa heads that use the target's lm_head, with a copy of it: engines refuse heads without one. Other
    checkpoints as they are. UserError if the target is needed and not given."""
    if not checkpoint.config.get("original_lm_head") or "lm_heads.0.weight" in checkpoint.tensors:
        return checkpoint
    if not target:
        raise UserError("these heads use the target's lm_head: give --target")
    weight = (
        loading.load_model(target, "target", "cpu", "float32")
        .get_output_embeddings()
        .weight.detach()
    )
    dtype = checkpoint.tensors["blocks.0.layers.0.weight"].dtype
    sizes = {"vocab_size": len(weight), "truncated_vocab_size": len(weight)}
    tensors = checkpoint.tensors | {"lm_heads.0.weight": weight.to(dtype)}
    config = layouts.HeadConfig(checkpoint.config | sizes)
    return DraftCheckpoint(checkpoint.family, config, tensors)


def check_one_llama_layer(draft: str, config: layouts.HeadConfig) -> None:
    """UserError for EAGLE heads of several layers or with Qwen3's, which engines would load as one of Llama's."""
    if config.value("num_hidden_layers", 1) != 1 or config.get("qk_norm"):
        raise UserError(
            f"draft {draft!r} has other than one layer of Llama, which no layout here describes to engines: serve it "
            "as its trainer wrote it"
        )


def to_flat(checkpoint: DraftCheckpoint, target: str, k: int) -> ExportedFiles:
    """Our layout. UserError for EAGLE-3 heads that no flat config describes to all engines."""
    checkpoint = with_lm_head(checkpoint, target)
    config, tensors = checkpoint.config, checkpoint.tensors
    if checkpoint.family != "eagle3":
        if checkpoint.config.get("original_lm_head"):
            names = {"lm_heads.0.weight": "lm_head.weight"}
            tensors = {names.get(name, name): value for name, value in tensors.items()}
        return config, tensors, layouts.WEIGHTS_FILE
    if config["norm_before_residual"]:
        raise UserError(
            "this draft was trained with norm_before_residual, which SGLang does not implement: only --format "
            "speculators can store it"
        )
    return config, layouts.to_midlayer(tensors), layouts.WEIGHTS_FILE


LAYER_KEYS = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("hidden_act", "rms_norm_eps", "max_position_embeddings", "vocab_size", "num_hidden_layers"),
    *("attention_bias", "mlp_bias", "tie_word_embeddings", "num_aux_hidden_states"),
    *("rope_parameters", "rope_theta", "rope_scaling"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)
"""Keys of a flat config that belong into `transformer_layer_config`."""


def to_speculators(checkpoint: DraftCheckpoint, target: str, k: int) -> ExportedFiles:
    """The speculators library's nested config with the same tensors. UserError for other families than EAGLE-3."""
    if checkpoint.family != "eagle3":
        raise UserError(f"the speculators format is for EAGLE-3, and this is {checkpoint.family}")
    if not target:
        raise UserError("the speculators format names the target: give --target")
    config = checkpoint.config
    layer = {key: config[key] for key in LAYER_KEYS if key in config}
    outer = {key: config[key] for key in eagle_layouts.OUTER_KEYS if key in config}
    method = {"proposal_type": "greedy", "speculative_tokens": k}
    nested = {
        # No model_type: with one the other keys are not read.
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        **outer,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "transformer_layer_config": {"model_type": "llama", **layer},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{**method, "verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "verifier": {
                "name_or_path": target,
                "architectures": list(loading.load_config(target, "target").architectures or []),
            },
        },
    }
    return nested, checkpoint.tensors, layouts.WEIGHTS_FILE


def to_medusa_legacy(checkpoint: DraftCheckpoint, target: str, k: int) -> ExportedFiles:
    """Numbered tensors, in which a head's projection follows its last layer. Loaders that need .pt cannot read it.
    UserError for other families than Medusa."""
    if checkpoint.family != "medusa":
        raise UserError(f"medusa-legacy is for Medusa heads, and this is {checkpoint.family}")
    config, layers = checkpoint.config, checkpoint.config["num_hidden_layers"]

    def numbered_name(name: str) -> str:
        block = re.fullmatch(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)", name)
        if block:
            return f"{block[1]}.{block[2]}.linear.{block[3]}"
        return re.sub(r"lm_heads\.(\d+)\.weight", rf"\1.{layers}.weight", name)

    tensors = checkpoint.tensors
    if config["original_lm_head"]:  # the target's, which this layout omits
        tensors = {name: value for name, value in tensors.items() if "lm_head" not in name}
    legacy = {
        "medusa_num_heads": config["num_heads"],
        "medusa_num_layers": layers,
        "base_model_name_or_path": target,
    }
    legacy |= {key: config[key] for key in ("dtype", "torch_dtype") if key in config}
    named = {numbered_name(name): value for name, value in tensors.items()}
    return legacy, named, importers.WEIGHT_FILES[1]


LAYOUTS = {"flat": to_flat, "speculators": to_speculators, "medusa-legacy": to_medusa_legacy}
"""By the names in settings; K is what the speculators format records."""
HEAD_FORMATS, CAUSAL_FORMATS = (*LAYOUTS, "gguf"), ("hf", "gguf", "w8a8", "transplant")


def export_hf(path: str, name: str, out: Path) -> None:
    """Writes a causal draft with the vocabulary size of the target `name`, whose tokenizer files are copied unchanged.
    Rows are added to its embedding and lm_head, or surplus ones are cut off, as training does; a reduced vocabulary
    stays beside them, and other engines do not draft the other tokens (`silence_other_tokens`). UserError for another
    tokenizer."""
    if not name or not Path(name).is_dir():
        raise UserError("hf copies the target's tokenizer files: give --target, a local folder")
    target, path = loading.load_target(name, "cpu"), loading.adapter_folder(path, "draft") or path
    check_vocabulary(path, target)
    dtype = str(loading.load_config(path, "draft").dtype or "float32").removeprefix("torch.")
    model = loading.load_model(path, "draft", "cpu", dtype)
    size, wanted = model.get_output_embeddings().weight.shape[0], target.runner.vocab_size
    ids = load_ids(path, min(size, wanted))
    out.mkdir(parents=True, exist_ok=True)
    draft_vocab.save_ids(out, ids)
    has_config = (Path(path) / "config.json").is_file()
    copied = size == wanted and has_config and not loading.head_is_misstated(path, "draft")
    if copied and ids is None:
        model_files = ("config.json", "generation_config.json", "model*.safetensors*")
        copy_files(files_named(Path(path), model_files), Path(path), out)
    else:
        draft_vocab.resize_vocabulary(model, wanted)
        if ids is not None:
            draft_vocab.silence_other_tokens(model, ids)
        model.save_pretrained(out, safe_serialization=True)
    loading.copy_tokenizer_files(name, out)


def export_draft(
    draft: str, layout: str, out: Path, given: str, k: int, dtype: FloatName
) -> list[str]:
    """Writes a copy of the draft into the new folder `out`; returns lines that say what was written.

    The target's name is `given`, else the one in draftsmith.json. UserError for a layout that the draft's family does
    not have.
    """
    check_folder(out)
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out} is not empty: name a new folder with --out")
    if given:
        check_name(given, "target")
    elif layout == "transplant":
        raise UserError("transplant lays the draft on a target's vocabulary: give --target")
    stored = loading.NUMBER_TYPES["bfloat16" if layout == "w8a8" else "float32"]
    path = gguf_folder(draft, dtype=stored) or importers.resolve_folder(draft)
    if not (Path(path) / "config.json").is_file():
        raise UserError(f"draft {draft!r} holds no config.json: give the folder of a saved draft")
    family, facts = draft_family(path), read_metadata(path)
    target = given or (facts.target or TargetRecord()).name
    if family in ("dflash2", "xpress", "domino", "dflare"):
        raise UserError(
            f"drafts of family {family} are read and not written here: serve the folder as its trainer wrote it"
        )
    if layout not in (CAUSAL_FORMATS if family == "causal" else HEAD_FORMATS):
        raise UserError(
            f"a draft of family {family} has no layout {layout!r}: hf, w8a8 and transplant are for language "
            "models, gguf for both, the others are for heads"
        )
    if family in ("eagle3", "peagle"):
        check_one_llama_layer(draft, importers.read_checkpoint(path).config)
    with replace_folder(out) as folder:
        if layout == "gguf":
            folder.mkdir(parents=True, exist_ok=True)
            if family == "causal":
                gguf_export.write_gguf(path, folder / "model.gguf", dtype, given)
            else:
                gguf_heads.write_head(path, folder / "model.gguf", target, dtype)
        elif layout == "w8a8":
            w8a8_export.write_w8a8(path, folder)
        elif layout == "transplant":
            facts = transplant(draft, given, folder, facts)
        elif layout == "hf":
            export_hf(draft, target, folder)
            if facts.is_known:  # the target's tokenizer may have more tokens
                own = loading.tokenizer_fingerprint(loading.load_tokenizer(target))
                facts = replace(facts, tokenizer_hash=own)
        else:
            checkpoint = importers.read_checkpoint(path)
            layouts.write_checkpoint(folder, *LAYOUTS[layout](checkpoint, target, k))
        if layout != "gguf" and facts.is_known:  # a folder with a GGUF alone loads as that model
            before, now = draft_sha256(path), draft_sha256(str(folder))
            write_metadata(folder, replace(facts, draft_sha256=now, exported_from=before))
    files = ", ".join(sorted(file.name for file in out.iterdir()))
    lines = [f"{family} in the {layout} layout: {files}"]
    if layout == "transplant" and facts.transplanted is not None:
        made = facts.transplanted
        lines.append(
            f"{made.shared} of the target's {made.tokens} tokens are the draft's too, and keep its rows; the others "
            "have means of rows: train/distill.py --draft.init trains them"
        )
    vocab = draft_vocab.VOCAB_FILE
    if layout in ("hf", "gguf") and (Path(path) / vocab).is_file():
        lines.insert(
            0,
            f"note: tokens outside {vocab}, which were not trained, got the mean row of the LM head: engines that "
            "compute all of it never find one of them most probable",
        )
    return lines
