"""Fingerprints of targets: equal exactly where the logits are, whatever the files look like."""

import json
import os
import shutil
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from decode.common.target_record import ModelFingerprint, difference
from decode.common.target_settings import PlacementConfig
from decode.common.typed_json import from_json, to_json
from decode.distributed import placement
from decode.model import fingerprint, loading
from decode.model.fingerprint import weights_fingerprint
from decode.model.loading import load_target
from tests import worlds
from tests.gguf_writer import Case, write_case
from tests.seq2seq import tiny_t5
from tests.tiny import ARCHITECTURES, rope, tiny_model, tiny_target
from tests.vision import VARIANTS, vision_model

BUNDLED = Path(__file__).resolve().parents[3] / "assets" / "target"
# Longer than the window of 8 and than the first context of RoPE scalings
IDS = torch.arange(1, 60)[None]
Tensors = dict[str, Tensor]
Change = Callable[[Path], Any]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def saved(folder: Path, arch: str = "llama", **changes: Any) -> Path:
    worlds.save(folder, tiny_model(arch, **changes), worlds.byte_tokenizer())
    return folder


def logits(folder: Path, attention: str = "sdpa") -> Tensor:
    """By transformers' own code, in float32."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=attention
    )
    with torch.no_grad():
        return model(IDS).logits


def tensors(change: Callable[[Tensors], None]) -> Change:
    """An edit of model.safetensors."""

    def edit(folder: Path) -> None:
        file = folder / "model.safetensors"
        found = load_file(file)
        change(found)
        save_file({k: v.contiguous() for k, v in found.items()}, file, metadata={"format": "pt"})

    return edit


def config(**fields: Any) -> Change:
    """An edit of config.json; None deletes a field."""

    def edit(folder: Path) -> None:
        file = folder / "config.json"
        found = json.loads(file.read_text()) | fields
        kept = {name: value for name, value in found.items() if value is not None}
        file.write_text(json.dumps(kept))

    return edit


def in_shards(folder: Path, size: str = "20KB") -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size=size)
    assert len(list(folder.glob("model-*.safetensors"))) > 2


def renamed_shards(folder: Path) -> None:
    in_shards(folder)
    index = folder / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    for name in set(listed["weight_map"].values()):
        (folder / name).rename(folder / f"x-{name}")
    listed["weight_map"] = {k: f"x-{v}" for k, v in listed["weight_map"].items()}
    index.write_text(json.dumps(listed))


SAME: dict[str, Change] = {
    "copied": lambda folder: None,
    "in shards": in_shards,
    "in shards of other names": renamed_shards,
    "saved again": lambda folder: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder),
    "fields without effect": config(
        transformers_version="4.0.0", torch_dtype="float16", dtype=None, _name_or_path="elsewhere",
        use_cache=False, initializer_range=0.5, attention_dropout=0.1, architectures=["LlamaForCausalLM"],
    ),
    "defaults left out": config(mlp_bias=None, attention_bias=None, pretraining_tp=None, head_dim=None),
    "fields of an earlier version": config(
        rope_parameters=None, rope_theta=10000, rope_scaling=None, rms_norm_eps=0.000001
    ),
    "tensors in another order": tensors(lambda x: x.update({k: x.pop(k) for k in sorted(x, reverse=True)})),
    "a tie that the stored head contradicts in words only": config(tie_word_embeddings=False),
}  # fmt: skip


def add(name: str, how: Callable[[Tensor], Tensor]) -> Change:
    def change(found: Tensors) -> None:
        found[name] = how(found[name].clone())

    return tensors(change)


def nudged(value: Tensor) -> Tensor:
    """The last element moved by the smallest step of its dtype."""
    flat = value.reshape(-1)
    flat[-1] = torch.nextafter(flat[-1], torch.tensor(9.0, dtype=flat.dtype))
    return value


def noise(found: Tensors) -> None:
    generator = torch.Generator().manual_seed(3)
    for value in found.values():
        value += 1e-3 * torch.randn(value.shape, generator=generator, dtype=value.dtype)


def lora(found: Tensors) -> None:
    """Rank 1 on the queries of two layers."""
    for layer in (0, 2):
        weight = found[f"model.layers.{layer}.self_attn.q_proj.weight"]
        weight += 0.01 * torch.outer(torch.ones(weight.shape[0]), torch.arange(weight.shape[1]) / 9)


def swap(a: str, b: str) -> Change:
    def change(found: Tensors) -> None:
        found[a], found[b] = found[b], found[a]

    return tensors(change)


LAYER = "model.layers.{}.{}.weight"
DIFFERENT: dict[str, Change] = {
    "fine-tuned": tensors(noise),
    "LoRA on two layers": tensors(lora),
    "head": add("lm_head.weight", lambda x: x * 1.01),
    "embedding": add("model.embed_tokens.weight", lambda x: x * 1.01),
    "last norm": add("model.norm.weight", lambda x: x * 1.01),
    "a norm": add(LAYER.format(1, "input_layernorm"), lambda x: x + 0.01),
    "one element by one step": add(LAYER.format(2, "mlp.down_proj"), nudged),
    "signs of a row": add(LAYER.format(0, "self_attn.o_proj"), lambda x: torch.cat([-x[:1], x[1:]])),
    "rows exchanged": add(LAYER.format(1, "mlp.up_proj"), lambda x: x.flip(0)),
    "transposed": add(LAYER.format(1, "self_attn.q_proj"), lambda x: x.T),
    "rounded to bfloat16": tensors(lambda x: x.update({k: v.bfloat16() for k, v in x.items()})),
    "layers exchanged": swap(LAYER.format(0, "self_attn.q_proj"), LAYER.format(1, "self_attn.q_proj")),
    "gate and up exchanged": swap(LAYER.format(0, "mlp.gate_proj"), LAYER.format(0, "mlp.up_proj")),
    "head and embedding exchanged": swap("lm_head.weight", "model.embed_tokens.weight"),
    "a layer less": config(num_hidden_layers=2),
    "rope_theta": config(rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
    "rope scaling": config(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}),
    "yarn": config(rope_parameters=rope("yarn", factor=4.0)["rope_parameters"]),
    "eps of norms": config(rms_norm_eps=1e-2),
    "activation": config(hidden_act="relu"),
    "heads of the same size in all": config(num_attention_heads=8, num_key_value_heads=4, head_dim=4),
}  # fmt: skip


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    return saved(tmp_path / "model")


@pytest.mark.parametrize("how", SAME)
def test_the_same_values_are_the_same_target(model_folder: Path, tmp_path: Path, how: str) -> None:
    """Bug: a copy, another sharding or a newer config.json makes another target, and finished work is refused."""
    other = Path(shutil.copytree(model_folder, tmp_path / "deep" / "other"))
    SAME[how](other)
    assert torch.equal(logits(other), logits(model_folder))
    assert weights_fingerprint(str(other)) == weights_fingerprint(str(model_folder))


@pytest.mark.parametrize("how", DIFFERENT)
def test_whatever_moves_the_logits_is_another_target(
    model_folder: Path, tmp_path: Path, how: str
) -> None:
    """Bug: a change that a sample of values or the list of tensors does not show is taken for the same target."""
    other = Path(shutil.copytree(model_folder, tmp_path / "other"))
    DIFFERENT[how](other)
    assert not torch.equal(logits(other), logits(model_folder))
    assert weights_fingerprint(str(other)) != weights_fingerprint(str(model_folder))


WINDOWS: dict[str, tuple[str, dict[str, Any]]] = {
    "window": ("mistral", {"sliding_window": 4}),
    "no window": ("mistral", {"sliding_window": None}),
    "which layers have one": ("gemma3_text", {"layer_types": ["full_attention", *["sliding_attention"] * 2]}),
    "scale of queries": ("gemma3_text", {"query_pre_attn_scalar": 16}),
    "softcap": ("gemma2", {"attn_logit_softcapping": 5.0}),
    "scale of logits": ("granite", {"logits_scaling": 0.25}),
    "layers without RoPE": ("smollm3", {"no_rope_layers": [1, 1, 1]}),
    "experts asked": ("mixtral", {"num_experts_per_tok": 1}),
}  # fmt: skip


@pytest.mark.parametrize("what", WINDOWS)
def test_settings_of_other_architectures_count(tmp_path: Path, what: str) -> None:
    """Bug: a list of known fields misses what another architecture computes with."""
    arch, fields = WINDOWS[what]
    one = saved(tmp_path / "one", arch)
    other = Path(shutil.copytree(one, tmp_path / "other"))
    file = other / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    # sdpa of older versions leaves out Gemma's soft cap
    assert not torch.equal(logits(other, "eager"), logits(one, "eager"))
    assert weights_fingerprint(str(other)) != weights_fingerprint(str(one))


def test_a_tied_head_counts_once(tmp_path: Path) -> None:
    """Bug: the same model with the head stored, left out, or called untied is three targets."""
    tied = saved(tmp_path / "tied", tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(tied / "model.safetensors")
    stored, untied = (Path(shutil.copytree(tied, tmp_path / name)) for name in ("stored", "untied"))
    copy_head = tensors(lambda x: x.update({"lm_head.weight": x["model.embed_tokens.weight"].clone()}))  # fmt: skip
    copy_head(stored)
    copy_head(untied)
    config(tie_word_embeddings=False)(untied)
    assert torch.equal(logits(untied), logits(tied))
    assert torch.equal(logits(stored), logits(tied))
    assert len({weights_fingerprint(str(x)) for x in (tied, stored, untied)}) == 1
    apart = Path(shutil.copytree(untied, tmp_path / "apart"))
    add("lm_head.weight", lambda x: x * 1.01)(apart)
    said_tied = Path(shutil.copytree(apart, tmp_path / "said_tied"))
    config(tie_word_embeddings=True)(said_tied)
    assert torch.equal(logits(said_tied), logits(apart))
    assert len({weights_fingerprint(str(x)) for x in (tied, apart, said_tied)}) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_storage_in_more_bits_changes_nothing(tmp_path: Path, dtype: torch.dtype) -> None:
    """Bug: a checkpoint that was loaded and saved in float32 is another target."""
    narrow = saved(tmp_path / "narrow", dtype=dtype)
    wide = Path(shutil.copytree(narrow, tmp_path / "wide"))
    tensors(lambda x: x.update({name: value.float() for name, value in x.items()}))(wide)
    assert weights_fingerprint(str(wide)) == weights_fingerprint(str(narrow))
    assert torch.equal(logits(wide), logits(narrow))
    add(LAYER.format(0, "mlp.down_proj"), nudged)(wide)
    assert weights_fingerprint(str(wide)) != weights_fingerprint(str(narrow))


def test_an_encoder_decoder(tmp_path: Path) -> None:
    """Bug: copies of the shared embedding count or not as a version of transformers saves them; the flag that scales
    the head's input does not."""
    model = tiny_t5()
    model.save_pretrained(tmp_path / "one")
    again: Any = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "one")
    again.save_pretrained(tmp_path / "again", max_shard_size="20KB")
    other = Path(shutil.copytree(tmp_path / "one", tmp_path / "other"))
    shared = next(name for name in load_file(other / "model.safetensors") if "shared" in name)
    tensors(lambda x: x.update({"encoder.embed_tokens.weight": x[shared].clone()}))(other)
    found = {weights_fingerprint(str(tmp_path / name)) for name in ("one", "again", "other")}
    assert len(found) == 1
    add("decoder.block.0.layer.0.layer_norm.weight", nudged)(other)
    assert weights_fingerprint(str(other)) not in found


