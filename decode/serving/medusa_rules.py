"""The tensors of Medusa heads, by vLLM's names, and checks on them that more than one engine needs."""

import re
from collections.abc import Iterator

from decode.serving.rules import (
    DraftFiles,
    TensorShape,
    compare_shapes,
    require_tensors,
)


def head_count(d: DraftFiles) -> int:
    """Heads; 5 if neither vLLM's key nor that of Medusa's authors is set."""
    return int(d.get("num_heads", d.get("medusa_num_heads", 5)))


def layer_count(d: DraftFiles) -> int:
    """Residual layers of each head; 1 if neither key is set."""
    return int(d.get("num_hidden_layers", d.get("medusa_num_layers", 1)))


def expected_shapes(d: DraftFiles) -> dict[str, TensorShape]:
    """{name: shape} of every tensor that config.json implies; biases only with medusa_fc_bias."""
    hidden, vocab = d.get("hidden_size", 4096), d.get("vocab_size", 32001)
    shared = d.get("original_lm_head", False)
    shapes: dict[str, TensorShape] = {}
    for i in range(head_count(d)):
        for j in range(layer_count(d)):
            shapes[f"blocks.{i}.layers.{j}.weight"] = (hidden, hidden)
            if d.get("medusa_fc_bias", False):
                shapes[f"blocks.{i}.layers.{j}.bias"] = (hidden,)
        if not shared:
            shapes[f"lm_heads.{i}.weight"] = (vocab, hidden)
    return shapes


def missing_tensors(d: DraftFiles) -> Iterator[str]:
    """Tensors that config.json implies and that are not in the files."""
    yield from require_tensors(d, expected_shapes(d))
    shared = ("lm_head.weight", "lm_heads.0.weight")
    if d.get("original_lm_head", False) and not any(name in d.tensors for name in shared):
        yield "lm_head.weight is missing: with original_lm_head all heads use it as their projection"


def wrong_shapes(d: DraftFiles) -> Iterator[str]:
    """Tensors whose shape is not the one that config.json implies."""
    yield from compare_shapes(d, expected_shapes(d))


def unknown_tensors(d: DraftFiles) -> Iterator[str]:
    """Tensors that are dropped, without biases and projections, which have rules of their own."""
    for name in sorted(set(d.tensors) - set(expected_shapes(d)) - {"lm_head.weight", "token_map"}):
        if not re.fullmatch(r"blocks\.\d+\.layers\.\d+\.bias|lm_heads\.\d+\.weight", name):
            yield f"{d.name_in_file[name]} is dropped: config.json has {head_count(d)} heads of {layer_count(d)} layers"


def dropped_biases(d: DraftFiles) -> Iterator[str]:
    """Biases in the files while medusa_fc_bias is off."""
    dropped = [name for name in d.tensors if name.endswith(".bias")]
    if dropped and not d.get("medusa_fc_bias", False):
        yield f"medusa_fc_bias is not true: {len(dropped)} biases are dropped"


def dropped_projections(d: DraftFiles) -> Iterator[str]:
    """A projection for each head while original_lm_head is on."""
    projections = [name for name in d.tensors if name.startswith("lm_heads.")]
    if d.get("original_lm_head", False) and len(projections) > 1:
        yield f"original_lm_head is true: of {len(projections)} projections one is used for all heads"


def hidden_size_mismatch(d: DraftFiles) -> Iterator[str]:
    """hidden_size that is absent, which vLLM takes for 4096, or is not the target's."""
    if "hidden_size" not in d.config:
        yield "hidden_size is not set: the engine takes 4096"
    if d.target is not None and d.get("hidden_size", 4096) != d.target.config["hidden_size"]:
        yield f"hidden_size is {d.get('hidden_size', 4096)} and the target's {d.target.config['hidden_size']}"


def missing_token_map(d: DraftFiles) -> Iterator[str]:
    """A reduced vocabulary without the map to the target's ids."""
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


def numbered_tensors(d: DraftFiles) -> Iterator[str]:
    """Tensors in the numbered layout of FasterDecoding."""
    if any(re.match(r"(medusa_heads?\.)?\d+\.\d+\.", name) for name in d.name_in_file.values()):
        yield "tensors are numbered: export it with --format flat"


def unnumbered_tensors(d: DraftFiles) -> Iterator[str]:
    """Tensors in vLLM's layout."""
    if any(name.startswith("blocks.") for name in d.name_in_file.values()):
        yield "tensors have vLLM's names: export it with --format medusa-legacy"
