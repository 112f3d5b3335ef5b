"""Drafts as other trainers publish them, written here as those write them: they decode, and export back."""

import json
import pickle
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from decode.checkpoints import eagle_layouts, importers, layouts
from decode.checkpoints.draft_folder import METADATA_FILE
from decode.common.errors import UserError
from decode.drafts.registry import load_draft
from decode.engine.engine import decode
from decode.model import names
from decode.model.loading import Target
from eval.served.reading import Edit, remove_file, set_config
from scripts import export
from tests.decode.checkpoints.test_layouts import VD, V, proposals, saved, small_target
from tests.decode.drafts.test_heads_decoding import TIGHT, Plain, distance, watched
from tests.heads import Net, draft_of, fields, hf_states, net_of
from tests.tiny import tiny_model, tiny_prompts, tiny_target

LLAMA = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
LLAMA += ("num_hidden_layers", "hidden_act", "rms_norm_eps", "max_position_embeddings")
BIN = "pytorch_model.bin"
Tensors = dict[str, torch.Tensor]


def write(folder: Path, config: dict[str, Any], tensors: Tensors, file: str) -> str:
    """A published folder: no draftsmith.json, and no tokenizer."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    whole = {name: value.clone().contiguous() for name, value in tensors.items()}
    if file.endswith(".safetensors"):
        save_file(whole, folder / file)
    else:
        torch.save(whole, folder / file)
    return str(folder)


def maps(net: Any) -> Tensors:
    """d2t and t2d as EAGLE's authors compute them."""
    t2d = torch.zeros(V, dtype=torch.bool)
    t2d[net.ids] = True
    d2t = torch.tensor([int(id_) - i for i, id_ in enumerate(net.ids)])
    return {"d2t": d2t, "t2d": t2d}


def midlayer(tensors: Tensors) -> Tensors:
    return {name.replace("layers.0.", "midlayer."): value for name, value in tensors.items()}


def llama(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of any Llama, RoPE by its old name, the head size left to be computed."""
    theta = config["rope_parameters"]["rope_theta"]
    own = {key: config[key] for key in LLAMA} | {"rope_theta": theta, "rope_scaling": None}
    return own | {"model_type": "llama", "vocab_size": V, "tie_word_embeddings": False}


def embedding(own: Target) -> torch.Tensor:
    return own.runner.model.get_input_embeddings().weight.detach()


# ---- how others write ----


def authors_eagle3(folder: Path, own: Target) -> tuple[str, Net]:
    """yuhuili: a pickle, `midlayer.`, no embedding, the default layers."""
    net = net_of("eagle3", own, **NO_TAPS)
    config = llama(fields("eagle3", own)) | {"architectures": ["LlamaForCausalLMEagle3"]}
    config |= {"draft_vocab_size": VD}
    tensors = midlayer(net.state_dict()) | maps(net)
    return write(folder, config, tensors, BIN), net


def specforge(folder: Path, own: Target) -> tuple[str, Net]:
    """SpecForge: layers by what leaves them, a copy of the target's embedding."""
    net = net_of("eagle3", own, eagle_aux_hidden_state_layer_ids=[1, 3, 6])
    config = llama(fields("eagle3", own)) | {"architectures": ["LlamaForCausalLMEagle3"]}
    config |= {
        "draft_vocab_size": VD,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 5], "use_aux_hidden_state": True},
    }  # fmt: skip
    tensors = midlayer(net.state_dict()) | maps(net) | {"embed_tokens.weight": embedding(own)}
    return write(folder, config, tensors, "model.safetensors"), net


