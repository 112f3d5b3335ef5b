"""The grammars of a batch's rows: masks along drafted chains, forced tokens, and what was committed.

Masks are asked for by (row, path): `path` are the ids after the row's committed text, such as the drafted tokens so
far. A matcher is moved along the path and back again, so it always stands behind the committed text and a rejected
draft leaves nothing in it. Masks are kept until the row commits, since drafting and verification ask for the same ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decode.common.errors import UserError
from decode.constraints.grammar import Matcher
from decode.verification.rules import NO_DRAFT

Path = tuple[int, ...]


@dataclass(frozen=True)
class AllowedTokens:
    """The tokens that may come next."""

    mask: Tensor
    """[V] bool on the CPU; at least one is True."""
    only: int | None
    """The token, if it is the only one: it has p = 1 whatever the target says, so a draft of it cannot fail."""


class RowConstraints:
    """A matcher for each row of a batch, or none for a row without a grammar, which may go on with any token.

    Behind EOS, behind a position without a draft and behind a token that the grammar forbids any token is allowed too:
    what is verified there is never kept.
    """

    def __init__(self, rows: int, vocab_size: int, eos: frozenset[int]):
        self.eos = eos
        self.anything = AllowedTokens(torch.ones(vocab_size, dtype=torch.bool), None)
        self.matchers: list[Matcher | None] = [None] * rows
        self.running = [False] * rows
        self.kept: list[dict[Path, AllowedTokens]] = [{} for _ in range(rows)]

    def start(self, row: int, matcher: Matcher | None) -> None:
        """The row gets a new text, constrained from the position of `matcher`. UserError if no token can come first."""
        self.matchers[row] = None if matcher is None else matcher.copy()
        self.running[row], self.kept[row] = True, {}
        if matcher is not None and not bool(matcher.allowed().any()):
            raise UserError(
                "the grammar allows no first token of the target's vocabulary: give one that allows some text"
            )

    def stop(self, row: int) -> None:
        self.matchers[row], self.running[row] = None, False

    def allowed(self, row: int, path: Path = ()) -> AllowedTokens:
        """The tokens that may follow the row's text and `path`."""
        matcher = self.matchers[row]
        if matcher is None or NO_DRAFT in path or not self.eos.isdisjoint(path):
            return self.anything
        kept = self.kept[row]
        if path not in kept:
            kept[path] = self._ask(matcher, path)
        return kept[path]

    def _ask(self, matcher: Matcher, path: Path) -> AllowedTokens:
        taken = matcher.advance(path)
        mask = matcher.allowed() if taken == len(path) else self.anything.mask
        matcher.rollback(taken)
        count = int(mask.sum())
        if count == 0:  # `commit` ends the text here
            return self.anything
        return AllowedTokens(mask, int(mask.nonzero()[0, 0]) if count == 1 else None)

    def masks(self, rows: Sequence[int], paths: Sequence[Sequence[int]]) -> Tensor:
        """[n, V] bool on the CPU: what may follow each of the paths in its row."""
        return torch.stack(
            [self.allowed(row, tuple(path)).mask for row, path in zip(rows, paths, strict=True)]
        )

    def masks_along(self, tokens: Tensor) -> Tensor:
        """[B, N + 1, V] bool, for chains [B, N]: what may follow the committed text and each drafted token."""
        found = []
        for row, chain in enumerate(tokens.tolist()):
            paths = [chain[:count] for count in range(len(chain) + 1)]
            found.append(self.masks([row] * len(paths), paths))
        return torch.stack(found).to(tokens.device)

    def restrict(self, logits: Tensor, drafted: Sequence[Tensor]) -> Tensor:
        """A draft's logits [B, V] after the chains `drafted`, a tensor [B] for each token: -inf for what is forbidden.

        Where the draft gives no allowed token any probability, the first of them gets all of it.
        """
        rows = range(len(logits))
        paths = torch.stack(list(drafted), 1).tolist() if drafted else [[] for _ in rows]
        mask = self.masks(rows, paths).to(logits.device)
        masked = logits.masked_fill(~mask, float("-inf"))
        first = torch.full_like(masked, float("-inf")).scatter(1, mask.long().argmax(1)[:, None], 0)
        return torch.where((masked.amax(-1) == float("-inf"))[:, None], first, masked)

    def forced_after(self, row: int, path: Sequence[int], limit: int) -> list[int]:
        """The tokens after `path` that each were the only one allowed, up to and including EOS, at most `limit`."""
        chain = list(path)
        while len(chain) < len(path) + limit:
            token = self.allowed(row, tuple(chain)).only
            if token is None:
                break
            chain.append(token)
        return chain[len(path) :]

    def all_forced(self, count: int) -> bool:
        """Whether the next `count` tokens of every running row are forced, or all up to its end."""
        for row, running in enumerate(self.running):
            chain = self.forced_after(row, (), count) if running else []
            if running and len(chain) < count and self.eos.isdisjoint(chain):
                return False
        return True

    def forced_positions(self, row: int, chain: Sequence[int]) -> list[bool]:
        """Of each token of a drafted chain, whether it was the only one allowed. To be asked before `commit`."""
        return [
            self.allowed(row, tuple(chain[:position])).only is not None
            for position in range(len(chain))
        ]

    def commit(self, row: int, tokens: list[int]) -> tuple[list[int], bool]:
        """Moves the row's matcher behind `tokens`. Returns (the leading ones that it takes, whether the text can end or
        go on after them). EOS is the last that it takes."""
        matcher = self.matchers[row]
        if matcher is None:
            return tokens, True
        end = next((i for i, token in enumerate(tokens) if token in self.eos), len(tokens))
        taken = matcher.advance(tokens[:end])
        if taken < end:
            return tokens[:taken], False
        self.kept[row] = {}
        mask = matcher.allowed()
        if end < len(tokens):
            fits = bool(mask[tokens[end]])
            return tokens[: end + fits], fits
        return tokens, bool(mask.any())
