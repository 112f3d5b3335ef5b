"""The statistical side of losslessness: exact rules pass, every planted bug is caught at a stated number of tokens.

tests/decode/verification/test_exact_distribution.py enumerates the exact distribution; these tests are what users can
run on a real vocabulary.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decode.common.journal import Journal
from decode.drafts.base import Draft, Proposal
from decode.drafts.causal import CausalDraft
from decode.drafts.lookup import NgramDraft
from decode.model.kv_cache import SlotMapping
from decode.model.loading import Target
from decode.model.runner import ModelRunner
from decode.verification import registry, rules
from decode.verification.rules import accept_weights, count_accepted, residual
from decode.verification.sampling import CounterRNG, SamplingParams, warp
from decode.verification.tree import DynamicTree
from eval.benchmark.methods import Method
from eval.checks import sampling_distribution
from eval.metrics import distribution_tests
from eval.results.report import LawTest
from eval.settings.evaluation import EvalConfig
from eval.tasks.loading import TaskPrompt
from tests.params import slow_except
from tests.tiny import noisy, tiny_model, tiny_prompts, tiny_target

TOKENS = 6000
"""Enough for every bug below; a shift of 4.9 % of the probability is found with probability .999."""
K, SAMPLING = 2, SamplingParams(0.5)
CLOSE = 0.03
"""Noise of the draft: small enough that bonus tokens are many, large enough that drafts are rejected."""


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama", num_hidden_layers=2)


@pytest.fixture(autouse=True)
def many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling_distribution, "BATCH_SIZE", 64)


def shown_by(
    model: Any, make: Callable[[Target], Draft | None], rule: str = "exact", tokens: int = TOKENS,
    sampling: SamplingParams = SAMPLING,
) -> dict[str, LawTest]:  # fmt: skip
    """{order: test} of a tiny target with that draft."""
    target = tiny_target(model)
    items = [TaskPrompt("t", str(i), prompt) for i, prompt in enumerate(tiny_prompts(4, 6, 9))]
    method = Method("m", make(target), K, rule)
    drawn = sampling_distribution.sample_pit_values(
        target, model, method, items, sampling, tokens, seed=0
    )
    assert len(drawn["p"]) >= tokens
    tests = sampling_distribution.judge_tests(sampling_distribution.run_ks_tests(drawn))
    return {test.order: test for test in tests}


def near(target: Target, **shape: Any) -> CausalDraft:
    return CausalDraft(ModelRunner(noisy(target.runner.model, CLOSE)), **shape)


LOSSLESS: dict[str, tuple[Callable[[Target], Draft | None], str]] = {
    "plain": (lambda t: None, "exact"),
    "chain": (near, "exact"),
    "block": (near, "block"),
    "tree": (lambda t: near(t, shape=DynamicTree(2, 4)), "exact"),
    "ngram": (lambda t: NgramDraft(), "exact"),
}


@pytest.mark.parametrize("name", slow_except(LOSSLESS, ["chain"]))
def test_lossless_rules_pass(model: Any, name: str) -> None:
    """Bug: the test itself is wrong, and calls a correct decoder broken."""
    make, rule = LOSSLESS[name]
    found = shown_by(model, make, rule)
    assert all(test.passed for test in found.values()), found
    assert ("p - q" in found) == (name in ("chain", "ngram"))
    assert ("p, bonus" in found) == (name in ("chain", "ngram"))


def test_truncated_sampling_passes(model: Any) -> None:
    """Bug: p is compared unwarped, or a token at the border of top-p counts as impossible."""
    found = shown_by(model, near, tokens=2000, sampling=SamplingParams(0.8, top_k=20, top_p=0.9))
    assert all(test.passed for test in found.values()), found


# ---- planted bugs in the real path ----


def last(p: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """p with another bonus column."""
    return torch.cat([p[:, :-1], other], 1)


def bonus_unwarped(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    return last(warp(logits, sampling), torch.softmax(logits[:, -1:], -1))


def bonus_early(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    p = warp(logits, sampling)
    return last(p, p[:, -2:-1])


def one_late(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    return warp(logits, sampling).roll(1, 1)


def accept_by_p(tokens: torch.Tensor, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    stay = p[:, :-1].gather(-1, tokens.clamp_min(0)[..., None])[..., 0]
    return torch.stack([stay, 1 - stay], -1)


def accept_swapped(tokens: torch.Tensor, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return accept_weights(tokens, q, p[:, :-1])


def accept_twice(tokens: torch.Tensor, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return accept_weights(tokens, p, q / 2)


def keep_rejected(accept: torch.Tensor) -> torch.Tensor:
    return (count_accepted(accept) + 1).clamp_max(accept.shape[1])


def mask_one_ahead(self: SlotMapping, window: int | None, groups: int) -> torch.Tensor:
    allow = self.write_slots[:, :, None] - self.slot >= -1
    return allow[:, None].repeat(1, 1, groups, 1)


PROPOSE = CausalDraft.propose


def propose_shifted_q(
    self: CausalDraft, history: torch.Tensor, length: torch.Tensor, k: int
) -> Proposal:
    proposal = PROPOSE(self, history, length, k)
    assert proposal.q is not None
    return Proposal(proposal.tokens, proposal.q.roll(1, 1))


class NeverAdvances(CounterRNG):
    def uniform(self, shape: torch.Size) -> torch.Tensor:
        self.draws.zero_()
        return super().uniform(shape)


class ReusesAcceptance(CounterRNG):
    def __call__(self, weights: torch.Tensor) -> torch.Tensor:
        index = super().__call__(weights)
        self.draws -= int(weights.ndim == 3)
        return index


BUGS: dict[str, tuple[object, str, object]] = {
    "bonus token unwarped": (registry, "warp", bonus_unwarped),
    "bonus from one position early": (registry, "warp", bonus_early),
    "p one position late": (registry, "warp", one_late),
    "residual: drawn from p": (rules, "residual", lambda p, q: p),
    "residual: q not normalised": (rules, "residual", lambda p, q: residual(p, q / 2)),
    "residual: not clamped": (rules, "residual", lambda p, q: (p - q).abs()),
    "accept with p": (rules, "accept_weights", accept_by_p),
    "accept with q / p": (rules, "accept_weights", accept_swapped),
    "accept with 2 p / q": (rules, "accept_weights", accept_twice),
    "drafted token kept after its rejection": (rules, "count_accepted", keep_rejected),
    "accepts on after a rejection": (rules, "count_accepted", lambda a: a.sum(-1)),
    "sees one slot ahead": (SlotMapping, "mask", mask_one_ahead),
    "q of another position": (CausalDraft, "propose", propose_shifted_q),
    "random numbers again": ("decode.engine.engine", "CounterRNG", NeverAdvances),
    "correction with acceptance's number": ("decode.engine.engine", "CounterRNG", ReusesAcceptance),
}


@pytest.mark.parametrize("name", slow_except(BUGS, ["residual: drawn from p", "accept with q / p"]))
def test_planted_bugs_are_caught(model: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above are blind if one of these passes with as many tokens."""
    owner, function, bug = BUGS[name]
    if isinstance(owner, str):
        monkeypatch.setattr(f"{owner}.{function}", bug)
    else:
        monkeypatch.setattr(owner, function, bug)
    found = shown_by(model, near)
    assert not all(test.passed for test in found.values()), found


