"""Checks that greedy output equals that of transformers' `generate`, which shares no code with this decoder.

A forward pass over one token and a pass over several sum in different orders, so two logits that differ by less than
this rounding noise may swap: rarely in fp32, often in bf16. Such a difference is a tie, counted and listed with its
margin; any other difference is a failure. The noise is measured on transformers' own passes, because a bug of this
decoder could enlarge the noise of its own.
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
    """The first position at which an output differs from the reference."""

    task: str
    id: str
    position: int
    gap: float  # largest logit - logit of the output's token, by one teacher-forced pass
    noise: float  # largest |Δlogit| between passes over this text that differ only in width
    tie: bool


def reference_greedy_output(
    model: Any, prompt: list[int], max_new_tokens: int, target: Target, stop: Sequence[str] = ()
) -> list[int]:
    """Token ids of transformers' greedy `generate`, cut at the context length and the stop strings as ours are."""
    ids = torch.tensor([prompt], device=model.device)
    room = min(max_new_tokens, target.decoder.context - len(prompt))
    eos = sorted(target.eos)
    settings = GenerationConfig(
        do_sample=False, max_new_tokens=room, eos_token_id=eos or None, pad_token_id=0
    )
    # Without a mask, generate() takes id 0 for padding and masks it in the prompt.
    out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    return trim_at_stop(out[0, len(prompt) :].tolist(), stop, target.tokenizer)


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token that differs, where a missing token differs too; None for equal sequences."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


@torch.inference_mode()
def logit_noise(model: Any, ids: list[int], start: int, several: int) -> float:
    """Largest |Δlogit| from `start` on between passes over `ids` one token at a time, `several` at a time, and at once.

    The passes are the plain model's with transformers' KV cache; the prompt, ids[:start], is one pass, as in decoding.
    The result is at least the rounding error of the largest logit, because other kernels may round differently.
    """
    tokens = torch.tensor([ids], device=model.device)

    def read(width: int) -> torch.Tensor:
        cache: Any = None
        logits, at = [], 0
        while at < len(ids):
            end = min(len(ids), start if at < start else at + width)
            out = model(tokens[:, at:end], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            logits.append(out.logits[0, -1:] if at < start else out.logits[0])
            at = end
        return torch.cat(logits).float()  # after the prompt's last token and each token after it

    one, some = read(1), read(several)
    whole = model(tokens, use_cache=False).logits[0, -len(one) :].float()
    rounding = torch.finfo(model.dtype).eps * float(whole.abs().max())
    return max(rounding, float((one - some).abs().max()), float((one - whole).abs().max()))


@torch.inference_mode()
def gap_to_top_logit(model: Any, ids: list[int], token: int | None) -> float:
    """Largest logit after `ids` minus the logit of `token`; infinity if `token` is None."""
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
    """The `lossless` field of a report's entry; `greedy_identical` is True if every difference is a tie.

    references, outputs: token ids of `reference_greedy_output` and of the checked method for each item; k: drafted
    tokens per round. A difference is a tie if the logit of the output's token is within twice the noise of the largest:
    each of the two passes may be off by the noise. `exact`, `tied` and `failed` are shares of prompts; `noise` is the
    largest noise of the differing prompts.
    """
    mismatches = []
    for item, reference, output in zip(items, references, outputs, strict=True):
        at = first_difference(reference, output)
        if at is None:
            continue
        text = [*item.prompt_ids, *reference[:at]]
        token = output[at] if at < len(output) else None
        gap = gap_to_top_logit(model, text, token)
        noise = logit_noise(model, text, len(item.prompt_ids), k + 1)
        mismatches.append(GreedyMismatch(item.task, item.id, at, gap, noise, gap <= 2 * noise))
    ties = [asdict(d) for d in mismatches if d.tie]
    failures = [_json_safe_gap(asdict(d)) for d in mismatches if not d.tie]
    share = 1 / max(1, len(items))
    return {
        "greedy_identical": len(failures) == 0,
        "prompts": len(items),
        "identical": len(items) - len(mismatches),
        "ties": ties,
        "failures": failures,
        "exact": share * (len(items) - len(mismatches)),
        "tied": share * len(ties),
        "failed": share * len(failures),
        "noise": max((d.noise for d in mismatches), default=None),
    }


def _json_safe_gap(mismatch: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity: the gap of a missing token becomes None."""
    return mismatch | {"gap": None if mismatch["gap"] == float("inf") else mismatch["gap"]}
