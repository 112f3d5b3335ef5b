"""Suspects of EAGLE heads: taps, norms, the map of a reduced vocabulary, biases, inputs and matrices."""

from collections.abc import Iterator
from typing import Any

import torch

from decode.checkpoints import eagle_layouts, layouts
from decode.checkpoints.layouts import Shapes
from decode.drafts.drafting import ReducedVocab
from decode.model.hidden_states import HiddenStateSpec
from decode.serving import family_rules, vllm_engine
from decode.serving.edits import ConfigEdit, Edit, TensorEdit, combine, set_config
from decode.serving.rules import DraftFiles
from eval.served.reading import (
    AdjustFn,
    Reading,
    drop_all,
    fill_tensors,
    layer_config,
    reverse_columns,
)

# ---- taps ----


def taps(d: DraftFiles) -> Iterator[Reading]:
    """The layers whose states the head reads: shifted by one, the default ones, vLLM's and those of training."""
    assert d.target is not None
    count: int = d.target.config["num_hidden_layers"]
    own = written_taps(d, count)
    trained = family_rules.trained_aux_layers(d) or own
    options: dict[tuple[int, ...], bool] = {}
    for layers, visible in (
        (trained, True),
        (vllm_engine.aux_layers(d, count), True),
        (tuple(i + 1 for i in own), False),
        (tuple(i - 1 for i in own), False),
        (family_rules.default_aux_layers(count) if count >= 7 else own, False),
    ):
        if len(layers) == len(own) and all(0 <= i < count for i in layers):
            options.setdefault(layers, visible)
    options.pop(own, None)
    for layers, visible in options.items():
        says = f"the states that enter layers {list(layers)} instead of {list(own)}"
        edit: Edit = set_config(eagle_aux_hidden_state_layer_ids=list(layers))
        yield Reading("taps", says, edit, visible=visible)
    if len(own) > 1:
        edit = reverse_columns(d, ["fc.weight"], len(own))
        yield Reading("taps", "the tapped states in the opposite order", edit)


def earlier_state(d: DraftFiles) -> Iterator[Reading]:
    """For heads that read the target's final state: the state that enters its last layer."""
    assert d.target is not None
    last: int = d.target.config["num_hidden_layers"] - 1

    def adjust(draft: Any) -> None:
        draft.aux_layers = HiddenStateSpec((last,))

    says = f"the state that enters layer {last} instead of the final one"
    yield Reading("taps", says, combine(), adjust)


def written_taps(d: DraftFiles, count: int) -> tuple[int, ...]:
    """The layers (capture ids) that config.json names in either convention, else the default ones."""
    outputs = (d.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    own = d.config.get("eagle_aux_hidden_state_layer_ids")
    return tuple(
        own
        or (
            layouts.output_to_capture(outputs)
            if outputs
            else family_rules.default_aux_layers(count)
        )
    )


# ---- norms ----

NORM_TENSORS = {"norm_before_fc": "input_norm.", "fc_norm": "fc_norm."}
"""How the tensors begin that a norm flag implies; the other flags imply none."""


def norms(d: DraftFiles) -> Iterator[Reading]:
    """Each norm flag of EAGLE-3 the other way round; norms that are left at one."""
    for flag in eagle_layouts.NORM_FLAGS:
        on, own = family_rules.norm_flag(d, flag), NORM_TENSORS.get(flag, "-")
        there = [name for name in d.tensors if name.startswith(own)]
        fill = {} if on or there else flag_shapes(d, flag)
        yield Reading(
            "norms",
            f"{flag} {'off' if on else 'on'}" + (", its weights one" if fill else ""),
            combine(set_flag(d, flag, not on), drop_all(d, there if on else []), fill_tensors(fill, 0)),
            visible=d.is_speculators_format and d.config.get(flag) is None,
        )  # fmt: skip
    for name in ("norm.weight", "layers.0.hidden_norm.weight"):
        if name in d.tensors:
            ones = fill_tensors({name: tuple(d.tensors[name].shape)}, 0)
            yield Reading("norms", f"{name} left at one", combine(drop_all(d, [name]), ones))


def set_flag(d: DraftFiles, flag: str, value: bool) -> ConfigEdit:
    """The flag where the importer looks for it first."""
    nested = flag in (d.raw_config.get("eagle_config") or {})
    return ConfigEdit({flag: value}, "eagle_config" if nested else "")


def flag_shapes(d: DraftFiles, flag: str) -> Shapes:
    """The tensors that a norm flag implies."""
    count, width = (
        eagle_layouts.aux_layer_count(d.config),
        d.get("target_hidden_size", d.get("hidden_size")),
    )
    shapes: dict[str, Shapes] = {
        "norm_before_fc": {"input_norm.weight": (count * width,)},
        "fc_norm": {f"fc_norm.{i}.weight": (width,) for i in range(count)},
    }
    return shapes.get(flag, {})


# ---- the vocabulary ----


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
    loadable = TensorEdit(lambda tensors: (tensors.pop("t2d", None), tensors.update(d2t=0 * own)))
    for says, ids in options.items():
        adjust = set_ids(ids.clamp(0, whole - 1), whole)
        yield Reading("vocabulary map", says, loadable, adjust, visible=broken)


def set_ids(ids: torch.Tensor, size: int) -> AdjustFn:
    """Gives a loaded head these target ids [Vd], which need not rise: files with such a map are refused."""

    def adjust(draft: Any) -> None:
        draft.vocab = ReducedVocab(ids.to(draft.device), size)

    return adjust


# ---- biases, inputs, matrices ----


def biases(d: DraftFiles) -> Iterator[Reading]:
    """Biases of an EAGLE layer: dropped, or allocated because a flag says so and filled by no tensor."""
    off = layer_config(d, attention_bias=False, mlp_bias=False)
    flags = ", ".join(x for x in ("attention_bias", "mlp_bias", "bias", "qkv_bias") if d.get(x))
    names = [name for name in d.tensors if name.endswith(".bias") and bool(d.tensors[name].any())]
    options: dict[str, tuple[Edit, AdjustFn | None]] = {}
    if names:
        options[f"{', '.join(names)} dropped"] = combine(off, drop_all(d, names)), None
    elif flags:
        options[f"{flags} off"] = off, None
        options[f"biases that {flags} asks for and no tensor fills, at random"] = off, random_biases
    for says, (edit, adjust) in options.items():
        yield Reading("biases", says, edit, adjust, visible=True)


def random_biases(draft: Any) -> None:
    """Gives the attention of a loaded head biases as memory that nobody filled may hold them."""
    generator = torch.Generator().manual_seed(0)
    attention = draft.net.layer.self_attn
    for linear in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
        noise = torch.randn(linear.out_features, generator=generator)
        linear.bias = torch.nn.Parameter(noise.to(linear.weight))


def swapped_inputs(d: DraftFiles) -> Iterator[Reading]:
    """The embedding and the state, which EAGLE concatenates, in the opposite order."""
    eagle3 = [f"layers.0.self_attn.{x}_proj.weight" for x in "qkv"]
    edit = reverse_columns(d, ["fc.weight"] if d.family == "eagle1" else eagle3, 2)
    yield Reading("inputs", "state and embedding in the opposite order", edit)


def shared_matrices(d: DraftFiles) -> Iterator[Reading]:
    """The target's embedding or output matrix in place of the draft's own."""
    for name in sorted(family_rules.shared_tensors(d) & set(d.tensors)):
        yield Reading("matrices", f"the target's {name}", drop_all(d, [name]))
