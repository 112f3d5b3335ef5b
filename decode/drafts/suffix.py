"""A draft that needs no model: how texts that held the last tokens went on, counted in a suffix tree.

SuffixDecoding (Oliaro et al. 2024, arXiv:2411.04975): one tree for each request's prompt and output, one for the
outputs of earlier requests. All of it is host-side Python; the device only receives the proposal.
"""

import heapq
import itertools
import json
import math
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

from decode.common.errors import UserError
from decode.drafts.base import Draft, DraftContext, Proposal
from decode.drafts.drafting import build_token_tree
from decode.verification.rules import NO_DRAFT

_SHIFT = 32
_INDEX = (1 << _SHIFT) - 1
_NO_CHILD = -1


class _SuffixNode:
    """A string that has occurred twice or more: how often it does, and what follows it.

    The most frequent child (of equal ones the lowest token) is held apart: a chain takes it without a search,
    and most nodes have no other.
    """

    __slots__ = ("child", "count", "others", "token")

    def __init__(self, count: int):
        self.count = count
        self.token = _NO_CHILD
        self.child: TreePosition = 0  # behind `token`
        self.others: dict[int, TreePosition] | None = None

    def get(self, token: int) -> "TreePosition | None":
        if token == self.token:
            return self.child
        return self.others.get(token) if self.others else None

    def put(self, token: int, child: "TreePosition") -> None:
        """A new child, a node in place of a place, or one that became more frequent."""
        if token == self.token or self.token == _NO_CHILD:
            self.token, self.child = token, child
            return
        if self.others is None:
            self.others = {}
        self.others[token] = child
        times, most = _occurrences(child), _occurrences(self.child)
        if times > most or (times == most and token < self.token):
            self._promote(token)

    def drop(self, token: int) -> None:
        """Removes a child and all below it."""
        if token == self.token and self.others:
            self._promote(self._most_frequent_other())
        if token == self.token:
            self.token, self.child = _NO_CHILD, 0
        elif self.others:
            del self.others[token]
            self.others = self.others or None

    def on_child_decreased(self, token: int) -> None:
        """To be told of a child that became less frequent."""
        if token == self.token and self.others:
            other = self._most_frequent_other()
            self.put(other, self.others[other])

    def _most_frequent_other(self) -> int:
        others = self.others or {}
        return min(others, key=lambda token: (-_occurrences(others[token]), token))

    def _promote(self, token: int) -> None:
        assert self.others is not None
        child = self.others.pop(token)
        self.others[self.token] = self.child
        self.token, self.child = token, child


TreePosition: TypeAlias = _SuffixNode | int
"""Where a string ends in the tree: its node, or the place of its only occurrence.

A place is (number of the text << _SHIFT) + the index in it of the string's last token; place + 1 is one token on.
"""


def _occurrences(spot: TreePosition) -> int:
    return 1 if isinstance(spot, int) else spot.count


@dataclass(frozen=True, slots=True)
class SuffixMatch:
    """What probably follows a pattern, as a tree: a parent comes before its children.

    parents[i] is 0 for the pattern's last token and j + 1 for tokens[j]; a chain has parents 0, 1, 2, …
    probabilities[i] is the product of the relative counts on the way to tokens[i], score their sum, match_length
    how many of the pattern's last tokens were found.
    """

    tokens: list[int]
    parents: list[int]
    probabilities: list[float]
    score: float
    match_length: int


