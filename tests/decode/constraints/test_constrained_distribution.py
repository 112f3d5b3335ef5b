"""The law of constrained decoding, enumerated through the real engine, is the target's masked law.

The grammar is a small automaton, so that no package is needed and every mask is known by heart.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from decode.constraints.rows import AllowedTokens, Path, RowConstraints
from decode.drafts import drafting
from decode.drafts.base import Draft, Proposal
from decode.drafts.causal import CausalDraft
from decode.drafts.lookup import GrammarDraft, NgramDraft
from decode.engine import engine
from decode.engine import round as engine_round
from decode.engine.engine import decode
from decode.model.loading import Target
from decode.model.runner import ModelRunner
from decode.verification import rules as verification_rules
from decode.verification.rules import VerificationResult
from decode.verification.sampling import SamplingParams, warp
from tests.automata import START, Automaton, Rules
from tests.decode.verification.test_exact_distribution import Branches, small
from tests.spellings import two_of_three
from tests.tiny import noisy, reference, tiny_target

A, B, EOS = range(3)
VOCAB = 3
RULES: Rules = {
    START: {A: "a", B: "b"},
    "a": {B: "b", EOS: ""},
    "b": {A: "end"},  # forced
    "end": {B: "b", EOS: ""},
}
PROMPT = [0, 2, 1]
LENGTH = 3
FORCED = 1
"""Forced tokens behind a chain at most: few, so that there are few branches."""
SAMPLING = SamplingParams(0.7)
CUT = SamplingParams(0.7, top_k=2, top_p=0.9)
Law = dict[tuple[int, ...], float]
"""{text: probability}"""


def near(target: Target) -> CausalDraft:
    return CausalDraft(ModelRunner(noisy(target.runner.model, 0.4)))


def reduced(target: Target) -> CausalDraft:
    """It knows only A, so there are places at which it knows none of the allowed tokens."""
    return CausalDraft(ModelRunner(noisy(target.runner.model, 0.4), ids=torch.tensor([A])))


class PossibleBranches(Branches):
    """Branches of probability 0 go on as the most probable one, with weight 0: a place without a draft is no token that
    a model could read."""

    def __call__(self, weights: Tensor) -> Tensor:
        picked = super().__call__(weights)
        share = weights.gather(-1, picked[..., None])[..., 0]
        return torch.where(share > 0, picked, weights.argmax(-1))


# name: (draft, keywords of decode)
CASES: dict[str, tuple[Callable[[Target], Draft | None], dict[str, Any]]] = {
    "plain": (lambda target: None, {}),
    "chain": (near, {}),
    "top-k, top-p": (near, {"sampling": CUT}),
    "block": (near, {"rule": "block"}),
    "reduced": (reduced, {}),
    "other tokenizer": (two_of_three, {}),
    "one-hot": (lambda target: NgramDraft(), {}),
    "forced only": (lambda target: GrammarDraft(), {}),
}


@torch.no_grad()
def masked_law(sampling: SamplingParams) -> Law:
    """Plain forward passes of a plain HF model; masked, then warped, token by token."""
    plain, done = reference(small()), {}
    texts: dict[tuple[int, ...], tuple[str, float]] = {(): (START, 1.0)}
    while texts:
        longer = {}
        for text, (state, mass) in texts.items():
            logits = plain(torch.tensor([[*PROMPT, *text]])).logits[0, -1]
            allowed = list(RULES[state])
            mask = torch.full_like(logits, float("-inf"))
            mask[allowed] = 0
            probs = warp(logits + mask, sampling).double()
            for token in allowed:
                share = mass * float(probs[token])
                if token == EOS or len(text) + 1 == LENGTH:
                    done[*text, token] = share
                else:
                    longer[*text, token] = RULES[state][token], share
        texts = longer
    return done


def distance(name: str) -> float:
    """TV of what `decode` emits from the masked law of the target. How many branches there are depends on the longest
    chain of each round, so a run with too few of them tells how many there are."""
    make, keywords = CASES[name]
    settings = {"sampling": SAMPLING} | keywords
    target, paths = tiny_target(small(), eos=(EOS,)), 3**2
    for _ in range(6):
        choose = PossibleBranches(1, paths)
        outputs = decode(
            target, make(target), [PROMPT] * paths, k=1, max_new_tokens=LENGTH, choose=choose,
            matchers=[Automaton(RULES, VOCAB)] * paths, **settings,
        )  # fmt: skip
        if choose.walked == paths:
            break
        paths = choose.walked
    assert choose.walked == paths
    law = {text: -share for text, share in masked_law(settings["sampling"]).items()}
    for output, weight in zip(outputs, choose.weight.tolist(), strict=True):
        text = tuple(output.output_ids)
        law[text] = law.get(text, 0.0) + weight
    return sum(map(abs, law.values())) / 2


@pytest.fixture(autouse=True)
def few_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "MAX_FORCED", FORCED)


@pytest.mark.parametrize("name", CASES)
def test_text_follows_the_masked_law(name: str) -> None:
    """Catches masks of the wrong place, a q that is not what was drawn from, forced tokens that move the law, and texts
    that end where the grammar does not. Exact: no false alarm."""
    assert distance(name) < 1e-7  # HF norms compute in fp32


def accept_by_unmasked_p(monkeypatch: pytest.MonkeyPatch) -> None:
    verify, weigh, seen = engine_round.verify, verification_rules.accept_weights, []

    def remember(
        proposal: Proposal, logits: Tensor, config: engine_round.StepConfig
    ) -> VerificationResult:
        seen.append(warp(logits, config.sampling))
        return verify(proposal, logits, config)

    monkeypatch.setattr(engine_round, "verify", remember)
    monkeypatch.setattr(
        verification_rules, "accept_weights", lambda tokens, p, q: weigh(tokens, seen[-1], q)
    )


def unnormalised_q(monkeypatch: pytest.MonkeyPatch) -> None:
    """q keeps the draft's unmasked probabilities, of the allowed tokens alone."""
    restrict, raw = RowConstraints.restrict, []

    def remember(self: RowConstraints, logits: Tensor, drafted: Sequence[Tensor]) -> Tensor:
        raw.append(logits)
        return restrict(self, logits, drafted)

    def keep_scale(logits: Tensor, sampling: SamplingParams) -> Tensor:
        return torch.where(logits == float("-inf"), 0, warp(raw[-1], sampling))

    monkeypatch.setattr(RowConstraints, "restrict", remember)
    monkeypatch.setattr(drafting, "warp", keep_scale)


