"""How well speed-ups at K = 3, 4 and 5 are predicted from rounds at K = 2 and 6 on other prompts."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table

from decode.drafts.base import Draft
from decode.engine.engine import row_seeds
from decode.model.loading import Target
from eval.benchmark.methods import PLAIN_DECODING, Method
from eval.benchmark.timing import TimingContext, decode_batch
from eval.benchmark.turns import Attempt, Turn, steady_turns
from eval.tasks.loading import TaskPrompt
from eval.tuning.selection import cross_validated_predictions


def check_predictions(
    target: Target, draft: Draft, items: Sequence[TaskPrompt], max_new_tokens: int
) -> list[dict[str, Any]]:
    """Speed-ups of rounds (without prefill) at K = 3, 4, 5 on one half of the prompts, predicted from the other half.

    All settings decode each prompt in turn; a prediction uses only rounds of K = 2, K = 6 and plain decoding on the
    calibration half. One entry for each task and for all of them.
    """
    context = TimingContext(target, items, max_new_tokens)
    settings = {k: Method(draft.name, draft, k) for k in (2, 3, 4, 5, 6)} | {0: PLAIN_DECODING}
    engines = {
        k: context.build_engine(setting, context.sampling(0.0)) for k, setting in settings.items()
    }
    turns = []
    without_domain = [replace(item, domain="") for item in items]  # records are grouped by task
    for index, item in enumerate(without_domain):
        seeds = row_seeds(0, index + 1)[index:]
        timed = {
            str(k): decode_batch(engines[k], setting, [item], seeds, max_new_tokens)
            for k, setting in settings.items()
        }
        turns.append(Turn([Attempt(timed, {})]))
    steady = steady_turns(turns, of_rounds=True)
    records = {k: [x for turn in steady for x in turn.attempt.records[str(k)]] for k in settings}
    rows = []
    for name in ["all", *dict.fromkeys(record.task for record in records[0])]:
        of_task = {k: [x for x in each if name in ("all", x.task)] for k, each in records.items()}
        rows += [
            {"task": name, **cell}
            for cell in cross_validated_predictions(of_task, (2, 6))
            if cell["k"] in (3, 4, 5)
        ]
    return rows


def print_predictions(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    """What `check_predictions` returned, as a table."""
    table = Table("task", "K", "predicted", "measured", "error", "counted", title="causal, eager")
    for row in rows:
        table.add_row(
            row["task"], str(row["k"]), f"{row['predicted']:.2f}", f"{row['measured']:.2f}",
            f"{100 * row['error']:.0f} %", "yes" if row["counted"] else "no: interval > ±10 %",
        )  # fmt: skip
    console.print(table)
