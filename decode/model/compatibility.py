"""Which causal LMs can be decoded with drafts here, for how many positions, and why others cannot.

Every check reads what transformers or the config says about a model, never its name. What none of them foresees
fails aloud later: a mask of the model's own in decode/model/attention.py, a recurrent state in decode/model/kv_cache.py.
"""

import inspect
import sys
from typing import Any

from transformers import PreTrainedModel

from decode.common.errors import UserError

SUPPORTED_LAYER_TYPES = {"full_attention", "sliding_attention"}


def check_supported(model: Any) -> None:
    """UserError with the reason if rows of unequal length, roll-back or token trees would change this model's text."""
    config = model.config.get_text_config(decoder=True)
    reason = _unsupported_reason(model, config)
    if reason is not None:
        raise UserError(f"this {config.model_type} model cannot be decoded: it {reason}")


def _unsupported_reason(model: Any, config: Any) -> str | None:
    if model.config.is_encoder_decoder:
        return "is an encoder-decoder, not a causal language model"
    parts = text_submodels(model, config)
    modules = {name: module for part in parts for name, module in part.named_modules()}
    kinds = set(vars(config).get("layer_types") or [])
    if any(part._is_stateful for part in parts):
        return "has recurrent layers, whose state cannot be taken back when a draft is rejected"
    if kinds - SUPPORTED_LAYER_TYPES:
        return f"has {', '.join(sorted(kinds - SUPPORTED_LAYER_TYPES))} layers; full and sliding attention are known"
    if not all(part._can_set_attn_implementation() for part in parts):
        return (
            "computes attention by itself (as those with ALiBi or local attention do) and not through "
            "transformers' AttentionInterface, so that the positions of drafts cannot be told to it"
        )
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return "takes no position_ids, and drafts have others than their places in a batch"
    if any(vars(module).get("is_causal") is False for module in modules.values()):
        return "attends to later tokens, which are not known yet when text is decoded"
    padded = [name for name, part in modules.items() if vars(part).get("padding_idx") is not None]
    if any(name.endswith("position_embeddings") for name in padded):
        return "counts positions from its padding id and not from 0"
    if any("dynamic" in rope["rope_type"] for rope in rope_configs(config)):
        return "changes its RoPE with the length of the text (dynamic NTK), so that cached keys go stale"
    window = vars(config).get("sliding_window")
    slides = "sliding_attention" in kinds if kinds else window is not None
    if slides and window < context_length(config) and _window_only_in_mask(parts):
        return f"does not tell its attention function about its window of {window} positions"
    return None


def context_length(config: Any) -> int:
    """Positions that a row may have: those of the config, but of longrope only the ones before its long factors.

    There longrope changes the frequencies of all tokens of a forward at once, cached keys excepted: a row's text
    would depend on the other rows and on how far its drafts reach.
    """
    original = [
        rope["original_max_position_embeddings"]
        for rope in rope_configs(config)
        if rope["rope_type"] == "longrope"
    ]
    return min([config.max_position_embeddings, *original])


def rope_configs(config: Any) -> list[dict[str, Any]]:
    """The RoPE of the model, or those of its kinds of layers; none where positions are learned."""
    found = vars(config).get("rope_parameters") or {}
    return [found] if "rope_type" in found else [rope for rope in found.values() if rope]


def text_submodels(model: Any, config: Any) -> list[Any]:
    """The transformers models inside `model`, itself among them, that follow the text `config`."""
    return [
        part
        for part in model.modules()
        if isinstance(part, PreTrainedModel) and part.config is config
    ]


def use_grouped_experts(model: Any) -> None:
    """Experts one by one ask the host which of them have tokens; grouped ones do not, and compute the same."""
    for part in model.modules():
        if not isinstance(part, PreTrainedModel) or not part._can_set_experts_implementation():
            continue
        if part.get_experts_implementation()[""] == "eager":
            part.set_experts_implementation("grouped_mm")


def _window_only_in_mask(parts: list[Any]) -> bool:
    """Whether their code has windows in the mask that it builds, and not among what the attention function is told."""
    files = [inspect.getsource(sys.modules[type(part).__module__]) for part in parts]
    return any(
        "create_sliding_window_causal_mask" in code and "sliding_window=" not in code
        for code in files
    )
