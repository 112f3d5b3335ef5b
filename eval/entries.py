"""The elements of a report: one for each method × temperature × task, for all tasks together, and for each domain."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from decode.drafts.base import draft_sha256
from eval import metrics, scoring
from eval.methods import simulated, tree_of, verification
from eval.options import Settings
from eval.speed import Failure, Method, Run

POOLED = "all"


@dataclass(frozen=True)
class Group:
    """Prompts that share an element: a task, a domain, or all."""

    task: str = POOLED
    domain: str = ""

    def has(self, run: Run) -> bool:
        fits = self.task in (POOLED, run.item.task)
        return fits and self.domain in ("", run.item.domain)


def entry(
    s: Settings,
    method: Method,
    path: str,
    group: Group,
    temperature: float,
    own: Sequence[Run],
    plain: Sequence[Run],
    scores: dict[int, float | None],
    failures: Sequence[Failure],
    verdict: dict[str, Any] | None,
    phases: dict[str, float] | None,
    eos: frozenset[int],
) -> dict[str, Any]:
    """One element of report["methods"] or report["domains"], of the runs `own` that are the group's."""
    summary = metrics.summarize(
        [r.sample() for r in own], [r.sample() for r in plain], method.k, s.seed
    )
    made_up = simulated(method)
    return {
        "name": method.name,
        "draft": path or None,
        "k": method.k,
        "tree": tree_of(method.draft),
        "temperature": temperature,
        "top_k": s.top_k,
        "top_p": s.top_p,
        "batch_size": s.batch_size,
        "task": group.task,
        "domain": group.domain or None,
        **summary,
        "finish": dict(sorted(Counter(r.output.finish_reason for r in own).items())),
        "tokens_after_eos": sum(behind_eos(r.output.output_ids, eos) for r in own),
        "failed": [asdict(failure) for failure in failures],
        "quality": scoring.parity(own, plain, scores, s.seed),
        "draft_sha256": draft_sha256(path) if path else None,
        "mode": s.mode,
        "dtype": s.dtype,
        "verification": verification(method, temperature),
        "lossy": method.rule == "typical",
        "simulated": made_up,
        "predicted_speedup": None,
        "phase_ms": phases,
        "lossless": verdict or {"greedy_identical": None, "prompts": len(own)},
    }


def behind_eos(ids: Sequence[int], eos: frozenset[int]) -> int:
    """Tokens behind the first EOS. They must not be there: counted, they would make one arm look faster."""
    ends = [i for i, token in enumerate(ids) if token in eos]
    return len(ids) - 1 - ends[0] if ends else 0


def of_group(failures: Sequence[Failure], group: Group, domains: dict[Any, str]) -> list[Failure]:
    """The failures of the group; `domains` are by (task, id)."""
    return [
        f
        for f in failures
        if group.task in (POOLED, f.task) and group.domain in ("", domains[f.task, f.id])
    ]
