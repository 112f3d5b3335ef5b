"""What a draft's folder is: heads under a trainer's prefix, a language model and nothing else, or refused by name."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from decode.common.errors import UserError
from decode.drafts import causal
from decode.drafts.registry import load_draft
from decode.engine.engine import decode
from decode.model.loading import load_model, load_target
from tests.decode.checkpoints.test_importers import BIN, TRAINERS, alike, quietly
from tests.decode.checkpoints.test_layouts import small_target
from tests.heads import draft_of
from tests.seq2seq import letter_tokenizer
from tests.tiny import tiny_model

WEIGHTS = "model.safetensors"
VOCAB = 258


def edit(folder: Path, change: Any) -> None:
    """Writes the tensors of a folder anew, as `change` gives them from the old ones."""
    tensors = change(load_file(folder / WEIGHTS))
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def language_model(folder: Path, arch: str = "llama", seed: int = 0, **changes: Any) -> Path:
    torch.manual_seed(seed)
    tiny_model(arch, vocab_size=VOCAB, **changes).save_pretrained(folder)
    letter_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "prefix", ["draft_model.", "eagle_module.", "_orig_mod.", "module.draft_model.", "a.b.c.model."]
)
@pytest.mark.parametrize("trainer", ["eagle3 of SpecForge", "eagle3 of speculators"])
def test_heads_under_a_trainers_prefix_are_read(prefix: str, trainer: str, tmp_path: Path) -> None:
    """Catches a head that was not exported, or saved compiled, taken for a language model without a tokenizer."""
    own = small_target()
    path, net = TRAINERS[trainer](tmp_path, own)
    edit(tmp_path, lambda tensors: {prefix + name: value for name, value in tensors.items()})
    alike(draft_of(net, own), quietly(path, own), own)


def test_a_head_of_no_known_layout_is_named(tmp_path: Path) -> None:
    """Catches "its tokenizer cannot be loaded" for a head: its first tensor is named, and the model that it is not."""
    target = load_target(str(language_model(tmp_path / "target")), "cpu")
    head = language_model(tmp_path / "head", seed=1)
    (head / "tokenizer.json").unlink()
    edit(head, lambda tensors: tensors | {"adapter.mixer.weight": torch.ones(3)})
    with pytest.raises(UserError, match=r"adapter.mixer.weight and 0 further .* LlamaForCausalLM"):
        load_draft(str(head), target)


@pytest.mark.parametrize(
    "name",
    [
        "mtp.fc.weight",
        "mtp.layers.0.mlp.gate_proj.weight",
        "model.mtp_layers.0.input_proj.weight",
        "model.mtp_block.0.norm.weight",
    ],
)
def test_mtp_layers_of_other_layouts_are_refused_by_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches the whole target that drafts for itself, without a word, where its folder is given as its MTP draft:
    Qwen3-Next and Qwen3.5, MiMo, ERNIE. A smaller model that has such layers too drafts, and they are named."""
    folder = language_model(tmp_path / "target", num_hidden_layers=2)
    target = load_target(str(folder), "cpu")
    edit(folder, lambda tensors: tensors | {name: torch.ones(3)})
    with pytest.raises(UserError, match=rf"is the target, and its MTP layers \({name}"):
        load_draft(str(folder), target)
    small = language_model(tmp_path / "small", num_hidden_layers=1)
    edit(small, lambda tensors: tensors | {name: torch.ones(3)})
    # As transformers' classes of these models do, which leave such tensors out without a word
    monkeypatch.setattr(type(target.runner.model), "_keys_to_ignore_on_load_unexpected", ["mtp"])
    load_draft(str(small), target)
    assert f"MTP layers ({name}, …) have a layout that is not read" in capsys.readouterr().err


@pytest.mark.parametrize("how", ["its folder", "a copy", "in bfloat16", "in shards"])
def test_a_draft_that_is_the_target_is_said(
    how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a report with α near 1 and twice the memory that nobody is told the reason of."""
    folder = language_model(tmp_path / "target")
    edit(folder, lambda tensors: {n: v.bfloat16().float() for n, v in tensors.items()})
    target = load_target(str(folder), "cpu")
    draft = folder if how == "its folder" else tmp_path / "draft"
    if how != "its folder":
        shutil.copytree(folder, draft)
    if how == "in bfloat16":
        edit(draft, lambda tensors: {name: value.bfloat16() for name, value in tensors.items()})
    if how == "in shards":
        (draft / WEIGHTS).unlink()
        load_model(str(folder), "target", "cpu", "float32").save_pretrained(
            draft, max_shard_size="20KB"
        )
        assert (draft / "model.safetensors.index.json").exists()
    load_draft(str(draft), target)
    assert f"draft {str(draft)!r} has the target's own weights" in capsys.readouterr().err
    load_draft(str(language_model(tmp_path / "other", seed=5)), target)
    assert "own weights" not in capsys.readouterr().err


def test_weights_of_a_target_are_read_to_compare_only_where_sizes_are_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches gigabytes that are hashed for every small draft."""
    target = load_target(str(language_model(tmp_path / "target")), "cpu")
    small = language_model(tmp_path / "small", hidden_size=16)
    monkeypatch.setattr(causal, "model_fingerprint", None)
    assert not causal.has_weights_of(str(small), target)


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("file", [BIN, "pytorch_model-00001-of-00002.bin", "model.pt"])
def test_pickled_weights_are_refused_with_the_command_that_converts(
    role: str, file: str, tmp_path: Path
) -> None:
    """Catches "restore model.safetensors" for a folder that never had one."""
    folder = language_model(tmp_path)
    torch.save(load_file(folder / WEIGHTS), folder / file)
    (folder / WEIGHTS).unlink()
    with pytest.raises(UserError) as refused:
        load_model(str(folder), role, "cpu", "float32")
    said = str(refused.value)
    assert f"holds its weights in {file}" in said
    assert "only safetensors are read" in said
    if file == BIN:
        code = said[said.index('"import') + 1 : -1]
        for name, own in {"'OUT'": tmp_path / "out", "'FOLDER'": folder}.items():
            code = code.replace(name, repr(str(own)))
        exec(compile(code, "the command", "exec"))
        converted = load_target(str(tmp_path / "out"), "cpu")
        assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == VOCAB
        assert decode(converted, None, [[3, 4, 5]], max_new_tokens=4)[0].output_ids
