"""One round on the device: propose, verify in one pass of the target, accept, commit. No tensor is read on the host."""

import time
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from decode.constraints.rows import RowConstraints
from decode.drafts.base import (
    Draft,
    DraftContext,
    Proposal,
    cut_proposal,
    empty_chain,
    pad_chain,
    propose_within_context,
)
from decode.drafts.drafting import discard_draws
from decode.drafts.wrappers import point_masses
from decode.engine.compiled import compile_function
from decode.model.loading import Target
from decode.verification.registry import DraftedTokens, find_rule
from decode.verification.rules import NO_DRAFT, VerificationResult
from decode.verification.sampling import Sampler, SamplingParams, has_finite_logits

# ---- memory ----


def round_bytes(
    rows: int,
    tokens: int,
    vocab: int,
    sampling: SamplingParams,
    *,
    rule: str = "exact",
    tree: bool = False,
    itemsize: int = 4,
) -> int:
    """Bytes that are alive at once at the worst moment of a round that verifies `tokens` tokens of each row.

    `tokens` are K + 1 of a chain, or the nodes of a `tree` with its root, or 1 of plain decoding. `itemsize` is that of
    the target's logits; probabilities are in fp32. It holds for drafts that draw their
    tokens from q; activations of the layers are not counted, and neither is what kernels allocate for themselves, nor
    the copy that a draw makes of a vocabulary of no multiple of 256 tokens.
    """
    wide, row = rows * tokens * vocab, rows * vocab
    logits = itemsize * wide
    if sampling.greedy and rule != "typical":
        return logits
    q = 0 if tree or sampling.greedy else 4 * (wide - row)
    p = 4
    cut = 0 if sampling.greedy else 4 + p  # scores and their softmax
    if not sampling.greedy and sampling.top_k > 0:
        cut = 4 + 4 + 1  # scores before, after, mask
    if not sampling.greedy and sampling.top_p < 1:
        cut = p + 4 + 8 + 4 + 1  # sorted, their order, the sums before each, mask
    if rule == "typical":
        drawn = (p + 4) * wide  # the terms of the entropy
    elif tree or tokens == 1:
        drawn = p * wide  # a token is drawn at each node
    else:
        residuals = 4 if rule == "block" else 3  # p, q and what is left of them
        drawn = p * wide + 4 * residuals * row
    return logits + q + max(cut * wide, drawn)


# ---- proposals under grammars ----

MAX_FORCED = 8
"""Forced tokens behind a chain of K at most; the buffers of drafts grow with it."""


def propose_with_forced_tokens(
    draft: Draft, history: Tensor, length: Tensor, request: DraftContext
) -> Proposal:
    """A chain of `request.k` tokens of the draft and up to `request.extra` forced ones behind it.

    The draft is not asked in a round in which the next K tokens of every running row are forced. Forced tokens have
    q = 1, and their p is 1 as well. Above temperature 0 there is a q for every proposal, and the random numbers are
    those of K drafted tokens, so that a row's text depends on no other row.
    """
    constraint, k = request.constraint, request.k
    assert constraint is not None
    asked = not constraint.all_forced(k)
    if asked:
        chain = propose_within_context(draft, history, length, k)
    else:
        every = torch.ones_like(length, dtype=torch.bool)
        chain = empty_chain(history, every)
    if chain.q is None:
        discard_draws(request, length, k)
    tokens = add_forced_tokens(chain.tokens, constraint, k + request.extra)
    width, added = tokens.shape[1], tokens.shape[1] - chain.tokens.shape[1]
    if not asked:
        draft.skip(history, length, width)
    elif added > 0:
        draft.skip(history, length, width, proposed=True)
    if request.sampling.greedy:
        return Proposal(tokens, None, finite=chain.finite)
    certain = point_masses(tokens, len(constraint.anything.mask))
    if chain.q is None:
        return Proposal(tokens, certain, finite=chain.finite)
    drafted = F.pad(chain.tokens, (0, added), value=NO_DRAFT) != NO_DRAFT
    q = torch.where(drafted[..., None], F.pad(chain.q, (0, 0, 0, added)), certain)
    return Proposal(tokens, q, finite=chain.finite)


