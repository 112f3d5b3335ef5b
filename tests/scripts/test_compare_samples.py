"""scripts/compare_samples.py: equal laws pass, other lengths, tokens or ends are found."""

import numpy as np
import pytest

from scripts.compare_samples import AnswerSet, compare

N = 400


def drawn(
    seed: int, *, stop: float = 0.05, skew: float = 1.0, longest: int = 60, cut: float = 0.0
) -> AnswerSet:
    """To N prompts: geometric lengths, tokens whose law depends on the prompt, a share `cut` called cut."""
    rng = np.random.default_rng(seed)
    lengths = rng.geometric(stop, N).clip(1, longest)
    weights = np.arange(1, 21.0) ** -skew
    tokens = {}
    for i, length in enumerate(lengths):
        law = np.roll(weights, i % 3)
        tokens[str(i)] = rng.choice(20, length, p=law / law.sum())
    ended = (lengths < longest) & (rng.random(N) >= cut)
    return AnswerSet(tokens, {str(i): float(x) for i, x in enumerate(ended)})


def test_equal_laws_give_uniform_p_values() -> None:
    """Catches a test that finds differences where there are none: prompts differ from each other on purpose."""
    found = [compare(drawn(2 * i), drawn(2 * i + 1), 99, i) for i in range(20)]
    for name in ("lengths", "tokens", "ended"):
        values = [x[name]["p_value"] for x in found]
        assert min(values) >= 0.01
        assert sum(value < 0.2 for value in values) <= 10


@pytest.mark.parametrize(
    ("name", "other"),
    [("lengths", {"stop": 0.08}), ("tokens", {"skew": 1.3}), ("ended", {"cut": 0.2})],
)
def test_another_law_is_found(name: str, other: dict[str, float]) -> None:
    """Catches a test that sees nothing: answers that end sooner, another temperature, answers that are cut."""
    found = compare(drawn(1), drawn(2, **other), 300, 0)  # type: ignore[arg-type]
    assert found[name]["p_value"] < 0.01


def test_prompts_of_both_sets_are_compared() -> None:
    """Catches answers that are compared with those to other prompts."""
    own, other = drawn(3), drawn(4)
    few = AnswerSet({key: own.tokens[key] for key in ("7", "30")}, own.ended)
    found = compare(few, other, 9, 0)
    assert found["prompts"] == 2
    means = [np.mean([len(x.tokens[key]) for key in ("7", "30")]) for x in (own, other)]
    assert found["mean_length"] == means
    assert compare(few, own, 9, 0)["tokens"] == {"distance": 0, "p_value": 1}