def library(folder: Path, own: Target, kind: str = "llama", **layers: Any) -> tuple[str, Net]:
    """speculators, as it trains by default: nested, normed residual (unsaid), norms before fc and of the output.
    `layers` are further settings of its layers, which are of this `kind`."""
    flags = {"norm_before_fc": True, "norm_output": True}
    net = net_of(
        "narrow", own, norm_before_residual=True, eagle_aux_hidden_state_layer_ids=[1, 4, 6],
        qk_norm=kind == "qwen3", **flags, **layers,
    )  # fmt: skip
    flat = fields("narrow", own)
    layer = llama(flat) | {"head_dim": flat["head_dim"]} | layers | {"model_type": kind}
    config = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", **flags}
    config |= {"draft_vocab_size": V, "target_hidden_size": own.runner.config.hidden_size}
    config |= {"eagle_aux_hidden_state_layer_ids": [1, 4, 6], "transformer_layer_config": layer}
    config |= {"speculators_config": {"verifier": {"name_or_path": "someone/target"}}}
    return write(folder, config, net.state_dict(), "model.safetensors"), net


def authors_eagle1(folder: Path, own: Target) -> tuple[str, Net]:
    """yuhuili: a pickle, fc with a bias, a copy of the target's embedding, any Llama's config."""
    net = net_of("eagle1", own)
    with torch.no_grad():
        net.fc.bias.copy_(torch.linspace(-1, 1, len(net.fc.bias)))  # type: ignore[union-attr]
    config = llama(fields("eagle1", own)) | {"architectures": ["LlamaForCausalLM"], "bias": True}
    tensors = net.state_dict() | {"embed_tokens.weight": embedding(own)}
    return write(folder, config, tensors, BIN), net


def numbered(net: Any) -> Tensors:
    """FasterDecoding's names."""
    found: Tensors = {}
    for i, block in enumerate(net.blocks):
        for j, layer in enumerate(block.layers):
            found |= {f"{i}.{j}.linear.weight": layer.weight, f"{i}.{j}.linear.bias": layer.bias}
        found[f"{i}.{len(block.layers)}.weight"] = net.lm_heads[i % len(net.lm_heads)].weight
    return {name: value.detach() for name, value in found.items()}


def authors_medusa(folder: Path, own: Target) -> tuple[str, Net]:
    """FasterDecoding: a .pt, numbers for names, a config that says 2 heads where there are 3."""
    net = net_of("medusa", own, num_hidden_layers=2)
    config = {"medusa_num_heads": 2, "medusa_num_layers": 2, "base_model_name_or_path": "x/y"}
    return write(folder, config, numbered(net), "medusa_lm_head.pt"), net


def headless_medusa(folder: Path, own: Target) -> tuple[str, Net]:
    """The same by its present trainer: all heads project by the target's matrix, which is not saved."""
    net: Any = net_of("medusa", own, original_lm_head=True)
    with torch.no_grad():
        net.lm_heads[0].weight.copy_(own.runner.model.get_output_embeddings().weight)
    tensors = {name: value for name, value in numbered(net).items() if "linear" in name}
    config = {"medusa_num_heads": 3, "medusa_num_layers": 1}
    return write(folder, config, tensors, "medusa_lm_head.safetensors"), net


def whole_medusa(folder: Path, own: Target) -> tuple[str, Net]:
    """Medusa-2: the heads in one checkpoint with their target, in two shards."""
    net = net_of("medusa", own)
    heads = {f"medusa_head.{name}": value for name, value in numbered(net).items()}
    rest = {"model.norm.weight": torch.ones(2)}
    config = {"medusa_num_heads": 3, "medusa_num_layers": 1, "hidden_size": 16, "vocab_size": V}
    path = write(folder, config, heads, "model-00001-of-00002.safetensors")
    write(folder, config, rest, "model-00002-of-00002.safetensors")
    shards = dict.fromkeys(heads, 1) | dict.fromkeys(rest, 2)
    index = {name: f"model-0000{i}-of-00002.safetensors" for name, i in shards.items()}
    (folder / importers.INDEX_FILE).write_text(json.dumps({"weight_map": index}))
    return path, net


def served_medusa(folder: Path, own: Target) -> tuple[str, Net]:
    """vLLM's layout without biases, one projection for all heads."""
    net = net_of("medusa", own, original_lm_head=True, medusa_fc_bias=False)
    names = {"lm_heads.0.weight": "lm_head.weight"}
    tensors = {names.get(name, name): value for name, value in net.state_dict().items()}
    config = fields("medusa", own) | {"original_lm_head": True, "medusa_fc_bias": False}
    return write(folder, config, tensors, "model.safetensors"), net


