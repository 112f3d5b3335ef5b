"""One round on the device: propose, verify in one target pass, accept, commit. Nothing in it reads the device."""

import time
from dataclasses import dataclass

import torch

from decode.drafts.base import Draft, Proposal
from decode.engine.compile import compile_function
from decode.model.loading import Target
from decode.verification.registry import DraftedTokens, find_rule
from decode.verification.rules import NO_DRAFT, VerificationResult
from decode.verification.sampling import Sampler, SamplingParams


@dataclass(frozen=True)
class StepConfig:
    """How a round drafts and accepts."""

    k: int
    """Tokens of a chain, or levels of a tree, drafted a round."""
    sampling: SamplingParams
    choose: Sampler
    rule: str = "exact"
    """Name of a registered rule (decode/verification/registry.py)."""

    def __post_init__(self) -> None:
        find_rule(self.rule)


@dataclass
class BatchState:
    """B rows of text on the device, changed in place: a captured graph knows them by their addresses."""

    history: torch.Tensor  # [B, S] committed ids; whatever lies behind `length` is stale
    length: torch.Tensor  # [B]
    limit: torch.Tensor  # [B] length at which a row ends
    done: torch.Tensor  # [B] bool: the row stays as it is

    @staticmethod
    @torch.inference_mode()
    def empty(rows: int, size: int, device: torch.device) -> "BatchState":
        """Rows that hold two tokens of nothing and are done."""
        count = torch.full((rows,), 2, dtype=torch.long, device=device)
        history = torch.zeros(rows, size, dtype=torch.long, device=device)
        return BatchState(history, count, count.clone(), torch.ones_like(count, dtype=torch.bool))

    @torch.inference_mode()
    def clear(self) -> None:
        """No row holds anything."""
        self.length.fill_(2)
        self.limit.fill_(2)
        self.done.fill_(True)

    def reset_rows(
        self,
        row: torch.Tensor,
        tokens: torch.Tensor,
        length: torch.Tensor,
        first: torch.Tensor,
        limit: torch.Tensor,
        eos: torch.Tensor,
    ) -> None:
        """Rows `row` [b] hold prompts [b, W] of `length` and the `first` token that followed them."""
        self.history[row, : tokens.shape[1]] = tokens
        self.history[row, length] = first
        self.length[row] = length + 1
        self.limit[row] = limit
        self.done[row] = (first[:, None] == eos).any(1) | (length + 1 >= limit)

    def reserve(self, size: int) -> None:
        """Room for `size` tokens a row."""
        longer = self.history.new_zeros(len(self.history), size)
        longer[:, : self.history.shape[1]] = self.history
        self.history = longer


@dataclass
class PhaseTimes:
    """Seconds a phase, summed over rounds; filled only when asked for, since the clock stops the device."""

    draft: float = 0.0
    verify: float = 0.0
    total: float = 0.0
    rounds: int = 0

    @property
    def overhead(self) -> float:
        """What is neither draft nor target: acceptance, commit, reading the result."""
        return self.total - self.draft - self.verify


@torch.inference_mode()
def run_round(
    target: Target,
    draft: Draft | None,
    state: BatchState,
    rules: StepConfig,
    *,
    compiled: bool = False,
    phases: PhaseTimes | None = None,
) -> torch.Tensor:
    """Runs one round on `state` and returns its report [B, 4 + levels + N]: see `read`."""
    device = target.decoder.device
    draft_part, target_part = propose, verify_and_commit
    if compiled:
        target_part = compile_function(verify_and_commit, device.type)
        if draft is not None and not draft.on_host:
            draft_part = compile_function(propose, device.type)
    start = synchronized_time(device, phases)
    proposal = draft_part(draft, state, rules.k, target.decoder.context)
    if device.type == "cpu":
        proposal = drop_empty_columns(proposal, compiled)
    drafted = synchronized_time(device, phases)
    reader = draft if draft is not None and draft.taps is not None else None
    report = target_part(target, state, proposal, rules, reader)
    if phases is not None:
        phases.draft += drafted - start
        phases.verify += synchronized_time(device, phases) - drafted
    return report


def propose(draft: Draft | None, state: BatchState, k: int, context: int) -> Proposal:
    """The draft's proposal without what has no position in the context, and nothing for rows that are done."""
    if draft is None:
        return Proposal(state.history[:, :0], None)
    proposal = draft.propose(state.history, state.length, k)
    depth = node_depths(proposal)[..., 1:]
    room = (context - state.length).masked_fill(state.done, 0)
    tokens = torch.where(depth <= room[:, None], proposal.tokens, NO_DRAFT)
    return Proposal(tokens, proposal.q, proposal.tree)


