"""Exported small LMs have the target's vocabulary size, which engines ask for; models in W8A8 are read back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from decode.checkpoints.draft_vocab import save_ids, silence_other_tokens
from decode.common.errors import UserError
from decode.drafts.registry import load_draft
from decode.engine.engine import decode
from decode.model.loading import load_model, load_target, load_tokenizer
from decode.model.quantized.w8a8 import W8A8Linear
from decode.serving.checks import full_head
from decode.serving.export import export_draft, export_hf
from decode.serving.rules import read_draft
from tests.decode.engine.test_engine import PROMPTS, WORDS, save
from tests.tiny import VOCAB, tiny_model

IDS = torch.tensor([3, 8, 9, 30, 41, 70])


def logits(model: Any) -> torch.Tensor:
    ids = torch.randint(0, VOCAB - 20, (4, 30), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        out: torch.Tensor = model(input_ids=ids, use_cache=False).logits.flatten(0, 1)
    return out


# gpt_neox: a head of another name; phi: one with a bias; gemma2, granite: logits that are capped or scaled
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "phi", "gemma2", "gpt_neox", "granite", "opt"])
def test_tokens_that_were_not_trained_are_never_the_most_probable(arch: str, tied: bool) -> None:
    """Catches rows of other tokens that win, an embedding that changes with the head, and tokens that move."""
    model = tiny_model(arch, tie_word_embeddings=tied)
    head = model.get_output_embeddings()
    others = torch.ones(VOCAB, dtype=torch.bool).index_fill(0, IDS, False)
    with torch.no_grad():
        head.weight[others] *= 3
    before, read = logits(model), model.get_input_embeddings().weight.detach().clone()
    won = others[before.argmax(-1)]
    assert won.float().mean() > 0.5  # as they stand, the others win
    silence_other_tokens(model, IDS)
    after = logits(model)
    assert torch.equal(after[:, IDS], before[:, IDS])
    assert torch.equal(model.get_input_embeddings().weight, read)
    assert not others[after.argmax(-1)].any()
    assert torch.equal(after.argmax(-1), IDS[before[:, IDS].argmax(-1)])
    assert (after.softmax(-1)[:, others] < 1 / len(IDS)).all()


@pytest.mark.parametrize("rows", [VOCAB - 20, VOCAB, VOCAB + 8])
@pytest.mark.parametrize("tied", [True, False])
def test_an_exported_reduced_draft_keeps_to_its_tokens_everywhere(
    tied: bool, rows: int, tmp_path: Path
) -> None:
    """Catches a copy with which other engines draft what was never trained, one that drafts otherwise here, and a tied
    head that is tied again when the copy is loaded."""
    name = save(tmp_path / "target", WORDS)
    path = save(tmp_path / "draft", WORDS, vocab_size=rows, tie_word_embeddings=tied)
    save_ids(tmp_path / "draft", IDS)
    out = tmp_path / "out"
    out.mkdir()
    export_hf(path, name, out)
    target = load_target(name, "cpu")
    rounds = [
        [o.rounds for o in decode(target, load_draft(one, target), PROMPTS, k=3, max_new_tokens=12)]
        for one in (path, str(out))
    ]
    assert rounds[0] == rounds[1]
    copied, own = (AutoModelForCausalLM.from_pretrained(folder) for folder in (out, path))
    assert not copied.config.tie_word_embeddings
    assert torch.equal(logits(copied)[:, IDS], logits(own)[:, IDS])
    assert torch.isin(logits(copied).argmax(-1), IDS).all()
    assert not torch.isin(logits(own).argmax(-1), IDS).all()
    embeddings = [model.get_input_embeddings().weight for model in (copied, own)]
    shared = min(rows, VOCAB)
    assert torch.equal(embeddings[0][:shared], embeddings[1][:shared])
    findings = [list(full_head(read_draft(str(folder)))) for folder in (path, out)]
    assert [len(found) for found in findings] == [1, 0]
    assert "scripts/export.py --format hf" in findings[0][0]


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_in_w8a8_is_read_back_as_it_was_rounded(tied: bool, tmp_path: Path) -> None:
    """Catches scales of other rows, a head that is rounded as well, a config that names neither what is rounded nor
    how, and a folder without its tokenizer or one of its chat templates."""
    name = save(tmp_path / "target", WORDS, tie_word_embeddings=tied)
    tokenizer = load_tokenizer(name)
    tokenizer.chat_template = {"default": "D", "rag": "R"}
    tokenizer.save_pretrained(name)
    export_draft(name, "w8a8", tmp_path / "out", "", 4, "float32")
    copied = load_target(str(tmp_path / "out"), "cpu").tokenizer
    assert copied("def")["input_ids"] == [1]
    assert copied.chat_template == tokenizer.chat_template
    own = load_model(name, "model", "cpu", "bfloat16")
    for dtype in ("w8a8", "float32"):
        model = load_model(str(tmp_path / "out"), "model", "cpu", dtype)
        layers = [x for x in model.model.layers.modules() if isinstance(x, W8A8Linear)]
        assert len(layers) == (7 * len(model.model.layers) if dtype == "w8a8" else 0)
        assert type(model.lm_head) is torch.nn.Linear
        assert torch.equal(model.lm_head.weight, own.lm_head.weight.float())
        for path in ("model.layers.1.self_attn.k_proj", "model.layers.0.mlp.down_proj"):
            weight = own.get_submodule(path).weight.float()
            step = weight.abs().amax(1, keepdim=True) / 127
            got = model.get_submodule(path).weight.float()
            assert (got - weight).abs().le(step * 0.501).all()
            assert not torch.equal(got, weight)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == ["lm_head"]
    assert config["tie_word_embeddings"] is tied


def test_what_w8a8_would_leave_out_is_refused(tmp_path: Path) -> None:
    """Catches experts and a vocabulary of a draft's own that an engine would not find in the folder."""
    tiny_model("mixtral").save_pretrained(tmp_path / "experts")
    path = save(tmp_path / "draft", WORDS)
    save_ids(tmp_path / "draft", IDS)
    for name, reason in ((str(tmp_path / "experts"), "stacked"), (path, "vocabulary of its own")):
        with pytest.raises(UserError, match=reason):
            export_draft(name, "w8a8", tmp_path / "out", "", 4, "float32")
        assert not (tmp_path / "out").exists()
