"""What Medusa heads consist of, in vLLM's layout and in the numbered one, and what can be wrong with them."""

import re
from collections.abc import Iterator

from scripts.engine_compat.rules.checkpoint import (
    DraftFiles,
    TensorShape,
    compare_shapes,
    require_tensors,
)

LAYOUT = ("num_heads", "num_hidden_layers")


def head_count(d: DraftFiles) -> int:
    return int(d.get("num_heads", d.get("medusa_num_heads", 5)))


def layer_count(d: DraftFiles) -> int:
    return int(d.get("num_hidden_layers", d.get("medusa_num_layers", 1)))


def expected_shapes(d: DraftFiles) -> dict[str, TensorShape]:
    """Every tensor that config.json speaks of, but for biases that it turns off."""
    hidden, vocab = d.get("hidden_size", 4096), d.get("vocab_size", 32001)
    shared = d.get("original_lm_head", False)
    found: dict[str, TensorShape] = {}
    for i in range(head_count(d)):
        for j in range(layer_count(d)):
            found[f"blocks.{i}.layers.{j}.weight"] = (hidden, hidden)
            if d.get("medusa_fc_bias", False):
                found[f"blocks.{i}.layers.{j}.bias"] = (hidden,)
        if not shared:
            found[f"lm_heads.{i}.weight"] = (vocab, hidden)
    return found


def missing_tensors(d: DraftFiles) -> Iterator[str]:
    yield from require_tensors(d, expected_shapes(d))
    shared = ("lm_head.weight", "lm_heads.0.weight")
    if d.get("original_lm_head", False) and not any(name in d.tensors for name in shared):
        yield "lm_head.weight is missing, by which original_lm_head makes all heads project"


def wrong_shapes(d: DraftFiles) -> Iterator[str]:
    yield from compare_shapes(d, expected_shapes(d))


def unknown_tensors(d: DraftFiles) -> Iterator[str]:
    """Tensors that are dropped, but for biases and projections, of which others speak."""
    for name in sorted(set(d.tensors) - set(expected_shapes(d)) - {"lm_head.weight", "token_map"}):
        if not re.fullmatch(r"blocks\.\d+\.layers\.\d+\.bias|lm_heads\.\d+\.weight", name):
            yield f"{d.name_in_file[name]} is dropped: config.json speaks of {head_count(d)} heads of {layer_count(d)} layers"


def dropped_biases(d: DraftFiles) -> Iterator[str]:
    dropped = [name for name in d.tensors if name.endswith(".bias")]
    if dropped and not d.get("medusa_fc_bias", False):
        yield f"medusa_fc_bias is not true: {len(dropped)} biases are dropped"


def dropped_projections(d: DraftFiles) -> Iterator[str]:
    own = [name for name in d.tensors if name.startswith("lm_heads.")]
    if d.get("original_lm_head", False) and len(own) > 1:
        yield f"original_lm_head is true: of {len(own)} projections one is used for all heads"


def hidden_size_mismatch(d: DraftFiles) -> Iterator[str]:
    for key, default in (("hidden_size", 4096),):
        if key not in d.config:
            yield f"{key} is not said: it is taken for {default}"
    if d.target is not None and d.get("hidden_size", 4096) != d.target.config["hidden_size"]:
        yield f"hidden_size is {d.get('hidden_size', 4096)} and the target's {d.target.config['hidden_size']}"


def missing_token_map(d: DraftFiles) -> Iterator[str]:
    said, vocab = d.config.get("truncated_vocab_size"), d.get("vocab_size")
    if said is not None and said != vocab and "token_map" not in d.tensors:
        yield f"truncated_vocab_size is {said} of {vocab} and there is no token_map"


def ambiguous_keys(d: DraftFiles) -> Iterator[str]:
    """Any key with num and heads, or num and layers, is taken for the one: the last that stands there."""
    for kind, known in (("heads", "num_heads"), ("layers", "num_hidden_layers")):
        found = [key for key in d.raw if "num" in key and kind in key]
        values = {d.raw[key] for key in found}
        if len(values) > 1:
            yield f"{', '.join(found)} all become {known}, and they differ"


def vocab_rows_mismatch(d: DraftFiles) -> Iterator[str]:
    """Rows of the projections against the target's vocabulary, which vLLM sets vocab_size to."""
    for name, value in d.tensors.items():
        if (
            "lm_head" in name
            and d.target is not None
            and len(value) != d.target.config["vocab_size"]
        ):
            yield f"{d.name_in_file[name]} has {len(value)} rows and the target's vocabulary {d.target.config['vocab_size']}"


def numbered_tensors(d: DraftFiles) -> Iterator[str]:
    if any(re.match(r"(medusa_heads?\.)?\d+\.\d+\.", name) for name in d.name_in_file.values()):
        yield "tensors are numbered: export it with --format flat"


def unnumbered_tensors(d: DraftFiles) -> Iterator[str]:
    if any(name.startswith("blocks.") for name in d.name_in_file.values()):
        yield "tensors have vLLM's names: export it with --format medusa-legacy"
