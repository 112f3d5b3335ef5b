"""Draft heads on disk: names, shapes and settings as serving engines read them, and what damage says when loaded."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from decode.checkpoints import eagle_layouts, head_layouts, layouts
from decode.checkpoints.draft_folder import METADATA_FILE
from decode.checkpoints.importers import LAYOUTS
from decode.common.errors import UserError
from decode.drafts.eagle import EagleDraft
from decode.drafts.eagle_model import Eagle3Model, llama_config
from decode.drafts.registry import load_draft
from decode.engine.engine import decode
from decode.model.hidden_states import HiddenStateSpec
from decode.model.loading import Target
from eval.served.reading import edit_tensors, rename, set_config
from tests.decode.drafts.test_heads_decoding import watched
from tests.heads import FAMILIES, HEADS, draft_of, hf_states, ids_of, net_of, save
from tests.tiny import rope, tiny_model, tiny_prompts, tiny_target

H, V, INNER, LAYERS = 16, 64, 32, 8
SIZE: dict[str, Any] = {"hidden_size": H, "vocab_size": V, "intermediate_size": INNER}
SIZE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
SIZE |= {"num_hidden_layers": LAYERS}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
PROMPTS = tiny_prompts(7, 1, 4, vocab=V)


def small_target(**changes: Any) -> Target:
    return tiny_target(tiny_model("llama", **SIZE | ROPE | changes))


def saved(folder: Path, family: str) -> str:
    own = small_target()
    return save(folder, family, net_of(family, own), own, torch.float32)


VD = 55


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_have_the_names_and_shapes_of_the_format(family: str, tmp_path: Path) -> None:
    """Catches a parameter renamed in our nets, buffers that are saved, maps for a full vocabulary: engines would refuse
    the file, or drop what they do not know without a word. Which names and sizes they are, goldens say."""
    path = saved(tmp_path, family)
    layout = LAYOUTS["eagle3" if family == "narrow" else family]
    config, tensors = layouts.read_config(path), load_file(f"{path}/model.safetensors")
    assert layout.shapes is not None
    wanted = layout.shapes(config)
    for name in layout.shared(config) - {"lm_head.weight"}:  # EAGLE-3 is saved with its own
        del wanted[name]
    assert {layout.name(name): tuple(value.shape) for name, value in tensors.items()} == wanted
    assert any(name.startswith("midlayer.") for name in tensors) == (layout.family == "eagle3")
    files = {file.name for file in tmp_path.iterdir()}
    assert files == {"config.json", METADATA_FILE, "model.safetensors"}


def test_medusa_has_no_other_keys_that_vllm_would_rename() -> None:
    """Catches a new field with num and heads or layers in its name, which vLLM takes for its own."""
    keys = head_layouts.medusa_config(small_target().runner.config, HEADS, 1, V)
    renamed = [key for key in keys if "num" in key and ("heads" in key or "layers" in key)]
    assert renamed == ["num_heads", "num_hidden_layers"]


@pytest.mark.parametrize("layers", [(2, 4, 5), (1, 4, 7), (3, 6)])
def test_engines_tap_the_same_states(layers: tuple[int, ...]) -> None:
    """Catches ids in one convention where an engine reads the other (vLLM PR #43671: 10 % accepted instead of 45 %).
    Ids of the default layers are not written: some engines misread them."""
    config = eagle_layouts.eagle3_config(small_target().runner.config, V, VD, layers)
    default = [2, LAYERS // 2, LAYERS - 3]  # of both; SGLang counts a layer's output
    assert config.get("eagle_aux_hidden_state_layer_ids", default) == list(layers)
    outputs = config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
    assert (default if outputs is None else [i + 1 for i in outputs]) == list(layers)
    assert eagle_layouts.aux_layers(config, LAYERS) == layers
    written = {"eagle_aux_hidden_state_layer_ids", "eagle_config", "num_aux_hidden_states"}
    assert written & config.keys() == (set() if layers == (2, 4, 5) else written)
    assert config.get("num_aux_hidden_states", 3) == len(layers)


def test_the_map_is_an_offset(tmp_path: Path) -> None:
    """Catches d2t read or written as an index (methods 12), a map whose halves disagree, one for all ids."""
    path = saved(tmp_path / "some", "eagle3")
    config, tensors = layouts.read_config(path), load_file(f"{path}/model.safetensors")
    ids = torch.arange(VD) + tensors["d2t"]
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)
    assert torch.equal(ids, tensors["t2d"].nonzero()[:, 0])
    assert torch.equal(ids, ids_of("eagle3", V))
    assert layouts.draft_to_target_ids("some", config, tensors).tolist() == ids.tolist()  # type: ignore[union-attr]
    whole = load_file(saved(tmp_path / "all", "narrow") + "/model.safetensors")
    assert not {"d2t", "t2d"} & whole.keys()


def proposals(draft: Any, own: Target) -> list[torch.Tensor]:
    """All logits of a run: of each chain the first and those behind its own states, three steps deep."""
    with watched(draft) as seen:
        decode(own, draft, PROMPTS, k=3 if draft.name == "medusa" else 4, max_new_tokens=6)
    return [call.logits for round_ in seen for call in round_.calls]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_reloaded_draft_computes_the_same(family: str, tmp_path: Path) -> None:
    """Catches a tensor lost or exchanged, norms or feedback that differ (methods 16, 17), RoPE that falls back to its
    default (15), a vocabulary map applied twice or not: bit for bit, over three steps of the draft's own states."""
    own = small_target()
    net = net_of(family, own)
    path = save(tmp_path, family, net, own, torch.float32)
    again: Any = load_draft(path, own)
    assert again.name == ("eagle3" if family == "narrow" else family)
    for name, value in net.state_dict().items():
        assert torch.equal(again.net.state_dict()[name], value), name
    assert again.net.aux_layers == net.aux_layers
    for here, there in zip(proposals(draft_of(net, own), own), proposals(again, own), strict=True):
        assert torch.equal(here, there)


ROPES = {
    "theta": ROPE["rope_parameters"],
    "llama3": rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)[
        "rope_parameters"
    ],
    "yarn": rope("yarn", factor=4.0)["rope_parameters"],
}


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("family", ["eagle1", "eagle3"])
def test_the_targets_rope_is_the_drafts(family: str, kind: str, tmp_path: Path) -> None:
    """Catches a base or scaling that training ignores and serving honours, or the reverse (methods 15)."""
    own = small_target(rope_parameters=ROPES[kind])
    draft: Any = load_draft(save(tmp_path, family, net_of(family, own), own, torch.float32), own)
    theirs = own.runner.model.model.rotary_emb
    place, x = torch.arange(60)[None], torch.zeros(1)
    for a, b in zip(draft.net.rotary(x, place), theirs(x, place), strict=True):
        assert torch.equal(a, b)
    config, theta = json.loads((tmp_path / "config.json").read_text()), ROPES[kind]["rope_theta"]
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == theta
    assert config["rope_scaling"] == (None if kind == "theta" else config["rope_parameters"])