class SuffixTree:
    """Counts every string of up to `depth` tokens in a set of growing texts; strings do not cross texts.

    The counts are those of a trie of all suffixes cut at `depth`, but a string that occurred only once is kept as a
    place in its text, so memory goes with what repeats. Appending a token visits the ends of the text that had
    occurred before, at most `depth`; speculating costs O(depth²) and reads the children of few nodes.
    Counts depend on the texts alone, not on the steps in which they grew or on texts removed since. Tokens are
    ids, 0 or more.

    Measured at depth 24 (CPython 3.11): 240 bytes and about 5 µs a token of 96 k tokens of Python source, 715 bytes
    and 25 µs where all of it occurs twice, the worst case; a plain trie of dicts takes 5.3 kB a token.
    """

    def __init__(self, depth: int = 24):
        if depth < 2:
            raise UserError(f"a suffix tree needs depth >= 2, got {depth}")
        self.depth = depth
        self._root = _SuffixNode(0)
        self._texts: dict[int, list[int]] = {}
        self._text_ids: dict[Hashable, int] = {}
        self._counter = itertools.count()
        self._open: tuple[int, list[_SuffixNode]] | None = (
            None  # the text that grew last, and its ends
        )

    def text(self, key: Hashable) -> list[int]:
        """The tokens of a sequence so far, to be read only."""
        return self._texts[self._text_ids[key]]

    def extend(self, key: Hashable, tokens: Iterable[int]) -> None:
        """Appends tokens to the sequence of that name, or begins it."""
        if key not in self._text_ids:
            self._text_ids[key] = next(self._counter)
            self._texts[self._text_ids[key]] = []
        number = self._text_ids[key]
        text = self._texts[number]
        ends = (
            self._open[1]
            if self._open and self._open[0] == number
            else self._repeated_suffixes(text)
        )
        for place, token in enumerate(tokens, (number << _SHIFT) + len(text)):
            text.append(token)
            ends = self._append(ends, token, place)
        self._open = number, ends

    def remove(self, key: Hashable) -> None:
        """Takes the sequence out of the counts. Strings that still occur keep their nodes."""
        text = self._texts[self._text_ids[key]]
        for start in range(len(text)):
            node = self._root
            node.count -= 1
            for token in text[start : start + self.depth]:
                child = node.get(token)
                if not isinstance(child, _SuffixNode) or child.count == 1:
                    node.drop(token)  # what lies below is of this suffix alone
                    break
                child.count -= 1
                node.on_child_decreased(token)
                node = child
        del self._texts[self._text_ids.pop(key)]
        self._open = None

    def count(self, tokens: Sequence[int]) -> int:
        """How often a string of at most `depth` tokens occurs; for the empty one, how many tokens there are."""
        spot = self._find(tokens)
        return 0 if spot is None else _occurrences(spot)

    def speculate(
        self,
        pattern: Sequence[int],
        max_tokens: int,
        factor: float = 1.0,
        offset: float = 0.0,
        min_probability: float = 0.1,
        tree: bool = False,
    ) -> SuffixMatch:
        """The best continuation of the last m tokens of the pattern, over m = 1 … min(len(pattern), depth) - 1.

        Each m that occurs gives a guess of at most min(max_tokens, floor(m * factor + offset)) tokens, as deep as
        the counts go, whose probabilities are at least min_probability: as a chain, always the most frequent
        child; as a tree, the most probable tokens first. The highest score wins, of equal ones the longest match.
        Of equally frequent children the lowest token comes first; of equally probable tokens of a tree, the one
        whose parent was taken first. A pattern that was never continued gives an empty guess.
        """
        best = SuffixMatch([], [], [], 0.0, 0)
        lengths = []  # (most it can score, length, spot)
        for length, spot in enumerate(self._suffix_matches(pattern), 1):
            room = math.floor(length * factor + offset + 1e-6)  # 3 * 0.6 + 0.2 < 2
            room = min(room, max_tokens)
            if not tree or isinstance(spot, int):  # no branches: only so deep
                room = min(room, self.depth - length)
            lengths.append((room, length, spot))
        for room, length, spot in sorted(lengths, key=lambda entry: entry[:2], reverse=True):
            if room < max(best.score, 1):
                break
            if tree:
                found = self._draft_tree(spot, length, room, min_probability)
            else:
                found = self._draft_chain(spot, room, min_probability)
            tokens, parents, probabilities = found
            score = sum(probabilities)
            if tokens and (score, length) > (best.score, best.match_length):
                best = SuffixMatch(tokens, parents, probabilities, score, length)
        return best

    def _suffix_matches(self, pattern: Sequence[int]) -> Iterator[TreePosition]:
        """The spots of the pattern's last 1, 2, … tokens, less than all of them, while they can be continued."""
        spot: TreePosition | None = None
        for length in range(1, min(len(pattern), self.depth)):
            if not isinstance(spot, int):
                spot = self._find(pattern[len(pattern) - length :])
                if spot is None or (isinstance(spot, int) and not self._tokens_after(spot, 1)):
                    return
            else:  # the only occurrence: does it reach one token further back?
                text, start = self._texts[spot >> _SHIFT], (spot & _INDEX) + 1 - length
                if start < 0 or text[start] != pattern[-length]:
                    return
            yield spot

    def _append(self, ends: list[_SuffixNode], token: int, place: int) -> list[_SuffixNode]:
        """Counts the suffixes that end at `place`; ends[i] is the node of the i + 1 tokens before it.

        Longer suffixes had occurred once: the place that stands for each covers the new token already.
        """
        self._root.count += 1
        new: list[_SuffixNode] = []
        for node in (self._root, *ends[: self.depth - 1]):
            child = node.get(token)
            if child is None:  # nor did any longer suffix
                node.put(token, place)
                continue
            if isinstance(child, int):
                text, after = self._texts[child >> _SHIFT], (child & _INDEX) + 1
                shared = _SuffixNode(2)
                if after < len(text) and len(new) + 1 < self.depth:
                    shared.token, shared.child = text[after], child + 1
                child = shared
            else:
                child.count += 1
            new.append(child)
            if token == node.token:
                node.child = child
            else:
                node.put(token, child)
        return new

    def _repeated_suffixes(self, text: list[int]) -> list[_SuffixNode]:
        """The nodes of the text's last 1, 2, … tokens, as far as these occur twice."""
        ends: list[_SuffixNode] = []
        for length in range(1, min(len(text), self.depth) + 1):
            spot = self._find(text[-length:])
            if not isinstance(spot, _SuffixNode):
                break
            ends.append(spot)
        return ends

    def _find(self, tokens: Sequence[int]) -> TreePosition | None:
        """Where a string of at most `depth` tokens ends; None if it does not occur."""
        node = self._root
        for i, token in enumerate(tokens, 1):
            spot = node.get(token)
            if not isinstance(spot, _SuffixNode):
                rest = list(tokens[i:])
                occurs = spot is not None and self._tokens_after(spot, len(rest)) == rest
                return spot + len(rest) if spot is not None and occurs else None
            node = spot
        return node

    def _tokens_after(self, place: int, n: int) -> list[int]:
        """The up to n tokens behind a place in its text."""
        start = (place & _INDEX) + 1
        return self._texts[place >> _SHIFT][start : start + n]

    def _draft_chain(
        self, spot: TreePosition, room: int, least: float
    ) -> tuple[list[int], list[int], list[float]]:
        """Guess's first three fields: from a spot on the most frequent children, `room` at most."""
        tokens: list[int] = []
        probabilities: list[float] = []
        probability = 1.0
        while len(tokens) < room and isinstance(spot, _SuffixNode) and spot.token != _NO_CHILD:
            probability *= _occurrences(spot.child) / spot.count
            if probability < least:
                break
            tokens.append(spot.token)
            probabilities.append(probability)
            spot = spot.child
        if isinstance(spot, int):  # one way on, to the end of the text
            tokens += self._tokens_after(spot, room - len(tokens))
            probabilities += [probability] * (len(tokens) - len(probabilities))
        return tokens, list(range(len(tokens))), probabilities

    def _draft_tree(
        self, spot: TreePosition, length: int, room: int, least: float
    ) -> tuple[list[int], list[int], list[float]]:
        """Guess's first three fields: below a spot of that length the most probable tokens, `room` at most."""
        tokens: list[int] = []
        parents: list[int] = []
        probabilities: list[float] = []
        heap: list[
            tuple[float, int, int, int, TreePosition]
        ] = []  # -probability, parent, token, length, spot
        probability = 1.0
        while len(tokens) < room:
            for token, child in self._children(spot, length):
                chance = probability * (_occurrences(child) / _occurrences(spot))
                if chance >= least:
                    heapq.heappush(heap, (-chance, len(tokens), token, length + 1, child))
            if not heap:
                break
            chance, parent, token, length, spot = heapq.heappop(heap)
            probability = -chance
            tokens.append(token)
            parents.append(parent)
            probabilities.append(probability)
        return tokens, parents, probabilities

    def _children(self, spot: TreePosition, length: int) -> Iterable[tuple[int, TreePosition]]:
        """The children of a spot of that length, the most frequent first."""
        if isinstance(spot, int):
            after = self._tokens_after(spot, 1) if length < self.depth else []
            return [(token, spot + 1) for token in after]
        if spot.token == _NO_CHILD:
            return []
        return itertools.chain([(spot.token, spot.child)], (spot.others or {}).items())


