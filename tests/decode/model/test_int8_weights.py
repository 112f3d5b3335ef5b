"""Targets whose linear layers have int8 weights: the same text with every draft as without, and as transformers'."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from decode.common.errors import UserError
from decode.drafts.base import Draft
from decode.drafts.early_exit import EarlyExitDraft
from decode.drafts.registry import load_draft, pick_draft
from decode.engine.engine import decode
from decode.model.formats.quantized import quantize_linear_layers
from decode.model.loading import Target, load_model, load_target
from tests import heads, worlds
from tests.tiny import noisy, tiny_model, tiny_prompts

torchao = pytest.importorskip("torchao")
ONE_KEY_HEAD = {"num_key_value_heads": 1}
MODELS = {"llama": {}, "llama with one key head": ONE_KEY_HEAD, "qwen3_moe": {}, "gemma2": {}}


@pytest.fixture(params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A target, and in `draft` a copy of it that is right now and then."""
    tokenizer = worlds.byte_tokenizer()
    size: dict[str, Any] = {"vocab_size": len(tokenizer), **MODELS[request.param]}
    model = tiny_model(request.param.split()[0], **size)
    worlds.save(tmp_path / "draft", noisy(model, 0.02), tokenizer)
    return worlds.save(tmp_path / "target", model, tokenizer)


def drafts_of(target: Target, folder: Path) -> dict[str, Draft | None]:
    return {
        "ngram": pick_draft("ngram", target),
        "causal": load_draft(str(folder.parent / "draft"), target),
        "causal in eight bits": load_draft(str(folder.parent / "draft"), target, dtype="int8"),
        "eagle3": heads.random_draft("eagle3", target),
        "early exit": EarlyExitDraft(target, 2, None),
    }


def test_text_with_a_draft_is_the_target_s_own(folder: Path) -> None:
    """Bug: layers that a decoder replaces lose their eight bits, or drafts read weights that are packed."""
    target = load_target(str(folder), "cpu", "int8")
    prompts = tiny_prompts(5, 9, vocab=97)
    settings: dict[str, Any] = {"k": 3, "max_new_tokens": 24}
    plain = [record.output_ids for record in decode(target, None, prompts, **settings)]
    for name, draft in drafts_of(target, folder).items():
        found = [record.output_ids for record in decode(target, draft, prompts, **settings)]
        assert found == plain, name
    model = load_model(str(folder), "target", "cpu", "int8")
    for prompt, wanted in zip(prompts, plain, strict=True):
        made = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)
        assert made[0, len(prompt) :].tolist() == wanted
    layers = [m for m in target.runner.model.modules() if isinstance(m, torch.nn.Linear)]
    kept = [layer for layer in layers if type(layer.weight) is torch.nn.Parameter]
    assert kept == [target.runner.model.get_output_embeddings()]


def test_each_row_of_weights_has_eight_bits_and_a_scale(folder: Path) -> None:
    """Bug: the LM head or norms are rounded too, or nothing is."""
    before, after = (
        load_model(str(folder), "target", "cpu", dtype) for dtype in ("float32", "int8")
    )
    head = after.get_output_embeddings()
    assert type(head.weight) is torch.nn.Parameter
    torch.testing.assert_close(head.weight, before.get_output_embeddings().weight, atol=0, rtol=0)
    changed = 0
    for (name, a), b in zip(before.named_modules(), after.modules(), strict=True):
        if isinstance(a, torch.nn.Linear) and b is not head:
            weight, rounded = a.weight.detach(), b.weight.dequantize()
            step = weight.abs().amax(1, keepdim=True) / 127.5
            assert ((rounded - weight).abs() <= 0.51 * step + 1e-7).all(), name
            changed += int((rounded != weight).any())
    assert changed > 10


def test_without_torchao_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(UserError, match="pip install torchao"):
        quantize_linear_layers(tiny_model("llama"), "int8")