def test_the_loaded_target_knows_it_in_every_dtype_and_place(tmp_path: Path) -> None:
    """Bug: what is computed in or where the layers are changes what the weights are said to be."""
    folder = saved(tmp_path / "model", vocab_size=len(worlds.byte_tokenizer()))
    weights = weights_fingerprint(str(folder))
    dtypes = ["float32", "bfloat16", *(["int8"] if find_spec("torchao") else [])]
    for dtype in dtypes:
        target = load_target(str(folder), "cpu", dtype)
        assert target.identity == ModelFingerprint(weights, dtype)
    offloaded = PlacementConfig("device_map", {"cpu": 0.0001}, str(tmp_path / "offloaded"))
    placed = placement.load_target(offloaded, str(folder), "cpu", "float32")
    assert any(p.is_meta for p in placed.runner.model.parameters())
    assert placed.identity == ModelFingerprint(weights, "float32")
    ends = load_target(str(folder), "cpu", with_layers=False)
    assert ends.identity == ModelFingerprint(weights, "float32")
    assert to_json(ends.describe()) == {
        "name": str(folder), "revision": None, "tokenizer": ends.fingerprint, "weights": weights, "dtype": "float32",
    }  # fmt: skip
    assert tiny_target(tiny_model("llama")).identity == ModelFingerprint()


