"""Autocast around a request, as notebooks have it on for whole cells: nothing changes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from decode.drafts.causal import CausalDraft
from decode.engine.engine import decode, speculate
from decode.engine.records import collect_outputs
from decode.model.runner import ModelRunner
from tests.tiny import noisy, tiny_model, tiny_prompts, tiny_target

PROMPTS = tiny_prompts(5, 9)


def outputs(target: Any, draft: Any, **settings: Any) -> list[list[int]]:
    return [o.output_ids for o in decode(target, draft, PROMPTS, max_new_tokens=12, **settings)]


def in_turns(target: Any, draft: Any) -> list[list[int]]:
    """Rounds that are read alternately inside autocast and outside."""
    rounds, records = speculate(target, draft, PROMPTS, max_new_tokens=12, k=3), []
    for number in range(1000):
        with torch.autocast("cpu", torch.bfloat16, enabled=number % 2 == 0):
            record = next(rounds, None)
        if record is None:
            break
        records.append(record)
    return [output.output_ids for output in collect_outputs(PROMPTS, records)]


WAYS: dict[str, Callable[[Any, Any], list[list[int]]]] = {
    "plain": lambda target, draft: outputs(target, None),
    "drafted": lambda target, draft: outputs(target, draft, k=3),
    "in turns": in_turns,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", WAYS)
def test_autocast_changes_nothing(way: str, dtype: torch.dtype) -> None:
    """Catches a traceback of oneDNN, a text in the dtype of autocast, and autocast that stays off after a request."""
    model = tiny_model("llama").to(dtype)
    target, draft = tiny_target(model), CausalDraft(ModelRunner(noisy(model, 0.02)))
    alone = WAYS[way](target, draft) if way != "in turns" else outputs(target, draft, k=3)
    with torch.autocast("cpu", torch.float16 if dtype == torch.bfloat16 else torch.bfloat16):
        assert WAYS[way](target, draft) == alone
        assert torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")