def drop_empty_columns(proposal: Proposal, compiled: bool) -> Proposal:
    """A chain without the columns that no row fills, or whole if it must keep its shape and any is filled.

    It reads the tensor, which is free on a CPU and forbidden elsewhere.
    """
    tokens, q = proposal.tokens, proposal.q
    if proposal.tree is not None or tokens.shape[1] == 0:
        return proposal
    used = int((tokens != NO_DRAFT).sum(1).max())
    if compiled and used > 0:
        return proposal
    return Proposal(tokens[:, :used], None if q is None else q[:, :used])


def verify_and_commit(
    target: Target, state: BatchState, proposal: Proposal, rules: StepConfig, reader: Draft | None
) -> torch.Tensor:
    """Verifies in one pass of the target, accepts and commits. Returns the report.

    `reader` is a draft that taps the target: it gets the states of the accepted path.
    """
    root = state.history.gather(1, state.length[:, None] - 1)
    fed = torch.cat([root, proposal.tokens.clamp_min(0)], 1)
    nodes = None if proposal.tree is None else proposal.tree.nodes
    logits = target.decoder.step(fed, state.length - 1, nodes)
    verdict = verify(proposal, logits, rules)
    if proposal.tree is not None:
        assert verdict.path is not None
        target.decoder.keep(state.length - 1, verdict.path)
    if reader is not None:
        features = target.decoder.features
        if verdict.path is not None:
            features = features.gather(
                1, verdict.path[..., None].expand(-1, -1, features.shape[-1])
            )
        reader.update_hidden_states(features, (verdict.accepted + 1).masked_fill(state.done, 0))
    return commit(state, proposal, verdict, target.eos_ids)


def node_depths(proposal: Proposal) -> torch.Tensor:
    """[1|B, N + 1] depth of each node, the root's being 0."""
    if proposal.tree is not None:
        return proposal.tree.nodes.depth
    return torch.arange(proposal.tokens.shape[1] + 1, device=proposal.tokens.device)[None]


def verify(proposal: Proposal, logits: torch.Tensor, rules: StepConfig) -> VerificationResult:
    """Which drafted tokens stay and what follows them, by the registered rule `rules.rule`."""
    tokens, tree = proposal.tokens, proposal.tree
    drafted = DraftedTokens(
        tokens=tokens,
        logits=logits,
        q=proposal.q,
        parents=None if tree is None else tree.parents,
        depth=tokens.shape[1] if tree is None else tree.levels,
        sampling=rules.sampling,
        sampler=rules.choose,
    )
    return find_rule(rules.rule).verify(drafted)


def commit(
    state: BatchState, proposal: Proposal, verdict: VerificationResult, eos: torch.Tensor
) -> torch.Tensor:
    """Writes drafts and bonus behind the committed ids, moves lengths on, and ends rows. Returns the report.

    A row that is done keeps its length; what is written behind it is never read.
    """
    tokens, tree = proposal.tokens, proposal.tree
    if tree is None:
        chosen = tokens
    else:
        assert verdict.path is not None
        chosen = tokens.gather(1, (verdict.path[:, 1:] - 1).clamp_min(0))
    emitted = torch.cat([chosen, verdict.bonus[:, None]], 1)
    emitted = emitted.scatter(
        1, verdict.accepted[:, None], verdict.bonus[:, None]
    )  # [B, levels + 1]
    place = torch.arange(emitted.shape[1], device=emitted.device)
    state.history.scatter_(1, state.length[:, None] + place, emitted)
    fresh = place <= verdict.accepted[:, None]
    ended = ((emitted[..., None] == eos).any(-1) & fresh).any(-1)
    length = state.length + (verdict.accepted + 1).masked_fill(state.done, 0)
    state.length.copy_(length)
    state.done.logical_or_(ended | (length >= state.limit))
    drafted = (tokens != NO_DRAFT).sum(1)
    levels = torch.full_like(drafted, emitted.shape[1] - 1)
    head = torch.stack([drafted, verdict.accepted, levels], 1)
    return torch.cat([head, emitted, tokens], 1)


@dataclass(frozen=True)
class RowResult:
    """One row of a round as the host sees it."""

    drafted: int
    accepted: int
    tokens: list[int]  # accepted drafts and the bonus, not trimmed
    proposed: list[int]


def read_results(report: torch.Tensor) -> list[RowResult]:
    """The report's rows: the one read of the device in a round."""
    return [
        RowResult(
            drafted=drafted,
            accepted=accepted,
            tokens=rest[: accepted + 1],
            proposed=[token for token in rest[levels + 1 :] if token != NO_DRAFT],
        )
        for drafted, accepted, levels, *rest in report.tolist()
    ]


def synchronized_time(device: torch.device, wanted: PhaseTimes | bool | None = True) -> float:
    """Seconds now, after the device has finished; 0 when nobody asked."""
    if wanted is None:
        return 0.0
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