def test_a_gguf_and_its_cached_folders_are_one_target(tmp_path: Path) -> None:
    """Bug: the file and the folders that it became are several targets; a changed file is none."""
    file = write_case(tmp_path / "model.gguf", Case(), kind="Q8_0")
    target = load_target(str(file), "cpu")
    folder = target.runner.model.config.name_or_path
    assert folder.startswith(constants.HF_HOME)
    assert target.identity.weights == load_target(folder, "cpu").identity.weights is not None
    assert load_target(str(file), "cpu", "bfloat16").identity.weights == target.identity.weights
    without_weights = loading.model_folder(str(file), "target")
    assert not list(Path(without_weights).glob("*.safetensors"))
    assert loading.model_fingerprint(without_weights).weights == target.identity.weights
    norm = np.full(64, 1.5, dtype=np.float32)
    other = write_case(
        tmp_path / "other.gguf", Case(), kind="Q8_0", tensors={"output_norm.weight": norm}
    )
    assert load_target(str(other), "cpu").identity.weights != target.identity.weights


def test_it_is_the_same_on_every_machine_and_quick() -> None:
    """Bug: threads, processors or versions of libraries have a say; a small model takes seconds."""
    fingerprint._file_digests.cache_clear()
    began = time.process_time()
    found = weights_fingerprint(str(BUNDLED))
    assert time.process_time() - began < 5
    assert found == "51e8bd207042343d"


