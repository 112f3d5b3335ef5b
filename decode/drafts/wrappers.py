"""Drafts that wrap another draft: one that runs on another device than the target, and one that records proposals."""

from dataclasses import replace

import torch

from decode.drafts.base import Draft, DraftContext, Proposal, TokenTree
from decode.model.kv_cache import SlotMapping, TreeNodes


class DraftWrapper(Draft):
    """Passes every call on to `inner`. Subclasses change what differs.

    Not for captured rounds: a CUDA graph would not keep the tensors of `inner` alive.
    """

    def __init__(self, inner: Draft):
        self.inner, self.on_host = inner, inner.on_host
        self.name, self.taps, self.shape = inner.name, inner.taps, inner.shape

    def max_slots(self, k: int) -> int:
        return self.inner.max_slots(k)

    def begin_batch(self, request: DraftContext) -> None:
        self.inner.begin_batch(request)

    def kv_slots(self) -> list[SlotMapping]:
        return self.inner.kv_slots()

    def prefill(
        self,
        row: torch.Tensor,
        prompts: torch.Tensor,
        length: torch.Tensor,
        features: torch.Tensor | None,
    ) -> None:
        self.inner.prefill(row, prompts, length, features)

    def reserve(self, size: int) -> None:
        self.inner.reserve(size)

    def on_commit(self, row: int, tokens: list[int]) -> None:
        self.inner.on_commit(row, tokens)

    def update_hidden_states(self, features: torch.Tensor, count: torch.Tensor) -> None:
        self.inner.update_hidden_states(features, count)

    def propose(self, history: torch.Tensor, length: torch.Tensor, k: int) -> Proposal:
        return self.inner.propose(history, length, k)


class RecordingDraft(DraftWrapper):
    """Keeps a copy of every proposal of `inner` in `proposals`: the n-th belongs to each row's n-th round."""

    def __init__(self, inner: Draft):
        super().__init__(inner)
        self.proposals: list[Proposal] = []

    def propose(self, history: torch.Tensor, length: torch.Tensor, k: int) -> Proposal:
        proposal = self.inner.propose(history, length, k)
        q = None if proposal.q is None else proposal.q.clone()
        self.proposals.append(Proposal(proposal.tokens.clone(), q, proposal.tree, proposal.finite))
        return proposal


class CrossDeviceDraft(DraftWrapper):
    """`inner`, whose weights lie on `device`, drafts for a target on `target_device`: a second GPU, or the CPU.

    The history is copied to `device` and the proposal back, and the host waits for the copy. This pays where the
    target's device has no memory left, or where the other device would be idle.
    """

    def __init__(self, inner: Draft, device: torch.device, target_device: torch.device):
        super().__init__(inner)
        self.on_host = True
        self.device, self.target_device = device, target_device

    def begin_batch(self, request: DraftContext) -> None:
        def choose(weights: torch.Tensor) -> torch.Tensor:
            return request.choose(weights.to(self.target_device)).to(self.device)

        self.inner.begin_batch(replace(request, choose=choose))

    def prefill(
        self,
        row: torch.Tensor,
        prompts: torch.Tensor,
        length: torch.Tensor,
        features: torch.Tensor | None,
    ) -> None:
        device = self.device
        moved = None if features is None else features.to(device)
        self.inner.prefill(row.to(device), prompts.to(device), length.to(device), moved)

    def update_hidden_states(self, features: torch.Tensor, count: torch.Tensor) -> None:
        self.inner.update_hidden_states(features.to(self.device), count.to(self.device))

    def propose(self, history: torch.Tensor, length: torch.Tensor, k: int) -> Proposal:
        proposal = self.inner.propose(history.to(self.device), length.to(self.device), k)
        return Proposal(
            proposal.tokens.to(self.target_device),
            None if proposal.q is None else proposal.q.to(self.target_device),
            None if proposal.tree is None else self._to_target_device(proposal.tree),
            None if proposal.finite is None else proposal.finite.to(self.target_device),
        )

    def _to_target_device(self, tree: TokenTree) -> TokenTree:
        nodes = tree.nodes
        parts = (nodes.index, nodes.depth, nodes.ancestor_mask)
        return TokenTree(
            tree.parents.to(self.target_device),
            TreeNodes(*(x.to(self.target_device) for x in parts)),
            tree.levels,
        )