def test_a_lossy_rule_is_caught(model: Any) -> None:
    """Bug: the negative control of a report passes what is known to be lossy."""
    found = shown_by(model, near, "typical")
    assert not all(test.passed for test in found.values()), found


@pytest.mark.slow
def test_registered_rules_are_labelled(
    model: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Bug: a lossy rule under a new name is called lossless, or is held to the target's distribution."""
    monkeypatch.setattr(registry, "VERIFICATION_RULES", dict(registry.VERIFICATION_RULES))
    registry.register_rule(replace(registry.find_rule("typical"), name="my-lossy"))
    target = tiny_target(model)
    methods = [
        Method("plain"), Method("sound", near(target), K), Method("lossy", near(target), K, "my-lossy"),
    ]  # fmt: skip
    s = EvalConfig(check_law=TOKENS, temperatures=[0.0, SAMPLING.temperature])
    items = [TaskPrompt("t", str(i), prompt) for i, prompt in enumerate(tiny_prompts(4, 6, 9))]
    journal = Journal(tmp_path / "journal.jsonl", {})
    law = sampling_distribution.check_sampling_distribution(
        s, target, model, methods, items, journal
    )
    assert law is not None
    assert law.passed
    assert [tuple(vars(verdict).values()) for verdict in law.methods] == [
        ("plain", False, True, None), ("sound", False, True, True), ("lossy", True, False, None),
    ]  # fmt: skip


# ---- the statistics ----


def test_ks_by_hand() -> None:
    """Bug: the distance looks at one side of each step only."""
    assert distribution_tests.ks_distance(np.array([0.5])) == pytest.approx(0.5)
    assert distribution_tests.ks_distance(np.array([0.9, 0.1])) == pytest.approx(0.4)
    assert distribution_tests.ks_distance(np.array([0.7, 0.8])) == pytest.approx(0.7)


def test_ks_has_its_level_and_its_power() -> None:
    """Bug: false alarms more often than said, or a shift of the stated size that goes unseen. 2000 uniform samples of
    500; then as many with the least shift of the distribution that is said to be found."""
    rng = np.random.default_rng(0)
    n, level = 500, 0.05
    clean = [
        distribution_tests.ks_p_value(distribution_tests.ks_distance(rng.random(n)), n)
        for _ in range(2000)
    ]
    assert 0.03 < np.mean(np.array(clean) < level) < 0.07
    shift = distribution_tests.minimum_detectable_shift(n, level)
    found = 0
    for _ in range(2000):
        values = rng.random(n)
        moved = np.where((values > 0.5 - shift) & (values < 0.5), rng.uniform(0.5, 1, n), values)
        found += distribution_tests.ks_p_value(distribution_tests.ks_distance(moved), n) < level
    assert found >= 1980


def test_holm_fails_no_test_that_a_smaller_one_protects() -> None:
    """Bug: every p-value is held against the whole level, so that many tests make a false alarm likely."""

    def passed(*p_values: float, impossible: float = 0.0) -> list[bool]:
        tests = [LawTest("m", "p", 1000, 0.1, p, impossible) for p in p_values]
        return [test.passed for test in sampling_distribution.judge_tests(tests)]

    level = distribution_tests.SIGNIFICANCE_LEVEL
    assert passed(0.4 * level, 0.5, level / 4) == [False, True, False]
    assert passed(0.4 * level, 0.5, 0.6) == [True, True, True]
    assert passed(0.5, impossible=0.01) == [False]
