"""A draft written in another layout: for another engine or trainer, or in ours from one that was published elsewhere.

    python scripts/export.py outputs/quickstart/drafts/eagle3 --format speculators --target ORG/MODEL --out exported

flat         EAGLE-3, EAGLE-1 and Medusa as they are trained here: vLLM, SGLang, TensorRT-LLM (Medusa: vLLM to 0.32)
speculators  EAGLE-3 with the nested config that `vllm serve DRAFT` reads and the speculators library trains
medusa-legacy  Medusa with the numbered tensors of FasterDecoding, TensorRT-LLM and TGI
hf           a causal draft with the target's tokenizer files, its vocabulary padded with zeros to the target's

Tensors go over bit for bit. DIR may be any draft that loads here: ours, or published ones (decode/checkpoints/importers.py).
"""

import json
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from transformers import AutoConfig

from decode.checkpoints import importers, layouts
from decode.checkpoints.importers import DraftCheckpoint, Tensors
from decode.common.cli import run_command
from decode.common.errors import UserError, first_line
from decode.drafts.base import METADATA_FILE, check_tokenizer, draft_sha256, read_metadata
from decode.drafts.registry import draft_family
from decode.model.loading import load_model, load_target, load_tokenizer, tokenizer_fingerprint

FORMATS = ("flat", "speculators", "medusa-legacy", "hf")
ExportedFiles = tuple[dict[str, Any], Tensors, str]
"""config.json, the tensors and the file they go to."""


@dataclass
class ExportConfig:
    draft: str = ""
    """The draft's folder or hub name; may stand first without --draft."""
    format: str = ""
    """flat, speculators, medusa-legacy or hf."""
    out: str = ""
    """A new or empty folder."""
    target: str = ""
    """The target, as its users name it; empty: the one that draftsmith.json names. hf reads it."""
    k: int = 4
    """Tokens drafted a round, which the speculators format states."""


def with_lm_head(found: DraftCheckpoint, target: str) -> DraftCheckpoint:
    """Medusa whose files leave the target's own projection to the loader, with it: vLLM refuses heads without."""
    if not found.config.get("original_lm_head") or "lm_heads.0.weight" in found.tensors:
        return found
    if not target:
        raise UserError("these heads project by the target's own matrix: give --target")
    weight = load_model(target, "target", "cpu", "float32").get_output_embeddings().weight.detach()
    dtype = found.tensors["blocks.0.layers.0.weight"].dtype
    sizes = {"vocab_size": len(weight), "truncated_vocab_size": len(weight)}
    tensors = found.tensors | {"lm_heads.0.weight": weight.to(dtype)}
    return DraftCheckpoint(found.family, found.config | sizes, tensors)


def to_flat(found: DraftCheckpoint) -> ExportedFiles:
    """Our layout. UserError for an EAGLE-3 that one config cannot make right for both vLLM and SGLang."""
    config, tensors = found.config, found.tensors
    if found.family != "eagle3":
        if found.config.get("original_lm_head"):
            names = {"lm_heads.0.weight": "lm_head.weight"}
            tensors = {names.get(name, name): value for name, value in tensors.items()}
        return config, tensors, layouts.WEIGHTS_FILE
    if config["norm_before_residual"]:
        raise UserError(
            "this draft was trained with norm_before_residual, which SGLang does not know: only --format speculators "
            "can hold it"
        )
    return config, layouts.to_midlayer(tensors), layouts.WEIGHTS_FILE


LAYER_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "vocab_size",
    "num_hidden_layers",
    "attention_bias",
    "mlp_bias",
    "tie_word_embeddings",
    "rope_parameters",
    "rope_theta",
    "rope_scaling",
    "num_aux_hidden_states",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
"""What of a flat config goes into `transformer_layer_config`."""


def to_speculators(found: DraftCheckpoint, target: str, k: int) -> ExportedFiles:
    """The nested config around the same tensors."""
    if found.family != "eagle3":
        raise UserError(f"the speculators format is for EAGLE-3, and this is {found.family}")
    if not target:
        raise UserError("the speculators format names the target: give --target")
    config = found.config
    layer = {key: config[key] for key in LAYER_KEYS if key in config}
    outer = {key: config[key] for key in importers.SPECULATORS_OUTER_KEYS if key in config}
    method = {"proposal_type": "greedy", "speculative_tokens": k}
    nested = {
        # No model_type: with one vLLM would not look for the rest.
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
            "verifier": {"name_or_path": target, "architectures": _target_architectures(target)},
        },
    }
    return nested, found.tensors, layouts.WEIGHTS_FILE


