"""Costs, schedules and figures of a forecast by hand, vLLM's n-grams, and the real command."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decode.checkpoints.draft_vocab import save_ids
from decode.common.errors import UserError
from decode.drafts.causal import CausalDraft
from decode.model.loading import load_target
from decode.serving import sglang_engine, trtllm_engine, vllm_engine
from eval.forecasting import costs
from eval.forecasting.chains import VllmNgramDraft
from eval.forecasting.costs import CostPoint, EngineCost, fit_engine_cost, group_costs
from eval.forecasting.forecast import load
from eval.forecasting.rounds import ENGINE_RULES, RULES, ExpectedRounds, TextChains, rules_of
from eval.forecasting.rows import forecast_row, forecast_rows
from eval.metrics.speedup_model import RoundCost
from eval.results.forecast import ForecastCounts
from eval.settings.evaluation import ForecastConfig
from tests import worlds

K = 2


def text(number: int, best: list[list[int]], drafted: list[int] | None = None) -> TextChains:
    """A greedy text whose chains are accepted as `best` says."""
    right = np.array(best, dtype=bool)
    ones = np.ones(right.shape)
    lengths = np.array(drafted or [K] * len(best))
    task, length = "ab"[number % 2], len(best) + 1
    return TextChains(task, str(number), length, ones, ones * right, right, lengths)


def test_figures_by_hand() -> None:
    """Two texts of 5 tokens: one with rounds of 2, 0 accepted, one with 0, 0, 1; intervals need two prompts."""
    texts = [
        text(0, [[1, 1], [0, 0], [0, 0], [0, 1]]),
        text(1, [[0, 1], [0, 0], [1, 0], [1, 1]], drafted=[2, 0, 1, 2]),
    ]
    row = forecast_row(texts, "greedy", K, seed=0)
    assert row.counts == ForecastCounts(8, 5, 4, [2, 1])
    assert row.tau == (8 / 5, (4 / 3, 2.0))
    assert row.mean_accept_length.value == 1 + 3 / 4
    assert [x.value for x in row.alpha_by_position] == [2 / 4, 1 / 1]
    assert [x.value for x in row.unconditional_by_position] == [2 / 4, 1 / 4]
    assert row.acceptance_rate == 3 / (2 + 2 + 2 + 1)
    cost = EngineCost(10.0, RoundCost(12.0, 2.0), plain_prefill_ms=5.0, prefill_ms=7.0)
    timed = forecast_row(texts, "greedy", K, seed=0, cost=cost)
    first, second = 7 + 2 * (12 + 2 * 2), 7 + 10 + 2 * 12 + 2 * (2 + 1)  # ms
    assert timed.speedup.value == pytest.approx(2 * (5 + 40) / (first + second))
    rows = forecast_rows({0.0: texts, 1.0: texts}, [1, K], rules=list(RULES), seed=0)
    assert len(rows) == 3 * 2 * (1 + 3)  # all, a and b; greedy decoding has one rule
    assert forecast_row(texts[:1], "greedy", K, seed=0).tau.ci is None


def point(k: int, ms: float, batch: int = 1, drafted: float | None = None) -> CostPoint:
    return CostPoint(batch, 0, k, k if drafted is None else drafted, ms, 1.0)


def test_costs_are_lines_in_drafted_tokens() -> None:
    cost = fit_engine_cost([point(0, 10), point(5, 24, drafted=4), point(1, 15)])
    assert (cost.plain_ms, cost.line.per_token_ms) == (10, 3)
    assert (cost.round_ms(3), cost.round_ms(0)) == (21, 10)
    rounds = ExpectedRounds(9, 5, 3, 6, np.zeros(2), np.zeros(2))
    assert cost.request_ms(rounds) == 1 + 2 * 10 + 3 * 12 + 6 * 3
    for bad in ([point(1, 15), point(2, 16)], [point(0, 10), point(2, 16)]):
        with pytest.raises(UserError, match="give 0 and two other K"):
            fit_engine_cost(bad)


def test_costs_of_vllm_leave_out_rounds_without_a_draft() -> None:
    """11 tokens, first after 1 s; 4 rounds that drafted 2 and accepted 3 in all, so 3 plain steps of 0.5 s."""
    answer = {"ids": [[0] * 11], "seconds": 6.5, "first_token_seconds": 1.0}
    drafted = answer | {"rounds": 4, "drafted": 8, "accepted": 3}
    assert costs.vllm_point([drafted], 2, 1, 0, 500.0) == CostPoint(1, 0, 2, 2.0, 1000.0, 1000.0)
    assert costs.vllm_point([answer], 0, 1, 0, 0.0).round_ms == 550.0
    twice = {**drafted, "ids": [[0] * 11] * 2, "rounds": 8, "drafted": 16, "accepted": 6}
    assert costs.vllm_point([twice], 2, 2, 0, 500.0).round_ms == 1000.0  # both rows in each round
    with pytest.raises(UserError, match="no round of vLLM drafted"):
        costs.vllm_point([answer | {"rounds": 0, "drafted": 0, "accepted": 0}], 2, 1, 0, 0.0)


def vllm_lookup(config: dict[str, Any], most: int, batches: int) -> list[int]:
    """K by batch size as vLLM's validator and lookup read a schedule: inclusive ranges from 1, gaps and the tail
    carried on, at most num_speculative_tokens."""
    found, last, end = list[int](), 0, 0
    for start, stop, k in config["num_speculative_tokens_per_batch_size"]:
        assert end < start <= stop
        assert k >= 0
        found += [last] * (start - end - 1) + [min(k, most)] * (stop - start + 1)
        last, end = min(k, most), stop
    return (found + [last] * batches)[:batches]


def test_schedules_choose_the_fastest_k_of_every_batch_size() -> None:
    """Costs at batches 1 and 9 between which the best K changes from 2 over 1 to 0, and the engines' forms."""
    points = [point(0, 10, 1), point(1, 11, 1), point(2, 12, 1)]
    points += [point(0, 12, 9), point(1, 25, 9), point(2, 38, 9)]
    by_batch = {batch: cost for (_, batch), cost in group_costs(points).items()}
    tau = {1: 1.5, 2: 1.8}
    ranges = costs.best_ranges(by_batch, tau)
    for batch in range(1, 10):
        at = (batch - 1) / 8
        ms = {0: 10 + 2 * at, 1: 11 + 14 * at, 2: 12 + 26 * at}
        best = max(ms, key=lambda k: {0: 1.0, **tau}[k] / ms[k])
        assert next(k for first, last, k in ranges if first <= batch <= last) == best
    assert [k for _, _, k in ranges] == [2, 1, 0]
    config = vllm_engine.schedule(ranges)["speculative_config"]
    assert config["num_speculative_tokens"] == 2
    dense = vllm_lookup(config, 2, 12)
    assert dense[:9] == [k for first, last, k in ranges for _ in range(first, last + 1)]
    assert dense[9:] == [0, 0, 0]
    (_, end, _), (_, last, _), _ = ranges
    assert trtllm_engine.schedule(ranges)["speculative_config"] == {
        "max_draft_len": 2,
        "draft_len_schedule": {end: 2, last: 1},
    }
    flags = sglang_engine.schedule(ranges)["flags"]
    assert flags[-1] == "--speculative-num-draft-tokens 3"
    for engine in (vllm_engine, trtllm_engine):
        assert engine.schedule([(1, 9, 0)])["speculative_config"] == {}
    assert sglang_engine.schedule([(1, 9, 0)]) == {"flags": []}


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        ([1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3], [9, 1, 2]),  # of equally long matches the first
        ([5, 1, 2, 8, 3, 1, 2, 7, 3, 1, 2], [7, 3, 1]),  # the longest match before the first
        ([4, 4, 4], [4]),  # may overlap; no more than there is
        ([1, 2, 3], []),
        ([1], []),
    ],
)
def test_vllms_ngrams(tokens: list[int], found: list[int]) -> None:
    draft = VllmNgramDraft(longest=3, shortest=2)
    history = torch.tensor([[*tokens, 77, 77]])  # stale tokens behind the text
    proposal = draft.propose(history, torch.tensor([len(tokens)]), 3)
    assert [token for token in proposal.tokens[0].tolist() if token >= 0] == found


