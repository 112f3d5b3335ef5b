"""A draft on another device than its target: a second GPU, or the CPU beside one."""

from dataclasses import replace

import torch

from decode.cache import Nodes, Slots
from decode.drafts.base import Draft, Proposal, Request, Tree


class ElsewhereDraft(Draft):
    """`inner`, whose weights lie on `device`, drafting for a target on `home`.

    History goes there and the proposal comes back, which the host waits for: worth it where the target leaves no
    room, or where the other device would idle. Not for captured rounds.
    """

    on_host = True

    def __init__(self, inner: Draft, device: torch.device, home: torch.device):
        self.inner, self.device, self.home = inner, device, home
        self.name, self.taps, self.shape = inner.name, inner.taps, inner.shape

    def reach(self, k: int) -> int:
        return self.inner.reach(k)

    def begin(self, request: Request) -> None:
        def choose(weights: torch.Tensor) -> torch.Tensor:
            return request.choose(weights.to(self.home)).to(self.device)

        self.inner.begin(replace(request, choose=choose))

    def stores(self) -> list[Slots]:
        return self.inner.stores()

    def admit(
        self,
        row: torch.Tensor,
        prompts: torch.Tensor,
        length: torch.Tensor,
        features: torch.Tensor | None,
    ) -> None:
        there = None if features is None else features.to(self.device)
        where = self.device
        self.inner.admit(row.to(where), prompts.to(where), length.to(where), there)

    def absorb(self, features: torch.Tensor, count: torch.Tensor) -> None:
        self.inner.absorb(features.to(self.device), count.to(self.device))

    def reserve(self, size: int) -> None:
        self.inner.reserve(size)

    def observe(self, row: int, tokens: list[int]) -> None:
        self.inner.observe(row, tokens)

    def propose(self, history: torch.Tensor, length: torch.Tensor, k: int) -> Proposal:
        made = self.inner.propose(history.to(self.device), length.to(self.device), k)
        return Proposal(
            made.tokens.to(self.home),
            None if made.q is None else made.q.to(self.home),
            None if made.tree is None else self._home(made.tree),
        )

    def _home(self, tree: Tree) -> Tree:
        nodes = tree.nodes
        parts = (nodes.index, nodes.depth, nodes.visible)
        return Tree(
            tree.parents.to(self.home), Nodes(*(x.to(self.home) for x in parts)), tree.levels
        )
