"""Answers that teach little or nothing: cut off, very short, loops, with special tokens, or cut by training."""

from collections import Counter
from typing import Any

import numpy as np

from train.doctor_checks.findings import Tally, count, percent
from train.doctor_checks.rows import SeenRow

LONGEST_PHRASE = 64
"""Tokens of the longest phrase whose repetition is looked for."""
LEAST_REPEATED = 24
"""Tokens that must repeat what stood one phrase before them; and twice the phrase at least."""


class AnswerCheck:
    """Counts rows by what is wrong with their answers."""

    def __init__(
        self,
        tally: Tally,
        tokenizer: Any,
        eos: frozenset[int],
        vocab_size: int,
        max_length: int,
        short: int,
    ):
        self.tally, self.tokenizer, self.eos, self.vocab_size = tally, tokenizer, eos, vocab_size
        added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.special = added | set(tokenizer.all_special_ids) | eos
        self.inside = Counter[int]()
        self.max_length, self.short = max_length, short
        self.ends = self.read = 0
        tally.said |= {"max_length": max_length, "short": short}

    def add(self, row: SeenRow) -> None:
        tally, labels = self.tally, int(row.labels.sum())
        tally.looked["rows"] += 1
        tally.labels += labels
        self.read += len(row.ids)
        if row.ids and not 0 <= min(row.ids) <= max(row.ids) < self.vocab_size:
            tally.add("tokens outside the vocabulary", row)
        if lost := int(row.labels[self.max_length :].sum()):
            tally.add("rows longer than training reads", row, lost)
        if labels == 0:
            tally.add("rows without labels", row)
        elif not row.is_window:
            self._add_answers(row, labels)

    def _add_answers(self, row: SeenRow, labels: int) -> None:
        tally = self.tally
        tally.looked["answers"] += 1
        if row.row["finish_reason"] == "length":
            tally.add("answers cut off", row, labels)
        answers = [row.ids[start:end] for start, end in row.spans]
        self.ends += sum(answer[-1] in self.eos for answer in answers)
        said = [answer[: len(answer) - (answer[-1] in self.eos)] for answer in answers]
        if sum(map(len, said)) < self.short:
            tally.add("very short answers", row, labels)
        if looping := sum(map(loop_length, said)):
            tally.add("loops", row, looping)
        if inside := [token for ids in said for token in ids if token in self.special]:
            tally.add("special token inside a reply", row, len(inside))
            self.inside.update(inside)

    def finish(self) -> None:
        """Tells what the findings state of all answers; reports a set of few labels."""
        most = self.inside.most_common(3)
        self.tally.said |= {
            "specials": ", ".join(repr(self.tokenizer.decode([i])) for i, _ in most),
            "ends_in_words": count(self.ends, "end"),
        }
        rows, labels = self.tally.looked["rows"], self.tally.labels
        if labels < self.tally.worth * self.read:
            self.tally.report(
                "few supervised tokens", rows, rows,
                judged=float(labels == 0), labelled=percent(labels, self.read),
            )  # fmt: skip


def loop_length(ids: list[int]) -> int:
    """Tokens at the end of a reply that repeat one phrase, its first occurrence not counted; 0 if it is no loop."""
    tokens = np.asarray(ids)
    longest = 0
    for period in range(1, min(LONGEST_PHRASE, len(ids) - 1) + 1):
        differs = np.flatnonzero(tokens[period:] != tokens[:-period])
        repeated = len(ids) - period - (int(differs[-1]) + 1 if len(differs) else 0)
        if repeated >= max(LEAST_REPEATED, 2 * period):
            longest = max(longest, repeated)
    return longest