def add_forced_tokens(tokens: Tensor, constraint: RowConstraints, limit: int) -> Tensor:
    """[B, N'] from chains [B, N]: each goes on with the tokens that its grammar forces, up to `limit` tokens in all."""
    chains = []
    for row, ids in enumerate(tokens.tolist()):
        chain = [token for token in ids if token != NO_DRAFT]
        chains.append(chain + constraint.forced_after(row, chain, limit - len(chain)))
    width = max(tokens.shape[1], *map(len, chains))
    padded = [chain + [NO_DRAFT] * (width - len(chain)) for chain in chains]
    return torch.tensor(padded, dtype=torch.long, device=tokens.device).reshape(len(chains), width)


# ---- rounds ----


@dataclass(frozen=True)
class StepConfig:
    """How a round drafts and accepts. UserError for an unknown rule."""

    k: int
    """Tokens of a chain, or levels of a tree, drafted in a round."""
    sampling: SamplingParams
    choose: Sampler
    rule: str = "exact"
    """Name of a registered rule (decode/verification/registry.py)."""
    constrained: DraftContext | None = None
    """What the draft was given, where rows have grammars; None: no row has one."""

    def __post_init__(self) -> None:
        find_rule(self.rule)


@dataclass
class BatchState:
    """B rows of token ids on the device, changed in place: a captured CUDA graph holds their addresses."""

    history: Tensor  # [B, S] committed ids; those from `length` on are stale
    length: Tensor  # [B]
    limit: Tensor  # [B] length at which a row ends
    done: Tensor  # [B] bool: the row does not change any more

    @staticmethod
    @torch.inference_mode()
    def empty(rows: int, size: int, device: torch.device) -> "BatchState":
        """`rows` rows of `size` slots that are done, with two meaningless tokens each."""
        count = torch.full((rows,), 2, dtype=torch.long, device=device)
        history = torch.zeros(rows, size, dtype=torch.long, device=device)
        return BatchState(history, count, count.clone(), torch.ones_like(count, dtype=torch.bool))

    @torch.inference_mode()
    def clear(self) -> None:
        self.length.fill_(2)
        self.limit.fill_(2)
        self.done.fill_(True)

    def reset_rows(
        self, row: Tensor, tokens: Tensor, length: Tensor, first: Tensor, limit: Tensor, eos: Tensor
    ) -> None:
        """Rows `row` [b] start with prompts [b, W] of `length` [b], their `first` token [b] and `limit` [b]."""
        self.history[row, : tokens.shape[1]] = tokens
        self.history[row, length] = first
        self.length[row] = length + 1
        self.limit[row] = limit
        self.done[row] = (first[:, None] == eos).any(1) | (length + 1 >= limit)

    def reserve(self, size: int) -> None:
        longer = self.history.new_zeros(len(self.history), size)
        longer[:, : self.history.shape[1]] = self.history
        self.history = longer


@dataclass
class PhaseTimes:
    """Seconds of each phase, summed over rounds; measured only on request, since timing synchronizes the device."""

    draft: float = 0.0
    verify: float = 0.0
    total: float = 0.0
    rounds: int = 0

    @property
    def overhead(self) -> float:
        """Seconds outside draft and target: acceptance, commit, reading the result."""
        return self.total - self.draft - self.verify


