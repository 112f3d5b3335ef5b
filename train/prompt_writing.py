"""What train/write_prompts.py does: a chat model goes on as the user, and what it writes is kept."""

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from decode.common import run_dir
from decode.common.chat.choice import Messages
from decode.common.chat.probe import user
from decode.common.chat.render import ChatTemplate
from decode.common.damage import read_log
from decode.common.errors import UserError, naming
from decode.common.files import write_atomically
from decode.common.progress import progress_bars
from decode.common.target_record import ModelFingerprint, difference
from decode.common.typed_json import from_json, to_json
from decode.engine.engine import speculate
from decode.model.loading import Target, adopt_tokenizer, load_target
from decode.model.vocabularies import check_embedded
from train.sampling.config import WritePromptsConfig
from train.sampling.rows import reply_seed

COMMAND = "train/write_prompts.py"
LOG_FILE, PROMPT_FILE = "written.jsonl", "prompts.jsonl"
OWNED_FILES = (LOG_FILE, PROMPT_FILE)
MARK = "\ue000"  # a character of private use, which no template holds


class UserTurn(NamedTuple):
    """What stands around the words of a user."""

    beginning: list[int]
    """Ids up to where they begin."""
    end: int
    """The id that ends the turn."""


@dataclass(frozen=True)
class WrittenPrompt:
    """A line of the log."""

    number: int
    finish_reason: str
    text: str
    target: ModelFingerprint = ModelFingerprint()
    """What wrote it; earlier versions named none."""


def user_turn(template: ChatTemplate, system: str) -> UserTurn:
    """UserError if the tokenizer has no chat template, or one that begins a user's turn with nothing or ends it with
    plain text."""
    tokenizer = template.tokenizer
    if tokenizer.chat_template is None:
        raise UserError(
            "the target's tokenizer has no chat template: use an instruction-tuned target"
        )
    text = tokenizer.decode(template.encode(chat(system, MARK)))
    before, found, after = text.rpartition(MARK)
    beginning, ending = (
        tokenizer(part, add_special_tokens=False)["input_ids"] for part in (before, after)
    )
    does = ""
    if not found or not ending or ending[0] not in tokenizer.all_special_ids:
        does = "does not end a user's turn with a special token"
    elif not beginning:
        does = "puts nothing before the user's words"
    if does:
        raise UserError(f"the target's chat template {does}: write prompts with another model")
    return UserTurn(beginning, ending[0])


def chat(system: str, asked: str) -> Messages:
    messages = [{"role": "system", "content": system}] if system else []
    return [*messages, user(asked)]


def user_turns(s: WritePromptsConfig, target: Target) -> list[UserTurn]:
    """`user_turn` of each system message. UserError for one that leaves no room in the target's context."""
    turns = [user_turn(target.chat, system) for system in s.systems]
    for number, (ids, _) in enumerate(turns):
        check_embedded(target.tokenizer, ids, target.runner.embedding_rows)
        if len(ids) >= target.runner.context:
            raise UserError(
                f"systems[{number}] makes a beginning of {len(ids)} tokens, and the target's context holds "
                f"{target.runner.context}: shorten it"
            )
    return turns


def prompt_id(s: WritePromptsConfig, number: int) -> str:
    """The id of a prompt, from which its random seed is made too."""
    return f"system{number % len(s.systems)}-{number // len(s.systems)}"


def write_prompts(
    s: WritePromptsConfig, target: Target, turns: list[UserTurn], todo: list[int], log: Path
) -> None:
    """Writes the prompts with the numbers `todo`, and appends each to the log as soon as it is finished."""
    target = replace(target, eos=target.eos | {turn.end for turn in turns})
    written: dict[int, list[int]] = {}
    tokens, start = 0, time.perf_counter()
    with log.open("a", encoding="utf-8") as file, progress_bars(fields=("speed",)) as bars:
        bar = bars.add_task("writing", total=len(todo), speed="")
        for record in speculate(
            target,
            None,
            [turns[number % len(turns)].beginning for number in todo],
            k=1,
            rows=s.batch_size,
            sampling=s.sampling,
            max_new_tokens=s.max_new_tokens,
            seeds=[reply_seed(prompt_id(s, number), s.seed) for number in todo],
        ):
            ids = written.setdefault(record.prompt, [])
            ids += record.tokens
            tokens += len(record.tokens)
            if record.finished is None:
                continue
            del written[record.prompt]
            number = todo[record.prompt]
            text = target.tokenizer.decode(ids, skip_special_tokens=True).strip()
            entry = WrittenPrompt(number, record.finished, text, target.identity)
            with naming(log):
                file.write(json.dumps(to_json(entry)) + "\n")
                file.flush()
            bars.update(bar, speed=f"{tokens / (time.perf_counter() - start):,.0f} tokens/s")
            bars.advance(bar)


def read_written(log: Path) -> list[WrittenPrompt]:
    fields = {"number": int, "finish_reason": str, "text": str}
    entries = read_log(log, fields, "they are written again")
    return [from_json(WrittenPrompt, entry) for entry in entries]


def whole_prompts(s: WritePromptsConfig, written: list[WrittenPrompt]) -> dict[str, Messages]:
    """{id: chat} of prompts that ended by themselves, in the order of their numbers, without empty and repeated ones.

    Of entries with the same number the first one counts, and of entries with other numbers than the run's none.
    """
    seen, prompts = {""}, {}
    by_number = {entry.number: entry for entry in reversed(written)}
    for number in sorted(n for n in by_number if 0 <= n < s.count):
        entry = by_number[number]
        if entry.finish_reason != "eos" or entry.text in seen:
            continue
        seen.add(entry.text)
        prompts[prompt_id(s, number)] = chat(s.systems[number % len(s.systems)], entry.text)
    return prompts


def write(s: WritePromptsConfig) -> None:
    if not s.systems:
        raise UserError("systems is empty: give a system message, or [''] for the template's own")
    adopt_tokenizer(s.target, s.tokenizer, s.revision)
    target = load_target(s.target, s.device, s.dtype, s.revision).with_template(s.template)
    turns = user_turns(s, target)
    out = Path(s.out)
    with run_dir.open_run(s, COMMAND, OWNED_FILES, [s.target]):
        written = read_written(out / LOG_FILE)
        for then in {entry.target for entry in written}:
            if found := difference(then, target.identity):
                what = f"another target wrote prompts in {s.out} ({found})"
                run_dir.refuse_change(what, s.allow_changed)
        done = {entry.number for entry in written}
        todo = [number for number in range(s.count) if number not in done]
        if todo:
            write_prompts(s, target, turns, todo, out / LOG_FILE)
        prompts = whole_prompts(s, read_written(out / LOG_FILE))
        if not prompts:
            raise UserError(
                f"each of the {s.count} prompts is empty or was cut off: raise --max_new_tokens and add --overwrite "
                "true, or write prompts with another model"
            )
        rows = ({"id": name, "messages": chat} for name, chat in prompts.items())
        write_atomically(out / PROMPT_FILE, "".join(json.dumps(row) + "\n" for row in rows))
    Console(stderr=True).print(
        f"{len(prompts)} prompts, {s.count - len(prompts)} of {s.count} dropped as cut off, empty or repeated: "
        f"{out / PROMPT_FILE}"
    )
