"""Drafts that wrap another draft: to record its proposals, to run it on another device than the target, to end its
chains where it is unsure, or to ask it only where a lookup finds nothing to copy.
"""

from dataclasses import replace

import torch
from torch import Tensor

from decode.common.errors import UserError
from decode.drafts.base import (
    ChainStop,
    Draft,
    DraftBuffers,
    DraftContext,
    Proposal,
    TokenTree,
    pad_chain,
    propose_within_context,
)
from decode.drafts.drafting import discard_draws
from decode.model.kv_cache import TreeNodes
from decode.verification.rules import NO_DRAFT


class DraftWrapper(Draft):
    """Passes every call on to `inner`. Subclasses change what differs."""

    def __init__(self, inner: Draft):
        self.inner, self.name = inner, inner.name
        self.runs, self.shape, self.reads = inner.runs, inner.shape, inner.reads

    def run_on_host(self) -> None:
        """Its proposals are read or made on the host, whatever more `inner` needs."""
        self.runs = "pass" if self.inner.runs == "pass" else "host"

    def refuse_trees(self, why: str) -> None:
        """UserError if this draft or `inner` was given the shape of a tree."""
        if self.shape is not None or self.inner.shape is not None:
            raise UserError(f"draft {self.name!r} {why}: give it no tree")

    def begin_batch(self, request: DraftContext) -> None:
        self.inner.begin_batch(request)

    def buffers(self) -> DraftBuffers:
        own = self.inner.buffers()
        return replace(own, drafts=[self, *own.drafts])

    def prefill(
        self, row: Tensor, prompts: Tensor, length: Tensor, features: Tensor | None
    ) -> None:
        self.inner.prefill(row, prompts, length, features)

    def on_commit(self, row: int, tokens: list[int]) -> None:
        self.inner.on_commit(row, tokens)

    def update_hidden_states(self, features: Tensor, count: Tensor) -> None:
        self.inner.update_hidden_states(features, count)

    def propose(self, history: Tensor, length: Tensor, k: int) -> Proposal:
        return self.inner.propose(history, length, k)

    def skip(self, history: Tensor, length: Tensor, k: int, proposed: bool = False) -> None:
        self.inner.skip(history, length, k, proposed)

    def plan_compiled_round(self, history: Tensor, length: Tensor, k: int) -> None:
        self.inner.plan_compiled_round(history, length, k)


class RecordingDraft(DraftWrapper):
    """Keeps a copy of every proposal of `inner` in `proposals`: the n-th belongs to each row's n-th round."""

    def __init__(self, inner: Draft):
        super().__init__(inner)
        self.proposals: list[Proposal] = []

    def propose(self, history: Tensor, length: Tensor, k: int) -> Proposal:
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
        self.runs = "host"
        self.device, self.target_device = device, target_device

    def begin_batch(self, request: DraftContext) -> None:
        def choose(weights: Tensor) -> Tensor:
            return request.choose(weights.to(self.target_device)).to(self.device)

        self.inner.begin_batch(replace(request, choose=choose))

    def prefill(
        self, row: Tensor, prompts: Tensor, length: Tensor, features: Tensor | None
    ) -> None:
        device = self.device
        moved = None if features is None else features.to(device)
        self.inner.prefill(row.to(device), prompts.to(device), length.to(device), moved)

    def update_hidden_states(self, features: Tensor, count: Tensor) -> None:
        self.inner.update_hidden_states(features.to(self.device), count.to(self.device))

    def buffers(self) -> DraftBuffers:
        return replace(super().buffers(), reader=self)

    def propose(self, history: Tensor, length: Tensor, k: int) -> Proposal:
        proposal = self.inner.propose(history.to(self.device), length.to(self.device), k)
        return Proposal(
            proposal.tokens.to(self.target_device),
            None if proposal.q is None else proposal.q.to(self.target_device),
            None if proposal.tree is None else self._to_target_device(proposal.tree),
            None if proposal.finite is None else proposal.finite.to(self.target_device),
        )

    def skip(self, history: Tensor, length: Tensor, k: int, proposed: bool = False) -> None:
        self.inner.skip(history.to(self.device), length.to(self.device), k, proposed)

    def _to_target_device(self, tree: TokenTree) -> TokenTree:
        nodes = tree.nodes
        parts = (nodes.index, nodes.depth, nodes.ancestor_mask)
        return TokenTree(
            tree.parents.to(self.target_device),
            TreeNodes(*(x.to(self.target_device) for x in parts)),
            tree.levels,
        )


