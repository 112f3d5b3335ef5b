"""A model of the time of a round at batch 1, from bytes and kernels. Its two constants come from nothing of ours.

They are chosen so that gpt-fast's published figures come out within 10 % (README of pytorch-labs/gpt-fast, one
A100-80GB at 330 W, prompts of 5 tokens; commit 0f925b5): see `gpt_fast`. Tokens a second of ours are predictions;
nothing is timed.
"""

from dataclasses import dataclass
from typing import Any

SHARE = 0.74
"""Of a card's bandwidth that products with one to a few rows read weights at."""
KERNEL_S = 4.5e-6
"""Seconds of each kernel of a replayed graph beside what it reads: its start and its end."""
BANDWIDTH = {"A100": 2039e9, "H100": 3350e9}
"""Bytes a second, from NVIDIA's data sheets (SXM)."""
GPT_FAST_KERNELS = 10
"""Kernels of a layer of gpt-fast: five products, attention, and four of inductor's, as its model.py reads."""
GPT_FAST = {
    "Llama-2-7B bfloat16": (104.9, 1397.31 / 104.9, 32),
    "Llama-2-7B int8": (155.58, 1069.20 / 155.58, 32),
    "Llama-2-70B int8": (19.13, 1322.58 / 19.13, 80),
}
"""{what: (tokens a second, GB read for a token, layers)}. Its int4 figures are left out: their kernel is bound by what
it computes, and they are 16 to 19 % slower than this model."""


@dataclass(frozen=True)
class Weights:
    """Numbers of a model that are read for a token, and its K/V."""

    layers: int
    read: float  # bytes of weights
    kv: float  # bytes of keys and values of a token


LLAMA_8B = Weights(32, 2 * (8.03e9 - 128_256 * 4096), 2 * 2 * 8 * 128 * 32)
"""Llama-3.1-8B in bfloat16 without its embedding."""
HEAD_STEP = 2 * (8192 * 6144 + 4096 * 4096 + 3 * 4096 * 14336 + 4096 * 32_000)
"""Bytes that a step of its EAGLE-3 head reads, with an LM head of 32,000 tokens."""
HEAD_FC = 2 * 3 * 4096 * 4096


def seconds(read: float, kernels: float, card: str) -> float:
    return read / (SHARE * BANDWIDTH[card]) + kernels * KERNEL_S


def gpt_fast() -> dict[str, tuple[float, float]]:
    """(published, modelled) tokens a second of gpt-fast."""
    return {
        name: (published, 1 / seconds(1e9 * read, GPT_FAST_KERNELS * layers + 5, "A100"))
        for name, (published, read, layers) in GPT_FAST.items()
    }


def plain_seconds(length: int, layer: float, beside: float) -> float:
    """A token of Llama-3.1-8B on an H100 behind `length` tokens, with so many kernels a layer and beside the layers."""
    model = LLAMA_8B
    return seconds(model.read + length * model.kv, model.layers * layer + beside, "H100")


def eagle_seconds(length: int, k: int, layer: float, beside: float, draft: float) -> float:
    """A round with EAGLE-3: verification reads what a token does; `draft` are the kernels of the head's K steps."""
    head_kv = length * LLAMA_8B.kv / LLAMA_8B.layers
    drafted = seconds(k * (HEAD_STEP + head_kv) + HEAD_FC, draft, "H100")
    return plain_seconds(length, layer, beside) + drafted


def predictions(
    layer: float = 9, beside: float = 9, draft: float = 110, k: int = 4
) -> dict[str, Any]:
    """By length: predicted tokens a second of plain decoding, that of gpt-fast, and the speed-up of EAGLE-3 by τ."""
    found: dict[str, Any] = {"gpt_fast": gpt_fast(), "kernels": [layer, beside, draft]}
    for length in (128, 2048, 8192, 32768):
        plain = plain_seconds(length, layer, beside)
        theirs = plain_seconds(length, GPT_FAST_KERNELS, 5)
        found[str(length)] = {
            "plain": 1 / plain, "of_gpt_fast": theirs / plain,
            "eagle3_speed_up_by_tau": plain / eagle_seconds(length, k, layer, beside, draft),
        }  # fmt: skip
    return found