@pytest.mark.parametrize("family", FAMILIES)
def test_saving_in_bfloat16(family: str, tmp_path: Path) -> None:
    """Catches floats left in fp32, maps that are rounded (an id of 50,000 has no bfloat16), dtype fields that lie."""
    own = small_target()
    net = net_of(family, own)
    path = save(tmp_path, family, net, own, torch.bfloat16)
    tensors = load_file(f"{path}/model.safetensors")
    floats = {value.dtype for name, value in tensors.items() if name not in ("d2t", "t2d")}
    assert floats == {torch.bfloat16}
    draft: Any = load_draft(path, own)
    for name, value in net.state_dict().items():
        assert torch.equal(draft.net.state_dict()[name], value.bfloat16().float())
    assert next(net.parameters()).dtype == torch.float32  # the net itself trains on


@pytest.mark.parametrize("family", ["eagle1", "eagle3"])
def test_positions_are_exact_in_bfloat16(family: str, tmp_path: Path) -> None:
    """Catches RoPE frequencies rounded along with the weights: at position 5000 that turns keys by some radians."""
    own = small_target(max_position_embeddings=8192)
    path = save(tmp_path, family, net_of(family, own), own, torch.bfloat16)
    place, x = torch.tensor([[5000, 8191]]), torch.zeros(1)
    exact: Any = load_draft(path, own)
    rough: Any = load_draft(path, own, dtype="bfloat16")
    assert rough.net.fc.weight.dtype == torch.bfloat16
    for a, b in zip(rough.net.rotary(x, place), exact.net.rotary(x, place), strict=True):
        torch.testing.assert_close(a, b)


