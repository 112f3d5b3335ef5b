"""Prompt sets to judge drafts on, as token ids: the field's own by recipe (assets/tasks), and files of yours.

A recipe says where a set's rows are, what the prompt is, where an answer ends and how it is scored. Its version goes
up with any change, and a report states it.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from decode.common.chat_template import Messages, encode_prompt
from decode.common.errors import UserError
from decode.model.loading import Target
from eval.tasks.dataset_specs import (
    BUNDLED_PROMPTS_DIR,
    DatasetRow,
    DatasetSpec,
    evaluate_expression,
    find_dataset_spec,
    load_rows,
    render_template,
    row_domain,
)


@dataclass
class Task:
    """A named set of prompts."""

    name: str
    """code, prose and arithmetic are bundled; spec-bench, mt-bench, humaneval, mbpp, gsm8k, xsum, cnn-dailymail,
    wmt-en-de and alpaca come from a file of yours or the Hub; any other name needs a path."""
    path: str = ""
    """A .jsonl, .json, .parquet or .txt file, .gz too. Without a recipe its lines hold `prompt` (a text), `messages` (a
    chat) or `turns` (what a user says, one after the other), and maybe `id` and `domain`; the paragraphs of a .txt file
    are prompts. Empty: bundled, or the Hub data set of the recipe."""
    kind: str = ""
    """Recipe to read the file by, where the name is not that of one."""
    limit: int = 0
    """Take the first so many prompts, or chats; 0 takes all."""
    turns: int = 0
    """Take so many turns of a chat; 0 takes all."""
    too_long: Literal["refuse", "fail"] = "refuse"
    """A prompt that leaves no room in the target's context: refuse to begin, or count it as failed and name it."""


@dataclass(frozen=True)
class TaskPrompt:
    """One prompt of a task, as token ids."""

    task: str
    id: str
    prompt_ids: list[int]
    domain: str = ""
    stop: tuple[str, ...] = ()
    """Texts that end an answer."""
    metric: str = ""
    """How an answer is scored: number, rouge-l, code, or not at all."""
    reference: str = ""
    """What it is scored against: a text, or the program that tests it."""
    prefix: str = ""
    """Code that a completion continues."""
    messages: Messages = field(default_factory=list)
    later: tuple[str, ...] = ()
    """What the user says in turns to come."""
    error: str = ""
    """Why it cannot be decoded."""


def load_task_prompts(task: Task, target: Target) -> list[TaskPrompt]:
    """The task's prompts in file order, of a chat the first turn; `with_turns` adds the others.

    UserError names the file and line of a bad prompt, or of one that is too long (unless `task.too_long` counts it).
    """
    recipe = find_dataset_spec(task.kind or task.name)
    items: list[TaskPrompt] = []
    seen: set[str] = set()
    for row in load_rows(task.name, task.path, recipe, task.limit):
        item = _build_prompt(task, recipe, row, target)
        if item.id in seen:
            raise UserError(f"{row.where}: id {item.id} occurs twice: drop one")
        seen.add(item.id)
        items.append(item)
    return items


def with_later_turns(
    items: Sequence[TaskPrompt],
    target: Target,
    too_long: dict[str, str],
    answers: Callable[[Sequence[TaskPrompt]], list[list[int]]],
) -> list[TaskPrompt]:
    """`items` with the later turns of chats behind their first, the target's own answers in their context.

    `answers(items)` gives the ids that the target answers; every method then meets the same history, so that one
    token that differs in the first turn does not change the prompt of the second. `too_long` is {task: policy}.
    """
    chains = [[item] for item in items]
    while True:
        waiting = [chain for chain in chains if chain[-1].later and not chain[-1].error]
        if not waiting:
            return [item for chain in chains for item in chain]
        heads = [chain[-1] for chain in waiting]
        for chain, ids in zip(waiting, answers(heads), strict=True):
            text = target.tokenizer.decode(ids, skip_special_tokens=True)
            chain.append(_next_turn(chain[-1], len(chain) + 1, text, target, too_long))


