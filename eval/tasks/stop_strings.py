"""Stop strings: where a task ends an answer before EOS does. An answer ends at the token that completes one.

The end depends on the token ids alone, so plain and speculative decoding end at the same token.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from decode.engine.records import DecodeRecord, RoundRecord, add_record
from decode.engine.text_stream import TextStream
from eval.tasks.loading import TaskPrompt


class StopMatcher:
    """Finds the token of one answer that completes a stop string in the answer's text, as tokens arrive. Special tokens
    are part of that text."""

    def __init__(self, stop: Sequence[str], tokenizer: Any):
        self.stop = tuple(stop)
        self.tokens = 0
        if self.stop:
            self.stream = TextStream(tokenizer, skip_special_tokens=False)
            self.known = max(map(len, self.stop)) - 1  # characters of an unfinished stop string
            self.tail = ""

    def add(self, ids: Sequence[int]) -> int | None:
        """How many tokens the answer has up to and with the first of these that completes a stop string; None if none
        does."""
        if not self.stop:
            return None
        for token in ids:
            self.tokens += 1
            new = self.stream.add([token])
            text = self.tail + new + self.stream.rest()
            if any(stop in text for stop in self.stop):
                return self.tokens
            text = self.tail + new
            self.tail = text[max(0, len(text) - self.known) :]
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
    matchers = [StopMatcher(item.stop, tokenizer) for item in items]
    open_rows = set(range(len(items)))
    for record in rounds:
        if record.prompt not in open_rows:
            continue
        output = outputs[record.prompt]
        seen = len(output.output_ids)
        add_record(output, record)
        end = matchers[record.prompt].add(output.output_ids[seen:])
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
    return ids[: StopMatcher(stop, tokenizer).add(ids)]