@dataclass(frozen=True)
class _RequestState:
    """A request: its tree, whose only text is prompt and output, and how long the prompt is."""

    tree: SuffixTree
    prompt: int


class SuffixDraft(Draft):
    """Drafts from the request's own text, or from earlier outputs where these promise strictly more.

    `corpus` holds outputs known beforehand; with `learn`, what a row has emitted joins them when the row gets a new
    prompt or the next batch begins: a prompt that comes again is drafted from its own answer, which a
    measurement that repeats prompts must not allow. Beyond `max_corpus_tokens` the oldest outputs are forgotten.
    `nodes` above 0 drafts trees of so many. The other settings are those of SuffixTree.speculate; its max_tokens is
    the engine's k. A match of m tokens leaves depth - m to draft, so with factor 1 a chain has depth / 2 tokens at
    most.
    """

    name = "suffix"
    on_host = True

    def __init__(
        self,
        depth: int = 24,
        factor: float = 1.0,
        offset: float = 0.0,
        min_probability: float = 0.1,
        corpus: Iterable[list[int]] = (),
        learn: bool = False,
        max_corpus_tokens: int = 200_000,
        nodes: int = 0,
    ):
        self.factor, self.offset, self.min_probability = factor, offset, min_probability
        self.learn, self.max_corpus_tokens, self.nodes = learn, max_corpus_tokens, nodes
        self._corpus = SuffixTree(depth)
        self._corpus_keys: deque[int] = deque()  # keys in the corpus, oldest first
        self._counter = itertools.count()
        self._rows: list[_RequestState] = []
        for tokens in corpus:
            self._add_to_corpus(tokens)

    def begin_batch(self, request: DraftContext) -> None:
        """Ends the rows of an earlier batch."""
        for row in self._rows:
            self._finish_request(row)
        self._rows = [self._start_request(0) for _ in range(request.rows)]

    def prefill(
        self,
        row: torch.Tensor,
        prompts: torch.Tensor,
        length: torch.Tensor,
        features: torch.Tensor | None,
    ) -> None:
        """Ends these rows and begins them anew; the ids of the prompts are the first to be observed."""
        for at, prompt in torch.stack([row, length], 1).tolist():
            self._finish_request(self._rows[at])
            self._rows[at] = self._start_request(prompt)

    def on_commit(self, row: int, tokens: list[int]) -> None:
        """These ids stand in the row, prompt first, after those observed before. O(depth) a token."""
        self._rows[row].tree.extend(0, tokens)

    def reach(self, k: int) -> int:
        return max(self.nodes, k) + 1

    def propose(self, history: torch.Tensor, length: torch.Tensor, k: int) -> Proposal:
        """A chain of up to k tokens a row, or the most probable `nodes` as a tree of as many levels as it takes.

        Only the device of `history` matters: the ids were observed.
        """
        width = self.nodes or k
        guesses = [self._best_match(row, width, tree=self.nodes > 0) for row in self._rows]
        tokens = _padded([guess.tokens for guess in guesses], width, NO_DRAFT, history.device)
        if self.nodes == 0:
            return Proposal(tokens, None)
        parents = _padded([guess.parents for guess in guesses], width, 0, history.device)
        return Proposal(tokens, None, build_token_tree(parents, width))

    def _best_match(self, row: _RequestState, limit: int, tree: bool) -> SuffixMatch:
        pattern = row.tree.text(0)[-row.tree.depth :]
        how = (limit, self.factor, self.offset, self.min_probability, tree)
        own, other = row.tree.speculate(pattern, *how), self._corpus.speculate(pattern, *how)
        return other if other.score > own.score else own

    def _start_request(self, prompt: int) -> _RequestState:
        row = _RequestState(SuffixTree(self._corpus.depth), prompt)
        row.tree.extend(0, [])
        return row

    def _finish_request(self, row: _RequestState) -> None:
        if self.learn:
            self._add_to_corpus(row.tree.text(0)[row.prompt :])

    def _add_to_corpus(self, tokens: list[int]) -> None:
        """Puts an output, or the end of it that fits, into the corpus and forgets the oldest that are too much."""
        if len(tokens) == 0:
            return
        key = next(self._counter)
        self._corpus.extend(key, tokens[-self.max_corpus_tokens :])
        self._corpus_keys.append(key)
        while self._corpus.count([]) > self.max_corpus_tokens:
            self._corpus.remove(self._corpus_keys.popleft())


def _padded(rows: list[list[int]], width: int, fill: int, device: torch.device) -> torch.Tensor:
    return torch.tensor([row + [fill] * (width - len(row)) for row in rows]).to(device)


def corpus_from(path: str) -> list[list[int]]:
    """The outputs in an outputs.jsonl of the evaluation, once for each prompt and text that methods share.

    UserError names the file, and the line that is damaged.
    """
    file = Path(path)
    if not file.is_file():
        raise UserError(f"no file {path!r}: give the outputs.jsonl of an evaluation")
    known: dict[tuple[tuple[int, ...], tuple[int, ...]], None] = {}
    for number, line in enumerate(file.read_bytes().split(b"\n"), 1):
        if line.strip() == b"":
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise UserError(f"{path}:{number} is not valid JSON: restore or remove it") from error
        known[
            _ids(record, "prompt_ids", path, number), _ids(record, "output_ids", path, number)
        ] = None
    return [list(output) for _, output in known]


def _ids(record: Any, name: str, path: str, number: int) -> tuple[int, ...]:
    ids = record.get(name) if isinstance(record, dict) else None
    if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
        raise UserError(f"{path}:{number}: `{name}` must be a list of token ids")
    return tuple(ids)
