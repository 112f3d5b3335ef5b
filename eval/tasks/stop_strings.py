"""Where a task ends an answer before EOS does: at the token that completes a stop string, in every arm alike."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from decode.engine.engine import RequestOutput, RoundRecord, add_record

MAX_BYTES_PER_CHARACTER = 4
"""A token holds a byte at least, a letter of UTF-8 four at most."""


def length_at_stop(
    ids: list[int], stop: Sequence[str], tokenizer: Any, start: int = 0
) -> int | None:
    """How many of `ids` remain: up to and with the first token, from `start` on, that completes a stop string.

    None if none is completed. It depends on the ids alone, not on the rounds that brought them, so that plain and
    speculative decoding end at the same token.
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
    prompts: list[list[int]],
    records: Iterable[RoundRecord],
    stops: Sequence[Sequence[str]],
    tokenizer: Any,
    finished: Callable[[int], None] = lambda _: None,
) -> list[RequestOutput]:
    """One Output for each prompt, ended at its stop strings; reads no further once all have ended.

    `finished` hears the number of each prompt that ends. What a row does behind its stop is not counted; rounds are,
    as at EOS, those before trimming.
    """
    outputs = [RequestOutput(prompt) for prompt in prompts]
    open_rows = set(range(len(prompts)))
    for record in records:
        if record.prompt not in open_rows:
            continue
        output = outputs[record.prompt]
        seen = len(output.output_ids)
        add_record(output, record)
        end = length_at_stop(output.output_ids, stops[record.prompt], tokenizer, seen)
        if end is not None:
            del output.output_ids[end:]
            output.finish_reason = "stop"
        if output.finish_reason:
            open_rows.remove(record.prompt)
            finished(record.prompt)
        if not open_rows:
            break
    return outputs


def trim_at_stop(ids: list[int], stop: Sequence[str], tokenizer: Any) -> list[int]:
    """`ids` up to and with their first stop string."""
    return ids[: length_at_stop(ids, stop, tokenizer)]