@torch.inference_mode()
def run_round(
    target: Target,
    draft: Draft | None,
    state: BatchState,
    config: StepConfig,
    *,
    compiled: bool = False,
    phases: PhaseTimes | None = None,
    skip_draft: bool = False,
) -> Tensor:
    """Runs one round on `state` and returns its results [B, 5 + levels + N], which `read_results` decodes.

    With `skip_draft` the draft is not asked: no row that is being decoded is within its context any more.
    """
    device = target.runner.device
    draft_part, target_part = propose, verify_and_commit
    if compiled:
        target_part = compile_function(verify_and_commit, device.type)
        if draft is not None and draft.runs == "device":
            draft_part = compile_function(propose, device.type)
    start = synchronized_time(device, phases)
    context, constrained = target.runner.context, config.constrained
    if draft is not None and skip_draft:
        # In vain, as where it is asked: a row's random numbers depend on no other row.
        discard_draws(config, state.length, config.k if draft.shape is None else 0)
        proposal = empty_chain(state.history)
    elif draft is None or constrained is None:
        proposal = draft_part(draft, state, config.k, context)
    else:
        proposal = propose_with_forced_tokens(draft, state.history, state.length, constrained)
        proposal = cut_at_context(proposal, state, context)
    if device.type == "cpu":
        proposal = drop_empty_columns(proposal, compiled)
    if constrained is not None and constrained.constraint is not None:
        allowed = constrained.constraint.masks_along(proposal.tokens)
        proposal = replace(proposal, allowed=allowed)
    if compiled and proposal.tokens.shape[1] > 0:
        proposal = pad_chain(proposal, config.k)
    drafted = synchronized_time(device, phases)
    reader = None
    if draft is not None and draft.reads.aux_layers is not None:
        reader = draft.buffers().reader
    results = target_part(target, state, proposal, config, reader)
    if phases is not None:
        phases.draft += drafted - start
        phases.verify += synchronized_time(device, phases) - drafted
    return results


def propose(draft: Draft | None, state: BatchState, k: int, context: int) -> Proposal:
    """The draft's proposal, with NO_DRAFT for tokens beyond the context and in rows that are done."""
    if draft is None:
        return empty_chain(state.history)
    proposal = propose_within_context(draft, state.history, state.length, k)
    return cut_at_context(proposal, state, context)


def cut_at_context(proposal: Proposal, state: BatchState, context: int) -> Proposal:
    """The proposal with NO_DRAFT for tokens beyond the target's context and in rows that are done."""
    return cut_proposal(proposal, (context - state.length).masked_fill(state.done, 0))


def can_skip(draft: Draft, shortest: int, config: StepConfig) -> bool:
    """Whether a round need not ask the draft: the shortest of the rows that are being decoded has `shortest` tokens and
    is beyond the draft's context, as all are, and no grammar may force tokens."""
    limit = draft.reads.context
    beyond = limit is not None and shortest >= limit
    return beyond and config.constrained is None and draft.runs != "pass"


def drop_empty_columns(proposal: Proposal, compiled: bool) -> Proposal:
    """A chain without the columns in which no row has a token; compiled code keeps all columns unless all are empty,
    so that it has two shapes.

    It reads the tensor on the host, which costs nothing on a CPU and is forbidden on other devices.
    """
    tokens, q = proposal.tokens, proposal.q
    if proposal.tree is not None or tokens.shape[1] == 0:
        return proposal
    used = int((tokens != NO_DRAFT).sum(1).max())
    if used == 0:
        return empty_chain(tokens, proposal.finite)
    if compiled:
        return proposal
    q = None if q is None else q[:, :used]
    return Proposal(tokens[:, :used], q, finite=proposal.finite)


def verify_and_commit(
    target: Target, state: BatchState, proposal: Proposal, config: StepConfig, reader: Draft | None
) -> Tensor:
    """Verifies in one pass of the target, accepts and commits. Returns the results, as `run_round`.

    `reader` is the draft if it reads hidden states: it gets the target's hidden states of the accepted path.
    """
    root = state.history.gather(1, state.length[:, None] - 1)
    fed = torch.cat([root, proposal.tokens.clamp_min(0)], 1)
    nodes = None if proposal.tree is None else proposal.tree.nodes
    logits = target.runner.step(fed, state.length - 1, nodes)
    result = verify(proposal, logits, config)
    if proposal.tree is not None:
        assert result.path is not None
        target.runner.compact_kv_cache(state.length - 1, result.path)
    if reader is not None:
        features = target.runner.features
        if result.path is not None:
            features = features.gather(1, result.path[..., None].expand(-1, -1, features.shape[-1]))
        reader.update_hidden_states(features, (result.accepted + 1).masked_fill(state.done, 0))
    return commit(state, proposal, result, target.eos_ids, has_finite_logits(logits))


