"""EAGLE-3, DFlash and DSpark heads as a GGUF file, which llama.cpp drafts with (llamacpp_engine.py has the format).

The file is written from the module that decodes here, not from config.json, and holds the target's whole tokenizer.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import torch

from decode.checkpoints import importers
from decode.common.errors import UserError
from decode.common.ranges import FloatName
from decode.drafts.dflash_model import DFlashModel
from decode.drafts.eagle_model import Eagle3Model
from decode.model.loading import end_ids, load_config, load_tokenizer
from decode.serving import gguf_export
from decode.serving import llamacpp_engine as llamacpp
from decode.serving.gguf_export import Array
from decode.serving.rules import check_rules, read_draft, read_target
from decode.serving.target_outline import load_without_target

KeyValue = int | bool | list[int]


def write_head(name: str, out: Path, target: str, dtype: FloatName = "float32") -> None:
    """Writes the heads in the folder or on the Hub `name` to the file `out`, matrices as `dtype`. UserError, before
    anything is written, for heads that llama.cpp's graph does not compute, for a target whose states it does not hand
    out, for heads that do not load here, and for a tokenizer that is not written here."""
    if not target:
        raise UserError("a GGUF of heads holds the target's tokenizer: give --target")
    family, net, keys, tensors = head_content(name, target)
    ends = end_ids(target, load_config(target, "target"))
    architecture = llamacpp.HEADS[family].architecture
    writer = gguf.GGUFWriter(out, architecture)
    tokenizer, rows = load_tokenizer(target), net.config.vocab_size
    gguf_export.write_tokenizer(writer, target, tokenizer, ends, rows)
    for key, value in keys.items():
        full = f"{architecture}.{key}"
        if isinstance(value, bool):
            writer.add_bool(full, value)
        elif isinstance(value, int):
            writer.add_uint32(full, value)
        else:
            writer.add_array(full, value)
    if isinstance(net, DFlashModel):
        writer.add_mask_token_id(net.mask_token)
    gguf_export.write_file(writer, Path(name).stem, net.config, tensors, dtype)


def head_content(
    name: str, target: str
) -> tuple[str, Eagle3Model | DFlashModel, dict[str, KeyValue], dict[str, Array]]:
    """(the family, the module, its keys by their names behind the architecture, its tensors by GGUF's names) of heads
    for this target. Only `d2t` holds integers. UserError as in `write_head`."""
    target_info = read_target(target, tokenizer=False)
    draft = read_draft(name, target_info)
    found = check_rules(draft, llamacpp.HEAD_RULES, llamacpp.LLAMACPP.version)
    if found:
        raise UserError(f"draft {name!r} is not written as GGUF: {found[0].what}")
    loaded: Any = load_without_target(name, target)
    tensors = head_tensors(draft.family, loaded.net)
    if not any(file.endswith("lm_head.weight") for file in importers.tensor_files(draft.path)):
        tensors.pop("output.weight", None)  # the target's, which llama.cpp takes by itself
    keys = head_keys(draft.family, loaded.net, target_info.config)
    return draft.family, loaded.net, keys, tensors


def head_keys(
    family: str, net: Eagle3Model | DFlashModel, target: Mapping[str, Any]
) -> dict[str, KeyValue]:
    """The keys of a family. `target` is its target's config."""
    layers: dict[str, KeyValue] = {"target_layers": list(net.aux_layers.layers)}
    if isinstance(net, Eagle3Model):
        return layers | {
            "target_hidden_size": net.config.target_hidden_size,
            "norm_before_residual": net.layer.normed_residual,
            "norm_before_fc": net.input_norm is not None,
        }
    layers |= {"block_size": net.block_size, "attention.causal": False}
    if "mrope_section" in (target.get("rope_parameters") or {}):  # text has one of four positions
        layers["rope.dimension_sections"] = [net.config.head_dim // 2, 0, 0, 0]
    if family == "dspark":
        layers |= {
            "sample_from_anchor": net.first == 0,
            "has_confidence_head": net.confidence_head is not None,
        }
    return layers


def head_tensors(family: str, net: Eagle3Model | DFlashModel) -> dict[str, Array]:
    """The tensors by GGUF's names: parameters, the ids of a reduced vocabulary, and the divisors of frequencies."""
    form, tensors = llamacpp.HEADS[family], dict[str, Array]()
    for key, value in net.state_dict().items():
        stored = llamacpp.gguf_name(family, key)
        assert stored is not None, key  # HEAD_RULES have refused it
        array = value.float().numpy()
        if form.alternates:
            array = gguf_export.in_gguf_order(key, array, net.config)
        tensors[stored] = array
    if net.ids is not None:
        tensors["d2t"] = net.ids.numpy()  # the target's ids, not the offsets of our d2t
    theta, size = net.config.rope_parameters["rope_theta"], int(net.config.head_dim or 0)
    plain = 1.0 / theta ** (torch.arange(0, size, 2).float() / size)
    divisors = plain / net.rotary.inv_freq
    if not torch.allclose(divisors, torch.ones_like(divisors)):
        tensors["rope_freqs.weight"] = divisors.numpy()
    return tensors
