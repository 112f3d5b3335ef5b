"""Grammars of token ids as finite automata: for tests of constrained decoding without llguidance."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from decode.constraints.grammar import Matcher

Rules = Mapping[str, Mapping[int, str]]
"""{state: {allowed token: the next state}}. EOS is such a token; what comes after it does not matter."""
START = "start"


@dataclass
class Automaton(Matcher):
    """A place in `rules`, which begin at START."""

    rules: Rules
    vocab: int
    states: list[str] = field(default_factory=lambda: [START])

    def copy(self) -> "Automaton":
        return Automaton(self.rules, self.vocab, list(self.states))

    def allowed(self) -> torch.Tensor:
        mask = torch.zeros(self.vocab, dtype=torch.bool)
        mask[list(self.rules[self.states[-1]])] = True
        return mask

    def advance(self, tokens: Sequence[int]) -> int:
        for count, token in enumerate(tokens):
            if token not in self.rules[self.states[-1]]:
                return count
            self.states.append(self.rules[self.states[-1]][token])
        return len(tokens)

    def rollback(self, count: int) -> None:
        assert 0 <= count < len(self.states)
        del self.states[len(self.states) - count :]


def follows(rules: Rules, text: Sequence[int], eos: int) -> bool:
    """Whether the text is one that the rules allow, EOS at its end at most."""
    state = START
    for place, token in enumerate(text):
        if token not in rules[state] or (token == eos and place + 1 < len(text)):
            return False
        state = rules[state][token]
    return True


def fields(vocab: int, eos: int, runs: Sequence[int], seed: int = 0) -> Rules:
    """Like JSON: for each of `runs` that many forced tokens, then up to three chosen ones of half the vocabulary, ended
    by a token that those cannot be; then EOS."""
    rng = random.Random(seed)
    tokens = [token for token in range(vocab) if token != eos]
    rules: dict[str, dict[int, str]] = {}
    state = START
    for number, length in enumerate(runs):
        for place in range(length):
            after = f"{number} key {place + 1}"
            rules[state] = {rng.choice(tokens): after}
            state = after
        mark, *values = rng.sample(tokens, len(tokens) // 2)
        for place in range(3):
            after, end = f"{number} value {place + 1}", f"{number + 1} key 0"
            rules[state] = dict.fromkeys(values, after) | ({mark: end} if place > 0 else {})
            state = after
        rules[state] = {mark: end}
        state = end
    rules[state] = {eos: ""}
    return rules
