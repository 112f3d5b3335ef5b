"""Answers that teach little or nothing: cut off, very short, loops, with special tokens, or cut by training."""

from collections import Counter
from typing import Any

import numpy as np

from train.doctor_checks.findings import (
    DataFinding,
    Defect,
    cost_or_note,
    count,
    percent,
    stop_or_cost,
)
from train.doctor_checks.seen_rows import SeenRow

LONGEST_PHRASE = 64
"""Tokens of the longest phrase whose repetition is looked for."""
LEAST_REPEATED = 24
"""Tokens that must repeat what stood one phrase before them; and twice the phrase at least."""


class AnswerCheck:
    """Counts rows by what is wrong with their answers."""

    def __init__(
        self, tokenizer: Any, eos: frozenset[int], vocab_size: int, max_length: int, short: int
    ):
        self.tokenizer, self.eos, self.vocab_size = tokenizer, eos, vocab_size
        self.special = special_ids(tokenizer, eos)
        self.inside: Counter[int] = Counter()
        self.max_length, self.short = max_length, short
        self.rows = self.answered = self.ends = self.in_loops = self.labels = self.read = 0
        self.unlabelled, self.cut_off, self.too_short, self.loops = (Defect() for _ in range(4))
        self.specials, self.cut_by_training, self.foreign = (Defect() for _ in range(3))

    def add(self, row: SeenRow) -> None:
        """Checks one row."""
        labels = int(row.labels.sum())
        self.rows += 1
        self.read += len(row.ids)
        self.labels += labels
        if row.ids and not 0 <= min(row.ids) <= max(row.ids) < self.vocab_size:
            self.foreign.add(row)
        lost = int(row.labels[self.max_length :].sum())
        if lost:
            self.cut_by_training.add(row, lost)
        if labels == 0:
            self.unlabelled.add(row)
            return
        if row.is_window:
            return
        self.answered += 1
        if row.row["finish_reason"] == "length":
            self.cut_off.add(row, labels)
        self.ends += sum(row.ids[end - 1] in self.eos for _, end in row.spans)
        said = [self._without_end(row.ids[start:end]) for start, end in row.spans]
        if sum(map(len, said)) < self.short:
            self.too_short.add(row, labels)
        looping = sum(loop_length(ids) for ids in said)
        if looping:
            self.loops.add(row, looping)
        inside = Counter(token for ids in said for token in ids if token in self.special)
        if inside:
            self.specials.add(row, inside.total())
            self.inside += inside

    def _names(self) -> str:
        """The special tokens that occur most in replies."""
        names = [repr(self.tokenizer.decode([i])) for i, _ in self.inside.most_common(3)]
        return ", ".join(names)

    def _without_end(self, ids: list[int]) -> list[int]:
        return ids[:-1] if ids and ids[-1] in self.eos else ids

    def findings(self, worth: float) -> list[DataFinding]:
        """The findings; shares from `worth` on cost something."""
        rows, answered, labels = self.rows, self.answered, self.labels
        found = [
            self.foreign.finding(
                "tokens outside the vocabulary", "stops", rows,
                f"{percent(self.foreign.rows, rows)} of the rows hold ids that the target has no embedding for: "
                "training ends there", "use the target that the samples were made with",
            ),
            self.specials.finding(
                "special token inside a reply", "costs", answered,
                f"{percent(self.specials.rows, answered)} of the answers hold {count(self.specials.tokens, 'label')} "
                f"that are special tokens and not their end ({self._names()}): engines end or hide the text there, so "
                "drafts learn what is never shown",
                "list turn ends as EOS of the target and sample again, or clean the answers",
            ),
            self.loops.finding(
                "loops", cost_or_note(self.loops.tokens, labels, worth), answered,
                f"{percent(self.loops.tokens, labels)} of the supervised tokens are loops "
                f"({percent(self.loops.rows, answered)} of the answers end by repeating a phrase): the draft's "
                "acceptance on them says nothing about other text",
                "sampling.temperature above 0, a lower --max_new_tokens, other prompts",
            ),
            self.cut_off.finding(
                "answers cut off", cost_or_note(self.cut_off.rows, answered, worth), answered,
                f"{percent(self.cut_off.rows, answered)} of the answers, with {percent(self.cut_off.tokens, labels)} "
                "of the supervised tokens, were cut at the limit: the set shows "
                f"{count(self.ends, 'end')} of an answer",
                "raise --max_new_tokens, and --loop.max_length with it",
            ),
            self.too_short.finding(
                "very short answers", cost_or_note(self.too_short.rows, answered, worth), answered,
                f"{percent(self.too_short.rows, answered)} of the answers have fewer than {self.short} tokens and give "
                f"{percent(self.too_short.tokens, labels)} of the labels, while their prompts are read in full",
                "filters.min_answer, or --supervise all in training",
            ),
            self.unlabelled.finding(
                "rows without labels", cost_or_note(self.unlabelled.rows, rows, worth), rows,
                f"{percent(self.unlabelled.rows, rows)} of the rows have no supervised token (skipped, too short or "
                "empty answers) and are dropped by training", "a server that lists token ids; filters.min_answer",
            ),
            self.cut_by_training.finding(
                "rows longer than training reads",
                cost_or_note(self.cut_by_training.tokens, labels, worth), rows,
                f"{percent(self.cut_by_training.tokens, labels)} of the supervised tokens lie behind token "
                f"{self.max_length:,} of their row and are cut", "raise --loop.max_length (here --max_length)",
            ),
        ]  # fmt: skip
        if labels < worth * self.read:
            found.append(
                DataFinding(
                    "few supervised tokens", stop_or_cost(labels == 0, 1, 1), rows, rows,
                    f"{percent(labels, self.read)} of the tokens that the target reads are labels",
                    "longer answers (--max_new_tokens), --turns all, or --supervise all in training",
                )
            )  # fmt: skip
        return [finding for finding in found if finding.rows > 0]


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


def special_ids(tokenizer: Any, eos: frozenset[int]) -> frozenset[int]:
    """Ids of all special tokens, those that end a text included."""
    added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(added | set(tokenizer.all_special_ids) | eos)
