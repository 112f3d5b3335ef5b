"""The checks of which engines' rules are made: tensors, vocabularies, layers, settings.

A check is a function from DraftFiles to sentences, one for each thing that is wrong.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from decode.checkpoints import block_layouts, eagle_layouts, layouts
from decode.checkpoints.draft_vocab import VOCAB_FILE, read_ids
from decode.checkpoints.eagle_layouts import MASK_TOKEN_FIELDS, NORM_FLAGS
from decode.checkpoints.head_layouts import medusa_counts
from decode.checkpoints.importers import LAYOUTS
from decode.checkpoints.layouts import VOCAB_MAPS
from decode.common.errors import UserError
from decode.model.loading import load_tokenizer, tokenizer_fingerprint
from decode.model.vocabularies import disagreement
from decode.serving.rules import SILENT, Check, DraftFiles, Rule

LM_HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"

# ---- how checks are made ----


def when(applies: Callable[[DraftFiles], object], what: str) -> Check:
    """The check whose one sentence holds of drafts to which `applies` says yes."""
    return lambda d: [what] if applies(d) else []


def unsupported(why: str) -> Check:
    return lambda d: [why]


def require_value(key: str, wanted: Any, default: Any = None) -> Check:
    """The check that a setting of config.json has one value; `default` stands for an absent one."""
    must = f"and must be {json.dumps(wanted)}"
    return lambda d: (
        [f"{key} is {json.dumps(value)} {must}" for value in [d.get(key, default)] if value != wanted]
    )  # fmt: skip


def require_keys(*keys: str) -> Check:
    return lambda d: [f"config.json has no {key}" for key in keys if key not in d.config]


def require_tensors(d: DraftFiles, names: Iterable[str]) -> list[str]:
    return [f"{name} is missing" for name in names if name not in d.tensors]


def context_at_least_targets(what: str) -> Check:
    """The check that a draft can read as many tokens as its target; `what` happens with longer texts."""

    def check(d: DraftFiles) -> Iterator[str]:
        configs = [d.config, *([] if d.target is None else [d.target.config])]
        own, *wanted = (c.get("max_position_embeddings") or c.get("n_positions") for c in configs)
        if own is not None and wanted and wanted[0] is not None and own < wanted[0]:
            yield f"the draft can read {own} tokens and the target {wanted[0]}: {what}"

    return check


# ---- tensors ----


def wrong_shapes(d: DraftFiles) -> Iterator[str]:
    if not d.shapes and d.config.lacks_sizes:
        yield "config.json lacks hidden_size, intermediate_size, num_attention_heads or vocab_size"
    elif not d.shapes:
        yield "config.json names no layers whose states are read"
    for name, shape in d.shapes.items():
        if name in d.tensors and tuple(d.tensors[name].shape) != shape:
            yield f"{d.name_in_file[name]} is {list(d.tensors[name].shape)} and config.json implies {list(shape)}"


def shared_tensors(d: DraftFiles) -> set[str]:
    return LAYOUTS[d.family].shared(d.config) if d.family in LAYOUTS and d.shapes else set()


def missing_tensors(d: DraftFiles) -> list[str]:
    return require_tensors(d, sorted(set(d.shapes) - shared_tensors(d) - {"t2d", "fc.bias"}))


def unknown_tensors(d: DraftFiles) -> Iterator[str]:
    """Tensors that config.json does not imply. Biases of EAGLE heads and maps have rules of their own."""
    apart = VOCAB_MAPS if d.family in LAYOUTS else (LM_HEAD,)
    for name in sorted(set(d.tensors) - set(d.shapes) - set(apart)):
        bias = name.endswith(".bias") and d.family in ("eagle1", "eagle3", "peagle")
        if not bias and "rotary_emb." not in name:
            yield f"{d.name_in_file[name]} is not part of this draft"


def dropped_biases(d: DraftFiles) -> Iterator[str]:
    """Biases of the layer or of fc, which engines drop; heads trained here have none but zeros."""
    for name in sorted(d.tensors):
        if name.endswith(".bias") and bool(d.tensors[name].float().count_nonzero()):
            yield f"{d.name_in_file[name]} is dropped: the heads were trained with it"


def unfilled_bias_flags(d: DraftFiles) -> Iterator[str]:
    """Settings that make the engine allocate biases for which there is no tensor."""
    has_biases = any(name.endswith("proj.bias") for name in d.tensors)
    for key in ("attention_bias", "mlp_bias", "bias", "qkv_bias"):
        if d.get(key, False) and not has_biases and (key != "bias" or d.family == "eagle1"):
            yield f"{key} is true: the engine allocates biases of the layer, and there is no tensor for them"


def wrong_layer_count(d: DraftFiles) -> Iterator[str]:
    count = d.get("num_hidden_layers")
    if count != 1:
        yield f"num_hidden_layers is {count}: engines agree only on heads of one layer"


def dtype_mismatch(d: DraftFiles) -> Iterator[str]:
    floats = [value.dtype for value in d.tensors.values() if value.is_floating_point()]
    dtypes = {str(dtype).removeprefix("torch.") for dtype in floats}
    for key in ("dtype", "torch_dtype"):
        if d.config.get(key) is not None and {d.config[key]} != dtypes:
            yield f"{key} is {d.config[key]}, and the tensors are {', '.join(sorted(dtypes))}"


def vocab_size_mismatch(d: DraftFiles) -> Iterator[str]:
    if d.target is not None and d.config.get("vocab_size") != d.target.config["vocab_size"]:
        yield f"vocab_size is {d.config.get('vocab_size')} and the target's {d.target.config['vocab_size']}"


# ---- the reduced vocabulary of heads ----


map_missing = when(
    lambda d: "d2t" in d.shapes and "d2t" not in d.tensors,
    "draft_vocab_size is smaller than vocab_size and there is no d2t: draft ids are used as the target's",
)
unneeded_map = when(
    lambda d: d.shapes and "d2t" not in d.shapes and "d2t" in d.tensors,
    "d2t is in the files although the draft has the whole vocabulary",
)


def map_wrong(d: DraftFiles) -> Iterator[str]:
    """d2t that is not a rising map into the vocabulary, or disagrees with t2d."""
    if "d2t" not in d.tensors or d.tensors["d2t"].ndim != 1:
        return
    d2t, vocab, t2d = d.tensors["d2t"], d.get("vocab_size", 0), d.tensors.get("t2d")
    try:
        ids = layouts.ids_from_d2t(d2t, vocab)
    except UserError:
        values = d2t.long()
        if bool((values[1:] > values[:-1]).all()) and values[0] >= 0 and values[-1] < vocab:
            yield "d2t contains ids instead of offsets"
        else:
            yield "d2t does not rise within the vocabulary"
    else:
        if t2d is not None and not torch.equal(ids, t2d.nonzero()[:, 0]):
            yield "d2t and t2d name different tokens"


def map_dtype(d: DraftFiles) -> Iterator[str]:
    d2t = d.tensors.get("d2t")
    if d2t is not None and d2t.is_floating_point():
        yield f"d2t is {d2t.dtype}, which rounds large offsets: save int64"


def t2d_dtype(d: DraftFiles) -> Iterator[str]:
    t2d = d.tensors.get("t2d")
    if t2d is not None and t2d.dtype != torch.bool:
        yield f"t2d is {t2d.dtype} and not bool: indexing with it selects tokens 0 and 1"


# ---- layers whose hidden states EAGLE-3 reads (taps) ----


def named_layers(d: DraftFiles) -> tuple[list[int] | None, list[int] | None]:
    """The layer ids in config.json, and those in its `eagle_config`, which number the states leaving a layer."""
    key = "eagle_aux_hidden_state_layer_ids"
    return d.config.get(key), (d.get("eagle_config") or {}).get(key)


def default_aux_layers(count: int) -> tuple[int, ...]:
    """The layers that engines read by default, for a target of any number of layers."""
    return 2, count // 2, count - 3


def trained_aux_layers(d: DraftFiles) -> tuple[int, ...] | None:
    """The layers whose input hidden states the head was trained on: by draftsmith.json, else by config.json, else the
    default ones. None if that depends on the target and there is none."""
    training = (d.facts.training or {}).get("draft")
    top, outputs = named_layers(d)
    own = top or [i + 1 for i in outputs or ()]
    named = tuple((training or {}).get("taps", own))
    if named or d.target_layers is None:
        return named or None
    return default_aux_layers(d.target_layers)


def wrong_aux_layers(d: DraftFiles, taps: tuple[int, ...]) -> Iterator[str]:
    """The layers that an engine reads against those of training and those that the target has."""
    if d.target_layers is None:
        return
    wanted = trained_aux_layers(d)
    if wanted is not None and taps != wanted:
        yield f"the engine reads the states entering layers {list(taps)}, and training those entering {list(wanted)}"
    if any(not 0 <= i < d.target_layers for i in taps):
        yield f"it reads layers {list(taps)} of a target of {d.target_layers} layers"


def conflicting_aux_layers(d: DraftFiles) -> Iterator[str]:
    top, outputs = named_layers(d)
    if top and outputs and [i + 1 for i in outputs] != list(top):
        yield (
            f"eagle_aux_hidden_state_layer_ids {top} numbers the states entering a layer, that of eagle_config "
            f"{outputs} those leaving a layer: each must be one less"
        )


def target_width_mismatch(d: DraftFiles) -> Iterator[str]:
    width = d.get("target_hidden_size", d.get("hidden_size"))
    if d.target is not None and width != d.target.config["hidden_size"]:
        yield f"target_hidden_size is {width} and the target's hidden_size {d.target.config['hidden_size']}"


# ---- settings that change the function of EAGLE heads ----


def norm_flag(d: DraftFiles, name: str) -> bool:
    """One of NORM_FLAGS. The speculators format has norm_before_residual true by default."""
    default = d.is_speculators_format and name == "norm_before_residual"
    return eagle_layouts.norm_flag(d.config, name, default)


def changed_norm_flags(d: DraftFiles) -> Iterator[str]:
    """Norm flags other than those that draftsmith.json says a head was trained with."""
    for name in NORM_FLAGS if d.trained_here else ():
        found, trained = norm_flag(d, name), name in (d.facts.norms or ())
        if found != trained:
            by_default = "" if d.config.get(name) is not None else " by default"
            yield f"{name} is {found}{by_default}, and was {trained} in training".lower()


norm_before_residual = when(
    lambda d: norm_flag(d, "norm_before_residual"),
    "norm_before_residual is not implemented: the residual is taken before the norm",
)
speculators_config = when(
    lambda d: d.is_speculators_format,
    "the nested config of speculators is not read: export it with --format flat",
)


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


# ---- drafts that propose a block ----


def no_mask_token(d: DraftFiles) -> Iterator[str]:
    named = [d.get("dflash_config", {}).get("mask_token_id")]
    named += [d.config.get(key) for key in MASK_TOKEN_FIELDS]
    token, vocab = next((int(x) for x in named if x is not None), None), d.get("vocab_size", 0)
    if token is None:
        yield "config.json names no mask token (dflash_config.mask_token_id, mask_token_id or pard_token)"
    elif not 0 <= token < vocab:
        yield f"the mask token {token} is outside the vocabulary of {vocab}"


def block_setting(d: DraftFiles, key: str, nested_key: str) -> Any:
    return d.get(key, d.get("dflash_config", {}).get(nested_key))


causal_blocks = when(
    lambda d: block_setting(d, "is_causal", "causal") and d.trained_here,
    "config.json makes blocks causal, and they were trained both ways",
)
wrong_anchor = when(  # a DFlash draft that predicts from its anchor's slot
    lambda d: block_setting(d, "sample_from_anchor", "sample_from_anchor"),
    "sample_from_anchor is true: it is served one place off, or refused",
)


def wrong_block_layers(d: DraftFiles) -> Iterator[str]:
    """Layers that the target does not have or that training did not read; the two keys against each other."""
    taps = block_layouts.aux_layers(d.config)
    outputs = d.get("dflash_config", {}).get("target_layer_ids")
    if outputs and taps != tuple(i + 1 for i in outputs):
        yield f"the engine reads the states entering layers {list(taps)}, and target_layer_ids name {list(outputs)}"
    yield from wrong_aux_layers(d, taps)


# ---- Medusa ----


def missing_medusa_tensors(d: DraftFiles) -> Iterator[str]:
    yield from missing_tensors(d)
    shared = (LM_HEAD, "lm_heads.0.weight")
    if d.get("original_lm_head", False) and not any(name in d.tensors for name in shared):
        yield "lm_head.weight is missing: with original_lm_head all heads use it as their projection"


def unknown_medusa_tensors(d: DraftFiles) -> Iterator[str]:
    heads, layers = medusa_counts(d.config)
    for name in sorted(set(d.tensors) - set(d.shapes) - {LM_HEAD, "token_map"}):
        if not re.fullmatch(r"blocks\.\d+\.layers\.\d+\.bias|lm_heads\.\d+\.weight", name):
            yield f"{d.name_in_file[name]} is dropped: config.json has {heads} heads of {layers} layers"


# ---- small language models ----


def dropped_lm_head(d: DraftFiles) -> Iterator[str]:
    """An lm_head that differs from the embedding and is dropped because of tie_word_embeddings."""
    tied = d.get("tie_word_embeddings", False) and LM_HEAD in d.tensors and EMBEDDING in d.tensors
    if tied and not torch.equal(d.tensors[LM_HEAD], d.tensors[EMBEDDING]):
        yield f"tie_word_embeddings is true, and {LM_HEAD} is another matrix: it is dropped"


def wrong_tokenizer(d: DraftFiles) -> Iterator[str]:
    """The draft's tokenizer against the target's and against the one recorded in training."""
    if not d.has_file("tokenizer_config.json"):
        yield "there are no tokenizer files: copy the target's"
        return
    tokenizer = load_tokenizer(d.path)
    own = tokenizer_fingerprint(tokenizer)
    if d.target is not None and d.target.fingerprint not in (None, own):
        found = disagreement(tokenizer, load_tokenizer(d.target.name))
        if found is not None:
            yield f"its tokenizer decodes the same ids to other text than the target's: {found}"
    recorded = d.facts.tokenizer_hash or own
    if recorded != own:
        yield f"its tokenizer is {own}, and it was trained with {recorded}"


rope_missing = when(
    lambda d: (
        d.get("model_type") in ("llama", "qwen2", "qwen3", "mistral")
        and d.config.get("rope_theta") is None
        and (d.get("rope_parameters") or {}).get("rope_theta") is None
    ),
    "neither rope_theta nor rope_parameters is set: engines use their default",
)


def full_head(d: DraftFiles) -> Iterator[str]:
    """A reduced vocabulary, which only this project's decoder reads, and other tokens with rows of their own."""
    if d.has_file(VOCAB_FILE) and not others_are_silent(d):
        yield (
            f"{VOCAB_FILE} is not read: the engine also drafts tokens that were left out in training: serve the copy "
            "that scripts/export.py --format hf writes"
        )


def others_are_silent(d: DraftFiles) -> bool:
    """Whether tokens outside the reduced vocabulary share one row of the LM head, as scripts/export.py leaves them."""
    tied = LM_HEAD not in d.tensors or d.get("tie_word_embeddings", False)
    head = d.tensors.get(EMBEDDING if tied else LM_HEAD)
    if head is None:
        return False
    try:
        ids = read_ids(d.path, len(head), False)
    except UserError:  # the rule `decoder` tells
        return False
    assert ids is not None  # the file is there
    others = head[torch.ones(len(head), dtype=torch.bool).index_fill(0, ids, False)]
    return torch.equal(others, others[:1].expand_as(others))


CAUSAL_RULES = (
    Rule("unknown-tensor", ("causal",), SILENT, "names of the architecture", unknown_tensors),
    Rule("whole-head", ("causal",), SILENT, "no engine has an option for it", full_head),
    Rule("rope", ("causal",), SILENT, "config of the architecture", rope_missing),
)
"""Rules for small language models that hold in every engine."""
