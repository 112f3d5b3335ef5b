"""The prompts of a run: first turns, later turns with the target's own answers before them, and what is too long."""

from collections.abc import Sequence

from decode.common.journal import Journal
from decode.engine.engine import SpeculativeEngine
from decode.model.loading import Target
from eval.results.report import FailedPrompt
from eval.tasks.loading import Task, TaskPrompt, load_task_prompts, with_later_turns
from eval.tasks.stop_strings import collect_until_stop

BATCH_SIZE = 16


def load_eval_prompts(
    tasks: Sequence[Task], target: Target, max_new_tokens: int, journal: Journal
) -> tuple[list[TaskPrompt], list[FailedPrompt]]:
    """(every prompt of the tasks in their order, those that are too long for the context).

    The history of a chat holds plain greedy decoding's answers, whatever the temperature, so that all methods and
    temperatures are measured on the same prompts.
    """

    def answers(items: Sequence[TaskPrompt]) -> list[list[int]]:
        keys = [["answer", item.task, item.id] for item in items]
        missing = [i for i, key in enumerate(keys) if journal.get(key) is None]
        for start in range(0, len(missing), BATCH_SIZE):
            part = missing[start : start + BATCH_SIZE]
            batch = [items[i] for i in part]
            rounds = SpeculativeEngine(target).speculate(
                [item.prompt_ids for item in batch], max_new_tokens=max_new_tokens
            )
            records = collect_until_stop(batch, rounds, target.tokenizer)
            for i, record in zip(part, records, strict=True):
                journal.put(keys[i], record.output_ids)
        return [journal.get(key) for key in keys]

    loaded = [item for task in tasks for item in load_task_prompts(task, target)]
    policy: dict[str, str] = {task.name: task.too_long for task in tasks}
    items = with_later_turns(loaded, target, policy, answers)
    failed = [FailedPrompt(item.task, item.id, item.error) for item in items if item.error]
    return [item for item in items if not item.error], failed
