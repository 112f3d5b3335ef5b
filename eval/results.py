"""The elements of a report: one for each method × temperature × task, for all tasks together, and for each domain."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from decode.drafts.base import draft_sha256, is_altered, trained_for
from decode.drafts.registry import DRAFT_FAMILIES, find_family
from decode.engine.records import DecodeRecord
from decode.verification.registry import find_rule
from eval.benchmark.config import EvalConfig
from eval.benchmark.methods import (
    Method,
    describe_adaptive,
    describe_lookup,
    describe_mirror,
    describe_tree,
    simulated_alpha,
    verification_name,
)
from eval.benchmark.timing import FailedPrompt
from eval.metrics import acceptance
from eval.metrics.common import ALL_TASKS


@dataclass(frozen=True)
class PromptGroup:
    """Prompts that share an element: those of a task, of a domain, or all."""

    task: str = ALL_TASKS
    domain: str = ""

    def contains(self, task: str, domain: str) -> bool:
        return self.task in (ALL_TASKS, task) and self.domain in ("", domain)


def method_entry(
    s: EvalConfig,
    method: Method,
    path: str,
    group: PromptGroup,
    temperature: float,
    records: Sequence[DecodeRecord],
    plain: Sequence[DecodeRecord],
    quality: list[dict[str, Any]],
    failures: Sequence[FailedPrompt],
    verdict: dict[str, Any] | None,
    phases: dict[str, float] | None,
    mirror: dict[str, float | None] | None,
    prediction: tuple[float | None, str | None],
    eos: frozenset[int],
) -> dict[str, Any]:
    """One element of report["methods"] or report["domains"].

    `records` are the method's on the prompts of `group`, `plain` those of plain decoding on (at least) these prompts.
    `prediction` is that of `predict_speedup`; plain decoding gets none.
    """
    predicted, missing = prediction
    if method.draft is None:
        predicted, missing = None, "speed-ups are relative to plain decoding"
    sha256 = draft_sha256(path) if path else None
    return {
        "name": method.name,
        "draft": path or None,
        "family": draft_family_name(method, path),
        "k": method.k,
        "tree": describe_tree(method.shape),
        "lookup": describe_lookup(s.methods, method.name),
        "adaptive": describe_adaptive(s.methods, method.name),
        "mirror": describe_mirror(method, mirror),
        "temperature": temperature,
        "top_k": s.top_k,
        "top_p": s.top_p,
        "batch_size": s.batch_size,
        "task": group.task,
        "domain": group.domain or None,
        **acceptance.summarize(records, plain, method.k, s.seed),
        "finish": dict(sorted(Counter(r.finish_reason for r in records).items())),
        "tokens_after_eos": sum(count_tokens_after_eos(r.output_ids, eos) for r in records),
        "failed": [asdict(failure) for failure in failures],
        "quality": quality,
        "draft_sha256": sha256,
        "draft_altered": is_altered(path, sha256),
        "trained_for": trained_for(path) if path else None,
        "mode": s.mode,
        "dtype": s.dtype,
        "draft_dtype": next((m.dtype for m in s.methods if m.name == method.name), "") or s.dtype,
        "verification": verification_name(method, temperature),
        "lossy": not find_rule(method.rule).lossless,
        "simulated": simulated_alpha(method),
        "predicted_speedup": predicted,
        "prediction_missing": missing,
        "phase_ms": phases,
        "lossless": verdict or {"greedy_identical": None, "prompts": len(records)},
    }


def draft_family_name(method: Method, path: str) -> str | None:
    """The family of a method's draft; None for plain decoding, and for a simulated draft."""
    if simulated_alpha(method) is not None:
        return None
    if path:
        return find_family(path).name
    return method.name if method.name in DRAFT_FAMILIES else None


def count_tokens_after_eos(ids: Sequence[int], eos: frozenset[int]) -> int:
    """Tokens after the first EOS. There must be none: counted, they would make one method look faster."""
    ends = [i for i, token in enumerate(ids) if token in eos]
    return len(ids) - 1 - ends[0] if ends else 0


def filter_failures(
    failures: Sequence[FailedPrompt], group: PromptGroup, domains: dict[tuple[str, str], str]
) -> list[FailedPrompt]:
    """The failures on prompts of the group; `domains` are by (task, id)."""
    return [f for f in failures if group.contains(f.task, domains[f.task, f.id])]
