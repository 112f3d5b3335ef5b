"""What EAGLE heads consist of, and what can be wrong with them in more than one engine."""

from collections.abc import Iterator

import torch

from decode.checkpoints import layouts
from decode.common.errors import UserError
from scripts.engine_compat.rules.checkpoint import (
    DraftFiles,
    TensorShape,
    compare_shapes,
    require_tensors,
)

VOCAB_MAPS = ("d2t", "t2d")


def expected_shapes(d: DraftFiles) -> dict[str, TensorShape]:
    """Every tensor that config.json speaks of, with its shape; {} if it lacks a size."""
    hidden, inner, heads = (
        d.get("hidden_size"),
        d.get("intermediate_size"),
        d.get("num_attention_heads"),
    )
    vocab = d.get("vocab_size")
    if None in (hidden, inner, heads, vocab):
        return {}
    size, kv = d.get("head_dim", hidden // heads), d.get("num_key_value_heads", heads)
    third = d.family == "eagle3"
    found: dict[str, TensorShape] = {"embed_tokens.weight": (vocab, hidden)}
    for i in range(d.get("num_hidden_layers", 1)):
        width = 2 * hidden if third and i == 0 else hidden
        layer = {
            "self_attn.q_proj.weight": (heads * size, width),
            "self_attn.k_proj.weight": (kv * size, width),
            "self_attn.v_proj.weight": (kv * size, width),
            "self_attn.o_proj.weight": (hidden, heads * size),
            "post_attention_layernorm.weight": (hidden,),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
        }
        if third or i > 0:
            layer["input_layernorm.weight"] = (hidden,)
        if third:
            layer["hidden_norm.weight"] = (hidden,)
        found |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    if not third:
        return found | {"fc.weight": (hidden, 2 * hidden), "fc.bias": (hidden,)}
    tapped, target = aux_layer_count(d), d.get("target_hidden_size", hidden)
    said = d.get("draft_vocab_size", vocab)
    found |= {
        "fc.weight": (hidden, tapped * target),
        "norm.weight": (hidden,),
        "lm_head.weight": (said, hidden),
    }
    if norm_flag(d, "norm_before_fc"):
        found["input_norm.weight"] = (tapped * target,)
    if norm_flag(d, "fc_norm"):
        found |= {f"fc_norm.{i}.weight": (target,) for i in range(tapped)}
    return found | ({} if said == vocab else {"d2t": (said,), "t2d": (vocab,)})


def norm_flag(d: DraftFiles, name: str) -> bool:
    """One of EAGLE-3's norm flags; the nested format has norm_before_residual true unless it is said."""
    nested = (d.get("eagle_config") or {}).get(name)
    default = d.nested and name == "norm_before_residual"
    return bool(nested if nested is not None else d.get(name, default))


def aux_layer_count(d: DraftFiles) -> int:
    """How many states are tapped."""
    ids = (d.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    return d.get("num_aux_hidden_states", len(ids) if ids else 3)


def wrong_shapes(d: DraftFiles) -> Iterator[str]:
    found = expected_shapes(d)
    if not found:
        yield "config.json lacks hidden_size, intermediate_size, num_attention_heads or vocab_size"
    yield from compare_shapes(d, found)


def missing_tensors(d: DraftFiles) -> Iterator[str]:
    """What is neither there nor taken from the target."""
    wanted = set(expected_shapes(d)) - {"t2d", "fc.bias"}
    if d.get("target_hidden_size", d.get("hidden_size")) == d.get("hidden_size"):
        wanted.discard("embed_tokens.weight")
    if d.get("draft_vocab_size", d.get("vocab_size")) == d.get("vocab_size"):
        wanted.discard("lm_head.weight")
    yield from require_tensors(d, sorted(wanted))


def unknown_tensors(d: DraftFiles) -> Iterator[str]:
    """Tensors that config.json does not speak of, but for biases."""
    for name in sorted(set(d.tensors) - set(expected_shapes(d)) - set(VOCAB_MAPS)):
        if not name.endswith(".bias") and "rotary_emb." not in name:
            yield f"{d.name_in_file[name]} is not known to be part of these heads"


def dropped_biases(d: DraftFiles) -> Iterator[str]:
    """Biases of the layer, or of fc: trained here never, dropped by engines."""
    for name in sorted(d.tensors):
        if name.endswith(".bias") and bool(d.tensors[name].count_nonzero()):
            yield f"{d.name_in_file[name]} is dropped: the heads were trained with it"


def unfilled_bias_flags(d: DraftFiles) -> Iterator[str]:
    """Settings by which an engine makes biases that no tensor fills."""
    for key in ("attention_bias", "mlp_bias", "bias", "qkv_bias"):
        kept = any(name.endswith("proj.bias") for name in d.tensors)
        if d.get(key, False) and not kept and (key != "bias" or d.family == "eagle1"):
            yield f"{key} is true: the engine makes biases of the layer, and no tensor fills them"


def wrong_layer_count(d: DraftFiles) -> Iterator[str]:
    count = d.get("num_hidden_layers")
    if count != 1:
        yield f"num_hidden_layers is {count}: heads of one layer are what every engine computes alike"


# ---- the reduced vocabulary ----


def map_missing(d: DraftFiles) -> Iterator[str]:
    if "d2t" in expected_shapes(d) and "d2t" not in d.tensors:
        yield "draft_vocab_size is smaller than vocab_size and there is no d2t: draft ids pass for the target's"


def unneeded_map(d: DraftFiles) -> Iterator[str]:
    if expected_shapes(d) and "d2t" not in expected_shapes(d) and "d2t" in d.tensors:
        yield "d2t is there although the draft has the whole vocabulary"


def map_wrong(d: DraftFiles) -> Iterator[str]:
    """d2t that is no rising map into the vocabulary, whatever it is instead."""
    if "d2t" not in d.tensors or d.tensors["d2t"].ndim != 1:
        return
    d2t, vocab = d.tensors["d2t"], d.get("vocab_size", 0)
    try:
        ids = layouts.ids_from_d2t(d2t, vocab)
    except UserError:
        whole = d2t.long()
        rises = (
            bool((whole[1:] > whole[:-1]).all()) and int(whole[0]) >= 0 and int(whole[-1]) < vocab
        )
        why = (
            "holds ids where offsets are meant" if rises else "does not rise within the vocabulary"
        )
        yield f"d2t {why}"
        return
    t2d = d.tensors.get("t2d")
    if t2d is not None and not torch.equal(ids, t2d.nonzero()[:, 0]):
        yield "d2t and t2d name different tokens"


def map_dtype(d: DraftFiles) -> Iterator[str]:
    """Offsets that are rounded, or may be."""
    d2t = d.tensors.get("d2t")
    if d2t is not None and d2t.is_floating_point():
        yield f"d2t is {d2t.dtype}, which rounds large offsets: save int64"


def t2d_dtype(d: DraftFiles) -> Iterator[str]:
    t2d = d.tensors.get("t2d")
    if t2d is not None and t2d.dtype != torch.bool:
        yield f"t2d is {t2d.dtype} and not bool: who indexes with it picks token 0 and 1"


# ---- layers that are tapped ----

LayerIds = tuple[int, ...]


def trained_aux_layers(d: DraftFiles) -> LayerIds | None:
    """The states entering these layers were trained on, as far as anything but the engine's own key says."""
    count = _target_layer_count(d)
    training = d.facts.get("training", {}).get("draft")
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
    """What engines tap if nothing is said."""
    return 2, count // 2, count - 3


def vllm_aux_layers(d: DraftFiles, count: int) -> LayerIds:
    """A set of its own key, as it is; or of SGLang's, as it is; or the default."""
    outputs = (d.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    ids = d.config.get("eagle_aux_hidden_state_layer_ids") or outputs
    return tuple(sorted(set(ids))) if ids else default_aux_layers(count)


def sglang_aux_layers(d: DraftFiles, count: int) -> LayerIds:
    """`eagle_config` alone, and one layer on."""
    ids = (d.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    return tuple(i + 1 for i in ids) if ids else default_aux_layers(count)


def wrong_aux_layers(d: DraftFiles, taps: LayerIds, count: int) -> Iterator[str]:
    """The taps that an engine resolves against those trained on, and against the target."""
    wanted = trained_aux_layers(d)
    if wanted is not None and taps != wanted:
        yield f"the engine taps the states entering layers {list(taps)}, trained on are {list(wanted)}"
    if any(not 0 <= i < count for i in taps):
        yield f"it taps layers {list(taps)} of a target of {count}"


def conflicting_aux_layers(d: DraftFiles) -> Iterator[str]:
    """The two keys name different states; known without the target."""
    top = d.config.get("eagle_aux_hidden_state_layer_ids")
    outputs = (d.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if top and outputs and [i + 1 for i in outputs] != list(top):
        yield (
            f"eagle_aux_hidden_state_layer_ids {top} counts states entering a layer, that of eagle_config {outputs} "
            "those leaving one: it must be one less each"
        )


def wrong_vllm_aux_layers(d: DraftFiles) -> Iterator[str]:
    count = _target_layer_count(d)
    if count is not None:
        yield from wrong_aux_layers(d, vllm_aux_layers(d, count), count)


def wrong_sglang_aux_layers(d: DraftFiles) -> Iterator[str]:
    count = _target_layer_count(d)
    if count is not None:
        yield from wrong_aux_layers(d, sglang_aux_layers(d, count), count)


# ---- settings that change what is computed ----


def changed_norm_flags(d: DraftFiles) -> Iterator[str]:
    """Norm flags that heads trained here never have."""
    for name in layouts.NORM_FLAGS if d.ours else ():
        if norm_flag(d, name):
            yield f"{name} is true{'' if d.config.get(name) else ' unless it is said'}, and was false in training"


def rope_mismatch(d: DraftFiles) -> Iterator[str]:
    """RoPE said in two places, which engines of different age read, and the target's."""
    new, old = d.get("rope_parameters"), d.config.get("rope_theta")
    theta = new.get("rope_theta") if isinstance(new, dict) else None
    if theta is not None and old is not None and theta != old:
        yield f"rope_theta is {old} and in rope_parameters {theta}"
    used = theta or old
    if d.target is None:
        if used is None:
            yield "neither rope_theta nor rope_parameters is there: engines take 10000"
        return
    its = (d.target.config.get("rope_parameters") or {}).get("rope_theta")
    if its is not None and (d.ours or used is None) and (used or 10000.0) != its:
        yield f"the base of RoPE is {used or '10000, unsaid,'} and the target's {its}, with which it was trained"


def target_width_mismatch(d: DraftFiles) -> Iterator[str]:
    said = d.get("target_hidden_size", d.get("hidden_size"))
    if d.target is not None and said != d.target.config["hidden_size"]:
        yield f"target_hidden_size is {said} and the target's hidden_size {d.target.config['hidden_size']}"
