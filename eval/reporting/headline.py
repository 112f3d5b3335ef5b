"""The README's headline: the draft over plain decoding first, then over the best arm of other engines."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from decode.common.errors import UserError
from decode.common.files import read_json_object
from eval.metrics.bootstrap import ALL_TASKS
from eval.metrics.rivals import Arm, over_best_arm
from eval.reporting.formatting import format_estimate, format_speedup
from eval.results.report import EvalReport, RivalSpeedup

CODE = {"code (humaneval, mbpp)": ("humaneval", "mbpp")}
"""Tasks that a headline names together."""
OURS = "here "


def headline_lines(report: EvalReport, rivals: list[RivalSpeedup]) -> list[str]:
    """Of the lowest temperature, each draft on all tasks and on each, with n and intervals."""
    sections = report.pooled_sections[:1]
    drafts = [m for section in sections for m in section.entries if m.is_real_draft]
    lines = []
    for best in drafts:
        own = [m for m in report.methods if (m.name, m.setting) == (best.name, best.setting)]
        parts = [f"{m.task} {format_speedup(m)}" for m in own]
        lines.append(
            f"{best.name} over plain decoding (T = {best.temperature:g}, n = {best.prompts}): {', '.join(parts)}"
        )
    for method, engine in dict.fromkeys((r.method, r.engine) for r in rivals):
        found = [r for r in rivals if (r.method, r.engine) == (method, engine)]
        parts = [f"{r.task} {format_estimate(r.speedup, 2, '×')} ({r.arm})" for r in found]
        n = max(r.prompts for r in found)
        lines.append(f"{method} over the best arm of {engine} (n = {n}): {', '.join(parts)}")
    return lines


def rivals_of(report: EvalReport, requests: Path | None) -> list[RivalSpeedup]:
    """Those of the report; of one before they were kept, from a file of its requests, one {task, id, arm, tokens,
    seconds} each, in which the arms of this engine begin with `here`. UserError for another file."""
    if requests is None:
        return report.rivals
    arms: dict[str, dict[tuple[str, str], tuple[float, int]]] = {}
    try:
        for x in read_json_object(requests, "a file of requests", ["requests"])["requests"]:
            arms.setdefault(x["arm"], {})[x["task"], x["id"]] = (x["seconds"], x["tokens"])
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{requests}: a request lacks {error}: give one with task, id, arm, tokens, seconds"
        ) from None
    others = {name: arm for name, arm in arms.items() if not name.startswith(OURS)}
    tasks = list(dict.fromkeys(task for arm in arms.values() for task, _ in arm))
    groups = {ALL_TASKS: tasks, **{task: [task] for task in tasks}}
    groups |= {name: [*own] for name, own in CODE.items() if {*own} <= {*tasks}}
    found = []
    for name, own in arms.items():
        if name in others or name == f"{OURS}plain":
            continue
        for group, members in groups.items():
            arm, prompts, speedup = over_best_arm(_of(own, members), others, report.seed)
            engine = arm.split(" ")[0]
            found.append(
                RivalSpeedup(name.removeprefix(OURS), engine, arm, group, 0.0, prompts, speedup)
            )
    return found


def _of(arm: Arm, tasks: list[str]) -> Mapping[tuple[str, str], Any]:
    return {key: x for key, x in arm.items() if key[0] in tasks}
