"""The suspects of each family: functions from a draft's files to readings that take one thing otherwise."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from decode.checkpoints import eagle_layouts, layouts
from decode.checkpoints.draft_vocab import VOCAB_FILE
from decode.checkpoints.head_layouts import medusa_counts
from decode.checkpoints.layouts import VOCAB_MAPS, Shapes, Tensors
from decode.common.errors import UserError
from decode.drafts.drafting import ReducedVocab
from decode.model.hidden_states import HiddenStateSpec
from decode.serving import checks, vllm_engine
from decode.serving.rules import DraftFiles
from eval.served.reading import (
    AdjustFn,
    Edit,
    Reading,
    combine,
    drop_all,
    edit_tensors,
    fill_tensors,
    layer_config,
    remove_file,
    rename,
    reverse_columns,
    set_config,
)


def readings(d: DraftFiles) -> list[Reading]:
    if d.target is None:
        raise UserError("the suspects depend on the target: give --target")
    return [reading for suspect in SUSPECTS.get(d.family, (rope,)) for reading in suspect(d)]


# ---- every family ----


def rope(d: DraftFiles) -> Iterator[Reading]:
    """RoPE with each base that the files and the target name and with the usual one; without scaling, or with the
    target's."""
    assert d.target is not None
    own, theirs = d.get("rope_parameters") or {}, d.target.config.get("rope_parameters") or {}
    if any(isinstance(value, dict) for value in (*own.values(), *theirs.values())):
        return  # a RoPE for each kind of layer
    scaling = {**(d.get("rope_scaling") or {}), **own}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    theta = own.get("rope_theta") or d.get("rope_theta", 10000.0)
    options: dict[str, tuple[dict[str, Any], bool]] = {}
    for base in (d.get("rope_theta"), theirs.get("rope_theta"), 10000.0):
        if base is not None and base != theta:
            written = {**scaling, "rope_type": kind, "rope_theta": base}
            says = f"{base:g} as the base of RoPE instead of {theta:g}"
            options.setdefault(says, (written, base == d.get("rope_theta")))
    plain = {"rope_type": "default", "rope_theta": theta}
    if kind != "default":
        options[f"RoPE without its {kind} scaling"] = plain, False
    elif theirs.get("rope_type", "default") != "default":
        scaled = {**theirs, "rope_theta": theta}
        options[f"the target's {theirs['rope_type']} scaling of RoPE"] = scaled, False
    for says, (written, visible) in options.items():
        edit = layer_config(
            d, rope_parameters=written, rope_theta=written["rope_theta"], rope_scaling=None
        )
        yield Reading("rope", says, edit, visible=visible)


HAS_OWN_SUSPECT = re.compile(r"\.bias$|^lm_head|^token_map$|rotary_emb\.|^verifier_")
"""Tensors that may be superfluous, and are either harmless or switched by another suspect."""


def missing_tensors(d: DraftFiles) -> Iterator[Reading]:
    """What is missing left as it may have been allocated, or found under the unknown name of an equal shape."""
    optional = {"fc.bias", *VOCAB_MAPS}
    if d.family in EAGLES:
        optional |= checks.shared_tensors(d)
    missing = {n: x for n, x in d.shapes.items() if n not in d.tensors and n not in optional}
    implied = {*d.shapes, *VOCAB_MAPS}
    others = [n for n in d.tensors if n not in implied and not HAS_OWN_SUSPECT.search(n)]
    unknown = {d.name_in_file[name]: tuple(d.tensors[name].shape) for name in others}
    without = edit_tensors(lambda tensors: [tensors.pop(name) for name in unknown])
    options: dict[str, Edit] = {}
    for name, shape in missing.items():
        for other in (other for other, its in unknown.items() if its == shape):
            options[f"{other} for {name}"] = rename(other, name)
    if unknown and not missing:
        options[f"no {', '.join(unknown)}"] = without
    norms = all("norm" in name for name in missing)
    left = {"one": 0.0} if norms else {"zero": 0.0, "at random": 1.0}
    for value, std in left.items() if missing else ():
        says = f"{', '.join(missing)} missing and left {value}"
        options[says] = combine(without, fill_tensors(missing, std))
    for says, edit in options.items():
        yield Reading("tensors", says, edit, visible=True)


# ---- EAGLE: layers whose states are read ----


