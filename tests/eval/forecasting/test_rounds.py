"""The law of rounds along a text, against all outcomes of the real verification rules and of short texts."""

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch

from decode.verification.rules import verify_block, verify_chain
from eval.forecasting import rounds
from eval.forecasting.rounds import RULES, TextChains, add_rounds, expected_rounds
from eval.metrics.bootstrap import Array
from tests.decode.verification.test_exact_distribution import Branches

VOCAB, K = 3, 3


def chains(p: Array, q: Array, best: Array, drafted: list[int] | None = None) -> TextChains:
    count = len(p)
    return TextChains("t", "0", count + 1, p, q, best, np.array(drafted or [K] * count))


class Tables:
    """Random p and q for every context of up to K tokens; a token may be impossible for one of them."""

    def __init__(self, seed: int):
        rng = np.random.default_rng(seed)
        self.p, self.q = {}, {}
        for n in range(K + 1):
            for context in product(range(VOCAB), repeat=n):
                for table in (self.p, self.q):
                    row = rng.dirichlet(np.full(VOCAB, 0.7))
                    row[rng.integers(VOCAB)] *= rng.random() < 0.8
                    table[context] = row / row.sum()

    def along(self, text: tuple[int, ...]) -> TextChains:
        """One chain behind the first token, along this text."""
        p, q = (
            np.array([[t[text[:i]][token] for i, token in enumerate(text)]])
            for t in (self.p, self.q)
        )
        best = np.array([[self.q[text[:i]].argmax() == token for i, token in enumerate(text)]])
        return chains(p, q, best)


def accepted_law(tables: Tables, rule: str) -> dict[tuple[int, ...], float]:
    """P(the first i tokens are accepted and are these), i = 1 … K, from all outcomes of the real rules."""
    drawn = rule != "greedy"
    law: dict[tuple[int, ...], float] = {}
    for x in product(range(VOCAB), repeat=K):
        q = torch.tensor(np.array([tables.q[x[:i]] for i in range(K)]))
        p = torch.tensor(np.array([tables.p[x[:i]] for i in range(K + 1)]))
        if not drawn and any(int(q[i].argmax()) != x[i] for i in range(K)):
            continue
        weight = float(np.prod([q[i, x[i]] for i in range(K)])) if drawn else 1.0
        paths = 2**K * VOCAB
        choose = Branches(1, paths)
        tokens = torch.tensor([x]).expand(paths, -1)
        verify = verify_block if rule == "block" else verify_chain
        result = verify(
            tokens, p.expand(paths, -1, -1), q.expand(paths, -1, -1) if drawn else None, choose
        )
        assert choose.walked == paths
        for i in range(1, K + 1):
            mass = float(choose.weight[result.accepted >= i].sum())
            law[x[:i]] = law.get(x[:i], 0.0) + weight * mass
    return law


def forecast_law(tables: Tables, rule: str) -> dict[tuple[int, ...], float]:
    """The same probabilities from texts of the target and the forecast's acceptance along them."""
    law: dict[tuple[int, ...], float] = {}
    for y in product(range(VOCAB), repeat=K):
        found = tables.along(y)
        mass = float(found.p.prod())
        if mass == 0:
            continue
        reach = RULES[rule](found).cumprod(1)[0]
        for i in range(1, K + 1):
            law[y[:i]] = law.get(y[:i], 0.0) + mass * float(reach[i - 1])
    return law


def distance(rule: str) -> float:
    worst = 0.0
    for seed in range(4):
        tables = Tables(seed)
        real, forecast = accepted_law(tables, rule), forecast_law(tables, rule)
        keys = real.keys() | forecast.keys()
        worst = max(worst, *(abs(real.get(x, 0.0) - forecast.get(x, 0.0)) for x in keys))
    return worst


@pytest.mark.parametrize("rule", RULES)
def test_acceptance_along_texts_is_that_of_the_rule(rule: str) -> None:
    """Catches an acceptance that is right on average over the draft's tokens and wrong along the target's text."""
    assert distance(rule) < 1e-12


@pytest.mark.parametrize(
    ("rule", "wrong"),
    [
        ("greedy", rounds.accept_drawn),
        ("probabilistic", rounds.accept_one_hot),
        ("probabilistic", lambda c: np.minimum(1, c.p / np.maximum(c.q, 1e-300))),  # as for drafts
        ("probabilistic", rounds.accept_block),
        ("block", rounds.accept_drawn),
    ],
)
def test_wrong_rules_are_seen(
    rule: str, wrong: Callable[[TextChains], Array], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RULES, rule, wrong)
    assert distance(rule) > 1e-3


def all_paths(accept: Array, k: int, drafted: list[int]) -> dict[str, Array]:
    """Counts by walking every sequence of rounds: what `expected_rounds` sums up without walking."""
    sums = {"rounds": np.zeros(1), "drafting": np.zeros(1), "drafted": np.zeros(1)}
    sums |= {"reached": np.zeros(k), "accepted": np.zeros(k)}

    def walk(s: int, weight: float) -> None:
        if s >= len(accept) or weight == 0:
            return
        width = min(k, drafted[s])
        sums["rounds"] += weight
        sums["drafting"] += weight * (width > 0)
        sums["drafted"] += weight * width
        reach = weight
        for i in range(width):
            sums["reached"][i] += reach
            walk(s + i + 1, reach * (1 - accept[s, i]))
            reach *= accept[s, i]
            sums["accepted"][i] += reach
        walk(s + width + 1, reach)

    walk(0, 1.0)
    return sums


@pytest.mark.parametrize("k", [1, 2, 3])
def test_expected_counts_are_those_of_all_paths(k: int) -> None:
    """Catches rounds that are taken to begin everywhere alike, and chains that are shorter than K."""
    rng = np.random.default_rng(k)
    p, q = rng.random((2, 7, K))
    drafted = [3, 0, 1, 3, 2, 3, 3]
    found = expected_rounds(chains(p, q, p > q, drafted), "probabilistic", k)
    by_hand = all_paths(np.minimum(1, q / p), k, drafted)
    assert found.emitted == 7
    assert found.rounds == pytest.approx(by_hand["rounds"][0])
    assert found.drafting_rounds == pytest.approx(by_hand["drafting"][0])
    assert found.drafted == pytest.approx(by_hand["drafted"][0])
    np.testing.assert_allclose(found.reached, by_hand["reached"])
    np.testing.assert_allclose(found.accepted, by_hand["accepted"])


def test_no_draft_is_plain_decoding_and_counts_add_up() -> None:
    ones = np.ones((5, K))
    found = chains(ones, ones, ones > 0)
    assert expected_rounds(found, "greedy", 0).rounds == 5
    all_accepted = expected_rounds(found, "greedy", K)  # behind tokens 1 and 5
    assert (all_accepted.rounds, all_accepted.drafted) == (2, 6)
    both = add_rounds([all_accepted, all_accepted])
    assert (both.emitted, both.rounds, list(both.accepted)) == (10, 4, [4, 4, 4])