def forced_tokens_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verification lets the target choose freely where the grammar leaves no choice."""
    allowed = RowConstraints.allowed

    def masks_along(self: RowConstraints, tokens: Tensor) -> Tensor:
        def mask(row: int, path: Path) -> Tensor:
            found = allowed(self, row, path)
            return self.anything.mask if found.only not in (None, EOS) else found.mask

        rows = tokens.tolist()
        return torch.stack(
            [
                torch.stack([mask(row, tuple(chain[:n])) for n in range(len(chain) + 1)])
                for row, chain in enumerate(rows)
            ]
        )

    monkeypatch.setattr(RowConstraints, "masks_along", masks_along)


def masks_of_the_round_before(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = RowConstraints.commit

    def keep(self: RowConstraints, row: int, tokens: list[int]) -> tuple[list[int], bool]:
        kept: dict[Path, AllowedTokens] = dict(self.kept[row])
        result = commit(self, row, tokens)
        self.kept[row] = kept
        return result

    monkeypatch.setattr(RowConstraints, "commit", keep)


def eos_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = Automaton.allowed

    def with_eos(self: Automaton) -> Tensor:
        return allowed(self) | (torch.arange(VOCAB) == EOS)

    monkeypatch.setattr(Automaton, "allowed", with_eos)


def masks_one_late(monkeypatch: pytest.MonkeyPatch) -> None:
    masks_along = RowConstraints.masks_along
    monkeypatch.setattr(
        RowConstraints, "masks_along", lambda self, tokens: masks_along(self, tokens).roll(1, 1)
    )


def masked_after_the_warp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Top-k and top-p of all tokens first leave another law of the allowed ones."""
    verify = engine_round.verify

    def warped(
        proposal: Proposal, logits: Tensor, config: engine_round.StepConfig
    ) -> VerificationResult:
        warped_logits = warp(logits, config.sampling).log()
        return verify(proposal, warped_logits, replace(config, sampling=SamplingParams(1.0)))

    monkeypatch.setattr(engine_round, "verify", warped)


BUGS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "acceptance by the unmasked p": ("chain", accept_by_unmasked_p),
    "q not renormalised": ("chain", unnormalised_q),
    "forced tokens drawn again": ("chain", forced_tokens_drawn_again),
    "no rollback of the matcher": (
        "chain",
        lambda patch: patch.setattr(Automaton, "rollback", lambda *_: None),
    ),
    "masks of the round before": ("chain", masks_of_the_round_before),
    "EOS allowed everywhere": ("chain", eos_everywhere),
    "masks one place late": ("chain", masks_one_late),
    "masked after the warp": ("top-k, top-p", masked_after_the_warp),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_move_the_law(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above is blind if one of these goes unseen. Exact: no false alarm."""
    case, plant = BUGS[bug]
    plant(monkeypatch)
    assert distance(case) > 1e-3