def aux_layers(d: DraftFiles) -> Iterator[Reading]:
    """The layers whose states the head reads: shifted by one, the default ones, vLLM's and those of training."""
    assert d.target is not None
    count: int = d.target.config["num_hidden_layers"]
    top, outputs = checks.named_layers(d)
    default = checks.default_aux_layers(count)
    own = tuple(top or (layouts.output_to_capture(outputs) if outputs else default))
    options: dict[tuple[int, ...], bool] = {}
    for layers, visible in (
        (checks.trained_aux_layers(d) or own, True),
        (vllm_engine.aux_layers(d, count), True),
        (tuple(i + 1 for i in own), False),
        (tuple(i - 1 for i in own), False),
        (default if count >= 7 else own, False),
    ):
        if layers != own and len(layers) == len(own) and all(0 <= i < count for i in layers):
            options.setdefault(layers, visible)
    for layers, visible in options.items():
        says = f"the states that enter layers {list(layers)} instead of {list(own)}"
        edit = set_config(eagle_aux_hidden_state_layer_ids=list(layers))
        yield Reading("taps", says, edit, visible=visible)
    if len(own) > 1:
        edit = reverse_columns(d, ["fc.weight"], len(own))
        yield Reading("taps", "the tapped states in the opposite order", edit)


def earlier_state(d: DraftFiles) -> Iterator[Reading]:
    """For heads that read the target's final state: the state that enters its last layer."""
    assert d.target is not None
    last: int = d.target.config["num_hidden_layers"] - 1

    def adjust(draft: Any) -> None:
        draft.reads = replace(draft.reads, aux_layers=HiddenStateSpec((last,)))

    says = f"the state that enters layer {last} instead of the final one"
    yield Reading("taps", says, combine(), adjust)


# ---- EAGLE: norms ----


def norms(d: DraftFiles) -> Iterator[Reading]:
    """Each norm flag of EAGLE-3 the other way round; norms that are left at one."""
    count = eagle_layouts.aux_layer_count(d.config)
    width = d.get("target_hidden_size", d.get("hidden_size"))
    implied: dict[str, Shapes] = {
        "norm_before_fc": {"input_norm.weight": (count * width,)},
        "fc_norm": {f"fc_norm.{i}.weight": (width,) for i in range(count)},
    }
    for flag in eagle_layouts.NORM_FLAGS:
        on, shapes = checks.norm_flag(d, flag), implied.get(flag, {})
        there = [name for name in shapes if name in d.tensors]
        fill = {} if on or there else shapes
        nested = flag in (d.raw_config.get("eagle_config") or {})  # looked for there first
        set_flag = set_config("eagle_config" if nested else "", **{flag: not on})
        yield Reading(
            "norms",
            f"{flag} {'off' if on else 'on'}" + (", its weights one" if fill else ""),
            combine(set_flag, drop_all(d, there if on else []), fill_tensors(fill, 0)),
            visible=d.is_speculators_format and d.config.get(flag) is None,
        )
    for name in ("norm.weight", "layers.0.hidden_norm.weight"):
        if name in d.tensors:
            ones = fill_tensors({name: tuple(d.tensors[name].shape)}, 0)
            yield Reading("norms", f"{name} left at one", combine(drop_all(d, [name]), ones))


# ---- EAGLE: the vocabulary ----


def vocabulary_map(d: DraftFiles) -> Iterator[Reading]:
    """The target's ids of a reduced vocabulary: from d2t alone, from t2d alone, one off, or the draft's own numbers."""
    size, whole = d.get("draft_vocab_size", 0), d.get("vocab_size")
    if not size or size == whole:
        return
    own, d2t, t2d = torch.arange(size), d.tensors.get("d2t"), d.tensors.get("t2d")
    options = {"draft ids taken for the target's, without d2t": own}
    broken = d2t is None
    if t2d is not None and int(t2d.bool().sum()) == size:
        options["the tokens of t2d, without d2t"] = t2d.bool().nonzero()[:, 0]
    if d2t is not None and len(d2t) == size:
        ids = own + d2t.long()
        broken = t2d is not None and not torch.equal(ids, t2d.bool().nonzero()[:, 0])
        options["d2t as it is, without t2d"] = ids
        options["d2t as ids, not as offsets"] = d2t.long()
        options |= {"ids one above d2t's": ids + 1, "ids one below d2t's": ids - 1}
        if not broken:  # two of the readings above are what the files say
            options = {says: x for says, x in options.items() if not torch.equal(x, ids)}

    def set_ids(ids: torch.Tensor) -> AdjustFn:
        """Gives a loaded head ids [Vd] that need not rise: files with such a map are refused."""

        def adjust(draft: Any) -> None:
            draft.vocab = ReducedVocab(ids.to(draft.device), whole)

        return adjust

    loadable = edit_tensors(lambda t: (t.pop("t2d", None), t.update(d2t=0 * own)))
    for says, ids in options.items():
        adjust = set_ids(ids.clamp(0, whole - 1))
        yield Reading("vocabulary map", says, loadable, adjust, visible=broken)


# ---- EAGLE: biases, inputs, matrices ----