def _target_architectures(target: str) -> list[str]:
    try:
        return list(AutoConfig.from_pretrained(target).architectures or [])
    except Exception as error:  # any of a dozen kinds, from no network to an unknown model type
        reason = first_line(error)
        raise UserError(f"config of target {target!r} cannot be read: {reason}") from error


def to_medusa_legacy(found: DraftCheckpoint, target: str) -> ExportedFiles:
    """Numbered tensors; the projection stands behind the last layer of its head. Loaders that want a .pt find none."""
    if found.family != "medusa":
        raise UserError(f"medusa-legacy is for Medusa heads, and this is {found.family}")
    config, layers = found.config, found.config["num_hidden_layers"]

    def numbered(name: str) -> str:
        block = re.fullmatch(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)", name)
        if block:
            return f"{block[1]}.{block[2]}.linear.{block[3]}"
        return re.sub(r"lm_heads\.(\d+)\.weight", rf"\1.{layers}.weight", name)

    tensors = found.tensors
    if config["original_lm_head"]:  # the target's own: this layout leaves it out
        tensors = {name: value for name, value in tensors.items() if "lm_head" not in name}
    legacy = {
        "medusa_num_heads": config["num_heads"],
        "medusa_num_layers": layers,
        "base_model_name_or_path": target,
    }
    legacy |= {key: config[key] for key in ("dtype", "torch_dtype") if key in config}
    return (
        legacy,
        {numbered(name): value for name, value in tensors.items()},
        importers.WEIGHT_FILES[1],
    )


MODEL_FILES = ("config.json", "generation_config.json")
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


def export_hf(path: str, name: str, out: Path) -> None:
    """Writes a causal draft whose vocabulary is the target's. Its tokenizer files are the target's, byte for byte."""
    if not name or not Path(name).is_dir():
        raise UserError("hf copies the target's tokenizer files: give --target, a local folder")
    target = load_target(name, "cpu")
    check_tokenizer(path, tokenizer_fingerprint(load_tokenizer(path)), target)
    model = load_model(path, "draft", "cpu", _config_dtype(path))
    size, wanted = model.get_output_embeddings().weight.shape[0], target.decoder.vocab_size
    if size > wanted:
        raise UserError(
            f"draft {path!r} has {size} logits and its target {wanted}: it cannot shrink"
        )
    out.mkdir(parents=True, exist_ok=True)
    if size == wanted and Path(path).is_dir():
        names = [*MODEL_FILES, *(file.name for file in Path(path).glob("model*.safetensors*"))]
        for file in (Path(path) / name for name in names):
            if file.is_file():
                shutil.copyfile(file, out / file.name)
    else:
        model.resize_token_embeddings(wanted, mean_resizing=False)
        with torch.no_grad():
            for part in (model.get_input_embeddings(), model.get_output_embeddings()):
                part.weight[size:] = 0
        model.save_pretrained(out, safe_serialization=True)
    for pattern in TOKENIZER_FILES:
        for file in Path(name).glob(pattern):
            shutil.copyfile(file, out / file.name)


def _config_dtype(path: str) -> str:
    return str(AutoConfig.from_pretrained(path).dtype or "float32").removeprefix("torch.")


def write_metadata(path: str, before: Mapping[str, Any], out: Path) -> None:
    """draftsmith.json beside the copy, with the checksums of what is there and of what it came from."""
    if before:
        facts = {
            **before,
            "draft_sha256": draft_sha256(str(out)),
            "exported_from": draft_sha256(path),
        }
        (out / METADATA_FILE).write_text(json.dumps(facts, indent=1) + "\n")


def main(s: ExportConfig) -> None:
    if not s.draft or not s.out or s.format not in FORMATS:
        raise UserError(f"give a draft's folder, --out and --format, one of {', '.join(FORMATS)}")
    out = Path(s.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{s.out} holds something already: name a new folder with --out")
    path = importers.resolve_folder(s.draft)
    family, facts = draft_family(path), read_metadata(path)
    target = s.target or facts.get("target", {}).get("name", "")
    if (family == "causal") != (s.format == "hf"):
        raise UserError(
            f"a draft of family {family} has no layout {s.format!r}: hf is for causal drafts, the others for heads"
        )
    if s.format == "hf":
        export_hf(s.draft, target, out)
    else:
        found = importers.read_checkpoint(path)
        if s.format == "flat":
            written = to_flat(with_lm_head(found, target))
        elif s.format == "speculators":
            written = to_speculators(found, target, s.k)
        else:
            written = to_medusa_legacy(found, target)
        layouts.write_checkpoint(out, *written)
    write_metadata(path, facts, out)
    print(f"{family} in the {s.format} layout: {', '.join(sorted(f.name for f in out.iterdir()))}")


if __name__ == "__main__":
    run_command(main, ExportConfig, __doc__, first="draft")
