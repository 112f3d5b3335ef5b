"""Prompt sets to judge drafts on: the bundled ones, versioned, and the user's own jsonl files."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decode.chat import encode
from decode.settings import UserError
from decode.target import Target

BUNDLED = Path(__file__).resolve().parents[1] / "assets" / "prompts"


@dataclass
class Task:
    """A named set of prompts."""

    name: str
    """code, prose and arithmetic are bundled; any other name needs a path."""
    path: str = ""
    """A jsonl file whose lines hold `prompt` (a text) or `messages` (a chat), and maybe `id`."""
    limit: int = 0
    """Take the first so many prompts; 0 takes all."""


@dataclass(frozen=True)
class Item:
    """One prompt of a task, as token ids."""

    task: str
    id: str
    prompt_ids: list[int]


def load_items(task: Task, target: Target) -> list[Item]:
    """The task's prompts in file order. UserError names the file and line of a bad or too long one."""
    path = task_file(task)
    lines = path.read_text(encoding="utf-8").split("\n")  # not splitlines(): U+2028
    items: list[Item] = []
    for number, line in enumerate(lines, 1):
        if line.strip() == "":
            continue
        if task.limit and len(items) == task.limit:
            break
        row = _row(path, number, line)
        prompt = row.get("prompt", row.get("messages"))
        if not prompt:
            raise UserError(f"{path}:{number} has neither `prompt` nor `messages`")
        if not isinstance(prompt, str | list):
            raise UserError(f"{path}:{number}: a prompt must be text or a list of messages")
        try:
            ids = encode(target.tokenizer, prompt)
        except UserError as error:
            raise UserError(f"{path}:{number}: {error}") from error
        if len(ids) >= target.decoder.context:
            raise UserError(
                f"{path}:{number} is a prompt of {len(ids)} tokens, the context of {target.name} holds "
                f"{target.decoder.context}: shorten it"
            )
        digest = hashlib.sha256(json.dumps(prompt).encode()).hexdigest()[:16]
        if any(item.id == str(row.get("id", digest)) for item in items):
            raise UserError(f"{path}:{number}: id {row.get('id', digest)} occurs twice: drop one")
        items.append(Item(task.name, str(row.get("id", digest)), ids))
    if len(items) == 0:
        raise UserError(f"{path} holds no prompts")
    return items


def task_file(task: Task) -> Path:
    """Where the task's prompts are; UserError when there is no such file."""
    path = Path(task.path) if task.path else BUNDLED / "eval" / f"{task.name}.jsonl"
    if not path.is_file():
        bundled = ", ".join(sorted(p.stem for p in (BUNDLED / "eval").glob("*.jsonl")))
        raise UserError(
            f"task {task.name!r}: no file {path}; bundled tasks are {bundled}, others need a path"
        )
    return path


def version(task: Task) -> str:
    """`name@version` for a bundled task, `name@hash of the file` for the user's."""
    path = task_file(task)
    if task.path:
        return f"{task.name}@{hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"
    return f"{task.name}@{(BUNDLED / 'VERSION').read_text().strip()}"


def _row(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"{path}:{number} is not valid JSON") from error
    if not isinstance(row, dict):
        raise UserError(f"{path}:{number} is not a JSON object")
    return row
