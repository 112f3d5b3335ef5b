"""The elements of a report: one for each method × temperature × task, for all tasks together, and for each domain."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from decode.drafts.base import draft_sha256
from eval.benchmark.config import EvalConfig
from eval.benchmark.methods import draft_tree_description, simulated_alpha, verification_name
from eval.benchmark.timing import FailedPrompt, Method, TimedOutput
from eval.checks import answer_quality
from eval.metrics import acceptance
from eval.metrics.records import ALL_TASKS


@dataclass(frozen=True)
class PromptGroup:
    """Prompts that share an element: a task, a domain, or all."""

    task: str = ALL_TASKS
    domain: str = ""

    def contains(self, run: TimedOutput) -> bool:
        fits = self.task in (ALL_TASKS, run.item.task)
        return fits and self.domain in ("", run.item.domain)


def method_entry(
    s: EvalConfig,
    method: Method,
    path: str,
    group: PromptGroup,
    temperature: float,
    own: Sequence[TimedOutput],
    plain: Sequence[TimedOutput],
    scores: dict[int, float | None],
    failures: Sequence[FailedPrompt],
    verdict: dict[str, Any] | None,
    phases: dict[str, float] | None,
    eos: frozenset[int],
) -> dict[str, Any]:
    """One element of report["methods"] or report["domains"], of the runs `own` that are the group's."""
    summary = acceptance.summarize(
        [r.sample() for r in own], [r.sample() for r in plain], method.k, s.seed
    )
    made_up = simulated_alpha(method)
    return {
        "name": method.name,
        "draft": path or None,
        "k": method.k,
        "tree": draft_tree_description(method.draft),
        "temperature": temperature,
        "top_k": s.top_k,
        "top_p": s.top_p,
        "batch_size": s.batch_size,
        "task": group.task,
        "domain": group.domain or None,
        **summary,
        "finish": dict(sorted(Counter(r.output.finish_reason for r in own).items())),
        "tokens_after_eos": sum(count_tokens_after_eos(r.output.output_ids, eos) for r in own),
        "failed": [asdict(failure) for failure in failures],
        "quality": answer_quality.compare_answer_quality(own, plain, scores, s.seed),
        "draft_sha256": draft_sha256(path) if path else None,
        "mode": s.mode,
        "dtype": s.dtype,
        "verification": verification_name(method, temperature),
        "lossy": method.rule == "typical",
        "simulated": made_up,
        "predicted_speedup": None,
        "phase_ms": phases,
        "lossless": verdict or {"greedy_identical": None, "prompts": len(own)},
    }


def count_tokens_after_eos(ids: Sequence[int], eos: frozenset[int]) -> int:
    """Tokens behind the first EOS. They must not be there: counted, they would make one arm look faster."""
    ends = [i for i, token in enumerate(ids) if token in eos]
    return len(ids) - 1 - ends[0] if ends else 0


def filter_failures(
    failures: Sequence[FailedPrompt], group: PromptGroup, domains: dict[Any, str]
) -> list[FailedPrompt]:
    """The failures of the group; `domains` are by (task, id)."""
    return [
        f
        for f in failures
        if group.task in (ALL_TASKS, f.task) and group.domain in ("", domains[f.task, f.id])
    ]
