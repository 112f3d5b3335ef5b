"""Embedding and LM head: whether they are one matrix is read from the tensors, in both directions, wherever it is
asked."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from decode.checkpoints.draft_vocab import resize_vocabulary
from decode.common import damage
from decode.common.errors import UserError
from decode.drafts.registry import load_draft
from decode.engine.engine import decode
from decode.model.loading import head_is_misstated, load_config, load_model, load_target
from decode.serving.gguf_export import write_gguf
from decode.serving.running.vllm_client import language_model_path
from tests.params import rotated
from tests.tiny import tiny_model
from tests.worlds import byte_tokenizer
from train.families.causal import random_init

VOCAB = 268
IDS = torch.arange(12, 52).view(2, 20)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(IDS).logits
    return found


def write(
    folder: Path, stated: bool, head: str, arch: str = "llama", shard: str = "5GB", **changes: Any
) -> Any:
    """Saves a tiny model whose config says `stated` of its head, which is "apart", a "copy" of the embedding or
    "absent" from the files; returns the model."""
    model = tiny_model(arch, vocab_size=VOCAB, tie_word_embeddings=head != "apart", **changes)
    model.save_pretrained(folder, max_shard_size=shard)
    byte_tokenizer().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": stated}))
    if head == "copy":
        tensors = load_file(folder / "model.safetensors")
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model.set_attn_implementation("eager")  # sdpa of older versions leaves out Gemma's soft cap
    return model


CASES = {
    "tied, apart": (True, "apart"),
    "tied, copy": (True, "copy"),
    "tied, absent": (True, "absent"),
    "untied, apart": (False, "apart"),
    "untied, copy": (False, "copy"),
    "untied, absent": (False, "absent"),
}


@pytest.mark.parametrize(("case", "arch"), rotated(CASES, ["llama", "qwen3", "gemma2"]))
def test_the_tensors_decide(
    case: str, arch: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a trained head that is dropped by the loader, by a change of size or by the estimates, and a missing one
    that is refused or filled at random."""
    stated, head = CASES[case]
    damage.warn_once.cache_clear()
    model = write(tmp_path, stated, head, arch)
    found = load_target(str(tmp_path), "cpu").runner.model
    torch.testing.assert_close(logits(found), logits(model), atol=1e-4, rtol=1e-5)
    tied = head == "absent" or (stated and head == "copy")
    assert found.config.tie_word_embeddings == tied
    assert load_config(str(tmp_path), "target").tie_word_embeddings == tied
    assert head_is_misstated(str(tmp_path), "target") == (stated != tied)
    # Estimates count what is loaded.
    with torch.device("meta"):
        counted_model = AutoModelForCausalLM.from_config(load_config(str(tmp_path), "target"))
    counted = sum(p.numel() for p in counted_model.parameters())
    assert counted == sum(p.numel() for p in found.parameters())
    embedding = model.get_input_embeddings().weight.numel()
    assert counted - sum(p.numel() for p in model.parameters()) == embedding * (
        case == "untied, copy"
    )
    said = "hold only the embedding" in capsys.readouterr().err
    assert said == (case == "untied, absent")


@pytest.mark.parametrize(
    ("head", "rows"), [("apart", VOCAB - 3), ("apart", VOCAB + 5), ("absent", VOCAB + 5), ("absent", VOCAB)]
)  # fmt: skip
def test_resized_and_saved_drafts_keep_their_head(head: str, rows: int, tmp_path: Path) -> None:
    """Catches a head that becomes the embedding when the draft gets the target's vocabulary, and a folder that does
    not load as what was saved."""
    model = write(tmp_path / "draft", head == "apart", head)
    draft = load_model(str(tmp_path / "draft"), "draft", "cpu", "float32")
    resize_vocabulary(draft, rows)
    least = min(rows, VOCAB)
    torch.testing.assert_close(
        logits(draft)[..., :least], logits(model)[..., :least], atol=1e-4, rtol=1e-5
    )
    draft.save_pretrained(tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["tie_word_embeddings"] == (head == "absent")
    again = load_model(str(tmp_path / "saved"), "draft", "cpu", "float32")
    torch.testing.assert_close(logits(again), logits(draft), rtol=0, atol=0)


def test_shards_and_parts_of_a_target(tmp_path: Path) -> None:
    """Catches heads in another file than the embedding, and ends of a target that are loaded alone (for training where
    a server has the layers)."""
    model = write(tmp_path, True, "apart", shard="60KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    ends = load_target(str(tmp_path), "cpu", with_layers=False).runner.model
    torch.testing.assert_close(ends.lm_head.weight, model.lm_head.weight, rtol=0, atol=0)
    torch.testing.assert_close(
        ends.model.embed_tokens.weight, model.model.embed_tokens.weight, rtol=0, atol=0
    )


def test_a_draft_with_a_trained_head_drafts_with_it(tmp_path: Path) -> None:
    """Catches a draft's head that is dropped: with the target's own weights it accepts all."""
    write(tmp_path, True, "apart")
    target = load_target(str(tmp_path), "cpu")
    outputs = decode(
        target, load_draft(str(tmp_path), target), IDS[:, :9].tolist(), max_new_tokens=13, k=3
    )
    counts = [counts for output in outputs for counts in output.rounds]
    assert counts
    assert all(drafted == accepted for drafted, accepted in counts)


def test_drafts_made_like_the_target_have_its_kind_of_head(tmp_path: Path) -> None:
    """Catches a draft with random weights whose head is tied because the target's config says so wrongly."""
    write(tmp_path, True, "apart")
    draft = random_init({"num_hidden_layers": 1}, load_target(str(tmp_path), "cpu"))
    assert draft.lm_head.weight is not draft.model.embed_tokens.weight


def test_engines_that_follow_the_file_are_not_given_it(tmp_path: Path) -> None:
    """Catches references of vLLM that drop the head, or lack one: one line, before vLLM starts."""
    for name, case in CASES.items():
        write(tmp_path / name, *case)
        if case[0] == (case[1] != "apart") or name == "untied, copy":
            continue
        with pytest.raises(UserError, match="contradict") as raised:
            language_model_path(str(tmp_path / name))
        assert repr(str(tmp_path / name)) in str(raised.value)
    assert language_model_path(str(tmp_path / "untied, apart")).endswith("apart")


def test_a_gguf_has_the_head_that_was_trained(tmp_path: Path) -> None:
    """Catches an export that leaves out a head because the file's config says tied."""
    write(tmp_path / "apart", True, "apart")
    write(tmp_path / "tied", False, "absent")
    for name in ("apart", "tied"):
        write_gguf(str(tmp_path / name), tmp_path / f"{name}.gguf")
    sizes = {name: (tmp_path / f"{name}.gguf").stat().st_size for name in ("apart", "tied")}
    assert sizes["apart"] - sizes["tied"] >= 4 * VOCAB * 32


def test_what_is_no_tied_pair_is_left_alone(tmp_path: Path) -> None:
    """Catches a guess where neither tensor tells: files without an embedding keep being refused, in one line."""
    write(tmp_path, False, "apart")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.embed_tokens.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(UserError, match=r"lacks 1 weights \(model.embed_tokens.weight"):
            load_model(str(tmp_path), "target", "cpu", "float32")