class ConfidentDraft(DraftWrapper):
    """`inner`, whose chains have at most K tokens: one ends behind the token with which the product of its tokens'
    probabilities falls below `confidence`.

    That token stays drafted, so the distribution of the output is as it was. The host reads each proposal: CUDA graphs
    are refused. A lookup belongs inside, not in front.
    """

    def __init__(self, inner: Draft, confidence: float):
        super().__init__(inner)
        self.run_on_host()
        self.confidence = confidence

    def begin_batch(self, request: DraftContext) -> None:
        """UserError for trees and under grammars, whose forced tokens would count as its own."""
        self.refuse_trees("ends chains by confidence")
        if request.constraint is not None:
            raise UserError(
                f"draft {self.name!r} ends chains by confidence, which no grammar goes with yet: drop `confidence`"
            )
        self.stop = ChainStop([request.k] * request.rows, path=self.confidence)
        self.running: set[int] = set()  # rows that have committed since the last proposal
        self.inner.begin_batch(replace(request, stop=self.stop))

    def on_commit(self, row: int, tokens: list[int]) -> None:
        self.running.add(row)
        self.inner.on_commit(row, tokens)

    def propose(self, history: Tensor, length: Tensor, k: int) -> Proposal:
        """Rows that have ended, which the engine still asks for, draft nothing and hold up no other row."""
        self.stop.limit[:] = [k if row in self.running else 0 for row in range(len(length))]
        self.running = set()
        proposal = self.inner.propose(history, length, k)
        if proposal.tree is not None:
            raise UserError(f"draft {self.name!r} drafts trees, which confidence does not end")
        return proposal


class TwoSourceDraft(DraftWrapper):
    """Each row's chain is copied by `lookup`, a draft without a model, where it finds a match, else drafted by `inner`.

    The text so far alone decides which, so every token is verified with the distribution that it was drawn from: a
    copied one was certain, whether or not the vocabulary of `inner` has it. A round in which every row has a match, or
    is beyond the context of `inner`, does not ask it; its `skip` keeps its state. A row's random numbers are the same
    in both kinds of rounds, so that its text does not depend on the other rows.

    The host decides in every round, so CUDA graphs are refused, and of the draft's part only the chain of `inner` is
    compiled.
    """

    def __init__(self, lookup: Draft, inner: Draft, vocab_size: int):
        super().__init__(inner)
        self.run_on_host()
        # A lookup has no limit, and that of `inner` holds for its own rows alone.
        self.reads = replace(inner.reads, context=None)
        self.lookup, self.vocab_size = lookup, vocab_size
        self.name = f"{inner.name}+{lookup.name}"

    def begin_batch(self, request: DraftContext) -> None:
        """UserError for trees: a row of a match would have another shape than a row of the model."""
        self.refuse_trees("drafts chains only")
        self.request = request
        self.lookup.begin_batch(request)
        self.inner.begin_batch(request)

    def prefill(
        self, row: Tensor, prompts: Tensor, length: Tensor, features: Tensor | None
    ) -> None:
        self.lookup.prefill(row, prompts, length, None)
        self.inner.prefill(row, prompts, length, features)

    def on_commit(self, row: int, tokens: list[int]) -> None:
        self.lookup.on_commit(row, tokens)
        self.inner.on_commit(row, tokens)

    def propose(self, history: Tensor, length: Tensor, k: int) -> Proposal:
        copied = self.lookup.propose(history, length, k).tokens
        found = copied[:, 0] != NO_DRAFT
        settled = found
        if self.inner.reads.context is not None:  # rows beyond it are not drafted for either
            settled = found | (length >= self.inner.reads.context)
        rows, greedy = settled.tolist(), self.request.sampling.greedy
        if all(rows):
            self.inner.skip(history, length, k)
            discard_draws(self.request, length, k)
            # q and `finite` are given as in other rounds, because compiled code would be made anew without them.
            q = None if greedy else point_masses(copied, self.vocab_size)
            return Proposal(copied, q, finite=torch.ones_like(found))
        if self.request.stop is not None:  # in other rows no chain is needed
            limit = self.request.stop.limit
            limit[:] = [0 if is_settled else n for is_settled, n in zip(rows, limit, strict=True)]
        drafted = pad_chain(self._ask(history, length, k), k)
        if any(rows):
            self.inner.skip(history, length, k, proposed=True)
        tokens = torch.where(found[:, None], copied, drafted.tokens)
        if drafted.q is None:
            return Proposal(tokens, None, finite=drafted.finite)
        certain = point_masses(copied, self.vocab_size)
        q = torch.where(found[:, None, None], certain, drafted.q)
        return Proposal(tokens, q, finite=drafted.finite)

    def _ask(self, history: Tensor, length: Tensor, k: int) -> Proposal:
        """What `inner` proposes."""
        compiled, inner = self.request.compiled, self.inner
        if compiled is None or inner.runs != "device" or self.request.stop is not None:
            return propose_within_context(inner, history, length, k)
        inner.plan_compiled_round(history, length, k)
        return compiled(propose_within_context)(inner, history, length, k)

    def buffers(self) -> DraftBuffers:
        own = super().buffers()
        return replace(own, drafts=[*own.drafts, *self.lookup.buffers().drafts])


def point_masses(tokens: Tensor, vocab_size: int) -> Tensor:
    """[B, K, V] with 1 at each of the tokens [B, K]; what stands at NO_DRAFT is never read."""
    q = torch.zeros(*tokens.shape, vocab_size, device=tokens.device)
    return q.scatter_(-1, tokens.clamp_min(0)[..., None], 1.0)
