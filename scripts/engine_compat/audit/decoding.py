"""Counts by prompt: of our decoder with one reading of a draft's files, and of an engine that serves them."""

import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decode.common.errors import UserError, first_line
from decode.drafts.registry import load_draft
from decode.model.loading import Target
from decode.serving.rules import DraftFiles
from eval.engine_logs.counts import EngineLog
from scripts.engine_compat.audit.reading import Reading, copy_files
from scripts.engine_compat.vllm_parity import (
    BATCH_ROWS,
    PromptCounts,
    VllmParityConfig,
    decode_counts,
)


@dataclass(frozen=True)
class Outcome:
    """What our decoder makes of one reading."""

    reading: Reading
    counts: list[PromptCounts]
    """Of each prompt; empty if the reading was refused."""
    refused: str = ""
    """Why our loader refuses it."""


@dataclass(frozen=True)
class ServedCounts:
    """What an engine made of the draft."""

    engine: str
    counts: list[PromptCounts] = field(default_factory=list)
    """Of each prompt, greedy; those of a log have no `ids`, and those of llama.cpp no `by_position`."""
    refused: str = ""
    """The engine's error message, if it did not serve the draft."""
    other_prompts: str = ""
    """How the prompts that the engine read differ from ours; then their counts are not comparable."""
    exact: bool = True
    """Both sides computed in float32, so that equal functions accept equal tokens."""


def decode_reading(
    s: VllmParityConfig,
    target: Target,
    d: DraftFiles,
    reading: Reading,
    prompts: Sequence[list[int]],
    dtype: str,
    out: str,
) -> Outcome:
    """The counts of a reading, from a copy of the files that lies in the folder `out` meanwhile.

    The draft computes in `dtype`, unless the reading has another.
    """
    with tempfile.TemporaryDirectory(dir=out, prefix="copy-") as scratch:
        folder = Path(scratch) / "draft"
        copy_files(d, folder)
        reading.edit.apply(folder)
        try:
            with warnings.catch_warnings():
                # A copy names no tokenizer; that of the draft was compared with the target's.
                warnings.filterwarnings("ignore", message=".*was not made here.*")
                draft = load_draft(str(folder), target, dtype=reading.dtype or dtype)
                if reading.adjust is not None:
                    reading.adjust(draft)
                return Outcome(reading, decode_counts(s, target, draft, prompts, BATCH_ROWS))
        except UserError as error:
            return Outcome(reading, [], first_line(error).replace(str(folder), d.path))


def vllm_counts(result: Mapping[str, Any], exact: bool) -> ServedCounts:
    """What vLLM's job gave (decode/serving/running/vllm_worker.py)."""
    if "error" in result:
        return ServedCounts("vLLM", refused=" ".join(result["error"].split())[:300], exact=exact)
    return ServedCounts(f"vLLM {result['vllm']}", result["answers"], exact=exact)


def log_counts(log: EngineLog, prompts: Sequence[list[int]], k: int) -> ServedCounts:
    """The requests of a log, which answer the prompts in their order. UserError if there are not as many."""
    if not log.per_request or len(log.requests) != len(prompts):
        raise UserError(
            f"{log.path} has {len(log.requests)} responses and there are {len(prompts)} prompts: give the responses to "
            "the prompts of --tasks, in their order"
        )
    counts: list[PromptCounts] = []
    for number, (request, prompt) in enumerate(zip(log.requests, prompts, strict=True), start=1):
        if request.rounds is None:
            raise UserError(
                f"{log.path} does not tell the rounds of request {number}: give the responses"
            )
        if request.prompt_tokens not in (None, len(prompt)):
            return ServedCounts(
                log.engine,
                other_prompts=f"response {number} is to {request.prompt_tokens} prompt tokens, and that prompt has "
                f"{len(prompt)} here: another chat template, tokenizer or prompt",
                exact=False,
            )
        at = list(request.accepted_at)
        counts.append(
            {
                "rounds": request.rounds,
                "drafted": request.drafted,
                "accepted": request.accepted,
                "by_position": (at + [0] * (k - len(at)))[:k] if at else None,
            }
        )
    return ServedCounts(log.engine, counts, exact=False)
