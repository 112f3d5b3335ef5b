"""Whether the sizes in a model's config make sense, before a model of them is built."""

import math
from collections.abc import Iterator
from typing import Any

from decode.common.errors import UserError

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
