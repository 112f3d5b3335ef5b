"""Loads the prompts of tasks as token ids: known benchmarks by their spec (assets/tasks), and the user's own files.

A spec says where a set's rows are, what the prompt is, where an answer ends and how it is scored. Its version goes up
with any change, and a report states it.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from decode.common.chat.choice import Arguments, Messages, Tools
from decode.common.errors import UserError
from decode.engine.image_prompts import ImageReader
from decode.model.loading import Target
from decode.model.vision import ImageInputs
from decode.model.vocabularies import check_embedded
from eval.settings.evaluation import Task
from eval.tasks import row_files
from eval.tasks.dataset_specs import (
    BUNDLED_PROMPTS,
    CUSTOM_DATASET,
    DatasetSpec,
    evaluate_expression,
    find_dataset_spec,
    load_rows,
    render_template,
)
from eval.tasks.images import FoundImages, PromptImages, names_in
from eval.tasks.row_forms import IMAGES, DatasetRow, read_arguments, read_row, read_tools

WITH_IMAGES = "images"
"""The domain of prompts with images whose rows name none."""


@dataclass(frozen=True)
class TaskPrompt:
    """One prompt of a task, as token ids."""

    task: str
    id: str
    prompt_ids: list[int]
    domain: str = ""
    stop: tuple[str, ...] = ()  # texts that end an answer
    metric: str = ""
    """How an answer is scored: number, rouge-l, code, json, or empty for not at all."""
    reference: str = ""  # what it is scored against: a text, or the program that tests it
    prefix: str = ""  # code that the answer continues
    messages: Messages = field(default_factory=list)
    tools: Tools | None = None  # what the chat may call
    arguments: Arguments | None = None  # the row's own arguments of the chat template
    later_turns: tuple[str, ...] = ()  # the user's messages after this turn
    error: str = ""  # why it cannot be decoded; empty if it can
    form: str = ""
    """How its row of a file of the user's was read, such as "read as prompt (columns prompt)"."""
    images: PromptImages | None = None
    """What the target's forward takes beside `prompt_ids`; None for a prompt of text."""


def load_task_prompts(task: Task, target: Target, with_images: bool = False) -> list[TaskPrompt]:
    """The task's prompts in file order, of a chat the first turn; `with_later_turns` adds the others.

    `with_images`: those of rows of the user's are read too, if the target reads images. UserError names the file and
    line of a bad prompt, of an image that cannot be read, or of a prompt that is too long (unless `task.too_long`
    counts it).
    """
    spec, images = _task_spec(task), None
    if with_images and target.runner.takes_images and spec.name == CUSTOM_DATASET.name:
        images = FoundImages(partial(ImageReader.of, target))
    items: list[TaskPrompt] = []
    seen: set[str] = set()
    for row in load_rows(task.name, task.path, spec, task.limit):
        item = _build_prompt(task, spec, row, target, images)
        if item.id in seen:
            raise UserError(f"{row.location}: id {item.id} occurs twice: drop one")
        seen.add(item.id)
        items.append(item)
    return items


def read_images(items: Sequence[TaskPrompt]) -> list[ImageInputs | None]:
    """The inputs of each prompt's images, for whoever starts a clock: making them is no part of decoding."""
    return [None if item.images is None else item.images.read() for item in items]


def load_fitting_prompts(tasks: Sequence[Task], target: Target) -> list[TaskPrompt]:
    """The prompts of all tasks, without those that are too long. UserError if none is left."""
    found = [item for task in tasks for item in load_task_prompts(task, target)]
    kept = [item for item in found if not item.error]
    if not kept:
        raise UserError("tasks have no prompt that fits the target's context: give others")
    return kept


def with_later_turns(
    items: Sequence[TaskPrompt],
    target: Target,
    too_long: dict[str, str],
    answers: Callable[[Sequence[TaskPrompt]], list[list[int]]],
) -> list[TaskPrompt]:
    """`items` with the later turns of chats after their first, the target's own answers in their context.

    `answers(items)` returns the ids of the target's answers. Every method then gets the same history, so one token that
    differs in the first turn does not change the prompt of the second. `too_long` is {task: policy}.
    """
    chains = [[item] for item in items]
    while True:
        waiting = [chain for chain in chains if chain[-1].later_turns and not chain[-1].error]
        if not waiting:
            return [item for chain in chains for item in chain]
        heads = [chain[-1] for chain in waiting]
        for chain, ids in zip(waiting, answers(heads), strict=True):
            text = target.tokenizer.decode(ids, skip_special_tokens=True)
            chain.append(_next_turn(chain[-1], len(chain) + 1, text, target, too_long))


def _next_turn(
    item: TaskPrompt, number: int, answer: str, target: Target, too_long: dict[str, str]
) -> TaskPrompt:
    reply = {"role": "assistant", "content": answer}
    messages = [*item.messages, reply, {"role": "user", "content": item.later_turns[0]}]
    base = item.id.removesuffix(f":{number - 1}")
    ids = _encode(target, messages, item.tools, item.arguments)
    error = _context_error(ids, target)
    if error and too_long[item.task] == "refuse":
        raise UserError(
            f"task {item.task!r}: turn {number} of {base} {error}: set its `turns` or `too_long: fail`"
        )
    return replace(
        item, id=f"{base}:{number}", prompt_ids=ids, messages=messages, later_turns=item.later_turns[1:],
        metric="", reference="", error=error,
    )  # fmt: skip


