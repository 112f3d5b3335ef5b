"""Drafts of blocks and native layers in w8a8 and int4, from their folders, over a target in w8a8."""

from pathlib import Path
from typing import Any

import pytest
import torch

from decode.drafts.base import Draft
from decode.drafts.registry import load_draft
from decode.engine.engine import decode
from decode.model.loading import Target
from decode.model.quantized.conversion import KINDS, quantize_model
from decode.model.quantized.layers import QuantizedLinear
from decode.model.runner import ModelRunner
from tests.blocks import LENGTH, PROMPTS, K
from tests.decode.drafts import test_dflash, test_mtp
from tests.decode.engine.test_engine import texts
from tests.tiny import tiny_model


def w8a8_target() -> Target:
    model = tiny_model("llama")
    quantize_model(model, "w8a8", "llama")
    return Target(ModelRunner(model), None, "tiny", None, "fingerprint", frozenset())


def assert_drafts_in(dtype: str, draft: Any, target: Target) -> None:
    """Its linear layers are of this dtype, where their width lets them, and what it drafts changes nothing."""
    assert isinstance(draft, Draft)
    parts = list(draft.net.modules())
    kinds = {type(part) for part in parts if isinstance(part, QuantizedLinear)}
    assert kinds == {KINDS[dtype]}
    assert all(part.in_features % 32 for part in parts if type(part) is torch.nn.Linear)
    settings: dict[str, Any] = {"k": K, "max_new_tokens": LENGTH}
    plain = texts(decode(target, None, PROMPTS, **settings))
    assert texts(decode(target, draft, PROMPTS, **settings)) == plain


@pytest.mark.parametrize("family", ["dflash", "dspark"])
@pytest.mark.parametrize("dtype", ["w8a8", "int4"])
def test_blocks_in_few_bits_draft(family: str, dtype: str, tmp_path: Path) -> None:
    """Bug: a network that reads weights which are no longer there, or that is loaded in floating point."""
    target = w8a8_target()
    path = test_dflash.saved(tmp_path, family, target)
    assert_drafts_in(dtype, load_draft(path, target, dtype=dtype), target)


@pytest.mark.parametrize("dtype", ["w8a8", "int4"])
def test_a_native_layer_in_few_bits_drafts(dtype: str, tmp_path: Path) -> None:
    """Bug: the folder's copy of the LM head, which the target itself no longer has, is taken for another one."""
    test_mtp.native_folder(tmp_path, "llama")
    target = w8a8_target()
    with pytest.warns(UserWarning, match="names no tokenizer"):
        draft = load_draft(str(tmp_path), target, dtype=dtype)
    assert_drafts_in(dtype, draft, target)
