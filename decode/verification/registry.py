"""Verification rules by name. A new rule is one function of tensors and one call of `register_rule`.

    def verify_argmax(drafted: DraftedTokens) -> VerificationResult:  # of chains
        return verify_greedy(drafted.tokens, drafted.logits.argmax(-1))

    register_rule(VerificationRule("argmax", lossless=False, verify=verify_argmax, description="…"))

From then on `rule: argmax` is accepted wherever a rule is a setting, and reports label its methods lossy.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from decode.common.errors import UserError
from decode.verification.rules import (
    VerificationResult,
    verify_block,
    verify_chain,
    verify_greedy,
    verify_tree,
    verify_tree_sampled,
    verify_typical,
)
from decode.verification.sampling import Sampler, SamplingParams, warp
from decode.verification.tree import chain_parents


@dataclass(frozen=True)
class DraftedTokens:
    """What a rule verifies: the drafted tokens of one round of B rows, and the target's logits after each of them."""

    tokens: Tensor
    """[B, N] token ids, NO_DRAFT where a row has none. A chain has N = K."""
    logits: Tensor
    """[B, N + 1, V] of the target: after the last committed token, then after each drafted token."""
    q: Tensor | None
    """The draft's distributions, [B, K, V] that a chain was drawn from or [B, N + 1, V] after each node of a tree;
    None: the tokens were not drawn (most probable ones, n-gram matches), which is always so for greedy decoding."""
    parents: Tensor | None
    """[N] or [B, N] of a tree, as in decode/verification/tree.py; None: a chain."""
    depth: int
    """K of a chain; levels of a tree."""
    sampling: SamplingParams
    sampler: Sampler
    """All random choices go through it; it is not used for greedy decoding."""

    def p(self) -> Tensor:
        """[B, N + 1, V] the target's distributions under `sampling`; one-hot at the argmax for greedy decoding."""
        if self.sampling.greedy:
            best = self.logits.argmax(-1, keepdim=True)
            dtype = torch.promote_types(self.logits.dtype, torch.float32)
            return torch.zeros_like(self.logits, dtype=dtype).scatter(-1, best, 1)
        return warp(self.logits, self.sampling)


@dataclass(frozen=True)
class VerificationRule:
    """A rule that decides which drafted tokens stay and which token follows them."""

    name: str
    lossless: bool
    """The output follows the target's distribution exactly, whatever the draft; False: reports mark it as lossy."""
    verify: Callable[[DraftedTokens], VerificationResult]
    """Reads no tensor on the host and works on fixed shapes: torch.compile and CUDA graphs trace it. For a tree the
    result needs `path`."""
    description: str
    """One line for tables and help."""


VERIFICATION_RULES: dict[str, VerificationRule] = {}


def register_rule(rule: VerificationRule) -> None:
    """Makes a rule known by its name. UserError if the name is taken."""
    if rule.name in VERIFICATION_RULES:
        raise UserError(f"there is a verification rule {rule.name!r} already: choose another name")
    VERIFICATION_RULES[rule.name] = rule


def find_rule(name: str) -> VerificationRule:
    """The registered rule of this name. UserError with the known names if there is none."""
    if name not in VERIFICATION_RULES:
        raise UserError(f"no verification rule {name!r}; there are {', '.join(VERIFICATION_RULES)}")
    return VERIFICATION_RULES[name]


def verify_exact(drafted: DraftedTokens) -> VerificationResult:
    """The lossless rule that fits how the tokens were drafted: chain or tree, drawn from q or not."""
    tokens, parents, depth = drafted.tokens, drafted.parents, drafted.depth
    if drafted.sampling.greedy:
        best = drafted.logits.argmax(-1)
        if parents is None:
            return verify_greedy(tokens, best)
        return verify_tree(tokens, parents, depth, best)
    if parents is None:
        return verify_chain(tokens, drafted.p(), drafted.q, drafted.sampler)
    if drafted.q is None:
        return verify_tree(tokens, parents, depth, drafted.sampler(drafted.p()))
    return verify_tree_sampled(tokens, parents, depth, drafted.p(), drafted.q, drafted.sampler)


def verify_block_exact(drafted: DraftedTokens) -> VerificationResult:
    """`verify_block` for a chain that was drawn from q; `verify_exact` for everything else."""
    if drafted.sampling.greedy or drafted.parents is not None or drafted.q is None:
        return verify_exact(drafted)
    return verify_block(drafted.tokens, drafted.p(), drafted.q, drafted.sampler)


def verify_typical_acceptance(drafted: DraftedTokens) -> VerificationResult:
    """`verify_typical` of a chain or tree; greedy decoding accepts at temperature 1 and takes the argmax as bonus."""
    tokens, parents, greedy = drafted.tokens, drafted.parents, drafted.sampling.greedy
    if parents is None:
        parents = chain_parents(drafted.depth, tokens.device)
    p = warp(drafted.logits, SamplingParams(1.0)) if greedy else drafted.p()
    result = verify_typical(tokens, parents, drafted.depth, p, drafted.sampler)
    if not greedy:
        return result
    last = result.path.gather(1, result.accepted[:, None])  # type: ignore[union-attr]
    bonus = drafted.logits.argmax(-1).gather(1, last)[:, 0]
    return VerificationResult(result.accepted, bonus, result.path)


register_rule(
    VerificationRule(
        "exact",
        lossless=True,
        verify=verify_exact,
        description="speculative sampling, token by token (Leviathan et al. 2023; on trees Miao et al. 2024)",
    )
)
register_rule(
    VerificationRule(
        "block",
        lossless=True,
        verify=verify_block_exact,
        description="block verification of chains of sampled tokens (Sun et al. 2025); otherwise exact",
    )
)
register_rule(
    VerificationRule(
        "typical",
        lossless=False,
        verify=verify_typical_acceptance,
        description="typical acceptance (Medusa, Cai et al. 2024): accepts more, output does not follow p",
    )
)
