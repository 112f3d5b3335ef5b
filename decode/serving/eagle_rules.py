"""The tensors of EAGLE heads, and checks on them that more than one engine needs."""

from collections.abc import Iterator

import torch

from decode.checkpoints import layouts
from decode.common.errors import UserError
from decode.serving.rules import (
    DraftFiles,
    TensorShape,
    compare_shapes,
    lacks_sizes,
    llama_layer_shapes,
    require_tensors,
)

VOCAB_MAPS = ("d2t", "t2d")
"""Maps between a reduced vocabulary and the target's: offsets of draft ids [V_draft], and a mask [V]."""


def expected_shapes(d: DraftFiles) -> dict[str, TensorShape]:
    """{name: shape} of every tensor that config.json implies; {} if it lacks a size."""
    if lacks_sizes(d):
        return {}
    hidden, vocab = d.get("hidden_size"), d.get("vocab_size")
    eagle3 = d.family in ("eagle3", "peagle")
    shapes: dict[str, TensorShape] = {"embed_tokens.weight": (vocab, hidden)}
    for i in range(d.get("num_hidden_layers", 1)):
        layer = llama_layer_shapes(d, 2 * hidden if eagle3 and i == 0 else hidden)
        if eagle3:
            layer["hidden_norm.weight"] = (hidden,)
        elif i == 0:
            del layer["input_layernorm.weight"]
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    if not eagle3:
        return shapes | {"fc.weight": (hidden, 2 * hidden), "fc.bias": (hidden,)}
    aux_layers, target = aux_layer_count(d), d.get("target_hidden_size", hidden)
    draft_vocab = d.get("draft_vocab_size", vocab)
    shapes |= {
        "fc.weight": (hidden, aux_layers * target),
        "norm.weight": (hidden,),
        "lm_head.weight": (draft_vocab, hidden),
    }
    if norm_flag(d, "norm_before_fc"):
        shapes["input_norm.weight"] = (aux_layers * target,)
    if norm_flag(d, "fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (target,) for i in range(aux_layers)}
    if d.family == "peagle":
        shapes["mask_hidden"] = (1, 1, aux_layers * target)
    if draft_vocab != vocab:
        shapes |= {"d2t": (draft_vocab,), "t2d": (vocab,)}
    return shapes


def norm_flag(d: DraftFiles, name: str) -> bool:
    """One of EAGLE-3's norm flags. The speculators format has norm_before_residual true by default."""
    nested = (d.get("eagle_config") or {}).get(name)
    default = d.is_speculators_format and name == "norm_before_residual"
    return bool(nested if nested is not None else d.get(name, default))


def aux_layer_count(d: DraftFiles) -> int:
    """Number of the target's layers whose hidden states the engine gives to `fc`."""
    nested = (d.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    ids = d.config.get("eagle_aux_hidden_state_layer_ids") or nested
    return len(ids) if ids else int(d.get("num_aux_hidden_states", 3))


def wrong_shapes(d: DraftFiles) -> Iterator[str]:
    """Tensors whose shape is not the one that config.json implies."""
    shapes = expected_shapes(d)
    if not shapes:
        yield "config.json lacks hidden_size, intermediate_size, num_attention_heads or vocab_size"
    yield from compare_shapes(d, shapes)


def missing_tensors(d: DraftFiles) -> Iterator[str]:
    """Tensors that are neither in the files nor taken from the target."""
    wanted = set(expected_shapes(d)) - {"t2d", "fc.bias"} - shared_tensors(d)
    yield from require_tensors(d, sorted(wanted))


def shared_tensors(d: DraftFiles) -> set[str]:
    """Tensors that are taken from the target where the files lack them."""
    shared = set()
    if d.get("target_hidden_size", d.get("hidden_size")) == d.get("hidden_size"):
        shared.add("embed_tokens.weight")
    if d.get("draft_vocab_size", d.get("vocab_size")) == d.get("vocab_size"):
        shared.add("lm_head.weight")
    return shared


def unknown_tensors(d: DraftFiles) -> Iterator[str]:
    """Tensors that config.json does not imply, without biases, which have a rule of their own."""
    for name in sorted(set(d.tensors) - set(expected_shapes(d)) - set(VOCAB_MAPS)):
        if not name.endswith(".bias") and "rotary_emb." not in name:
            yield f"{d.name_in_file[name]} is not part of these heads"


def dropped_biases(d: DraftFiles) -> Iterator[str]:
    """Biases of the layer or of fc, which engines drop; heads trained here have none but zeros."""
    for name in sorted(d.tensors):
        if name.endswith(".bias") and bool(d.tensors[name].float().count_nonzero()):
            yield f"{d.name_in_file[name]} is dropped: the heads were trained with it"


def unfilled_bias_flags(d: DraftFiles) -> Iterator[str]:
    """Settings that make the engine allocate biases for which there is no tensor."""
    for key in ("attention_bias", "mlp_bias", "bias", "qkv_bias"):
        has_biases = any(name.endswith("proj.bias") for name in d.tensors)
        if d.get(key, False) and not has_biases and (key != "bias" or d.family == "eagle1"):
            yield f"{key} is true: the engine allocates biases of the layer, and there is no tensor for them"


def wrong_layer_count(d: DraftFiles) -> Iterator[str]:
    """Heads of more than one decoder layer."""
    count = d.get("num_hidden_layers")
    if count != 1:
        yield f"num_hidden_layers is {count}: engines agree only on heads of one layer"


# ---- the reduced vocabulary ----


def map_missing(d: DraftFiles) -> Iterator[str]:
    """A reduced vocabulary without d2t."""
    if "d2t" in expected_shapes(d) and "d2t" not in d.tensors:
        yield "draft_vocab_size is smaller than vocab_size and there is no d2t: draft ids are used as the target's"


def unneeded_map(d: DraftFiles) -> Iterator[str]:
    """d2t of a draft with the whole vocabulary."""
    if expected_shapes(d) and "d2t" not in expected_shapes(d) and "d2t" in d.tensors:
        yield "d2t is in the files although the draft has the whole vocabulary"


def map_wrong(d: DraftFiles) -> Iterator[str]:
    """d2t that is not a rising map into the vocabulary, or disagrees with t2d."""
    if "d2t" not in d.tensors or d.tensors["d2t"].ndim != 1:
        return
    d2t, vocab = d.tensors["d2t"], d.get("vocab_size", 0)
    try:
        ids = layouts.ids_from_d2t(d2t, vocab)
    except UserError:
        values = d2t.long()
        rising = bool((values[1:] > values[:-1]).all())
        are_ids = rising and int(values[0]) >= 0 and int(values[-1]) < vocab
        why = (
            "contains ids instead of offsets" if are_ids else "does not rise within the vocabulary"
        )
        yield f"d2t {why}"
        return
    t2d = d.tensors.get("t2d")
    if t2d is not None and not torch.equal(ids, t2d.nonzero()[:, 0]):
        yield "d2t and t2d name different tokens"


def map_dtype(d: DraftFiles) -> Iterator[str]:
    """Offsets in a floating-point dtype, which rounds them."""
    d2t = d.tensors.get("d2t")
    if d2t is not None and d2t.is_floating_point():
        yield f"d2t is {d2t.dtype}, which rounds large offsets: save int64"


def t2d_dtype(d: DraftFiles) -> Iterator[str]:
    """A mask that is not boolean."""
    t2d = d.tensors.get("t2d")
    if t2d is not None and t2d.dtype != torch.bool:
        yield f"t2d is {t2d.dtype} and not bool: indexing with it selects tokens 0 and 1"


# ---- layers whose hidden states the head reads (taps) ----

LayerIds = tuple[int, ...]


def trained_aux_layers(d: DraftFiles) -> LayerIds | None:
    """The layers whose input hidden states the head was trained on: by draftsmith.json, else by config.json, else the
    default ones. None if that depends on the target and there is none.
    """
    count = _target_layer_count(d)
    training = (d.facts.training or {}).get("draft")
    if training is not None:
        return tuple(training["taps"]) or (default_aux_layers(count) if count else None)
    top = d.config.get("eagle_aux_hidden_state_layer_ids")
    outputs = (d.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if top:
        return tuple(top)
    if outputs:
        return tuple(i + 1 for i in outputs)
    return default_aux_layers(count) if count else None


def _target_layer_count(d: DraftFiles) -> int | None:
    return None if d.target is None else d.target.config["num_hidden_layers"]


def default_aux_layers(count: int) -> LayerIds:
    """The layers that engines read by default, for a target of `count` layers."""
    return 2, count // 2, count - 3


def vllm_aux_layers(d: DraftFiles, count: int) -> LayerIds:
    """The layers that vLLM reads: its own key, else SGLang's key without an offset, else the default."""
    outputs = (d.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    ids = d.config.get("eagle_aux_hidden_state_layer_ids") or outputs
    return tuple(sorted(set(ids))) if ids else default_aux_layers(count)


def sglang_aux_layers(d: DraftFiles, count: int) -> LayerIds:
    """The layers that SGLang reads: only the key in `eagle_config`, plus one, else the default."""
    ids = (d.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    return tuple(i + 1 for i in ids) if ids else default_aux_layers(count)


def wrong_aux_layers(d: DraftFiles, taps: LayerIds, count: int) -> Iterator[str]:
    """The layers that an engine reads against those of training and those that the target has."""
    wanted = trained_aux_layers(d)
    if wanted is not None and taps != wanted:
        yield f"the engine reads the states entering layers {list(taps)}, and training those entering {list(wanted)}"
    if any(not 0 <= i < count for i in taps):
        yield f"it reads layers {list(taps)} of a target of {count} layers"


def conflicting_aux_layers(d: DraftFiles) -> Iterator[str]:
    """The two keys name different hidden states. Needs no target."""
    top = d.config.get("eagle_aux_hidden_state_layer_ids")
    outputs = (d.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if top and outputs and [i + 1 for i in outputs] != list(top):
        yield (
            f"eagle_aux_hidden_state_layer_ids {top} numbers the states entering a layer, that of eagle_config "
            f"{outputs} those leaving a layer: each must be one less"
        )


def wrong_vllm_aux_layers(d: DraftFiles) -> Iterator[str]:
    """wrong_aux_layers of the layers that vLLM reads."""
    count = _target_layer_count(d)
    if count is not None:
        yield from wrong_aux_layers(d, vllm_aux_layers(d, count), count)


def wrong_sglang_aux_layers(d: DraftFiles) -> Iterator[str]:
    """wrong_aux_layers of the layers that SGLang reads."""
    count = _target_layer_count(d)
    if count is not None:
        yield from wrong_aux_layers(d, sglang_aux_layers(d, count), count)


# ---- settings that change the function ----


def changed_norm_flags(d: DraftFiles) -> Iterator[str]:
    """Norm flags other than those that draftsmith.json says a head was trained with."""
    for name in layouts.NORM_FLAGS if d.trained_here else ():
        found, trained = norm_flag(d, name), name in (d.facts.norms or ())
        if found != trained:
            by_default = "" if d.config.get(name) is not None else " by default"
            yield f"{name} is {found}{by_default}, and was {trained} in training".lower()


def norm_before_residual(d: DraftFiles) -> Iterator[str]:
    """For engines that do not implement norm_before_residual."""
    if norm_flag(d, "norm_before_residual"):
        yield "norm_before_residual is not implemented: the residual is taken before the norm"


def speculators_config(d: DraftFiles) -> Iterator[str]:
    """For engines that do not read the speculators format."""
    if d.is_speculators_format:
        yield "the nested config of speculators is not read: export it with --format flat"


def rope_mismatch(d: DraftFiles) -> Iterator[str]:
    """rope_parameters against rope_theta, which older engines read, and both against the target's."""
    new, old = d.get("rope_parameters"), d.config.get("rope_theta")
    theta = new.get("rope_theta") if isinstance(new, dict) else None
    if theta is not None and old is not None and theta != old:
        yield f"rope_theta is {old} and in rope_parameters {theta}"
    used = theta or old
    if d.target is None:
        if used is None:
            yield "neither rope_theta nor rope_parameters is set: engines take 10000"
        return
    wanted = (d.target.config.get("rope_parameters") or {}).get("rope_theta")
    if wanted is not None and (d.trained_here or used is None) and (used or 10000.0) != wanted:
        yield f"the base of RoPE is {used or '10000 by default'} and the target's {wanted}, with which it was trained"


def target_width_mismatch(d: DraftFiles) -> Iterator[str]:
    """target_hidden_size against the target's hidden_size."""
    width = d.get("target_hidden_size", d.get("hidden_size"))
    if d.target is not None and width != d.target.config["hidden_size"]:
        yield f"target_hidden_size is {width} and the target's hidden_size {d.target.config['hidden_size']}"
