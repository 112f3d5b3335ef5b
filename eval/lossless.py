"""Is greedy output the target's own? Judged against transformers' `generate`, which shares no code with us.

A forward over one token and one over several sum in different orders, so two logits closer than that noise may
swap. Such a divergence is a tie, listed and counted; any other is a failure.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import GenerationConfig

from decode.target import Target
from eval.tasks import Item


@dataclass(frozen=True)
class Divergence:
    """First place where an output differs from the reference."""

    task: str
    id: str
    position: int
    gap: float  # between the two largest logits of one teacher-forced pass
    noise: float  # largest |Δlogit| between one-token and several-token passes on this text
    tie: bool


def reference_greedy(
    model: Any, prompt: list[int], max_new_tokens: int, target: Target
) -> list[int]:
    """What transformers' own greedy `generate` answers; cut at the context like ours."""
    ids = torch.tensor([prompt], device=model.device)
    room = min(max_new_tokens, target.decoder.context - len(prompt))
    eos = sorted(target.eos)
    settings = GenerationConfig(
        do_sample=False, max_new_tokens=room, eos_token_id=eos or None, pad_token_id=0
    )
    # Without a mask, generate() takes id 0 for padding and hides it inside the prompt.
    out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    return out[0, len(prompt) :].tolist()


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token that differs (a missing one differs too); None for equal sequences."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


@torch.inference_mode()
def pass_noise(target: Target, ids: list[int], several: int) -> float:
    """Largest |Δlogit| between reading `ids` one token at a time and `several` at a time."""
    decoder = target.decoder
    tokens = torch.tensor([ids], device=decoder.device)

    def read(width: int) -> torch.Tensor:
        decoder.allocate(1, len(ids))
        pieces = []
        for at in range(0, len(ids), width):
            length = torch.tensor([at], device=decoder.device)
            pieces.append(decoder.step(tokens[:, at : at + width], length))
        return torch.cat(pieces, 1).float()

    return float((read(1) - read(several)).abs().max())


@torch.inference_mode()
def top_gap(model: Any, ids: list[int], token: int | None) -> float:
    """How much smaller the logit of `token` is than the largest after `ids`; infinite for no token."""
    if token is None:
        return float("inf")
    logits = model(torch.tensor([ids], device=model.device)).logits[0, -1].float()
    return float(logits.max() - logits[token])


def judge(
    target: Target,
    model: Any,
    items: Sequence[Item],
    references: Sequence[list[int]],
    outputs: Sequence[list[int]],
    k: int,
) -> dict[str, Any]:
    """The `lossless` field of a report: greedy_identical holds when every divergence is a proven tie."""
    divergences = []
    for item, reference, output in zip(items, references, outputs, strict=True):
        at = first_difference(reference, output)
        if at is None:
            continue
        text = [*item.prompt_ids, *reference[:at]]
        token = output[at] if at < len(output) else None
        gap, noise = top_gap(model, text, token), pass_noise(target, text, k + 1)
        divergences.append(Divergence(item.task, item.id, at, gap, noise, gap <= 2 * noise))
    ties = [asdict(d) for d in divergences if d.tie]
    failures = [asdict(d) for d in divergences if not d.tie]
    return {
        "greedy_identical": len(failures) == 0,
        "prompts": len(items),
        "identical": len(items) - len(divergences),
        "ties": ties,
        "failures": failures,
    }