def _next_turn(
    item: TaskPrompt, number: int, answer: str, target: Target, too_long: dict[str, str]
) -> TaskPrompt:
    said = [{"role": "assistant", "content": answer}, {"role": "user", "content": item.later[0]}]
    messages = [*item.messages, *said]
    base = item.id.removesuffix(f":{number - 1}")
    ids = encode_prompt(target.tokenizer, messages)
    error = _context_error(ids, target)
    if error and too_long[item.task] == "refuse":
        raise UserError(
            f"task {item.task!r}: turn {number} of {base} {error}: set its `turns` or `too_long: fail`"
        )
    return replace(
        item, id=f"{base}:{number}", prompt_ids=ids, messages=messages, later=item.later[1:],
        metric="", reference="", error=error,
    )  # fmt: skip


def _build_prompt(task: Task, recipe: DatasetSpec, row: DatasetRow, target: Target) -> TaskPrompt:
    turns = evaluate_expression(recipe.turns, row) if recipe.turns else None
    chat = target.tokenizer.chat_template is not None
    template = recipe.chat_prompt if chat and recipe.chat_prompt else recipe.prompt
    prompt: Any = turns if turns is not None else render_template(template, row)
    if turns is None and recipe.name == "own":
        prompt = row.fields.get("prompt", row.fields.get("messages"))
        if not prompt:
            raise UserError(f"{row.where} has neither `prompt` nor `messages` nor `turns`")
    if not isinstance(prompt, str | list) or (turns is not None and not _is_text_list(turns)):
        raise UserError(f"{row.where}: a prompt must be text or a list of messages")
    said = list(turns or [])[: task.turns or None]
    if turns is not None:  # one turn is a plain prompt: it needs no chat template
        prompt = said[0] if len(said) == 1 else [{"role": "user", "content": said[0]}]
    try:
        ids = encode_prompt(target.tokenizer, prompt)
    except UserError as error:
        hint = "; or set the task's `turns: 1`" if len(said) > 1 else ""
        raise UserError(f"{row.where}: {error}{hint}") from error
    error_text = _context_error(ids, target)
    if error_text and task.too_long == "refuse":
        raise UserError(f"{row.where} {error_text}: shorten it, or set the task's `too_long: fail`")
    digest = hashlib.sha256(json.dumps(prompt).encode()).hexdigest()[:16]
    own_id = evaluate_expression(recipe.id, row)
    domain = row_domain(recipe, row)
    metric, reference = recipe.metric_for(domain), ""
    if metric:
        reference = render_template(recipe.reference, row).strip("\n")
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    return TaskPrompt(
        task=task.name,
        id=digest if own_id is None else str(own_id),
        prompt_ids=ids,
        domain=domain or task.name,
        stop=() if chat else tuple(recipe.stop),
        metric=metric if reference else "",
        reference=reference,
        prefix=render_template(recipe.prefix, row),
        messages=messages,
        later=tuple(said[1:]),
        error=error_text,
    )


def _is_text_list(turns: Any) -> bool:
    return isinstance(turns, list) and bool(turns) and all(isinstance(x, str) and x for x in turns)


def _context_error(ids: list[int], target: Target) -> str:
    if len(ids) < target.decoder.context:
        return ""
    return (
        f"is a prompt of {len(ids)} tokens, the context of {target.name} holds "
        f"{target.decoder.context}"
    )


def task_version(task: Task) -> str:
    """`name@version` of bundled prompts; with a recipe's version, and the hash of the user's file, where there are.

    For example gsm8k@1+1a2b3c4d5e6f: recipe 1, the file with that hash.
    """
    recipe = find_dataset_spec(task.kind or task.name)
    if task.path:
        digest = hashlib.sha256(recipe.file(task.name, task.path).read_bytes()).hexdigest()[:12]
        own = recipe.name == "own" or recipe.bundled
        return f"{task.name}@{digest}" if own else f"{task.name}@{recipe.version}+{digest}"
    if recipe.bundled:
        return f"{task.name}@{(BUNDLED_PROMPTS_DIR / 'VERSION').read_text().strip()}"
    return f"{task.name}@{recipe.version}+{recipe.hub}:{recipe.split}@{recipe.revision or 'main'}"
