"""PARD in the engine: its distributions are those of a plain pass over text and masks, its text is the target's."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from decode.common.errors import UserError
from decode.drafts import blocks
from decode.drafts.blocks import PardDraft
from decode.drafts.registry import draft_family
from decode.model.loading import Target
from decode.model.runner import ModelRunner
from decode.verification.tree import TreeShape
from tests.blocks import decode_and_compare, watch_logits
from tests.tiny import VOCAB, noisy, reference, tiny_model

MASK = VOCAB - 1


def pard_of(model: Any, shape: TreeShape = None, noise: float = 0.05) -> PardDraft:
    """A disturbed copy of the model: some of its drafts are accepted, though it never learnt what a mask is."""
    return PardDraft(ModelRunner(noisy(model, noise)), MASK, shape=shape)


def drift(draft: Any, inner: PardDraft, own: Target, **settings: Any) -> tuple[float, set[int]]:
    """(largest difference from transformers' pass over the text and K - 1 masks, accepted lengths that occurred)."""
    plain = reference(noisy(own.runner.model, 0.05))

    def one_pass(text: list[int], depth: int) -> Tensor:
        whole = torch.tensor([[*text, *[MASK] * (depth - 1)]])
        return plain(whole).logits[0, -depth:]

    with watch_logits(inner, inner, "_read_with_masks") as seen:
        return decode_and_compare(own, draft, seen, one_pass, **settings)


def test_its_folder_says_what_it_is(tmp_path: Path) -> None:
    """Catches a PARD folder of another trainer taken for a plain language model, and a mask that is no token."""
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    assert draft_family(str(tmp_path)) == "causal"
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "pard_token": MASK}))
    assert draft_family(str(tmp_path)) == "pard"
    for wrong in (VOCAB, -1, "x"):
        (tmp_path / "config.json").write_text(json.dumps({**config, "pard_token": wrong}))
        with pytest.raises(UserError, match="pard_token"):
            blocks.mask_token_of("x", blocks.load_config(str(tmp_path), "draft"))