def test_the_other_name_of_the_layer_is_accepted(tmp_path: Path) -> None:
    """Catches refusal of `layers.0.`, which speculators writes where EAGLE-3's authors write `midlayer.` (SpecForge
    once lost the one, SGLang long did not know the other: 0 % accepted)."""
    own = small_target()
    net = net_of("eagle3", own)
    path = save(tmp_path, "eagle3", net, own, torch.float32)
    for name in load_file(f"{path}/model.safetensors"):
        rename(name, name.replace("midlayer.", "layers.0."))(tmp_path)
    draft: Any = load_draft(path, own)
    for name, value in net.state_dict().items():
        assert torch.equal(draft.net.state_dict()[name], value)


def test_loading_leaves_no_parameter_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches weights left at random by a loader that is not strict (methods 34): the sentinel itself must work."""
    own = small_target()
    path = save(tmp_path, "eagle3", net_of("eagle3", own), own, torch.float32)
    load = torch.nn.Module.load_state_dict

    def careless(self: Any, tensors: Any, strict: bool = True) -> Any:
        return load(self, {k: v for k, v in tensors.items() if k != "norm.weight"}, strict=False)

    monkeypatch.setattr(torch.nn.Module, "load_state_dict", careless)
    with pytest.raises(UserError, match=r"norm\.weight holds values that are not finite"):
        load_draft(path, own)


def test_heads_of_a_narrower_draft_are_whole() -> None:
    """Catches heads that do not divide the width, or K/V heads that do not divide the heads, at odd widths."""
    own = small_target(hidden_size=32, num_attention_heads=8, num_key_value_heads=4)
    for width in range(4, 32, 4):
        config = eagle_layouts.eagle3_config(own.runner.config, V, V, (2, 4, 5), width)
        assert config["num_attention_heads"] % config["num_key_value_heads"] == 0
        net = Eagle3Model(llama_config(config), HiddenStateSpec((2, 4, 5)), None)
        draft = EagleDraft(net, own, "eagle3")
        decode(own, draft, PROMPTS, k=2, max_new_tokens=3)


def test_a_longrope_for_part_of_each_head_is_left_out() -> None:
    """Catches its factors, made for part of a head, given to a draft that turns the whole (Phi-4-mini)."""
    partial = rope("longrope", short_factor=[1.0, 1.5], long_factor=[4.0, 5.0])["rope_parameters"]
    model = tiny_model("phi3+longrope", rope_parameters={**partial, "partial_rotary_factor": 0.5})
    own = tiny_target(model)
    for family in ("eagle1", "eagle3"):
        decode(own, draft_of(net_of(family, own), own), PROMPTS, k=2, max_new_tokens=3)


def set_metadata(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        file = folder / METADATA_FILE
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return edit


def half(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def one_nan(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[name][0] = float("nan")


def shorten(tensors: dict[str, torch.Tensor]) -> None:
    tensors["d2t"] = tensors["d2t"][:-1].clone()
    tensors["t2d"][63] = False


NORM = "layers.0.post_attention_layernorm.weight"
DAMAGE: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "missing": ("eagle3", edit_tensors(lambda t: t.pop(NORM.replace("layers.0", "midlayer"))), f"{NORM} is missing"),
    "missing head": ("medusa", edit_tensors(lambda t: t.pop("lm_heads.1.weight")), "lm_heads.1.weight"),
    "missing bias": ("medusa", edit_tensors(lambda t: t.pop("blocks.2.layers.0.bias")), "blocks.2"),
    "missing embedding": ("narrow", edit_tensors(lambda t: t.pop("embed_tokens.weight")), "embed_tok"),
    "unknown": (
        "eagle1",
        edit_tensors(lambda t: t.update({"layers.0.input_layernorm.weight": torch.ones(16)})),
        "holds layers.0.input_layernorm.weight, which no module",
    ),
    "second layer": (
        "eagle3",
        edit_tensors(lambda t: t.update({"layers.1.mlp.up_proj.weight": torch.ones(32, 16)})),
        "layers.1.mlp.up_proj.weight",
    ),
    "shape": ("eagle1", edit_tensors(lambda t: t.update({"fc.bias": torch.ones(8)})), r"fc.bias is \[8\]"),
    "nan": ("eagle3", edit_tensors(lambda t: one_nan(t, "fc.weight")), "fc.weight holds .* not finite"),
    "nan head": ("medusa", edit_tensors(lambda t: one_nan(t, "lm_heads.0.weight")), "lm_heads.0.weight"),
    "index for offset": ("eagle3", edit_tensors(lambda t: t["d2t"].add_(torch.arange(VD))), "rise within"),
    "falling map": ("eagle3", edit_tensors(lambda t: t["d2t"][:2].copy_(torch.tensor([5, 0]))), "rise"),
    "negative map": ("eagle3", edit_tensors(lambda t: t["d2t"][:1].fill_(-1)), "rise within"),
    # 57 for 58
    "other map": ("eagle3", edit_tensors(lambda t: t["d2t"][49:50].sub_(1)), "d2t and t2d name different"),
    "short map": ("eagle3", edit_tensors(shorten), "54 ids in d2t and draft_vocab_size 55"),
    "no map": ("eagle3", edit_tensors(lambda t: t.pop("d2t")), "55 of 64 ids and no d2t"),
    "half a file": ("eagle1", half, "model.safetensors cannot be read"),
    "no file": ("medusa", lambda folder: (folder / "model.safetensors").unlink(), "cannot be read"),
    "no config": ("medusa", lambda folder: (folder / "config.json").unlink(), "no readable config.json"),
    "half a config": ("eagle3", lambda folder: (folder / "config.json").write_text("{"), "no readable"),
    "tokenizer": ("eagle3", set_metadata(tokenizer_hash="0123"), "tokenizer 0123.*target 'tiny'"),
    "width": ("medusa", set_config(hidden_size=32), "hidden_size 32 and its target 16"),
    "target's width": ("eagle3", set_config(target_hidden_size=32), "fc.weight reads 48"),
    "vocabulary": ("eagle1", set_config(vocab_size=65), "vocab_size 65 and its target 64"),
    "heads": ("eagle3", set_config(num_attention_heads=8), "q_proj.weight"),
    "more heads": ("medusa", set_config(num_heads=4), "blocks.3"),
    "tap": ("eagle3", set_config(eagle_aux_hidden_state_layer_ids=[2, 4, 8]), "no layer 8 to tap"),
    "family": ("eagle3", set_metadata(family="eagle4"), "of family 'eagle4'; known: .*eagle3"),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    """Catches a draft that loads with something missing, random or meant for another target, and accepts little; and a
    stack trace where the user can act."""
    family, damage, message = DAMAGE[kind]
    own = small_target()
    path = save(tmp_path, family, net_of(family, own), own, torch.float32)
    load_draft(path, own)
    damage(tmp_path)
    with pytest.raises(UserError, match=message) as error:
        decode(own, load_draft(path, own), PROMPTS, k=2, max_new_tokens=2)
    assert "\n" not in str(error.value)


def test_the_states_of_the_default_layers_reach_the_draft(tmp_path: Path) -> None:
    """Catches defaults that are resolved otherwise when saved than when loaded: no id is on disk then."""
    own = small_target()
    config = eagle_layouts.eagle3_config(own.runner.config, V, V, (2, 4, 5))
    net = Eagle3Model(llama_config(config), HiddenStateSpec((2, 4, 5)), None)
    layouts.save_heads(tmp_path, config, net, torch.float32, None)
    facts = {"family": "eagle3", "tokenizer_hash": own.fingerprint}
    (tmp_path / METADATA_FILE).write_text(json.dumps(facts))
    draft: Any = load_draft(str(tmp_path), own)
    assert draft.reads.aux_layers == HiddenStateSpec((2, 4, 5))
    decode(own, draft, PROMPTS[:1], k=2, max_new_tokens=1)
    states, _ = hf_states(own.runner.model, PROMPTS[0])
    want = torch.cat([states[i][-1] for i in (2, 4, 5)])
    torch.testing.assert_close(draft.state_buffer.states[0, -1], want, atol=1e-5, rtol=1e-5)
