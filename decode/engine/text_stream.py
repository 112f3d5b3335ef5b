"""The text of an answer while its tokens arrive, round by round: every character comes out whole, with the origin of
its token.

A character may lie in several tokens (bytes), and a token's text may depend on the one before it (the leading spaces of
SentencePiece). So tokens are decoded together with those before them, and a character is held back until it is whole.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from os.path import commonprefix
from typing import Any

from transformers import PreTrainedTokenizerBase

from decode.model.vocabularies import byte_tokens, special_ids

REPLACEMENT = "\ufffd"
"""What decoding writes for bytes that are no character, or not yet."""
KEPT, WINDOW = 8, 16
"""Tokens that are decoded again with new ones: once they are more than WINDOW, only KEPT of them are kept. A character
has four bytes at most, and a token one at least. So the first three of those kept may be the end of a character, which
is shown already and now reads otherwise, and the last three the beginning of one."""
CLEANED_CHARACTERS = 20
"""Characters at the end that `clean_up_tokenization` may still change: as many as all that it looks for."""


class TextStream:
    """Decodes one answer, a few tokens at a time.

    What `add` returns, joined, and `rest` at the end are the tokenizer's text of all tokens, after that of the tokens
    `before` them, such as the prompt that they continue. A few tokens are decoded for each new one, however long the
    answer is; a tokenizer that cleans up spaces, which only those without BPE do, decodes its answer as a whole.
    """

    def __init__(
        self, tokenizer: Any, before: Sequence[int] = (), skip_special_tokens: bool = True
    ):
        self.tokenizer, self.skip_special_tokens = tokenizer, skip_special_tokens
        self.byte_values = byte_tokens(tokenizer)
        self.skipped = special_ids(tokenizer) if skip_special_tokens else frozenset()
        self.cleans = cleans_up(tokenizer)
        self.window: list[int] = []
        """The last tokens, which are decoded together."""
        self.shown = 0
        """So many characters of the window's text were returned."""
        self.held = ""
        """The text behind them, without that of `run`."""
        self.run = bytearray()
        """Tokens at the end that stand for a byte each. SentencePiece's tokenizers decode such a run as a whole: one
        bad byte makes all its characters unreadable. So nothing of it is certain before it ends."""
        if before:
            self.add(before)
            self.shown, self.held = len(self._decode(self.window)), ""

    def add(self, ids: Iterable[int]) -> str:
        """The text that is certain with these tokens and was not without them; often empty."""
        known = len(self.window) - len(self.run)
        for token in ids:
            if token in self.skipped:
                continue
            self.window.append(token)
            if token in self.byte_values:
                self.run.append(self.byte_values[token])
            else:
                self.run.clear()
        end = len(self.window) - len(self.run)
        if end == known:
            return ""
        text = self._decode(self.window[:end])
        certain = text[:-CLEANED_CHARACTERS] if self.cleans else text.removesuffix(REPLACEMENT)
        new = certain[self.shown :]
        self.shown = max(self.shown, len(certain))
        self.held = text[self.shown :]
        if end > WINDOW and not self.cleans:
            self.window = self.window[end - KEPT :]
            self.shown = len(self._decode(self.window[:KEPT])) - len(self.held)
        return new

    def rest(self) -> str:
        """The text behind what `add` returned, if the answer ends here: what it leaves incomplete is `REPLACEMENT`."""
        if not self.run:
            return self.held
        if self.shown == 0 or self.cleans:  # the text's first space may be left out
            return self._decode(self.window)[self.shown :]
        try:
            return self.held + self.run.decode()
        except UnicodeDecodeError:
            return self.held + REPLACEMENT * len(self.run)

    def preview(self, ids: Sequence[int]) -> str:
        """The whole characters that these tokens would add to the text; it stays as it is."""
        now, then = self._decode(self.window), self._decode([*self.window, *ids])
        return then[len(commonprefix([now, then])) :].replace(REPLACEMENT, "")

    def _decode(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=self.skip_special_tokens)
        return text


class LabelledText:
    """The text of an answer in pieces with the labels of its tokens. A character of several tokens has the label of the
    last one, which completes it."""

    def __init__(self, stream: TextStream):
        self.stream = stream
        self.held, self.labels = "", list[Any]()
        """The characters that are held back, as far as they are known, and their labels."""
        self.last: Any = None

    def add(self, ids: Iterable[int], label: Hashable) -> list[tuple[str, Any]]:
        """The pieces (text, label) that are certain with these tokens and were not without them."""
        new = self.stream.add(ids)
        held = self.stream.held + self.stream.run.decode(errors="replace")
        known = len(commonprefix([self.held, new + held]))
        labels = self.labels[:known] + [label] * (len(new + held) - known)
        self.held, self.labels, self.last = held, labels[len(new) :], label
        return _pieces(new, labels)

    def end(self) -> list[tuple[str, Any]]:
        """The pieces that were held back; the answer ends here."""
        text = self.stream.rest()
        return _pieces(text, self.labels + [self.last] * (len(text) - len(self.labels)))


def _pieces(text: str, labels: list[Any]) -> list[tuple[str, Any]]:
    """`text` cut where the labels of its characters change."""
    characters = zip(text, labels, strict=False)
    return [
        ("".join(character for character, _ in group), label)
        for label, group in groupby(characters, key=lambda pair: pair[1])
    ]


@dataclass(frozen=True)
class TraceSegment:
    """Consecutive text of an answer with one origin."""

    text: str
    kind: str
    """"accepted": drafted tokens that were accepted; "own": a token of the target (the first token, a correction after
    a rejection, or the bonus token after a draft that was accepted whole)."""
    rejected: int = 0  # number of drafted tokens that were rejected just before it


def split_by_origin(
    ids: Sequence[int],
    rounds: Sequence[Sequence[int]],
    tokenizer: Any,
    prompt_ids: Sequence[int] = (),
) -> list[TraceSegment]:
    """The text of `ids` after the prompt's, split where the origin of its tokens changes; the first token comes from
    prefill. A character of several tokens belongs to the last of them, which completes it.

    `rounds` are (drafted, accepted) before trimming: the last one may count tokens beyond the end of `ids`.
    """
    cuts = [(1, "own", 0)]
    for drafted, accepted in rounds:
        start = cuts[-1][0]
        if accepted > 0:
            cuts.append((start + accepted, "accepted", 0))
        cuts.append((start + accepted + 1, "own", drafted - accepted))
    text = LabelledText(TextStream(tokenizer, prompt_ids))
    texts, start = [""] * len(cuts), 0
    pieces: list[tuple[str, int]] = []
    for number, (end, *_) in enumerate(cuts):
        pieces += text.add(ids[start:end], number)
        start = end
    for piece, number in [*pieces, *text.end()]:
        texts[number] += piece
    segments, rejected = [], 0
    for (_, kind, own_rejected), own_text in zip(cuts, texts, strict=True):
        rejected += own_rejected
        if own_text:
            segments.append(TraceSegment(own_text, kind, rejected))
            rejected = 0
    return segments


def cleans_up(tokenizer: Any) -> bool:
    """Whether decoding removes spaces before punctuation; with BPE transformers does not, whatever is asked for."""
    return (
        isinstance(tokenizer, PreTrainedTokenizerBase)
        and tokenizer.clean_up_tokenization_spaces
        and tokenizer.decode(tokenizer(". .", add_special_tokens=False)["input_ids"]) != ". ."
    )