def test_rules_of_engines() -> None:
    assert rules_of(["sglang"]) == ["greedy"]
    assert set(rules_of(["vllm", "draftsmith"])) == set(RULES)
    assert set(RULES) >= {x for own in ENGINE_RULES.values() for x in own}
    with pytest.raises(UserError, match="no engine 'x'"):
        rules_of(["x"])


def test_the_command(tmp_path: Path) -> None:
    """The real command with our costs, then with given ones; α_1 at T = 0 is that of eval's own decoding elsewhere."""
    world = worlds.build(tmp_path, prompts=4)
    tasks = json.dumps([{"name": "own", "path": str(world.prompts)}])
    words = ["--target", world.target, "--draft", world.draft, "--tasks", tasks, "--k", "[1, 3]"]
    words += ["--max_new_tokens", 10, "--device", "cpu", "--batches", "[1, 2]", "--cost_tokens", 8]
    worlds.call("eval/forecast.py", *words, "--out", tmp_path / "out").ok()
    result = json.loads((tmp_path / "out" / "forecast.json").read_text())
    found = {(x["temperature"], x["rule"], x["k"]): x for x in result["rows"]}
    assert set(found) == {(0, "greedy", 1), (0, "greedy", 3)} | {
        (1, rule, k) for rule in RULES for k in (1, 3)
    }
    assert found[1, "block", 3]["tau"] >= found[1, "probabilistic", 3]["tau"] - 1e-9
    assert found[1, "probabilistic", 1]["tau"] == pytest.approx(found[1, "block", 1]["tau"])
    assert all(x["speedup"] > 0 for x in result["rows"])
    assert [x["batch"] for x in result["costs"]["points"]] == [1, 1, 1, 2, 2, 2]
    assert len(result["schedules"]) == 4
    assert "α_3" in (tmp_path / "out" / "forecast.md").read_text()
    given = tmp_path / "costs.json"
    given.write_text(json.dumps(result["costs"]))
    more = ["--out", tmp_path / "given", "--costs", given]
    assert worlds.call("eval/forecast.py", *words, *more).code == 0
    again = json.loads((tmp_path / "given" / "forecast.json").read_text())
    assert (again["rows"], again["schedules"]) == (result["rows"], result["schedules"])
    given.write_text(json.dumps({"points": [{"batch": 1}]}))
    again = worlds.call("eval/forecast.py", *words, *more, "--overwrite", "true")
    assert "round_ms" in again.error()


def test_other_engines_draft_with_the_whole_head(tmp_path: Path) -> None:
    """Catches a forecast for vLLM of a reduced draft as only this decoder runs it."""
    world = worlds.build(tmp_path, prompts=1)
    target = load_target(str(world.target), "cpu")
    save_ids(world.draft, torch.arange(64))
    settings = ForecastConfig(draft=str(world.draft), engines=["vllm"])
    prompt, length = torch.tensor([[1, 60, 5]]), torch.tensor([3])
    finite = {}
    for engine in ("vllm", "draftsmith"):
        draft = load(replace(settings, engines=[engine]), target)
        assert isinstance(draft, CausalDraft)
        draft.runner.allocate(1, 8)
        finite[engine] = int(draft.runner.prefill(prompt, length).isfinite().sum(-1).max())
    assert finite["draftsmith"] == 64 < finite["vllm"]
    with pytest.raises(UserError, match="forecast them apart"):
        load(replace(settings, engines=["vllm", "draftsmith"]), target)
