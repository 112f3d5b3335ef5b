"""Blocks of the attention kernel fit each card, by NVIDIA's assembler (docs/results/gpu_counts.json)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from decode.model.gpu import step_blocks
from decode.model.gpu.step_blocks import SHARED_KIB, Blocks, pick_blocks, power_of_two

ROOT = Path(__file__).resolve().parents[4]
MEASURED: dict[str, dict[str, Any]] = json.loads(
    (ROOT / "docs" / "results" / "gpu_counts.json").read_text()
)["attention"]
HEADS = {"llama": (128, 128), "gemma": (256, 256), "deepseek": (192, 128), "gpt-oss": (64, 64)}


@pytest.mark.parametrize("name", MEASURED)
def test_blocks_fit_the_card(name: str) -> None:
    """Catches a choice that a card cannot launch, a model of shared memory that says less than the assembler, and
    figures of another choice than today's. Without tensor cores, on 7.5, the kernel is not used."""
    found = MEASURED[name]
    blocks = Blocks(found["keys"], found["queries"], found["stages"])
    width, out_width = power_of_two(found["width"]), power_of_two(found["out_width"])
    said = blocks.shared_bytes(width, out_width, 2)
    assert said <= found["limit"]
    assert found["shared"] <= (found["limit"] if name.startswith("sm_75") else said)
    assert blocks == pick_blocks(
        found["tokens"], found["width"], found["out_width"], 2, found["limit"]
    )
    assert found["spilled"] <= 64 or name.startswith("sm_75")


@pytest.mark.parametrize("card", SHARED_KIB)
@pytest.mark.parametrize("model", HEADS)
@pytest.mark.parametrize("queries", [4, 20, 68, 260])
def test_every_card_has_blocks(card: int, model: str, queries: int) -> None:
    """Catches heads for which no choice fits, in 16 bits and in fp32."""
    for itemsize in (2, 4):
        limit = 1024 * SHARED_KIB[card]
        blocks = pick_blocks(queries, *HEADS[model], itemsize, limit)
        assert blocks.shared_bytes(*map(power_of_two, HEADS[model]), itemsize) <= limit


def test_blocks_that_do_not_fit_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: one choice for all cards, of which Gemma's heads need 148 KiB and DeepSeek's 116."""
    monkeypatch.setattr(step_blocks, "CHOICES", ((64, 3),))
    limit = 1024 * SHARED_KIB[86]
    for model in ("gemma", "deepseek"):
        blocks = pick_blocks(34, *HEADS[model], 2, limit)
        assert blocks.shared_bytes(*map(power_of_two, HEADS[model]), 2) > limit


def test_a_card_that_is_not_known_gets_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a new card that is taken for a large one."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (15, 0))
    assert step_blocks.shared_memory(torch.device("cuda")) == 64 * 1024
