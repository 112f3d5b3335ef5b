"""The interface between drafts and the engine."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from decode.common.lock import claim
from decode.constraints.rows import RowConstraints
from decode.model.hidden_states import HiddenStateSpec
from decode.model.kv_cache import StaticKVCache, TreeNodes
from decode.model.loading import Target
from decode.verification.rules import NO_DRAFT
from decode.verification.sampling import Sampler, SamplingParams
from decode.verification.tree import TreeShape


@dataclass(frozen=True)
class ChainStop:
    """Where chains end before K tokens. The token behind which a chain ends stays drafted: if its value decided whether
    it is drafted, q would not be the distribution that drafted tokens have."""

    limit: list[int]
    """Tokens of each row's chain at most. Set anew, in place, before each `propose`."""
    token: float = 0.0
    """A chain ends behind a token to which the draft gives less probability than this, at temperature 1."""
    path: float = 0.0
    """A chain ends behind the token with which the product of these probabilities falls below this."""


@dataclass(frozen=True)
class DraftContext:
    """What a draft is given before the first prompt of a batch."""

    rows: int
    size: int  # tokens that a row can hold, drafted ones included
    k: int
    sampling: SamplingParams
    choose: Sampler
    stop: ChainStop | None = None  # None: chains have K tokens
    constraint: RowConstraints | None = None
    """The grammars of the rows: tokens are drawn among those that they allow. None: there are none."""
    extra: int = 0
    """Tokens beyond `k` that a round may commit: forced ones, which the engine adds behind chains."""
    compiled: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    """Gives a function compiled, where rounds are: a draft that decides on the host asks another one by it."""
    closing: ExitStack = field(default_factory=ExitStack)
    """What a draft registers here is called when the requests have ended, or failed: it takes its hooks off a target
    that other drafts share."""


@dataclass(frozen=True)
class TokenTree:
    """The shape of a token tree. Node 0 is the last committed token, node i + 1 is tokens[:, i] of its Proposal."""

    parents: Tensor  # [N] or [B, N] each drafted node's parent, whose number is lower
    nodes: TreeNodes  # all N + 1 nodes, as the target verifies them
    levels: int  # length of the longest path that can be accepted


@dataclass(frozen=True)
class Proposal:
    """Drafted tokens; NO_DRAFT (decode/verification/rules.py) where there is none.

    Without `tree` they are a chain, and q [B, N, V] is the distribution that each token was drawn from. With a tree, q
    [B, N + 1, V] is the distribution that each node's children were drawn from without replacement. q None: the tokens
    were not drawn (most probable ones, matches).
    """

    tokens: Tensor  # [B, N]
    q: Tensor | None
    tree: TokenTree | None = None
    finite: Tensor | None = None
    """[B] bool: the draft's logits were numbers; None: it has none. NaN would be accepted as any token."""
    allowed: Tensor | None = None
    """[B, N + 1, V] bool, given by the engine for chains: the tokens that the rows' grammars allow after the committed
    text and after each drafted token. None: all tokens."""


def empty_chain(rows: Tensor, finite: Tensor | None = None) -> Proposal:
    """No token for any row of `rows` [B, ...]. Not a slice of it, whose stride compiled code would be made anew for."""
    return Proposal(rows.new_empty(len(rows), 0), None, finite=finite)


def cut_proposal(proposal: Proposal, room: Tensor) -> Proposal:
    """The proposal with NO_DRAFT for tokens that are deeper than the `room` [B] of their row."""
    if proposal.tree is None:
        depth = torch.arange(1, proposal.tokens.shape[1] + 1, device=room.device)[None]
    else:
        depth = proposal.tree.nodes.depth[..., 1:]
    tokens = torch.where(depth <= room[:, None], proposal.tokens, NO_DRAFT)
    return replace(proposal, tokens=tokens)


def propose_within_context(draft: "Draft", history: Tensor, length: Tensor, k: int) -> Proposal:
    """What the draft proposes, with NO_DRAFT for tokens beyond its own context."""
    proposal = draft.propose(history, length, k)
    limit = draft.reads.context
    return proposal if limit is None else cut_proposal(proposal, limit - length)


def pad_chain(proposal: Proposal, width: int) -> Proposal:
    """A chain with `width` columns at least: NO_DRAFT in those that it lacked. A tree as it is."""
    missing = width - proposal.tokens.shape[1]
    if proposal.tree is not None or missing <= 0:
        return proposal
    tokens = F.pad(proposal.tokens, (0, missing), value=NO_DRAFT)
    q = None if proposal.q is None else F.pad(proposal.q, (0, 0, 0, missing))
    return Proposal(tokens, q, finite=proposal.finite)


