"""The rounds of speculative decoding along a text that the target has written, for every K and rule, without drafting
again.

A lossless rule leaves the text's law as it is, so a text y drawn from the target is a text that the engine would emit.
Given this text, a round that begins behind position t accepts token j + 1 of its chain, once j were accepted, with

    one-hot drafts (the draft's argmax, n-grams)   1 if y is the drafted token, else 0
    drawn drafts, token by token                   min(1, q / p)
    drawn drafts, block verification               min(1, q / (r p)), then r becomes min(1, r p / q); r = 1 at first

where p and q are what target and draft give to the text's next token, the draft having read the text and, within its
chain, the text's tokens. (The joint law of a drawn token, its acceptance and what is emitted instead, divided by p:
Leviathan et al. 2023; Sun et al. 2025 for blocks.) A round that accepts a tokens is followed by one that begins a + 1
further on. Both together are a Markov chain along the text, whose expected counts are sums: nothing is simulated.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from decode.common.errors import UserError
from decode.serving.checker import ENGINES
from eval.metrics.bootstrap import Array


@dataclass(frozen=True)
class TextChains:
    """An answer of the target, and what a draft that is asked behind each of its tokens gives to the next K tokens.

    Row s is a chain behind s + 1 tokens of the answer, column j its token j + 1. The text goes on K tokens past the
    answer's end, because engines count what a last round accepts there.
    """

    task: str
    id: str
    length: int
    """Tokens of the answer, the first one (prefill's) and EOS included."""
    p: Array
    """[S, K] the target's probability of the text's token; 1 in greedy decoding."""
    q: Array
    """[S, K] the draft's probability of it at the same temperature, its chain having the text's tokens so far."""
    best: Array
    """[S, K] bool: it is the draft's most probable token, or the token that an n-gram match gives."""
    drafted: Array
    """[S] tokens of the chain: K, or fewer where a match ends or there is none."""


@dataclass(frozen=True)
class ExpectedRounds:
    """Expected counts of one text; sums of them are those of several texts."""

    emitted: float
    """Tokens after prefill's, trimmed at EOS and limit."""
    rounds: float
    drafting_rounds: float
    """Rounds that drafted at least one token: the rounds that serving engines count."""
    drafted: float
    reached: Array
    """[K] rounds that drafted token i and accepted the i - 1 before it."""
    accepted: Array
    """[K] rounds that accepted token i; not trimmed."""


def text_to_json(text: TextChains) -> dict[str, Any]:
    """The fields of a text, arrays as lists."""
    return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in vars(text).items()}


def text_from_json(values: dict[str, Any]) -> TextChains:
    arrays = {name: np.array(values[name]) for name in ("p", "q", "best", "drafted")}
    return TextChains(**{**values, **arrays})


def accept_one_hot(chains: TextChains) -> Array:
    return chains.best.astype(np.float64)


def accept_drawn(chains: TextChains) -> Array:
    return np.minimum(1.0, chains.q / chains.p)


def accept_block(chains: TextChains) -> Array:
    accept, r = np.zeros_like(chains.q), np.ones(len(chains.q))
    for i, (p, q) in enumerate(zip(chains.p.T, chains.q.T, strict=True)):
        accept[:, i] = np.minimum(1.0, q / (r * p))
        r = np.minimum(1.0, r * p / np.maximum(q, np.finfo(np.float64).tiny))
    return accept


RULES: dict[str, Callable[[TextChains], Array]] = {
    "greedy": accept_one_hot,
    "probabilistic": accept_drawn,
    "block": accept_block,
}
"""{rule: [S, K] probability that token j + 1 of each chain is accepted, given the text and that j were accepted}."""


def expected_rounds(chains: TextChains, rule: str, k: int) -> ExpectedRounds:
    """Expected counts of this text's rounds with `k` drafted tokens, k at most the measured K."""
    place = np.arange(k)
    has_token = place < chains.drafted[:, None]
    accept = np.where(has_token, RULES[rule](chains)[:, :k], 0.0)
    reach = np.cumprod(accept, axis=1)  # at least i tokens are accepted
    begins = round_starts(reach, chains.length - 1)
    reach, has_token = reach[: len(begins)], has_token[: len(begins)]
    before = np.concatenate([np.ones((len(begins), 1)), reach], axis=1)[:, :k]
    return ExpectedRounds(
        emitted=chains.length - 1.0,
        rounds=float(begins.sum()),
        drafting_rounds=float(begins @ has_token.any(1)) if k else 0.0,
        drafted=float(begins @ has_token.sum(1)),
        reached=begins @ (before * has_token),
        accepted=begins @ reach,
    )


def round_starts(reach: Array, starts: int) -> Array:
    """[starts] probability that a round begins behind token s + 1, given P(at least i accepted) [S, K] of a round
    there. The first round begins behind the first token."""
    begins = np.zeros(starts)
    begins[:1] = 1.0
    ends = np.zeros((len(reach), 1))
    exactly = np.diff(np.concatenate([ends + 1, reach, ends], axis=1), axis=1) * -1  # 0 … K
    for s in range(starts):
        reachable = begins[s + 1 : s + 1 + exactly.shape[1]]
        reachable += begins[s] * exactly[s, : len(reachable)]
    return begins


def add_rounds(texts: Sequence[ExpectedRounds]) -> ExpectedRounds:
    sums = {name: sum(vars(text)[name] for text in texts) for name in vars(texts[0])}
    return ExpectedRounds(**sums)


ENGINE_RULES: dict[str, Mapping[str, str]] = {
    **{name: engine.accepts for name, engine in ENGINES.items() if engine.accepts},
    "draftsmith": {"probabilistic": "rule exact", "block": "rule block"},
}
"""How engines accept chains at a temperature above 0: {engine: {rule: what chooses it}}."""


def rules_of(engines: Sequence[str]) -> list[str]:
    """The rules that these engines have. UserError for an unknown engine."""
    for engine in engines:
        if engine not in ENGINE_RULES:
            raise UserError(f"no engine {engine!r}: give some of {', '.join(ENGINE_RULES)}")
    accepts = [x for engine, own in ENGINE_RULES.items() if engine in engines for x in own]
    return list(dict.fromkeys(accepts))
