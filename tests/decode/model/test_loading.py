"""Models, tokenizers, devices and dtypes that are not what they should be: each is one line that says what to do."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from decode.common.errors import UserError
from decode.devices.choice import pick_device
from decode.drafts.registry import load_draft
from decode.model.loading import (
    end_ids,
    load_config,
    load_model,
    load_target,
    load_tokenizer,
)
from tests.tiny import tiny_model
from tests.worlds import byte_tokenizer

Damage = Callable[[Path], Any]
WEIGHTS, TOKENIZER, CONFIG = "model.safetensors", "tokenizer.json", "config.json"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Llama and its tokenizer."""
    folder = tmp_path_factory.mktemp("sound")
    tokenizer = byte_tokenizer()
    tiny_model("llama", vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(sound, tmp_path / "model"))


def holds(file: str, content: bytes | str) -> Damage:
    raw = content if isinstance(content, bytes) else content.encode()
    return lambda folder: (folder / file).write_bytes(raw)


def edited(file: str, edit: Callable[[dict[str, Any]], Any]) -> Damage:
    def damage(folder: Path) -> None:
        content = json.loads((folder / file).read_text())
        edit(content)
        (folder / file).write_text(json.dumps(content))

    return damage


def config(**changes: Any) -> Damage:
    return edited(CONFIG, lambda c: c.update(changes))


def rope(**values: Any) -> Damage:
    return config(rope_parameters={"rope_type": "default", "rope_theta": 1e4, **values})


def tensors(edit: Callable[[dict[str, Tensor]], Any]) -> Damage:
    def damage(folder: Path) -> None:
        content = load_file(folder / WEIGHTS)
        edit(content)
        save_file(content, folder / WEIGHTS, metadata={"format": "pt"})

    return damage


def gone(*files: str) -> Damage:
    def damage(folder: Path) -> None:
        for file in files:
            (folder / file).unlink()

    return damage


