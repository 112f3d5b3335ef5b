"""Which causal LMs can be decoded with drafts here, for how many positions, and why others cannot.

Every check reads properties of the model or its config, or tries a forward pass, never the name of its type. What the
checks do not cover raises an error later. Models with recurrent layers go through `check_recurrent` and the trial of
decode/model/recurrent.py.
"""

import inspect
import math
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from decode.common.errors import UserError, first_line
from decode.model import attention
from decode.model.gpu.kernel_choice import StepShape, choose_kernels, step_shape

# ---- sizes in a config ----

COUNTS = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)
"""Settings that are at least 1 where a config has them."""
MAX_LAYERS = 10_000
POSITIVE = ("rope_theta", "factor", "rope_local_base_freq")


def check_sizes(config: Any, what: str) -> None:
    """UserError that names the first setting of the text config which no model can have; `what` is the model."""
    text = config.get_text_config(decoder=True)
    fields = text.to_dict()
    sizes = {name: fields.get(text.attribute_map.get(name, name)) for name in COUNTS}
    for name, value in sizes.items():
        if isinstance(value, int) and value < 1:
            raise _nonsense(what, name, value, "must be at least 1")
    layers, heads, groups = (
        sizes[name] for name in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    )
    if isinstance(layers, int) and layers > MAX_LAYERS:
        raise _nonsense(what, "num_hidden_layers", layers, f"must be at most {MAX_LAYERS:,}")
    if isinstance(heads, int) and isinstance(groups, int) and heads % groups:
        raise _nonsense(what, "num_key_value_heads", groups, f"must divide the {heads} heads")
    for name, value in _numbers(fields.get("rope_parameters"), "rope_parameters"):
        last = name.rpartition(".")[2]
        if not math.isfinite(value) or value < 0 or (value == 0 and last in POSITIVE):
            raise _nonsense(what, name, value, "must be a number above 0")
    for name, value in _numbers(fields, ""):
        if name.endswith(("_eps", "_epsilon")) and not (math.isfinite(value) and value >= 0):
            raise _nonsense(what, name, value, "must be a number above 0")


