"""Stop strings: where a task ends an answer before EOS does. An answer ends at the token that completes one.

The end depends on the token ids alone, so plain and speculative decoding end at the same token.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from decode.engine.records import DecodeRecord, RoundRecord, add_record
from eval.tasks.loading import TaskPrompt

MAX_BYTES_PER_CHARACTER = 4
"""A token holds at least one byte, a UTF-8 character at most four."""


def length_at_stop(
    ids: list[int], stop: Sequence[str], tokenizer: Any, start: int = 0
) -> int | None:
    """How many of `ids` remain: up to and with the first token, from `start` on, that completes a stop string.

    None if no stop string is completed.
    """
    if len(stop) == 0:
        return None
    window = MAX_BYTES_PER_CHARACTER * max(map(len, stop)) + 1
    for n in range(start + 1, len(ids) + 1):
        tail = tokenizer.decode(ids[max(0, n - window) : n])
        if any(text in tail for text in stop):
            return n
    return None


def collect_until_stop(
    items: Sequence[TaskPrompt],
    rounds: Iterable[RoundRecord],
    tokenizer: Any,
    on_finished: Callable[[int], None] = lambda _: None,
) -> list[DecodeRecord]:
    """One record for each prompt, ended at its stop strings; reads no further round once all prompts have ended.

    `on_finished` is called with the index of each prompt that ends. Rounds are counted as at EOS: the one that
    completes a stop string counts as it was before trimming, later ones do not count.
    """
    outputs = [
        DecodeRecord(item.prompt_ids, task=item.task, id=item.id, domain=item.domain)
        for item in items
    ]
    open_rows = set(range(len(items)))
    for record in rounds:
        if record.prompt not in open_rows:
            continue
        output = outputs[record.prompt]
        seen = len(output.output_ids)
        add_record(output, record)
        end = length_at_stop(output.output_ids, items[record.prompt].stop, tokenizer, seen)
        if end is not None:
            del output.output_ids[end:]
            output.finish_reason = "stop"
        if output.finish_reason:
            open_rows.remove(record.prompt)
            on_finished(record.prompt)
        if not open_rows:
            break
    return outputs


def trim_at_stop(ids: list[int], stop: Sequence[str], tokenizer: Any) -> list[int]:
    """`ids` up to and with the token that completes the first stop string."""
    return ids[: length_at_stop(ids, stop, tokenizer)]
