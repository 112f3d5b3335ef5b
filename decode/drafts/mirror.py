"""Mirror speculative decoding (arXiv 2510.13161): a small LM drafts while the target verifies.

    draft = MirrorDraft(load_draft(path, target), target, MirrorConfig(exit_layer=15, branches=2))
    speculate(target, draft, prompts, k=3)

When the target's pass reaches the exit layer ℓe, the final norm and the LM head are applied to its hidden states there.
Their most probable tokens at each position of the window are guesses of how verification will end. A second thread
drafts K tokens behind every guess while the target computes the layers above. If the (number of accepted tokens, bonus
token) of the round is among the guesses, the next proposal is there already; else it is drafted as usual.

The distribution of the output stays: a branch's tokens are drawn from q, which is kept, with random numbers of their
own, and which branch is used depends on the outcome of the verification alone.
"""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from decode.common.errors import UserError
from decode.common.ranges import check_ranges
from decode.drafts.base import Draft, DraftContext, Proposal
from decode.drafts.branches import (
    BranchSet,
    accepted_path,
    draft_branches,
    exit_candidates,
    find_branch,
)
from decode.drafts.causal import CausalDraft
from decode.drafts.drafting import discard_draws
from decode.drafts.settings import MirrorConfig
from decode.drafts.wrappers import DraftWrapper
from decode.model.hidden_states import LMHead
from decode.model.layer_stack import check_exit, final_norm, layer_stack
from decode.model.loading import Target

# ---- counts and times ----


@dataclass
class OverlapCounts:
    """Sums over rounds; seconds are those of the whole batch, other counts are of rows."""

    rounds: int = 0
    """Rounds after which there were branches to choose from."""
    reused: int = 0
    """Rounds whose (accepted tokens, bonus token) had a branch."""
    positions: int = 0
    """Committed tokens of these rounds."""
    exit_hits: int = 0
    """Those that were among the exit's most probable ones, whether drafted or bonus tokens."""
    passes: int = 0
    """Passes of the target with branches beside them."""
    lower_seconds: float = 0.0
    """The target's time up to the exit layer."""
    upper_seconds: float = 0.0
    """The target's time from there to its logits, as the same cores were shared or not."""
    branch_seconds: float = 0.0
    """Drafting branches, the exit's logits included."""
    wait_seconds: float = 0.0
    """The target had its logits and the branches were not drafted yet."""
    redraft_seconds: float = 0.0
    """Drafting after verification, because a row had no branch."""
    redrafts: int = 0

    def rates(self) -> dict[str, float | None]:
        """reuse_rate: ρ, rounds that used a branch ÷ rounds that had branches. exit_hit_rate: committed tokens among
        the exit's most probable ones ÷ all. hidden_share: seconds of drafting beside the target ÷ all of drafting. None
        where there was nothing to divide by."""
        drafting = self.branch_seconds + self.redraft_seconds
        hidden = self.branch_seconds - self.wait_seconds
        return {
            "reuse_rate": self.reused / self.rounds if self.rounds else None,
            "exit_hit_rate": self.exit_hits / self.positions if self.positions else None,
            "hidden_share": hidden / drafting if drafting else None,
        }


# ---- the draft ----


