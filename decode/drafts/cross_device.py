"""A draft on another device than its target: a second GPU, or the CPU beside one."""

from dataclasses import replace

import torch

from decode.drafts.base import Draft, DraftContext, Proposal, TokenTree
from decode.model.kv_cache import SlotMapping, TreeNodes


class CrossDeviceDraft(Draft):
    """`inner`, whose weights lie on `device`, drafting for a target on `home`.

    History goes there and the proposal comes back, which the host waits for: worth it where the target leaves no
    room, or where the other device would idle. Not for captured rounds.
    """

    on_host = True

    def __init__(self, inner: Draft, device: torch.device, home: torch.device):
        self.inner, self.device, self.target_device = inner, device, home
        self.name, self.taps, self.shape = inner.name, inner.taps, inner.shape

    def reach(self, k: int) -> int:
        return self.inner.reach(k)

    def begin_batch(self, request: DraftContext) -> None:
        def choose(weights: torch.Tensor) -> torch.Tensor:
            return request.choose(weights.to(self.target_device)).to(self.device)

        self.inner.begin_batch(replace(request, choose=choose))

    def kv_slots(self) -> list[SlotMapping]:
        return self.inner.kv_slots()

    def prefill(
        self,
        row: torch.Tensor,
        prompts: torch.Tensor,
        length: torch.Tensor,
        features: torch.Tensor | None,
    ) -> None:
        there = None if features is None else features.to(self.device)
        where = self.device
        self.inner.prefill(row.to(where), prompts.to(where), length.to(where), there)

    def update_hidden_states(self, features: torch.Tensor, count: torch.Tensor) -> None:
        self.inner.update_hidden_states(features.to(self.device), count.to(self.device))

    def reserve(self, size: int) -> None:
        self.inner.reserve(size)

    def on_commit(self, row: int, tokens: list[int]) -> None:
        self.inner.on_commit(row, tokens)

    def propose(self, history: torch.Tensor, length: torch.Tensor, k: int) -> Proposal:
        made = self.inner.propose(history.to(self.device), length.to(self.device), k)
        return Proposal(
            made.tokens.to(self.target_device),
            None if made.q is None else made.q.to(self.target_device),
            None if made.tree is None else self._to_target_device(made.tree),
        )

    def _to_target_device(self, tree: TokenTree) -> TokenTree:
        nodes = tree.nodes
        parts = (nodes.index, nodes.depth, nodes.ancestor_mask)
        return TokenTree(
            tree.parents.to(self.target_device),
            TreeNodes(*(x.to(self.target_device) for x in parts)),
            tree.levels,
        )
