"""Proposals under grammars: the draft's chains, lengthened by the tokens that a grammar forces behind them."""

import torch
import torch.nn.functional as F

from decode.constraints.rows import RowConstraints
from decode.drafts.base import Draft, DraftContext, Proposal, propose_within_context
from decode.drafts.drafting import discard_draws
from decode.drafts.wrappers import point_masses
from decode.verification.rules import NO_DRAFT

MAX_FORCED = 8
"""Forced tokens behind a chain of K at most; the buffers of drafts grow with it."""


def propose_with_forced_tokens(
    draft: Draft, history: torch.Tensor, length: torch.Tensor, request: DraftContext
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
        chain = Proposal(history[:, :0], None, finite=every)
    if chain.q is None:
        discard_draws(request, length, k)
    tokens = add_forced_tokens(chain.tokens, constraint, k + request.extra)
    width, added = tokens.shape[1], tokens.shape[1] - chain.tokens.shape[1]
    if not asked:
        draft.skip(history, length, width)
    elif added > 0:
        draft.on_replaced(width)
    if request.sampling.greedy:
        return Proposal(tokens, None, finite=chain.finite)
    certain = point_masses(tokens, len(constraint.anything.mask))
    if chain.q is None:
        return Proposal(tokens, certain, finite=chain.finite)
    drafted = F.pad(chain.tokens, (0, added), value=NO_DRAFT) != NO_DRAFT
    q = torch.where(drafted[..., None], F.pad(chain.q, (0, 0, 0, added)), certain)
    return Proposal(tokens, q, finite=chain.finite)


def add_forced_tokens(tokens: torch.Tensor, constraint: RowConstraints, limit: int) -> torch.Tensor:
    """[B, N'] from chains [B, N]: each goes on with the tokens that its grammar forces, up to `limit` tokens in all."""
    chains = []
    for row, ids in enumerate(tokens.tolist()):
        chain = [token for token in ids if token != NO_DRAFT]
        chains.append(chain + constraint.forced_after(row, chain, limit - len(chain)))
    width = max(tokens.shape[1], *map(len, chains))
    padded = [chain + [NO_DRAFT] * (width - len(chain)) for chain in chains]
    return torch.tensor(padded, dtype=torch.long, device=tokens.device).reshape(len(chains), width)