NO_TAPS = {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}  # the default ones of 8 layers
TRAINERS: dict[str, Callable[[Path, Target], tuple[str, Net]]] = {
    "eagle3 of its authors": authors_eagle3,
    "eagle3 of SpecForge": specforge,
    "eagle3 of speculators": library,
    "eagle1 of its authors": authors_eagle1,
    "medusa of its authors": authors_medusa,
    "medusa without heads": headless_medusa,
    "medusa 2": whole_medusa,
    "medusa for vLLM": served_medusa,
}
OTHER_LAYERS: dict[str, Callable[[Path, Target], tuple[str, Net]]] = {
    "eagle3 that slides": partial(library, layer_types=["sliding_attention"], sliding_window=6),
    "eagle3 of two Qwen3 layers": partial(library, kind="qwen3", num_hidden_layers=2),
}
"""What speculators trains besides, and engines do not all serve."""


def quietly(path: str, own: Target) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load_draft(path, own)


def alike(a: Any, b: Any, own: Target) -> None:
    """Both propose from the same logits, bit for bit."""
    here, there = proposals(a, own), proposals(b, own)
    assert len(here) > 2
    for x, y in zip(here, there, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("trainer", [*TRAINERS, *OTHER_LAYERS])
def test_a_published_draft_decodes_here(trainer: str, tmp_path: Path) -> None:
    """Catches any name, flag, size, layer id or map of another trainer that is read as something else: the logits are
    those of the net that was written, bit for bit, over steps of the draft's own states. Who loads it is told that no
    tokenizer was compared."""
    own = small_target()
    path, net = (TRAINERS | OTHER_LAYERS)[trainer](tmp_path, own)
    with pytest.warns(UserWarning, match="names no tokenizer to compare with that of 'tiny'"):
        draft: Any = load_draft(path, own)
    assert draft.name == trainer.split()[0]
    assert draft.net.aux_layers == net.aux_layers
    alike(draft_of(net, own), draft, own)


def test_ours_is_loaded_without_a_warning(tmp_path: Path) -> None:
    """Catches a warning that says nothing because it is always there."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_draft(saved(tmp_path, "eagle3"), small_target())


def test_an_embedding_of_its_own_is_used(tmp_path: Path) -> None:
    """Catches a draft's own embedding replaced by the target's because their shapes agree (TorchSpec #38)."""
    own = small_target()
    path, _ = specforge(tmp_path, own)
    other = embedding(own) + torch.randn(V, 16, generator=torch.Generator().manual_seed(1))
    tensors = load_file(f"{path}/model.safetensors") | {"embed_tokens.weight": other}
    shared = proposals(quietly(path, own), own)
    save_file(tensors, f"{path}/model.safetensors")
    draft = quietly(path, own)
    assert torch.equal(draft.net.embed_tokens.weight, other)
    assert not torch.equal(proposals(draft, own)[1], shared[1])


# ---- variants of EAGLE-3 ----


class Variant(Plain):
    """The formulas of EAGLE-3 with what its four flags change, in fp64."""

    def logits(self, text: list[int], path: list[int]) -> torch.Tensor:
        states = hf_states(self.model, text[:-1])[0]
        parts = [states[i].double() for i in self.taps.layers]
        if self.config["norm_before_fc"]:
            joined = self.rms(torch.cat(parts, -1), "input_norm")
            parts = list(joined.chunk(len(parts), -1))
        if self.config["fc_norm"]:
            parts = [self.rms(part, f"fc_norm.{i}") for i, part in enumerate(parts)]
        state, tokens = torch.cat(parts, -1) @ self.w["fc.weight"].T, text[1:]
        for token in path:
            state = torch.cat([state, self.out(state, tokens)[-1:]])
            tokens = [*tokens, token]
        last = self.out(state, tokens)[-1]
        full = torch.full((len(self.embedding),), -torch.inf, dtype=torch.float64)
        ids = torch.arange(len(full)) if self.ids is None else self.ids
        normed = last if self.config["norm_output"] else self.rms(last, "norm")
        full[ids] = self.w["lm_head.weight"] @ normed
        return full

    def out(self, state: torch.Tensor, tokens: list[int]) -> torch.Tensor:
        """What the layer gives, and the next step gets."""
        found = self.layer(state, tokens)
        return self.rms(found, "norm") if self.config["norm_output"] else found

    def layer(self, state: torch.Tensor, tokens: list[int]) -> torch.Tensor:
        if not self.config["norm_before_residual"]:
            return super().layer(state, tokens)
        embeds = self.embedding[torch.tensor(tokens)]
        normed = self.rms(state, "layers.0.hidden_norm")
        read = torch.cat([self.rms(embeds, "layers.0.input_layernorm"), normed], -1)
        return self.mlp(normed + self.attention(read, 0), 0)


@pytest.mark.parametrize("flag", [*eagle_layouts.NORM_FLAGS, "all"])
def test_flags_mean_what_engines_read_in_them(flag: str) -> None:
    """Catches the residual taken from the wrong side of the norm, norms over all taps exchanged with norms of each, and
    a normed state fed back once too often or not at all: against the formulas, three states of its own deep."""
    model = tiny_model("llama", dtype=torch.float64)
    own = tiny_target(model)
    # Norms of each tap and of all of them exclude each other.
    on = {"norm_before_residual", "norm_before_fc", "norm_output"} if flag == "all" else {flag}
    flags = {name: name in on for name in eagle_layouts.NORM_FLAGS}
    net = net_of("eagle3", own, **flags)
    formula = Variant(net, fields("eagle3", own) | flags, model)
    draft = draft_of(net, own)
    with watched(draft) as seen:
        decode(own, draft, tiny_prompts(7, 5), k=4, max_new_tokens=6)
    assert [len(round_.calls) for round_ in seen[:3]] == [4, 4, 4]
    for number, round_ in enumerate(seen[:3]):
        row = number % 2
        for c, call in enumerate(round_.calls):
            want = formula.logits(round_.texts[row], round_.path(row, c, 0))[net.ids]
            assert distance(call.logits[row, 0].double(), want) < TIGHT


# ---- what cannot be read ----


def edited(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        change(config)
        (folder / "config.json").write_text(json.dumps(config))

    return edit


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


def points_elsewhere(folder: Path) -> None:
    index = {"weight_map": {"fc.weight": "../../secret.safetensors"}}
    (folder / importers.INDEX_FILE).write_text(json.dumps(index))
    (folder / BIN).unlink()


REFUSED: dict[str, tuple[str, Edit, str]] = {
    "code in a pickle": (
        "eagle1 of its authors", lambda f: (f / BIN).write_bytes(pickle.dumps(Bomb(f / "ran"))), BIN,
    ),
    "code in a checkpoint": (
        "eagle1 of its authors", lambda f: torch.save({"x": Bomb(f / "ran")}, f / BIN), "holds more than tensors",
    ),
    "an index that points elsewhere": ("eagle1 of its authors", points_elsewhere, "which is no shard"),
    "layers": ("eagle3 of SpecForge", set_config(num_hidden_layers=2), "layers.1."),
    "layers of EAGLE-1": ("eagle1 of its authors", set_config(num_hidden_layers=2), "of 2 layers"),
    "biases": ("eagle3 of SpecForge", set_config(attention_bias=True), "biases"),
    "layer of another kind": (
        "eagle3 of speculators", set_config("transformer_layer_config", model_type="gemma3"), "type 'gemma3'"
    ),
    "no norms of Qwen3's": (
        "eagle3 of speculators", set_config("transformer_layer_config", model_type="qwen3"), "lacks its layers.0"
    ),
    "another algorithm": (
        "eagle3 of speculators", set_config(speculators_model_type="dflash"), "its tensors are those of eagle3"
    ),
    "no sizes": ("eagle3 of SpecForge", set_config(hidden_size=None), "hidden_size"),
    "a config that is a list": (
        "medusa of its authors", lambda folder: (folder / "config.json").write_text("[]"), "config.json"
    ),
    "another vocabulary": ("eagle1 of its authors", set_config(vocab_size=65), "vocab_size 65 and its target 64"),
    "no folder": ("eagle1 of its authors", remove_file("config.json"), "holds no config.json"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_read_is_refused(kind: str, tmp_path: Path) -> None:
    """Catches code that a checkpoint brings and loading runs, a file name from the network taken for a path, and heads
    that would decode as something that they are not."""
    trainer, damage, message = REFUSED[kind]
    own = small_target()
    path, _ = TRAINERS[trainer](tmp_path, own)
    quietly(path, own)
    damage(tmp_path)
    with pytest.raises(UserError, match=message) as error:
        quietly(path, own)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "ran").exists()


# ---- export ----


def exported(path: str, out: Path, form: str, **settings: Any) -> str:
    export.main(export.ExportConfig(draft=path, out=str(out), format=form, **settings))
    return str(out)


def same(path: str, other: str) -> None:
    """Both folders have equal tensors of equal dtypes under equal names."""
    a, b = importers.raw_tensors(path), importers.raw_tensors(other)
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert value.dtype == b[name].dtype
        assert torch.equal(value, b[name]), name


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny target on disk, for what export reads of it."""
    folder = tmp_path_factory.mktemp("target")
    small_target().runner.model.save_pretrained(folder)
    return str(folder)


THERE = [("eagle3", "speculators", torch.bfloat16), ("narrow", "speculators", torch.float32)]
THERE += [("eagle1", "flat", torch.bfloat16), ("medusa", "medusa-legacy", torch.float32)]


@pytest.mark.parametrize(("family", "form", "dtype"), THERE)
def test_there_and_back(
    family: str, form: str, dtype: torch.dtype, tmp_path: Path, target_folder: str
) -> None:
    """Catches a tensor lost, renamed wrongly or rounded on the way, a setting that does not survive it, and a layer id
    read in the other convention: what comes back is byte for byte what went."""
    own = small_target()
    home = tmp_path / "ours"
    net = net_of(family, own)
    config = fields(family, own)
    if family not in ("medusa", "eagle1"):
        config |= layouts.aux_layer_fields((1, 3, 6))
    layouts.save_heads(home, config, net, dtype, getattr(net, "ids", None))
    name = "eagle3" if family == "narrow" else family
    facts = {"family": name, "tokenizer_hash": own.fingerprint}
    (home / METADATA_FILE).write_text(json.dumps(facts))
    there = exported(str(home), tmp_path / "there", form, target=target_folder, k=7)
    back = exported(there, tmp_path / "back", "flat", target=target_folder)
    same(back, str(home))
    a, b = importers.read_checkpoint(str(home)), importers.read_checkpoint(back)
    shared = set(a.config) & set(b.config)
    assert {key: a.config[key] for key in shared} == {key: b.config[key] for key in shared}
    if family != "medusa":  # whose legacy config says less
        assert a.config == b.config
    for path in (there, back):
        alike(load_draft(path, own), load_draft(str(home), own), own)


FOREIGN = {
    "eagle3 of its authors": "flat",
    "eagle3 of SpecForge": "flat",
    "eagle3 of speculators": "speculators",
    "eagle1 of its authors": "flat",
    "medusa of its authors": "medusa-legacy",
    "medusa without heads": "medusa-legacy",
    "medusa for vLLM": "flat",
}


@pytest.mark.parametrize("trainer", FOREIGN)
def test_a_published_draft_keeps_its_bits(trainer: str, tmp_path: Path, target_folder: str) -> None:
    """Catches a conversion that rounds, reorders or drops: in the layout that it came in, the tensors are those that
    were read; and no draftsmith.json is made up."""
    own = small_target()
    path, net = TRAINERS[trainer](tmp_path / "theirs", own)
    out = exported(path, tmp_path / "out", FOREIGN[trainer], target=target_folder)
    same(out, path)
    assert not (tmp_path / "out" / METADATA_FILE).exists()
    alike(quietly(out, own), draft_of(net, own), own)


def test_the_speculators_config_is_golden(tmp_path: Path, target_folder: str) -> None:
    """Catches what vLLM requires of the nested format and silently reads as something else when it is absent: a
    model_type hides it all, norm_before_residual is true unless said, vocab_size must be the target's."""
    home = saved(tmp_path / "ours", "eagle3")
    out = exported(home, tmp_path / "out", "speculators", target=target_folder, k=7)
    config = json.loads((Path(out) / "config.json").read_text())
    assert "model_type" not in config
    assert config["architectures"] == ["Eagle3Speculator"]
    assert config["speculators_model_type"] == "eagle3"
    assert {config[flag] for flag in eagle_layouts.NORM_FLAGS} == {False}
    assert (config["draft_vocab_size"], config["target_hidden_size"]) == (VD, 16)
    assert config["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    layer = config["transformer_layer_config"]
    assert (layer["model_type"], layer["vocab_size"], layer["num_hidden_layers"]) == ("llama", V, 1)
    assert layer["rope_parameters"]["rope_theta"] == layer["rope_theta"] == 5e5
    said = config["speculators_config"]
    assert said["proposal_methods"][0]["speculative_tokens"] == 7
    assert said["verifier"] == {
        "name_or_path": target_folder,
        "architectures": ["LlamaForCausalLM"],
    }
    names = set(load_file(Path(out) / "model.safetensors"))
    assert "layers.0.hidden_norm.weight" in names
    assert not any(name.startswith(("model.", "midlayer.")) for name in names)


def test_heads_without_a_projection_get_the_targets_for_vllm(
    tmp_path: Path, target_folder: str
) -> None:
    """Catches a Medusa for vLLM without any projection, which it refuses to load."""
    own = small_target()
    path, net = headless_medusa(tmp_path / "theirs", own)
    out = exported(path, tmp_path / "out", "flat", target=target_folder)
    head = own.runner.model.get_output_embeddings().weight
    assert torch.equal(importers.raw_tensors(out)["lm_head.weight"], head)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["original_lm_head"]
    assert (config["vocab_size"], config["hidden_size"], config["num_heads"]) == (V, 16, 3)
    alike(quietly(out, own), draft_of(net, own), own)


MISTAKES: dict[str, tuple[str, dict[str, Any], str]] = {
    "no layout": ("eagle3", {"format": "onnx"}, "one of flat, speculators"),
    "no out": ("eagle3", {"out": ""}, "--out"),
    "no target": ("eagle3", {"format": "speculators"}, "give --target"),
    "not eagle3": ("medusa", {"format": "speculators", "target": "x"}, "for EAGLE-3"),
    "not medusa": ("eagle1", {"format": "medusa-legacy"}, "for Medusa heads"),
    "not causal": (
        "eagle1",
        {"format": "hf"},
        "hf, w8a8 and transplant are for language models, gguf for both",
    ),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_wrong_exports_are_refused(kind: str, tmp_path: Path) -> None:
    """Catches a stack trace, or a folder that no engine reads, where the user asked for what cannot be."""
    family, changes, message = MISTAKES[kind]
    home = saved(tmp_path / "ours", family)
    settings = {"draft": home, "out": str(tmp_path / "out"), "format": "flat"} | changes
    with pytest.raises(UserError, match=message):
        export.main(export.ExportConfig(**settings))
    assert not (tmp_path / "out").exists()


def test_nothing_is_written_over(tmp_path: Path) -> None:
    """Catches an export into a folder that holds something."""
    home = saved(tmp_path / "ours", "eagle3")
    with pytest.raises(UserError, match="is not empty"):
        exported(home, tmp_path / "ours", "flat")


def test_what_sglang_cannot_serve_is_not_called_flat(tmp_path: Path) -> None:
    """Catches norm_before_residual exported to a layout where SGLang would ignore it and accept nothing."""
    path, _ = library(tmp_path / "theirs", small_target())
    with pytest.raises(UserError, match="norm_before_residual, which SGLang does not implement"):
        exported(path, tmp_path / "out", "flat")


# ---- causal drafts ----

ASSETS = Path(__file__).resolve().parents[3] / "assets"


def causal(folder: Path, vocab: int) -> str:
    """A small LM with the bundled tokenizer and so many rows in its vocabulary."""
    changes = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    model = tiny_model("llama", vocab_size=vocab, max_position_embeddings=512, **changes)
    model.save_pretrained(folder)
    for file in (ASSETS / "target").glob("tokenizer*"):
        shutil.copyfile(file, folder / file.name)
    return str(folder)


@pytest.mark.parametrize("rows", [4096, 4000, 4104])
def test_hf_has_the_targets_vocabulary_and_tokenizer(rows: int, tmp_path: Path) -> None:
    """Catches a draft that vLLM, SGLang and assistant_model refuse because the target's vocabulary is padded further or
    less (Qwen2.5: 151936 and 152064), rows that could be the largest logit, and tokenizer files written anew."""
    home = causal(tmp_path / "ours", rows)
    out = Path(exported(home, tmp_path / "out", "hf", target=str(ASSETS / "target")))
    before, after = (AutoModelForCausalLM.from_pretrained(folder) for folder in (home, out))
    assert after.config.vocab_size == 4096
    for a, b in zip(before.parameters(), after.parameters(), strict=True):
        shared = min(len(a), len(b))
        assert torch.equal(a[:shared], b[:shared])
        assert torch.allclose(b[shared:], a.mean(0).expand_as(b[shared:]), atol=1e-6)
    for file in (ASSETS / "target").glob("tokenizer*"):
        assert (out / file.name).read_bytes() == file.read_bytes()
    if rows == 4096:
        same(str(out), home)


def test_hf_refuses_another_tokenizer(tmp_path: Path) -> None:
    """Catches the target's tokenizer put beside weights that were trained on another's ids."""
    home = causal(tmp_path / "ours", 4096)
    file = Path(home) / "tokenizer.json"
    held = json.loads(file.read_text())
    vocab = held["model"]["vocab"]
    (a, b), *_ = zip(list(vocab)[1000:1001], list(vocab)[2000:2001], strict=True)
    vocab[a], vocab[b] = vocab[b], vocab[a]
    file.write_text(json.dumps(held))
    with pytest.raises(UserError, match="disagree on token ids"):
        exported(home, tmp_path / "out", "hf", target=str(ASSETS / "target"))
    with pytest.raises(UserError, match="give --target, a local folder"):
        exported(home, tmp_path / "out", "hf")


# ---- from the Hub ----


@pytest.fixture
def _reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hub answers, as far as the decision goes whether to ask it."""
    monkeypatch.setattr(names.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(names, "_reaches", lambda endpoint: True)
    monkeypatch.setattr(importers, "adapter_folder", lambda name, what: None)  # it would ask too


@pytest.mark.usefixtures("_reached")
def test_only_known_files_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches code or pickles fetched from a repository that has safetensors, and names taken from it: what is asked
    for is a fixed list, and pickles only where nothing else holds weights."""
    path, net = authors_eagle1(tmp_path, small_target())
    asked: list[list[str]] = []

    def fetch(name: str, allow_patterns: list[str]) -> str:
        assert name == "someone/eagle"
        asked.append(allow_patterns)
        return path

    monkeypatch.setattr(importers, "snapshot_download", fetch)
    own = small_target()
    alike(quietly("someone/eagle", own), draft_of(net, own), own)
    assert not any(file.endswith((".bin", ".pt", ".py")) for file in asked[0])
    assert {"pytorch_model.bin", "medusa_lm_head.pt"} < set(asked[1])
    asked.clear()
    save_file({"fc.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    importers.resolve_folder("someone/eagle")
    assert len(asked) == 1


@pytest.mark.usefixtures("_reached")
def test_a_repository_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a page of trace for a name with a typing error."""

    def fetch(name: str, allow_patterns: list[str]) -> str:
        raise OSError("404 Client Error\nmore of it")

    monkeypatch.setattr(importers, "snapshot_download", fetch)
    with pytest.raises(
        UserError, match=r"draft 'some/one' cannot be fetched: 404 Client Error more of it$"
    ):
        load_draft("some/one", small_target())