@dataclass(frozen=True)
class DraftBuffers:
    """What rounds of a draft read and change in place."""

    drafts: list["Draft"]
    """Those whose tensors a round uses: the draft and those inside it."""
    reader: "Draft"
    """The one whose `update_hidden_states` is called. Compiled code is specific to its class."""
    kv_caches: list[StaticKVCache] = field(default_factory=list)
    """The engine enlarges them as texts grow. The `slots` of one are a new object whenever it was allocated anew or
    enlarged."""
    state: list[Tensor] = field(default_factory=list)
    """Tensors that a later round reads as they are: a CUDA graph puts them back after the rounds that warm it up, which
    the text never sees. KV buffers are not among them: slots from a row's length on are written again before they are
    read."""
    can_grow: bool = True
    """Whether compiled code of this draft runs for any number of slots of its KV caches."""


@dataclass(frozen=True)
class Reads:
    """What a draft reads."""

    aux_layers: HiddenStateSpec | None = None
    """Hidden states of the target: `prefill` and `update_hidden_states` bring them."""
    target: Target | None = None
    """The target whose hidden states, layers or embedding it reads: it drafts for no other. None: it reads text."""
    tokenizer: str = ""
    """Fingerprint of the tokenizer whose ids it drafts; empty: that of any target, or not known."""
    context: int | None = None
    """Tokens that its model can read, drafted ones included: nothing is drafted beyond them. None: it has no limit of
    its own, and the engine's is the target's."""


class Draft:
    """Base class of everything that proposes tokens: a family overrides `propose` and what else it needs.

    A draft's state must be rebuildable from the token history: rejected tokens are simply overwritten there.
    """

    name: str
    runs: Literal["device", "host", "pass"] = "device"
    """Where it drafts. host: from what `on_commit` brings or other numbers on the host, so the engine must read each
    round before it starts the next. pass: so, and in the middle of the target's pass, which therefore is not compiled.
    """
    shape: TreeShape = None
    """Shape of its proposals, in families that support trees."""
    reads: Reads = Reads()

    def begin_batch(self, request: DraftContext) -> None:
        """Starts a batch with empty rows."""

    def buffers(self) -> DraftBuffers:
        """Its buffers as they are now."""
        return DraftBuffers([self], self)

    def prefill(
        self, row: Tensor, prompts: Tensor, length: Tensor, features: Tensor | None
    ) -> None:
        """Rows `row` [b] get new prompts [b, W], right-padded, of `length` [b].

        `features` [b, W, F] are the target's hidden states that `reads.aux_layers` names; None without them.
        """

    def on_commit(self, row: int, tokens: list[int]) -> None:
        """These ids were committed to the row, as read on the host: first prompt and first token, then each round's."""

    def update_hidden_states(self, features: Tensor, count: Tensor) -> None:
        """A round has committed `count` [B] tokens; the first `count` of `features` [B, P, F] are the hidden states of
        the token before each of them (the root and the accepted drafts). 0 for rows that do not change.

        Only called for a draft that reads hidden states. It runs on the device, inside a round.
        """

    def propose(self, history: Tensor, length: Tensor, k: int) -> Proposal:
        """Up to k tokens, or k levels of a tree, after the first `length` [B] ids of history [B, S].

        k may be smaller than that of `begin_batch` for chains, which may have fewer columns than k if the draft is
        asked to stop early (`DraftContext.stop`).
        """
        raise NotImplementedError

    def skip(self, history: Tensor, length: Tensor, k: int, proposed: bool = False) -> None:
        """A round's tokens, up to k, come from elsewhere, or none are drafted: later proposals are those that the text
        gives, as if the draft had been asked. It takes the place of `propose`, or with `proposed` follows it: then only
        a draft that takes the tokens of its last proposal, or their number, for those of the text has something to do.

        Nothing is to be done for a draft whose state is kept by `prefill`, `update_hidden_states` and `on_commit`.
        """

    def plan_compiled_round(self, history: Tensor, length: Tensor, k: int) -> None:
        """Runs before a `propose` that is compiled while the round is not: the numbers on the host that it reads become
        ones of few, since there is compiled code for each. What `propose` does in some rounds only, such as reading the
        tokens of skipped rounds, is done here."""


def check_request(draft: Draft, k: int, sampling: SamplingParams) -> None:
    """UserError if the draft cannot draft `k` tokens a round under `sampling`; it starts an empty batch to find out."""
    for part in draft.buffers().drafts:
        claim(part, f"draft {part.name!r}")
    with ExitStack() as closing:
        draft.begin_batch(DraftContext(1, 1, k, sampling, lambda p: p.argmax(-1), closing=closing))
