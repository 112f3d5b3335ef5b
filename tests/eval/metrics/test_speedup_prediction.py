"""Speed-ups of whole requests are predicted from other seconds and other prompts than those they are compared with."""

import random
from dataclasses import replace

import pytest

from decode.engine.records import DecodeRecord
from eval.metrics.acceptance import speedup
from eval.metrics.round_cost import (
    PromptRounds,
    StepCost,
    fit_step_cost,
    predict_ms_per_token,
    predict_speedup,
    with_batch_rounds,
)

PLAIN = StepCost(4.0, 0.1, 10.0)
DRAFTED = StepCost(5.0, 0.2, 14.0)


def answers(
    cost: StepCost, k: int, prompts: int = 8, rows: int = 1, tokens: int = 400, seed: int = 0
) -> list[DecodeRecord]:
    """Answers whose seconds are exactly those of `cost`; K = `k` drafts, each accepted with 0.6."""
    rng = random.Random(f"{seed} {k}")
    made = []
    for start in range(0, prompts, rows):
        batch = []
        for i in range(start, min(start + rows, prompts)):
            rounds: list[tuple[int, int]] = []
            while sum(a + 1 for _, a in rounds) < tokens:
                rounds.append((k, next((j for j in range(k) if rng.random() > 0.6), k)))
            length = 10 + 7 * (i % 5)
            ids = [1] * (1 + sum(a + 1 for _, a in rounds))
            batch.append(DecodeRecord([1] * length, ids, rounds, "length", task="t", id=str(i)))
        count = max(len(x.rounds) for x in batch)
        for x in batch:
            share = cost.prefill_ms + cost.prefill_ms_per_token * x.prompt_tokens
            made.append(
                replace(
                    x, first_token_seconds=len(batch) * share / 1000, rows=len(batch),
                    seconds=(share + cost.round_ms * count / len(batch)) / 1000,
                )
            )  # fmt: skip
    return made


def predicted(plain: list[DecodeRecord], own: list[DecodeRecord]) -> float:
    value, missing = predict_speedup(
        with_batch_rounds(plain), with_batch_rounds(own), PLAIN, DRAFTED
    )
    assert missing is None
    assert value is not None
    return value


@pytest.mark.parametrize("rows", [1, 3])
def test_costs_are_found_again(rows: int) -> None:
    """Bug: prefill counts as rounds, a batch's rounds count once for each row, or rows do not wait for each other."""
    found = fit_step_cost(answers(DRAFTED, 3, rows=rows))
    assert found is not None
    assert found.round_ms == pytest.approx(DRAFTED.round_ms)
    assert found.prefill_ms == pytest.approx(DRAFTED.prefill_ms)
    assert found.prefill_ms_per_token == pytest.approx(DRAFTED.prefill_ms_per_token)
    alike = [x for x in answers(DRAFTED, 3) if x.prompt_tokens == 10]
    fixed = fit_step_cost(alike)
    assert fixed is not None
    assert (fixed.prefill_ms, fixed.prefill_ms_per_token) == (pytest.approx(7.0), 0.0)


@pytest.mark.parametrize("rows", [1, 3])
def test_predictions_are_right_where_the_account_is(rows: int) -> None:
    """Bug: a bonus token, the prefill, or the share of a row in its batch is forgotten."""
    plain, own = answers(PLAIN, 0, rows=rows), answers(DRAFTED, 4, rows=rows)
    measured = speedup(own, plain, 0).value
    assert measured is not None
    assert abs(measured - 1) > 0.2  # else a prediction of 1 would do
    assert predicted(plain, own) == pytest.approx(measured, rel=0.03)


def test_the_seconds_that_it_is_compared_with_play_no_part() -> None:
    """Bug: the prediction is the measurement in other words."""
    plain, own = answers(PLAIN, 0), answers(DRAFTED, 4)
    slower = [
        replace(x, seconds=7 * x.seconds, first_token_seconds=1.0, round_seconds=[]) for x in own
    ]
    assert predicted(plain, slower) == predicted(plain, own)


@pytest.mark.parametrize("half", [0, 1])
def test_acceptance_is_that_of_the_other_half(half: int) -> None:
    """Bug: a prompt's own rounds foretell it."""
    own = with_batch_rounds(answers(DRAFTED, 4))
    alone = [x for x in own if x.batch % 2 == half]
    changed = [replace(x, rounds=1) if x.batch % 2 == half else x for x in own]

    def of_half(rounds: list[PromptRounds], wanted: int) -> float:
        """Predicted milliseconds of one half: all less those of the other with nothing to decode."""
        weights = [
            x if x.batch % 2 == wanted else replace(x, record=replace(x.record, rows=10**12))
            for x in rounds
        ]
        cost = replace(DRAFTED, prefill_ms=0.0, prefill_ms_per_token=0.0)
        found = predict_ms_per_token(weights, cost)
        assert found is not None
        return found

    assert len(alone) == 4
    assert of_half(own, half) == pytest.approx(of_half(changed, half))
    assert of_half(own, 1 - half) > 2 * of_half(changed, 1 - half)


def test_what_cannot_be_predicted_says_why() -> None:
    """Bug: one prompt foretells itself, an answer of one token divides by zero, or a missing cost is a zero."""
    plain, own = answers(PLAIN, 0), answers(DRAFTED, 4)
    one = with_batch_rounds(plain[:1]), with_batch_rounds(own[:1])
    assert predict_speedup(*one, PLAIN, DRAFTED)[0] is None
    assert "too few prompts" in str(predict_speedup(*one, PLAIN, DRAFTED)[1])
    assert predict_speedup(*one, PLAIN, None) == (None, "no step was timed")
    assert predict_speedup([], [], PLAIN, DRAFTED)[0] is None
    short = [replace(x, output_ids=[1], rounds=[]) for x in own]
    assert predict_speedup(one[0], with_batch_rounds(short), PLAIN, DRAFTED)[0] is None
    assert fit_step_cost(short) is None
    assert fit_step_cost([]) is None