def verify(proposal: Proposal, logits: Tensor, config: StepConfig) -> VerificationResult:
    """Which drafted tokens stay and what follows them, by the registered rule `config.rule`.

    Logits of tokens that a grammar forbids become -inf before temperature, top-k and top-p.
    """
    tokens, tree = proposal.tokens, proposal.tree
    if proposal.allowed is not None:
        logits = logits.masked_fill(~proposal.allowed, float("-inf"))
    drafted = DraftedTokens(
        tokens=tokens,
        logits=logits,
        q=proposal.q,
        parents=None if tree is None else tree.parents,
        depth=tokens.shape[1] if tree is None else tree.levels,
        sampling=config.sampling,
        sampler=config.choose,
    )
    return find_rule(config.rule).verify(drafted)


def commit(
    state: BatchState, proposal: Proposal, result: VerificationResult, eos: Tensor, finite: Tensor
) -> Tensor:
    """Appends accepted tokens and bonus to the history, updates lengths and ends rows. Returns the round's results.

    `finite` [B] tells whether the target's logits were numbers; it is passed on to the results. A row that is done
    keeps its length; what is written after it is never read.
    """
    tokens, tree = proposal.tokens, proposal.tree
    if tree is None:
        chosen = tokens
    else:
        assert result.path is not None
        chosen = tokens.gather(1, (result.path[:, 1:] - 1).clamp_min(0))
    emitted = torch.cat([chosen, result.bonus[:, None]], 1)
    # [B, levels + 1]
    emitted = emitted.scatter(1, result.accepted[:, None], result.bonus[:, None])
    position = torch.arange(emitted.shape[1], device=emitted.device)
    state.history.scatter_(1, state.length[:, None] + position, emitted)
    is_new = position <= result.accepted[:, None]
    ended = ((emitted[..., None] == eos).any(-1) & is_new).any(-1)
    length = state.length + (result.accepted + 1).masked_fill(state.done, 0)
    state.length.copy_(length)
    state.done.logical_or_(ended | (length >= state.limit))
    drafted = (tokens != NO_DRAFT).sum(1)
    levels = torch.full_like(drafted, emitted.shape[1] - 1)
    draft_finite = torch.ones_like(finite) if proposal.finite is None else proposal.finite
    head = torch.stack([drafted, result.accepted, levels, finite + 2 * draft_finite], 1)
    return torch.cat([head, emitted, tokens], 1)


@dataclass(frozen=True)
class RowResult:
    """One row of a round's results, on the host."""

    drafted: int
    accepted: int
    tokens: list[int]  # accepted drafted tokens and the bonus token, not trimmed
    proposed: list[int]
    target_finite: bool  # the logits were numbers
    draft_finite: bool


def read_results(results: Tensor) -> list[RowResult]:
    """The rows of a round's results: the only read of a device tensor in a round."""
    return [
        RowResult(
            drafted=drafted,
            accepted=accepted,
            tokens=rest[: accepted + 1],
            proposed=[token for token in rest[levels + 1 :] if token != NO_DRAFT],
            target_finite=finite % 2 == 1,
            draft_finite=finite >= 2,
        )
        for drafted, accepted, levels, finite, *rest in results.tolist()
    ]


def synchronized_time(device: torch.device, wanted: PhaseTimes | bool | None = True) -> float:
    """The clock in seconds after the device has finished its queue; 0 without synchronizing if `wanted` is None."""
    if wanted is None:
        return 0.0
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