def without_weights(then: Damage) -> Damage:
    def damage(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        then(folder)

    return damage


def cut(file: str, size: int) -> Damage:
    return lambda folder: (folder / file).write_bytes((folder / file).read_bytes()[:size])


DEEP, NORM = "[" * 100_000, "model.norm.weight"
DAMAGES: dict[str, tuple[Damage, str]] = {
    "-1 layers": (config(num_hidden_layers=-1), "num_hidden_layers -1, which must be at least 1"),
    "no layers": (config(num_hidden_layers=0), "num_hidden_layers 0"),
    "a billion layers": (config(num_hidden_layers=10**9), "num_hidden_layers 1000000000"),
    "text for a number": (config(num_hidden_layers="x"), "num_hidden_layers"),
    "no heads": (config(num_attention_heads=0), "num_attention_heads 0|modulo by zero"),
    "-4 heads": (config(num_attention_heads=-4), "num_attention_heads -4"),
    "heads that groups do not divide": (config(num_key_value_heads=3), "num_key_value_heads 3"),
    "a width that heads do not divide": (config(hidden_size=33), "hidden size"),
    "no width": (config(hidden_size=0), "hidden_size 0"),
    "no width of heads": (config(head_dim=0), "head_dim 0"),
    "no vocabulary": (config(vocab_size=0), "vocab_size 0"),
    "a huge vocabulary": (config(vocab_size=10**12), "other shapes than its config.json says"),
    "no positions": (config(max_position_embeddings=0), "max_position_embeddings 0"),
    "rope theta -1": (rope(rope_theta=-1.0), "rope_parameters.rope_theta -1.0"),
    "rope theta 0": (rope(rope_theta=0), "rope_parameters.rope_theta 0"),
    "rope theta nan": (rope(rope_theta=float("nan")), "rope_theta nan|rope_theta"),
    "rope factor": (rope(rope_type="linear", factor=-2.0), "rope_parameters.factor -2.0"),
    "rope type": (rope(rope_type="wheel"), "wheel"),
    "eps nan": (config(rms_norm_eps=float("nan")), "rms_norm_eps nan"),
    "unknown type": (config(model_type="wheel"), "wheel"),
    "a config that is a list": (holds(CONFIG, "[]"), "config.json is not a config.json: it holds a"),
    "an empty config": (holds(CONFIG, ""), "config.json is empty"),
    "a deep config": (holds(CONFIG, DEEP), "config.json is nested deeper"),
    "a config in another encoding": (holds(CONFIG, b"\xff\xfe"), "config.json is not UTF-8"),
    "no config": (gone(CONFIG), "holds no config.json"),
    "a generation config that is a list": (
        holds("generation_config.json", "[3]"), "is not a generation_config.json: it holds a list",
    ),
    "no weights": (gone(WEIGHTS), "no file named model.safetensors"),
    "weights cut off": (cut(WEIGHTS, 5000), "cannot be loaded .*header.*restore its files"),
    "a header cut off": (cut(WEIGHTS, 50), "cannot be loaded .*header.*restore its files"),
    "a huge header": (holds(WEIGHTS, struct.pack("<Q", 2**60)), "cannot be loaded .*header"),
    "weights that are a broken link": (
        without_weights(lambda f: (f / WEIGHTS).symlink_to("nowhere")), "no file named model.safetensors",
    ),
    "an index that is a list": (
        without_weights(holds(f"{WEIGHTS}.index.json", "[]")), "is not a model.safetensors.index.json: it holds a list",
    ),
    "a tensor is missing": (tensors(lambda t: t.pop(NORM)), "lacks 1 weights .*norm"),
    "a tensor has another shape": (
        tensors(lambda t: t.update({NORM: torch.ones(31)})), "other shapes than its config.json says",
    ),
    "weights of NaN": (
        tensors(lambda t: t[NORM].fill_(float("nan"))), r"1 of its weights hold NaN or infinity in float32 \(model",
    ),
    "no tokenizer": (gone(TOKENIZER, "tokenizer_config.json"), "tokenizer of .* cannot be loaded"),
    "a tokenizer that is a list": (holds(TOKENIZER, "[]"), "tokenizer.json: it holds a list"),
    "a tokenizer without content": (holds(TOKENIZER, "{}"), "KeyError 'added_tokens'"),
    "a tokenizer cut off": (cut(TOKENIZER, 500), "tokenizer.json is not valid JSON"),
    "a deep tokenizer": (holds(TOKENIZER, DEEP), "tokenizer.json is nested deeper"),
    "a tokenizer config that is a list": (
        holds("tokenizer_config.json", "[]"), "tokenizer_config.json: it holds a list",
    ),
    "a tokenizer without a vocabulary": (edited(TOKENIZER, lambda c: c["model"].update(vocab={})), "0 tokens"),
    "a tokenizer that is larger than the model": (
        edited(TOKENIZER, lambda c: c["model"]["vocab"].update(abc=300)),
        "tokens with ids up to 300, but the model embeds 268",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_targets(name: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Catches a model that is filled at random or decodes nonsense in silence, a stack trace, a table of transformers
    beside the one line, and a message that does not name the folder."""
    damage, message = DAMAGES[name]
    damage(folder)
    with pytest.raises(UserError, match=message) as error:
        load_target(str(folder), "cpu")
    assert "\n" not in str(error.value)
    assert str(folder) in str(error.value)
    assert "REPORT" not in capfd.readouterr().err


def test_a_sound_target_loads(sound: Path) -> None:
    """Catches a check that refuses what is fine."""
    target = load_target(str(sound), "cpu", "bfloat16")
    assert target.runner.vocab_size == 268
    assert target.eos == frozenset(end_ids(str(sound), load_config(str(sound), "target")))


def test_tokens_added_behind_the_vocabulary(folder: Path) -> None:
    """Catches a check that refuses text models which have an image token behind their vocabulary."""
    tokenizer = load_tokenizer(str(folder))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.save_pretrained(folder)
    assert len(load_target(str(folder), "cpu").tokenizer) == 269


def test_tensors_that_are_not_used_are_said(folder: Path) -> None:
    """Catches a layer that the config leaves out: the model would differ from its files in silence."""
    config(num_hidden_layers=2)(folder)
    with pytest.warns(UserWarning, match=r"tensors .* are not used \(model.layers.2"):
        load_model(str(folder), "target", "cpu", "float32")


def test_weights_that_overflow_a_dtype(folder: Path) -> None:
    """Catches weights that become infinite only when they are converted."""
    tensors(lambda t: t["model.norm.weight"].fill_(1e30))(folder)
    load_model(str(folder), "target", "cpu", "bfloat16")
    with pytest.raises(UserError, match="NaN or infinity in float16"):
        load_model(str(folder), "target", "cpu", "float16")


def test_a_generation_config_that_cannot_be_read(folder: Path) -> None:
    """Catches a file that is skipped, so that texts end at other tokens than when the model is loaded."""
    read = load_config(str(folder), "target")
    (folder / "generation_config.json").unlink()
    assert end_ids(str(folder), read) == []
    for content in ("[3]", "{", DEEP):
        holds("generation_config.json", content)(folder)
        with pytest.raises(UserError, match=r"cannot be loaded: .*generation_config\.json"):
            end_ids(str(folder), read)


def test_a_file_is_no_model(folder: Path) -> None:
    """Catches a file of weights given where its folder is wanted."""
    with pytest.raises(UserError, match=r"config\.json' is a file: name the folder"):
        load_target(str(folder / CONFIG), "cpu")
    (folder / "empty").mkdir()
    with pytest.raises(UserError, match="empty' holds no config.json"):
        load_tokenizer(str(folder / "empty"))


@pytest.mark.parametrize("device", ["tpu", "meta", "cuda:99", "cpu:1", "CPU", "", "cuda:x"])
def test_devices_that_are_not_here(device: str, sound: Path) -> None:
    """Catches a RuntimeError of torch, or a model on a device that computes nothing."""
    message = f"device '{device}' is not on this machine: choose among auto, cpu"
    with pytest.raises(UserError, match=message):
        load_target(str(sound), device)
    if device:  # a draft's empty device means the target's
        with pytest.raises(UserError, match=message):
            load_draft(str(sound), load_target(str(sound), "cpu"), device)


def test_an_accelerator_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a list of devices that leaves out the GPUs, or refuses them."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert [pick_device(name) for name in ("cuda", "cuda:1", "cpu")] == ["cuda", "cuda:1", "cpu"]
    with pytest.raises(UserError, match="'cuda:2' .*choose among auto, cpu, cuda, cuda:0, cuda:1$"):
        pick_device("cuda:2")


@pytest.mark.parametrize("dtype", ["int3", "fp16", "", "Float32"])
def test_dtypes_that_models_are_not_loaded_in(dtype: str, sound: Path) -> None:
    """Catches a KeyError in place of a list of what there is."""
    message = f"dtype '{dtype}': choose among float32, bfloat16, float16"
    with pytest.raises(UserError, match=message):
        load_target(str(sound), "cpu", dtype)
    with pytest.raises(UserError, match=message):
        load_draft(str(sound), load_target(str(sound), "cpu"), dtype=dtype)