class MirrorDraft(DraftWrapper):
    """`inner`, a small LM, whose next chain is drafted in branches while the target verifies the last one.

    Text and rounds do not depend on the threads: the branches are complete before verification draws, so random
    numbers are drawn in a fixed order. A row's text does not depend on the other rows. All rows draft again if one of
    them has no branch, and those that have one keep it. Rounds are eager, and the host reads each of them.

    Memory: q of (K + 1) · branches · K tokens for each row, which is 9 MB at K = 3, two branches and 49,152 tokens.
    """

    inner: CausalDraft

    def __init__(self, inner: Draft, target: Target, config: MirrorConfig):
        """UserError for a draft that is no small LM with a KV cache of its own, for a GPU, and for an exit layer that
        the target does not have."""
        if not isinstance(inner, CausalDraft):
            raise UserError(
                f"mirror needs a small language model as draft, which reads the text alone: {inner.name!r} is none "
                "and cannot draft before the target's pass has ended"
            )
        if target.runner.device.type != "cpu" or inner.runner.device.type != "cpu":
            raise UserError(
                "mirror runs target and draft in two threads of a CPU: choose device cpu or drop it"
            )
        check_ranges(config, "mirror.")
        model = target.runner.model
        check_exit(config.exit_layer, target.runner.config.num_hidden_layers)
        super().__init__(inner)
        self.config, self.name = config, f"mirror {inner.name}"
        self.runs, self.reads = "pass", replace(inner.reads, target=target)
        self.layers = layer_stack(model)
        self.norm, self.head = final_norm(model), LMHead(model)
        self.last_module = model.get_output_embeddings()
        self.counts = OverlapCounts()
        """Since the last one that was put here; it is not set back by a batch."""
        self.thread = ThreadPoolExecutor(1)

    def begin_batch(self, request: DraftContext) -> None:
        """Hooks stay in the target until the requests end. UserError for trees, and for a grammar, which branches do
        not follow."""
        self.refuse_trees("drafts chains only")
        if request.constraint is not None:
            raise UserError(
                f"draft {self.name!r} follows no grammar: leave out mirror, or the grammar"
            )
        # The window, all branches, and a chain behind them.
        self.spare = (max(1, (request.k + 1) * self.config.branches) + 2) * request.k + 1
        self.inner.begin_batch(replace(request, size=request.size + self.spare))
        device = self.inner.runner.device
        self.request = request
        self.base = torch.ones(request.rows, dtype=torch.long, device=device)  # slots of the roots
        self.window = torch.zeros(request.rows, 0, dtype=torch.long, device=device)
        self.has_branches = torch.zeros(request.rows, dtype=torch.bool, device=device)
        self.branches: BranchSet | None = None
        self.ranked: Tensor | None = None  # [B, T, branches] the exit's most probable tokens
        self.pending: Future[BranchSet] | None = None
        self.verifying = False  # the target's next pass is that of a proposal, not of prompts
        exit_layer = self.layers[self.config.exit_layer if self.config.branches else 0]
        handles = [
            exit_layer.register_forward_pre_hook(self._begin_branches, with_kwargs=True),
            self.last_module.register_forward_hook(self._collect_branches),
        ]
        for handle in handles:
            request.closing.callback(handle.remove)
        request.closing.callback(self._abandon_branches)

    def prefill(
        self, row: Tensor, prompts: Tensor, length: Tensor, features: Tensor | None
    ) -> None:
        """To the next proposal the prompt's last token is a root without a window, and the first token its bonus."""
        self.inner.prefill(row, prompts, length, features)
        self.base[row] = length - 1
        self.has_branches[row] = False

    def propose(self, history: Tensor, length: Tensor, k: int) -> Proposal:
        """The branch of the outcome in rows that have it; the other rows are drafted now."""
        runner, rows = self.inner.runner, torch.arange(len(length), device=length.device)
        runner.reserve(history.shape[1] + self.spare)
        runner.cache.slots.limit_to(runner.shape[1])
        outcome = length - self.base - 2  # accepted tokens; below 0 in rows that are done
        accepted = outcome.clamp_min(0)
        bonus = history.gather(1, length[:, None] - 1)[:, 0]
        found, number = torch.zeros_like(self.has_branches), torch.zeros_like(accepted)
        branches = self.branches
        if branches is not None:
            found, number = find_branch(branches, accepted, bonus)
            found = found & self.has_branches
            self._count(history, outcome, found)
        if branches is not None and not bool((~found & (outcome >= 0)).any()):
            discard_draws(self.request, length, k)
            chosen = take_branch(branches, rows, number)
        else:
            start = time.perf_counter()
            after = self.window.shape[1] + 1 + (0 if branches is None else branches.nodes.numel())
            drafted = draft_branches(
                runner, self.base, None, accepted[:, None], bonus[:, None], after, k, self.request
            )
            chosen = take_branch(drafted, rows, torch.zeros_like(number))
            if branches is not None:
                chosen = where_found(found, take_branch(branches, rows, number), chosen)
            self.counts.redraft_seconds += time.perf_counter() - start
            self.counts.redrafts += 1
        path = accepted_path(accepted, chosen.nodes, self.window.shape[1])
        runner.compact_kv_cache(self.base, path)
        self.base, self.window, self.branches = length - 1, chosen.proposal.tokens, None
        self.verifying, self.started = True, time.perf_counter()
        return chosen.proposal

    def _abandon_branches(self) -> None:
        """Ends what is still drafted where the target's pass or the other thread has failed."""
        if self.pending is not None:
            self.pending.exception()
            self._end_overlap()

    def _begin_branches(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Branches are drafted from the exit layer's input on, and complete when the target's logits are passed on."""
        if not self.verifying:
            return
        states = (args[0] if args else kwargs["hidden_states"]).clone()
        self.counts.lower_seconds += time.perf_counter() - self.started
        self.cores = torch.get_num_threads()
        if self.config.overlap:
            # torch's number of threads belongs to a thread: while both run, each has half of the cores.
            self.pending = self.thread.submit(self._draft_branches, states, max(1, self.cores // 2))
            torch.set_num_threads(max(1, self.cores - self.cores // 2))
        else:
            self.branches = self._draft_branches(states, self.cores)
        self.reached = time.perf_counter()

    def _collect_branches(self, module: Any, args: tuple[Any, ...], logits: Tensor) -> None:
        if not self.verifying:
            return
        finished, self.verifying = time.perf_counter(), False
        if self.pending is not None:
            self.branches = self.pending.result()
            self._end_overlap()
        self.has_branches.fill_(True)
        self.counts.passes += 1
        self.counts.upper_seconds += finished - self.reached
        self.counts.wait_seconds += time.perf_counter() - finished

    def _end_overlap(self) -> None:
        """The other thread is done: all cores are the target's again."""
        self.pending = None
        torch.set_num_threads(self.cores)

    @torch.inference_mode()
    def _draft_branches(self, states: Tensor, threads: int) -> BranchSet:
        """The branches of all outcomes that the exit's states [B, T, H] make probable."""
        torch.set_num_threads(threads)
        start = time.perf_counter()
        accepted, bonus = self._outcomes(states)
        k, first = self.window.shape[1], self.window.shape[1] + 1
        found = draft_branches(
            self.inner.runner, self.base, self.window, accepted, bonus, first, k, self.request
        )
        self.counts.branch_seconds += time.perf_counter() - start
        return found

    def _outcomes(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """(accepted [1, R], bonus [B, R]) that branches are drafted for. The text and the window alone decide."""
        width = self.window.shape[1]
        if self.config.branches == 0:
            self.ranked = None
            logits = self.inner.runner.step(self.window[:, -1:], self.base + width)
            return self.base.new_full((1, 1), width), logits.argmax(-1)
        logits = self.head(self.norm(states))
        self.ranked = logits.topk(min(self.config.branches, logits.shape[-1])).indices
        bonus = exit_candidates(logits, self.window, self.config.branches)
        position = torch.arange(bonus.shape[1], device=bonus.device)
        return position.repeat_interleave(bonus.shape[2])[None], bonus.flatten(1)

    def _count(self, history: Tensor, outcome: Tensor, found: Tensor) -> None:
        """Adds the rows that had branches and are not done; `outcome` [B] is the number of accepted tokens."""
        live = self.has_branches & (outcome >= 0)
        self.counts.rounds += int(live.sum())
        self.counts.reused += int((found & live).sum())
        if self.ranked is not None:
            position = torch.arange(self.ranked.shape[1], device=history.device)
            committed = history.gather(
                1, (self.base[:, None] + 1 + position).clamp_max(history.shape[1] - 1)
            )
            hit = (self.ranked == committed[..., None]).any(-1)
            inside = live[:, None] & (position <= outcome[:, None])
            self.counts.positions += int(inside.sum())
            self.counts.exit_hits += int((hit & inside).sum())


@dataclass(frozen=True)
class ChosenBranch:
    """One branch of each row: its proposal and the numbers of its nodes [B, K]."""

    proposal: Proposal
    nodes: Tensor


def take_branch(branches: BranchSet, rows: Tensor, number: Tensor) -> ChosenBranch:
    """Branch `number` [B] of each of the `rows` [B], with the q that its tokens were drawn from."""
    q = None if branches.q is None else branches.q[rows, :, number]
    proposal = Proposal(branches.tokens[rows, :, number], q, finite=branches.finite[rows, number])
    return ChosenBranch(proposal, branches.nodes[:, number].T)


def where_found(found: Tensor, one: ChosenBranch, other: ChosenBranch) -> ChosenBranch:
    """`one` in the rows where `found` [B], `other` elsewhere."""
    q = None
    if one.proposal.q is not None and other.proposal.q is not None:
        q = torch.where(found[:, None, None], one.proposal.q, other.proposal.q)
    tokens = torch.where(found[:, None], one.proposal.tokens, other.proposal.tokens)
    assert one.proposal.finite is not None
    assert other.proposal.finite is not None
    finite = torch.where(found, one.proposal.finite, other.proposal.finite)
    nodes = torch.where(found[:, None], one.nodes, other.nodes)
    return ChosenBranch(Proposal(tokens, q, finite=finite), nodes)
