"""The prompts of a run, with the target's own answers in the later turns of chats, and what cannot be decoded."""

from collections.abc import Sequence

from decode.speculate import Engine
from decode.target import Target
from eval.journal import Journal
from eval.speed import Failure
from eval.stops import gather
from eval.tasks import Item, Task, load_items, with_turns

ROWS = 16


def prompts_of(
    chosen: Sequence[Task], target: Target, max_new_tokens: int, journal: Journal
) -> tuple[list[Item], list[Failure]]:
    """(every prompt of the tasks in their order, those that are too long for the context).

    A chat's history is what plain greedy decoding answers, whatever the temperature, so that all methods and
    temperatures are measured on the same prompts.
    """

    def answers(items: Sequence[Item]) -> list[list[int]]:
        keys = [["answer", item.task, item.id] for item in items]
        missing = [i for i, key in enumerate(keys) if journal.get(key) is None]
        for start in range(0, len(missing), ROWS):
            part = missing[start : start + ROWS]
            prompts = [items[i].prompt_ids for i in part]
            records = Engine(target).speculate(prompts, max_new_tokens=max_new_tokens)
            stops = [items[i].stop for i in part]
            for i, out in zip(part, gather(prompts, records, stops, target.tokenizer), strict=True):
                journal.put(keys[i], out.output_ids)
        return [journal.get(key) for key in keys]

    loaded = [item for task in chosen for item in load_items(task, target)]
    policy: dict[str, str] = {task.name: task.too_long for task in chosen}
    items = with_turns(loaded, target, policy, answers)
    failed = [Failure(item.task, item.id, item.error) for item in items if item.error]
    return [item for item in items if not item.error], failed
