"""Drafts without a model: they copy what followed an earlier occurrence of the last tokens.

Prompt lookup looks for the last n tokens in the text so far. SuffixDecoding (Oliaro et al. 2024, arXiv:2411.04975) has
one suffix tree for each request's prompt and output, and one for the outputs of earlier requests. The trees are on the
host; the device only receives the proposal.
"""

import itertools
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from decode.drafts.base import Draft, DraftContext, Proposal, empty_chain
from decode.drafts.drafting import build_token_tree
from decode.drafts.suffix_tree import SuffixMatch, SuffixTree
from decode.verification.rules import NO_DRAFT
from decode.verification.tree import DynamicTree


class GrammarDraft(Draft):
    """Forced tokens alone: a round verifies all that the grammar allows no choice about. Without a grammar its rounds
    are plain steps."""

    name = "grammar"

    def propose(self, history: Tensor, length: Tensor, k: int) -> Proposal:
        return empty_chain(history)


# ---- prompt lookup ----


class NgramDraft(Draft):
    """Continues the longest suffix of `longest` … `shortest` tokens that occurs earlier; of several, the latest.

    Prompt lookup decoding (Saxena 2023), here over prompt and output, on the device, for all rows at once.
    """

    name = "ngram"

    def __init__(self, longest: int = 3, shortest: int = 1):
        self.longest, self.shortest = longest, shortest

    def propose(self, history: Tensor, length: Tensor, k: int) -> Proposal:
        rows, slots = history.shape
        position = torch.arange(slots, device=history.device)
        matched = torch.zeros(rows, slots, dtype=torch.long, device=history.device)
        alive = torch.ones(rows, slots, dtype=torch.bool, device=history.device)
        for n in range(1, self.longest + 1):
            # An occurrence that ends just before e: token e - n must equal the suffix's n-th from the end.
            suffix = history.gather(1, (length - n).clamp_min(0)[:, None])
            shifted = torch.nn.functional.pad(history, (n, -n), value=NO_DRAFT)
            alive = alive & (shifted == suffix) & (length >= n)[:, None]
            matched = torch.where(alive, n, matched)
        known = (position < length[:, None]) & (matched >= self.shortest)
        score = torch.where(known, matched * slots + position, -1)
        best, end = score.max(1)
        source = end[:, None] + torch.arange(k, device=history.device)
        found = (best >= 0)[:, None] & (source < length[:, None])
        tokens = torch.where(found, history.gather(1, source.clamp_max(slots - 1)), NO_DRAFT)
        return Proposal(tokens, None)


# ---- SuffixDecoding ----


@dataclass(frozen=True)
class _RequestState:
    """One request: the suffix tree of its prompt and output (one text), and the prompt's length."""

    tree: SuffixTree
    prompt_tokens: int


class SuffixDraft(Draft):
    """Drafts from the request's own text, or from earlier outputs where their match has a strictly higher score.

    `corpus` holds outputs known beforehand. With `learn`, the output of a row joins them when the row gets a new
    prompt or the next batch begins: a repeated prompt is then drafted from its own answer, so measurements that repeat
    prompts must leave it off. Beyond `max_corpus_tokens` the oldest outputs are removed. `nodes` above 0 drafts trees
    of that many nodes. The other settings are those of SuffixTree.speculate; its max_tokens is the engine's k. A match
    of m tokens, at least `shortest`, leaves depth - m to draft, so with factor 1 a chain has at most depth / 2 tokens.
    """

    name = "suffix"
    runs = "host"

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
        shortest: int = 1,
    ):
        self.shortest = shortest
        self.factor, self.offset, self.min_probability = factor, offset, min_probability
        self.learn, self.max_corpus_tokens, self.nodes = learn, max_corpus_tokens, nodes
        self.shape = DynamicTree(1, nodes) if nodes else None
        self._corpus = SuffixTree(depth)
        self._corpus_keys: deque[int] = deque()  # keys in the corpus, oldest first
        self._counter = itertools.count()
        self._rows: list[_RequestState] = []
        for tokens in corpus:
            self._add_to_corpus(tokens)

    def begin_batch(self, request: DraftContext) -> None:
        """Ends the requests of the batch before."""
        for row in self._rows:
            self._finish_request(row)
        self._rows = [self._start_request(0) for _ in range(request.rows)]

    def prefill(
        self, row: Tensor, prompts: Tensor, length: Tensor, features: Tensor | None
    ) -> None:
        """Ends the requests in these rows and starts new ones; `on_commit` brings the ids of their prompts."""
        for at, prompt in torch.stack([row, length], 1).tolist():
            self._finish_request(self._rows[at])
            self._rows[at] = self._start_request(prompt)

    def on_commit(self, row: int, tokens: list[int]) -> None:
        """Appends committed ids, the prompt first, to the row's text. O(depth) a token."""
        self._rows[row].tree.extend(0, tokens)

    def propose(self, history: Tensor, length: Tensor, k: int) -> Proposal:
        """A chain of up to k tokens a row, or a tree of the `nodes` most probable tokens, of any depth.

        Of `history` only the device is used: `on_commit` has brought the ids.
        """
        width = self.nodes or k
        matches = [self._best_match(row, width, tree=self.nodes > 0) for row in self._rows]
        tokens = _padded([match.tokens for match in matches], width, NO_DRAFT, history.device)
        if self.nodes == 0:
            return Proposal(tokens, None)
        parents = _padded([match.parents for match in matches], width, 0, history.device)
        return Proposal(tokens, None, build_token_tree(parents, width))

    def _best_match(self, row: _RequestState, limit: int, tree: bool) -> SuffixMatch:
        """The better match of the row's last tokens: in its own text or in the corpus."""
        pattern = row.tree.text(0)[-row.tree.depth :]
        settings = (limit, self.factor, self.offset, self.min_probability, tree, self.shortest)
        own = row.tree.speculate(pattern, *settings)
        earlier = self._corpus.speculate(pattern, *settings)
        return earlier if earlier.score > own.score else own

    def _start_request(self, prompt_tokens: int) -> _RequestState:
        row = _RequestState(SuffixTree(self._corpus.depth), prompt_tokens)
        row.tree.extend(0, [])
        return row

    def _finish_request(self, row: _RequestState) -> None:
        if self.learn:
            self._add_to_corpus(row.tree.text(0)[row.prompt_tokens :])

    def _add_to_corpus(self, tokens: list[int]) -> None:
        """Adds an output (its end, if it is too long) to the corpus and removes the oldest ones beyond the limit."""
        if len(tokens) == 0:
            return
        key = next(self._counter)
        self._corpus.extend(key, tokens[-self.max_corpus_tokens :])
        self._corpus_keys.append(key)
        while self._corpus.count([]) > self.max_corpus_tokens:
            self._corpus.remove(self._corpus_keys.popleft())


def _padded(rows: list[list[int]], width: int, fill: int, device: torch.device) -> Tensor:
    """[rows, width] of ragged rows, `fill` on their right."""
    return torch.tensor([row + [fill] * (width - len(row)) for row in rows]).to(device)