def _numbers(value: Any, name: str) -> Iterator[tuple[str, float]]:
    """(dotted name, number) of every number in nested dicts and lists."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _numbers(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for inner in value:
            yield from _numbers(inner, name)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, float(value)


def _nonsense(what: str, name: str, value: Any, rule: str) -> UserError:
    return UserError(f"{what} has {name} {value}, which {rule}: correct its config")


# ---- what a model can do ----

OWN_ATTENTION = (
    "computes attention by itself (as those with ALiBi or local attention do) and not through transformers' "
    "AttentionInterface"
)
LONGEST = 1 << 16
"""The context of models whose positions are relative and have no end."""
TRIAL_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
"""By dtype: share of the range of the logits by which two ways to compute them may differ in a trial; else 0.1."""
CACHE_NAMES = "cache", "past_key_values", "cache_params"
"""What the cache is called in transformers from 5.24 on, before it, and there by Mamba alone."""
SUPPORTED_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
"""Chunks (llama4) are full attention up to the end of the first, where `context_length` ends."""


def check_supported(model: Any) -> None:
    """UserError with the reason if rows of unequal length, roll-back or token trees would change its output."""
    config = model.config.get_text_config(decoder=True)
    reason = _unsupported_reason(model, config)
    if reason is not None:
        raise refusal(config, reason)


def check_recurrent(model: Any, attends: bool) -> None:
    """UserError with the reason if a model with recurrent layers cannot be decoded; `attends`: it has attention too."""
    config = model.config.get_text_config(decoder=True)
    reason = _attention_reason(model, config) if attends else None
    if reason is not None:
        raise refusal(config, reason)


@torch.no_grad()  # not inference_mode: the model may be trained later
def check_trial_pass(model: Any, layers: int) -> None:
    """UserError unless a forward of two tokens calls attention.py once for each of the `layers` that attend, and gives
    numbers.

    It finds what no property tells: attention or masks of the model's own, and weights that are NaN or infinite. On a
    GPU the kernels that decoding runs are chosen by what it has seen.
    `model` must run with the registered attention.
    """
    config = model.config.get_text_config(decoder=True)
    shapes: list[StepShape] = []

    def counted(
        module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        shapes.append(step_shape(query, key, value, kwargs))
        return attention.attention_forward(module, query, key, value, *args, **kwargs)

    AttentionInterface.register(attention.ATTENTION_NAME, counted)
    try:
        tokens = torch.zeros(1, 2, dtype=torch.long, device=model.device)
        position = torch.arange(2, device=model.device)[None]
        logits = model(input_ids=tokens, position_ids=position, use_cache=False).logits
    except UserError as error:
        raise UserError(f"this {config.model_type} model cannot be decoded: {error}") from error
    except Exception as error:  # whatever the code of a model raises
        raise refusal(config, f"fails in a trial pass: {first_line(error)}") from error
    finally:
        AttentionInterface.register(attention.ATTENTION_NAME, attention.attention_forward)
    if len(shapes) < layers:
        own = layers - len(shapes)
        raise refusal(config, f"{OWN_ATTENTION} in {own} of its {layers} layers")
    if not logits.isfinite().all():
        raise refusal(config, "gives NaN or infinite logits: its weights are damaged")
    choose_kernels(set(shapes), model.dtype, model.device)


def refusal(config: Any, reason: str) -> UserError:
    return UserError(f"this {config.model_type} model cannot be decoded: it {reason}")


def _unsupported_reason(model: Any, config: Any) -> str | None:
    if model.config.is_encoder_decoder:
        return "is an encoder-decoder, not a causal language model"
    parts = text_submodels(model, config)
    kinds = set(vars(config).get("layer_types") or [])
    if any(part._is_stateful for part in parts):
        return (
            "has recurrent layers whose states are not in transformers' cache, where they could be taken back when a "
            "draft is rejected"
        )
    if kinds - SUPPORTED_LAYER_TYPES:
        unknown = ", ".join(sorted(kinds - SUPPORTED_LAYER_TYPES))
        return f"has {unknown} layers; full and sliding attention are supported"
    return _attention_reason(model, config)


def _attention_reason(model: Any, config: Any) -> str | None:
    """Why the attention of a model cannot be run through attention.py."""
    parts = text_submodels(model, config)
    modules = {name: module for part in parts for name, module in part.named_modules()}
    kinds = set(vars(config).get("layer_types") or [])
    if not all(part._can_set_attn_implementation() for part in parts):
        return f"{OWN_ATTENTION}, so that drafted tokens cannot be given their positions"
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return "takes no position_ids, which differ from the indices in a batch for drafted tokens"
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
        return f"does not pass its window of {window} positions to its attention function"
    return None


def cache_name(model: Any) -> str:
    """The name of the cache among the arguments of a forward and in its output; "cache" where it takes none (RWKV)."""
    takes = inspect.signature(model.forward).parameters
    return next((name for name in CACHE_NAMES if name in takes), "cache")


def context_length(config: Any) -> int:
    """Positions that a row may have: `position_limit`, or LONGEST where positions have no limit (T5)."""
    limit = position_limit(config)
    return LONGEST if limit is None else limit


def position_limit(config: Any) -> int | None:
    """The positions of the config, but with longrope only the ones before its long factors, and with chunked attention
    only the first chunk; None where positions have no limit.

    From there on longrope changes the frequencies of all tokens of a forward, but not of cached keys: the text of a
    row would depend on the other rows and on the draft length. llama4 also scales its queries from `floor_scale` on, by
    the cache's length, which is not known per row.
    """
    original = [
        rope["original_max_position_embeddings"]
        for rope in rope_configs(config)
        if rope["rope_type"] == "longrope"
    ]
    name = config.attribute_map.get("max_position_embeddings", "max_position_embeddings")
    fields = vars(config)
    if "chunked_attention" in (fields.get("layer_types") or []):
        original.append(fields["attention_chunk_size"])
    if fields.get("attn_temperature_tuning"):
        original.append(fields["floor_scale"] - 1)
    named = [] if fields.get(name) is None else [fields[name]]
    return min([*named, *original], default=None)


def logits_agree(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> bool:
    """Whether logits of the same shape, computed in `dtype` in two ways, differ by no more than rounding explains where
    the `wanted` ones are finite."""
    finite = wanted.isfinite()
    off = (found - wanted)[finite].abs().max()
    scale = wanted[finite].max() - wanted[finite].min()
    return bool(off <= TRIAL_TOLERANCE.get(dtype, 0.1) * scale)


def rope_configs(config: Any) -> list[dict[str, Any]]:
    """The RoPE settings of the model, or those of each layer type; empty where positions are learned."""
    rope = vars(config).get("rope_parameters") or {}
    return [rope] if "rope_type" in rope else [one for one in rope.values() if one]


def text_submodels(model: Any, config: Any) -> list[Any]:
    """The transformers models inside `model`, itself included, that are built from the text `config`."""
    return [
        part
        for part in model.modules()
        if isinstance(part, PreTrainedModel) and part.config is config
    ]


def use_grouped_experts(model: Any) -> None:
    """Sets mixture-of-experts layers to grouped products, which give the same result without waiting for the host.

    Run one by one, experts need to know on the host which of them have tokens.
    """
    for part in model.modules():
        if not isinstance(part, PreTrainedModel) or not part._can_set_experts_implementation():
            continue
        if part.get_experts_implementation()[""] == "eager":
            part.set_experts_implementation("grouped_mm")


def _window_only_in_mask(parts: list[Any]) -> bool:
    """Whether the code of these models puts the window into its own mask only, not into the attention arguments."""
    files = [inspect.getsource(sys.modules[type(part).__module__]) for part in parts]
    return any(
        "create_sliding_window_causal_mask" in code and "sliding_window=" not in code
        for code in files
    )
