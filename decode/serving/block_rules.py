"""The tensors of drafts that propose a block in one pass and of MTP layers, and checks that engines need on them."""

from collections.abc import Iterator

from decode.checkpoints import importers
from decode.serving import eagle_rules as eagle
from decode.serving.rules import (
    DraftFiles,
    TensorShape,
    compare_shapes,
    head_dim,
    lacks_sizes,
    llama_layer_shapes,
    require_tensors,
)

MTP_MODEL_TYPES = ("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa")
"""Targets for which vLLM reads MTP layers in DeepSeek's layout."""
SHARED = ("embed_tokens.weight", "lm_head.weight")
"""Taken from the target where they are not in the files."""


def mask_token(d: DraftFiles) -> int | None:
    """The id of the mask token by the names that vLLM looks for; None if there is none."""
    nested = d.get("dflash_config", {}).get("mask_token_id")
    named = [d.config.get(key) for key in importers.MASK_TOKEN_FIELDS]
    return next((int(value) for value in (nested, *named) if value is not None), None)


def no_mask_token(d: DraftFiles) -> Iterator[str]:
    """A mask token that is not named, or not in the vocabulary."""
    token, vocab = mask_token(d), d.get("vocab_size", 0)
    if token is None:
        yield "config.json names no mask token (dflash_config.mask_token_id, mask_token_id or pard_token)"
    elif not 0 <= token < vocab:
        yield f"the mask token {token} is outside the vocabulary of {vocab}"


def expected_shapes(d: DraftFiles) -> dict[str, TensorShape]:
    """{name: shape} of every tensor that config.json of a DFlash or DSpark draft implies; {} if it lacks a size."""
    taps = aux_layers(d)
    if lacks_sizes(d) or not taps:
        return {}
    hidden, vocab = d.get("hidden_size"), d.get("vocab_size")
    draft_vocab = d.get("draft_vocab_size", vocab)
    shapes: dict[str, TensorShape] = {
        "fc.weight": (hidden, len(taps) * d.get("target_hidden_size", hidden)),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        "embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (draft_vocab, hidden),
    }
    for i in range(d.get("num_hidden_layers", 1)):
        layer = llama_layer_shapes(d, hidden)
        layer |= {f"self_attn.{name}_norm.weight": (head_dim(d),) for name in ("q", "k")}
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    if draft_vocab != vocab:
        shapes |= {"d2t": (draft_vocab,), "t2d": (vocab,)}
    if d.family == "dspark":
        rank = d.get("markov_rank", 0)
        shapes |= {
            "markov_head.markov_w1.weight": (vocab, rank),
            "markov_head.markov_w2.weight": (draft_vocab, rank),
            "confidence_head.proj.weight": (1, hidden + rank),
            "confidence_head.proj.bias": (1,),
        }
    return shapes


def aux_layers(d: DraftFiles) -> tuple[int, ...]:
    """Capture ids of the states that vLLM reads: its own key, else the layers' outputs plus one."""
    own = d.config.get("eagle_aux_hidden_state_layer_ids") or d.get("aux_hidden_state_layer_ids")
    outputs = d.get("dflash_config", {}).get("target_layer_ids") or d.get("target_layer_ids") or ()
    return tuple(own or (i + 1 for i in outputs))


def wrong_shapes(d: DraftFiles) -> Iterator[str]:
    """Tensors whose shape is not the one that config.json implies."""
    shapes = expected_shapes(d)
    if not shapes:
        yield "config.json lacks a size or the layers whose states are read"
    yield from compare_shapes(d, shapes)


def missing_tensors(d: DraftFiles) -> Iterator[str]:
    """Tensors that are neither in the files nor taken from the target."""
    wanted = set(expected_shapes(d)) - {"t2d", "embed_tokens.weight"}
    if d.get("draft_vocab_size", d.get("vocab_size")) == d.get("vocab_size"):
        wanted -= set(SHARED)
    yield from require_tensors(d, sorted(wanted))


def unknown_tensors(d: DraftFiles) -> Iterator[str]:
    """Tensors that config.json does not imply, biases among them. Vocabulary maps and tables of RoPE are not named."""
    for name in sorted(set(d.tensors) - set(expected_shapes(d)) - set(eagle.VOCAB_MAPS)):
        if "rotary_emb." not in name:
            yield f"{d.name_in_file[name]} is not part of this draft"


def nested_causality(d: DraftFiles) -> Iterator[str]:
    """Speculators' config, by which vLLM makes every layer causal unless sliding_window_non_causal is true."""
    if d.is_speculators_format and not d.get("sliding_window_non_causal", False):
        yield "sliding_window_non_causal is not true: every layer becomes causal, and blocks were trained both ways"


def causal_blocks(d: DraftFiles) -> Iterator[str]:
    """A flat config that makes the layers of a bidirectional draft causal."""
    causal = d.config.get("is_causal")
    causal = d.get("dflash_config", {}).get("causal") if causal is None else causal
    if causal and d.trained_here:
        yield "config.json makes blocks causal, and they were trained both ways"


def wrong_anchor(d: DraftFiles) -> Iterator[str]:
    """A DFlash draft that predicts from its anchor's slot."""
    if d.get("sample_from_anchor", d.get("dflash_config", {}).get("sample_from_anchor", False)):
        yield "sample_from_anchor is true: it is served one place off, or refused"


def wrong_aux_layers(d: DraftFiles) -> Iterator[str]:
    """Layers that the target does not have or that training did not read; the two keys against each other."""
    taps = aux_layers(d)
    outputs = d.get("dflash_config", {}).get("target_layer_ids")
    if outputs and taps != tuple(i + 1 for i in outputs):
        yield f"the engine reads the states entering layers {list(taps)}, and target_layer_ids name {list(outputs)}"
    if d.target is not None:
        yield from eagle.wrong_aux_layers(d, taps, d.target.config["num_hidden_layers"])


def no_mask_state(d: DraftFiles) -> Iterator[str]:
    """P-EAGLE without the state of a mask."""
    yield from require_tensors(d, ["mask_hidden"])


# ---- MTP layers ----


def unknown_mtp_target(d: DraftFiles) -> Iterator[str]:
    """A target of a kind whose MTP layers no class reads in this layout."""
    if d.get("model_type") not in MTP_MODEL_TYPES:
        known = ", ".join(MTP_MODEL_TYPES)
        yield f"model_type is {d.get('model_type')}: MTP layers in DeepSeek's layout are read for {known}"


def missing_mtp_tensors(d: DraftFiles) -> Iterator[str]:
    """The layer's own tensors, at the number behind the target's last layer."""
    number = d.get("num_hidden_layers", 0)
    names = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight")
    yield from require_tensors(d, [f"model.layers.{number}.{name}" for name in names])
    if not d.get("num_nextn_predict_layers", 0):
        yield "num_nextn_predict_layers is not set: the engine looks for no such layer"