def biases(d: DraftFiles) -> Iterator[Reading]:
    """Biases of an EAGLE layer: dropped, or allocated because a flag says so and filled by no tensor."""
    off = layer_config(d, attention_bias=False, mlp_bias=False)
    flags = ", ".join(x for x in ("attention_bias", "mlp_bias", "bias", "qkv_bias") if d.get(x))
    names = [name for name in d.tensors if name.endswith(".bias") and bool(d.tensors[name].any())]
    if names:
        edit = combine(off, drop_all(d, names))
        yield Reading("biases", f"{', '.join(names)} dropped", edit, visible=True)
    elif flags:
        yield Reading("biases", f"{flags} off", off, visible=True)
        says = f"biases that {flags} asks for and no tensor fills, at random"
        yield Reading("biases", says, off, random_biases, visible=True)


def random_biases(draft: Any) -> None:
    """Gives the attention of a loaded head biases as memory that nobody filled may hold them."""
    generator = torch.Generator().manual_seed(0)
    attention = draft.net.layer.self_attn
    for linear in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
        noise = torch.randn(linear.out_features, generator=generator)
        linear.bias = torch.nn.Parameter(noise.to(linear.weight))


def swapped_inputs(d: DraftFiles) -> Iterator[Reading]:
    eagle3 = [f"layers.0.self_attn.{x}_proj.weight" for x in "qkv"]
    edit = reverse_columns(d, ["fc.weight"] if d.family == "eagle1" else eagle3, 2)
    yield Reading("inputs", "state and embedding in the opposite order", edit)


def shared_matrices(d: DraftFiles) -> Iterator[Reading]:
    for name in sorted(checks.shared_tensors(d) & set(d.tensors)):
        yield Reading("matrices", f"the target's {name}", drop_all(d, [name]))


# ---- Medusa ----


def medusa_heads(d: DraftFiles) -> Iterator[Reading]:
    """Biases dropped; one projection for all heads, theirs or the target's; the heads one position off."""
    count, shared = medusa_counts(d.config)[0], bool(d.get("original_lm_head", False))
    biases = [name for name in d.tensors if name.endswith(".bias")]
    projections = [name for name in d.tensors if name.startswith("lm_heads.")]
    others = [name for name in projections if name != "lm_heads.0.weight"]
    if biases:
        edit = combine(set_config(medusa_fc_bias=False), drop_all(d, biases))
        unsaid = d.config.get("medusa_fc_bias") is not True
        yield Reading("biases", "the heads' biases dropped", edit, visible=unsaid)

    def one_projection(names: Sequence[str]) -> Edit:
        return combine(set_config(original_lm_head=True), drop_all(d, names))

    options = {
        "the first head's projection for all": one_projection(others),
        "the target's output matrix for all heads": one_projection(projections),
    }
    if shared:
        options["a projection for each head"] = set_config(original_lm_head=False)
    for says, edit in options.items() if others else ():
        yield Reading("matrices", says, edit, visible=shared)
    for says, step in (("after", 1), ("before", -1)):
        edit = rotate_heads(d, count, step)
        yield Reading("heads", f"for each position the head of the one {says}", edit)


def rotate_heads(d: DraftFiles, count: int, step: int) -> Edit:
    """Head i becomes what head i + step was."""

    def change(tensors: Tensors) -> None:
        before = dict(tensors)
        for name, own in d.name_in_file.items():
            kind, number, *rest = name.split(".")
            if number.isdecimal():
                other = ".".join([kind, str((int(number) + step) % count), *rest])
                tensors[own] = before[d.name_in_file.get(other, own)]

    return edit_tensors(change)


# ---- causal drafts ----


def causal_heads(d: DraftFiles) -> Iterator[Reading]:
    """The embedding as output matrix where there is another, or the other where the embedding is to be it; all rows of
    the output matrix of a draft that was trained on some of them."""
    if checks.LM_HEAD in d.tensors:
        tied = bool(d.get("tie_word_embeddings", False))
        matrix = checks.LM_HEAD if tied else "the embedding"
        edit = set_config(tie_word_embeddings=not tied)
        yield Reading("matrices", f"{matrix} as output matrix", edit, visible=tied)
    if d.has_file(VOCAB_FILE):
        yield Reading("vocabulary map", f"no {VOCAB_FILE}", remove_file(VOCAB_FILE), visible=True)


EAGLES = ("eagle1", "eagle3", "peagle")
OF_ALL_EAGLES = (missing_tensors, biases, swapped_inputs, shared_matrices)
EAGLE3 = (aux_layers, norms, rope, vocabulary_map, *OF_ALL_EAGLES)
SUSPECTS: dict[str, tuple[Callable[[DraftFiles], Iterator[Reading]], ...]] = {
    **dict.fromkeys(("eagle3", "peagle"), EAGLE3),
    "eagle1": (earlier_state, rope, *OF_ALL_EAGLES),
    "medusa": (earlier_state, medusa_heads, missing_tensors),
    "causal": (rope, missing_tensors, causal_heads),
}
"""The suspects of a family. For the others only RoPE is switched."""