def test_a_large_file_is_read_once_for_each_state_of_it(
    model_folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: 16 GB are read at every start; or a file that was replaced in place, with its time set back, is not read."""
    read: list[str] = []
    original = fingerprint.tensor_digest

    def counted(tensor: Tensor) -> str:
        read.append("tensor")
        return original(tensor)

    def in_a_new_process() -> str | None:
        fingerprint._file_digests.cache_clear()
        read.clear()
        return weights_fingerprint(str(model_folder))

    monkeypatch.setattr(fingerprint, "tensor_digest", counted)
    monkeypatch.setattr(fingerprint, "CACHED_BYTES", 0)
    first = in_a_new_process()
    assert len(read) > 10
    assert in_a_new_process() == first
    assert read == []
    file = model_folder / "model.safetensors"
    before = file.stat()
    time.sleep(0.02)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert in_a_new_process() != first
    assert len(read) > 10
    shutil.rmtree(cache)
    cache.write_text("no folder")
    data[-1] ^= 1
    file.write_bytes(data)
    assert in_a_new_process() == first


PAIRS: dict[str, tuple[ModelFingerprint, ModelFingerprint, str]] = {
    "same": (ModelFingerprint("aa", "float32", "main"), ModelFingerprint("aa", "float32"), ""),
    "commits of one": (ModelFingerprint("aa", "w8a8", "x"), ModelFingerprint("aa", "w8a8", "y"), ""),
    "weights": (ModelFingerprint("aa", "int4"), ModelFingerprint("bb", "int4"), "weights aa then, bb now"),
    "dtype": (ModelFingerprint("aa", "int4"), ModelFingerprint("aa", "w8a8"), "dtype int4 then, w8a8 now"),
    "both": (ModelFingerprint("aa", "a"), ModelFingerprint("bb", "b"), "weights aa then, bb now, dtype a then, b now"),
    "unknown": (ModelFingerprint(), ModelFingerprint("bb", "float32", "x"), ""),
    "commit": (ModelFingerprint(revision="x"), ModelFingerprint("bb", revision="y"), "revision x then, y now"),
    "server": (ModelFingerprint(served_as="m"), ModelFingerprint(served_as="n"), "served as m then, n now"),
}  # fmt: skip


@pytest.mark.parametrize("what", PAIRS)
def test_what_differs_is_named(what: str) -> None:
    """Bug: what cannot be known is called another target, or what is known is not compared."""
    then, now, words = PAIRS[what]
    assert difference(then, now) == words
    assert from_json(ModelFingerprint, {**to_json(then), "later": 1}) == then


def test_a_name_on_the_hub_is_what_its_cache_holds(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a name on the Hub and a copy of its files are two targets, or a revision is that of another one."""
    repository, commits = tmp_path / "hub" / "models--me--t", ["1" * 40, "2" * 40]
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commits[1])
    for commit in commits:
        shutil.copytree(model_folder, repository / "snapshots" / commit)
    tensors(noise)(repository / "snapshots" / commits[0])
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    assert weights_fingerprint("me/t") == weights_fingerprint(str(model_folder))
    assert weights_fingerprint("me/t", commits[1]) == weights_fingerprint(str(model_folder))
    assert weights_fingerprint("me/t", commits[0]) not in (None, weights_fingerprint("me/t"))


@pytest.mark.parametrize("kind", [*ARCHITECTURES, *(f"vision {kind}" for kind in VARIANTS)])
def test_every_architecture_has_one(tmp_path: Path, kind: str) -> None:
    """Bug: a config without a field that others have ends in a traceback, or is another one when it is saved again."""
    name = kind.removeprefix("vision ")
    model = vision_model(name) if kind.startswith("vision ") else tiny_model(name)
    model.save_pretrained(tmp_path / "one")
    type(model).from_pretrained(tmp_path / "one").save_pretrained(
        tmp_path / "again", max_shard_size="20KB"
    )
    found = weights_fingerprint(str(tmp_path / "one"))
    assert found is not None
    assert weights_fingerprint(str(tmp_path / "again")) == found
    with torch.no_grad():
        model.get_input_embeddings().weight[3] += 0.1
    model.save_pretrained(tmp_path / "other")
    assert weights_fingerprint(str(tmp_path / "other")) != found
