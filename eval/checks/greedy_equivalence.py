"""Is greedy output the target's own? Judged against transformers' `generate`, which shares no code with us.

A forward over one token and one over several sum in different orders, so two logits closer than that noise may
swap: hardly ever in fp32, often in bf16. Such a divergence is a tie, listed with its margin and counted; any other is a
failure. The noise is that of transformers' own passes: ours might be large because we are wrong.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import GenerationConfig

from decode.model.loading import Target
from eval.tasks.loading import TaskPrompt
from eval.tasks.stop_strings import trim_at_stop


@dataclass(frozen=True)
class GreedyMismatch:
    """First place where an output differs from the reference."""

    task: str
    id: str
    position: int
    gap: float  # by how much the output's token is below the largest logit of one teacher-forced pass
    noise: float  # largest |Δlogit| between passes over this text that differ in width alone
    tie: bool


def reference_greedy_output(
    model: Any, prompt: list[int], max_new_tokens: int, target: Target, stop: Sequence[str] = ()
) -> list[int]:
    """What transformers' own greedy `generate` answers; cut at the context and the stop strings like ours."""
    ids = torch.tensor([prompt], device=model.device)
    room = min(max_new_tokens, target.decoder.context - len(prompt))
    eos = sorted(target.eos)
    settings = GenerationConfig(
        do_sample=False, max_new_tokens=room, eos_token_id=eos or None, pad_token_id=0
    )
    # Without a mask, generate() takes id 0 for padding and hides it inside the prompt.
    out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    return trim_at_stop(out[0, len(prompt) :].tolist(), stop, target.tokenizer)


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token that differs (a missing one differs too); None for equal sequences."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


@torch.inference_mode()
def logit_noise(model: Any, ids: list[int], start: int, several: int) -> float:
    """Largest |Δlogit| from `start` on between reading `ids` one token at a time, `several` at a time, and at once.

    By the plain model with transformers' own cache; what is before `start`, the prompt, is read in one go, as decoding
    does. At least what rounding does to the largest logit, since other kernels than these may round otherwise.
    """
    tokens = torch.tensor([ids], device=model.device)

    def read(width: int) -> torch.Tensor:
        cache: Any = None
        pieces, at = [], 0
        while at < len(ids):
            end = min(len(ids), start if at < start else at + width)
            out = model(tokens[:, at:end], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            pieces.append(out.logits[0, -1:] if at < start else out.logits[0])
            at = end
        return torch.cat(pieces).float()  # after the prompt's last token and each one behind it

    one, some = read(1), read(several)
    whole = model(tokens, use_cache=False).logits[0, -len(one) :].float()
    rounding = torch.finfo(model.dtype).eps * float(whole.abs().max())
    return max(rounding, float((one - some).abs().max()), float((one - whole).abs().max()))


@torch.inference_mode()
def gap_to_top_logit(model: Any, ids: list[int], token: int | None) -> float:
    """How much smaller the logit of `token` is than the largest after `ids`; infinite for no token."""
    if token is None:
        return float("inf")
    logits = model(torch.tensor([ids], device=model.device)).logits[0, -1].float()
    return float(logits.max() - logits[token])


def check_greedy_equivalence(
    target: Target,
    model: Any,
    items: Sequence[TaskPrompt],
    references: Sequence[list[int]],
    outputs: Sequence[list[int]],
    k: int,
) -> dict[str, Any]:
    """The `lossless` field of a report: greedy_identical holds when every divergence is a proven tie.

    A divergence is one if the token chosen instead was within twice the noise of the best: each of the two passes may
    be off by the noise. `exact`, `tied` and `failed` are shares of prompts; `noise` is the largest that was met.
    """
    divergences = []
    for item, reference, output in zip(items, references, outputs, strict=True):
        at = first_difference(reference, output)
        if at is None:
            continue
        text = [*item.prompt_ids, *reference[:at]]
        token = output[at] if at < len(output) else None
        gap = gap_to_top_logit(model, text, token)
        noise = logit_noise(model, text, len(item.prompt_ids), k + 1)
        divergences.append(GreedyMismatch(item.task, item.id, at, gap, noise, gap <= 2 * noise))
    ties = [asdict(d) for d in divergences if d.tie]
    failures = [_json_safe_gap(asdict(d)) for d in divergences if not d.tie]
    share = 1 / max(1, len(items))
    return {
        "greedy_identical": len(failures) == 0,
        "prompts": len(items),
        "identical": len(items) - len(divergences),
        "ties": ties,
        "failures": failures,
        "exact": share * (len(items) - len(divergences)),
        "tied": share * len(ties),
        "failed": share * len(failures),
        "noise": max((d.noise for d in divergences), default=None),
    }


def _json_safe_gap(divergence: dict[str, Any]) -> dict[str, Any]:
    """A missing token has no logit: its gap is None, since JSON has no infinity."""
    return divergence | {"gap": None if divergence["gap"] == float("inf") else divergence["gap"]}