def _build_prompt(
    task: Task, spec: DatasetSpec, row: DatasetRow, target: Target, images: FoundImages | None
) -> TaskPrompt:
    if spec.placeholder and spec.placeholder in str(row.fields):
        raise UserError(
            f"{row.location} has no text of its own ({spec.placeholder!r}): complete the file first; {spec.about}"
        )
    chat = target.tokenizer.chat_template is not None
    turns = evaluate_expression(spec.turns, row)
    later: list[str] = []
    prompt: str | Messages
    tools, form = None, ""
    if turns is not None:
        whole = isinstance(turns, list) and all(isinstance(x, str) and x for x in turns)
        if not whole or not turns:
            raise UserError(f"{row.location}: `turns` must be a list of the user's messages")
        if images is not None and any(row.fields.get(column) for column in IMAGES):
            raise UserError(f"{row.location}: `turns` are texts: give a row's images in `messages`")
        prompt, *later = turns[: task.turns or None]
        # One turn is a plain prompt: it needs no chat template.
        prompt = [{"role": "user", "content": prompt}] if later else prompt
        tools = read_tools(row)
    elif spec.name == CUSTOM_DATASET.name:
        found = read_row(row, answered=False, with_images=images is not None)
        asked = None if found is None else found.question()
        if found is None or asked is None:
            raise UserError(f"{row.location} has no prompt: fill it or remove the row")
        prompt, tools, form = asked, found.tools, found.describe()
        if images is not None:
            path = spec.data_path(task.name, task.path)
            prompt = images.place(asked, found, row.location, path)
    else:
        prompt = render_template((spec.chat_prompt if chat else "") or spec.prompt, row)
    arguments = read_arguments(row)
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    shown = None
    try:
        if images is not None and names_in(messages):
            ids = images.encode(messages, tools, arguments)
            shown = images.inputs(ids, messages)
        else:
            ids = _encode(target, prompt, tools, arguments)
    except UserError as error:
        hint = "; or set the task's `turns: 1`" if later else ""
        raise UserError(f"{row.location}: {error}{hint}") from error
    error_text = _context_error(ids, target)
    if error_text and task.too_long == "refuse":
        raise UserError(
            f"{row.location} {error_text}: shorten it, or set the task's `too_long: fail`"
        )
    others = [tools, arguments] if arguments else [tools] if tools else []
    hashed = json.dumps([prompt, *others] if others else prompt)
    digest = hashlib.sha256(hashed.encode()).hexdigest()[:16]
    own_id = evaluate_expression(spec.id, row)
    domain = str(evaluate_expression(spec.domain_from, row) or spec.domain)
    metric = spec.metrics.get(domain, spec.metric)
    reference = render_template(spec.reference, row).strip("\n") if metric else ""
    return TaskPrompt(
        task=task.name,
        id=digest if own_id is None else str(own_id),
        prompt_ids=ids,
        domain=domain or (task.name if shown is None else WITH_IMAGES),
        stop=() if chat else tuple(spec.stop),
        metric=metric if reference else "",
        reference=reference,
        prefix=render_template(spec.prefix, row),
        messages=messages,
        tools=tools,
        arguments=arguments,
        later_turns=tuple(later),
        error=error_text,
        form=form,
        images=shown,
    )


def _encode(
    target: Target, prompt: str | Messages, tools: Tools | None, arguments: Arguments | None
) -> list[int]:
    ids = target.chat.encode(prompt, tools, arguments)
    check_embedded(target.tokenizer, ids, target.runner.embedding_rows)
    return ids


def _task_spec(task: Task) -> DatasetSpec:
    spec = find_dataset_spec(task.kind or task.name)
    return replace(spec, split=task.split) if task.split else spec


def _context_error(ids: list[int], target: Target) -> str:
    if len(ids) < target.runner.context:
        return ""
    return (
        f"is a prompt of {len(ids)} tokens, the context of {target.name} holds "
        f"{target.runner.context}"
    )


def task_version(task: Task) -> str:
    """`name@version` of bundled prompts; otherwise with the version of the spec and the hash of the user's file.

    For example gsm8k@1+1a2b3c4d5e6f: version 1 of the spec, the file with that hash.
    """
    spec = _task_spec(task)
    if task.path:
        path = spec.data_path(task.name, task.path)
        if path is None:
            digest = f"{task.path}:{row_files.hub_split(task.path, None, spec.split)}"
        else:
            digest = row_files.digest(path) + (f":{task.split}" if task.split else "")
        no_version = spec.name == CUSTOM_DATASET.name or spec.bundled
        return f"{task.name}@{digest}" if no_version else f"{task.name}@{spec.version}+{digest}"
    if spec.bundled:
        return f"{task.name}@{(BUNDLED_PROMPTS / 'VERSION').read_text().strip()}"
    return f"{task.name}@{spec.version}+{spec.hub}:{spec.split}@{spec.revision or 'main'}"
