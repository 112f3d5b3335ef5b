"""speculation_profile.json against figures worked out by hand, and against what its proposal demands."""

import json
from fractions import Fraction as F
from pathlib import Path
from typing import Any

import pytest

from decode.common.published import published
from decode.common.typed_json import from_json, to_json
from decode.engine.records import DecodeRecord
from eval.reporting.render import write_profile
from eval.results.report import EvalReport, MethodResult
from eval.results.speculation_profile import (
    SpeculationProfile,
    position_rates,
    speculation_profile,
    validate,
)
from tests import drafts

PROPOSED = {
    "schema_version": str, "measured": bool, "method": str, "draft_checkpoint": dict, "target_model": dict,
    "num_speculative_tokens": int, "block_size": (int, type(None)), "max_supported_k": int, "verification_method": str,
    "conditional_accept_rates": list, "marginal_accept_rates": list, "mean_accept_length": float,
    "mean_accept_length_per_request": float, "accept_length_model": str, "accept_length_by_k": dict,
    "acceptance_length_histogram": dict, "per_category": dict, "measurement_conditions": dict, "validation": dict,
}  # fmt: skip
"""{field: type} of `build_profile` in NVIDIA/Model-Optimizer, pull request 2247,
examples/specdec_bench/specdec_bench/speculation_profile.py."""


def record(name: str, rounds: list[tuple[int, int]], task: str, cut: int = 0) -> DecodeRecord:
    tokens = 1 + sum(accepted + 1 for _, accepted in rounds) - cut
    times = [0.01] * len(rounds)
    return DecodeRecord([5], [5] * tokens, rounds, round_seconds=times, task=task, id=name, seconds=1.0)  # fmt: skip


CODE = [record("a", [(3, 3), (3, 1)], "code", cut=1), record("b", [(3, 0)] * 4, "code")]
PROSE = [record("c", [(3, 2), (2, 2)], "prose")]
"""Rounds that accepted 0, 1, 2, 3: four, one, two, one. One round drafted two tokens only."""


def entry(task: str, records: list[DecodeRecord], **changes: Any) -> dict[str, Any]:
    facts = {"name": "mine", "family": "eagle3", "draft": "drafts/mine", "draft_sha256": "ab" * 32}
    found = to_json(drafts.measured(records, 3, task=task, **facts))
    return {**found, "speedup": 1.5, **changes}


def report(*more: dict[str, Any]) -> dict[str, Any]:
    own = [entry("all", CODE + PROSE), entry("code", CODE), entry("prose", PROSE)]
    plain = entry("all", [record("a", [(0, 0)] * 3, "code")], name="plain", k=0, speedup=9.0)
    target = {"name": "org/target", "revision": "main", "tokenizer": "0" * 16}
    return drafts.report("") | {"seed": 7, "target": target, "methods": [plain, *own, *more]}


def profiled(report: dict[str, Any], entries: list[dict[str, Any]] | None = None) -> Any:
    """As JSON."""
    own = None if entries is None else [from_json(MethodResult, m) for m in entries]
    return to_json(speculation_profile(from_json(EvalReport, report), own))


@pytest.fixture
def profile() -> dict[str, Any]:
    found = profiled(report())
    assert found is not None
    return found


def test_rates_by_hand(profile: dict[str, Any]) -> None:
    """8 rounds: 4, 3 and 1 of them accepted position 1, 2 and 3. τ is below the mean length: one token behind the end
    of an answer does not count there. The prompts' own lengths are 6/2, 4/4 and 6/2."""
    assert profile["marginal_accept_rates"] == [0.5, 0.375, 0.125]
    assert profile["conditional_accept_rates"] == [0.5, 0.75, round(1 / 3, 6)]
    assert profile["alpha_by_position"] == pytest.approx([4 / 8, 3 / 4, 1 / 2])
    assert profile["acceptance_length_histogram"] == {"1": 4, "2": 1, "3": 2, "4": 1}
    assert profile["mean_accept_length"] == 2.0
    assert profile["mean_accept_length_per_request"] == round(7 / 3, 6)
    assert profile["tau"] == pytest.approx(15 / 8)
    assert profile["accept_length_by_k"] == {"3": 2.0}
    low, high = profile["mean_accept_length_ci"]
    assert 1 <= low < 2 < high <= 3
    assert len(profile["marginal_accept_rates_ci"]) == 3


def test_the_proposals_fields_and_checks(profile: dict[str, Any]) -> None:
    """Catches a field that a reader of the proposal misses, a length without the target's token, a vector of another
    length than K."""
    for name, kind in PROPOSED.items():
        assert isinstance(profile[name], kind), name
    assert (profile["schema_version"], profile["method"]) == ("1.0", "eagle3")
    vectors = (profile["conditional_accept_rates"], profile["marginal_accept_rates"])
    assert [len(vector) for vector in vectors] == [profile["num_speculative_tokens"]] * 2
    lengths = {int(k): n for k, n in profile["acceptance_length_histogram"].items()}
    assert min(lengths) == 1
    steps = sum(lengths.values())
    for i, rate in enumerate(profile["marginal_accept_rates"]):
        beyond = F(sum(n for length, n in lengths.items() if length >= i + 2), steps)
        assert rate == pytest.approx(float(beyond))
    checks = profile["validation"]
    assert checks["mean_consistency"]["passed"]
    assert checks["mean_consistency"]["implied_mean_accept_length"] == 2.0
    assert checks["marginal_monotonicity"] == {"passed": True, "violations": []}


def test_the_proposals_own_example() -> None:
    """Catches another reading of the histogram: nvidia/MiniMax-M2.7-DFlash, mean 2.4733 in the proposal's tests."""
    rates = position_rates([8611, 7814, 5337, 8891])[1]
    assert rates == near_six([F(22042, 30653), F(14228, 30653), F(8891, 30653)])
    assert 1 + sum(rates) == pytest.approx(2.4733, abs=1e-4)


def near_six(values: list[F]) -> list[float]:
    return [round(float(value), 6) for value in values]


def test_checks_see_a_cut_vector_and_a_rise() -> None:
    """They are blind if one of these passes."""
    assert not validate(3.0, [0.5, 0.4]).mean_consistency.passed
    assert not validate(2.0, [0.4, 0.6]).marginal_monotonicity.passed
    assert not validate(2.0 + 1, [0.5, 0.375, 0.125]).mean_consistency.passed  # bonus twice


def test_tasks_and_other_settings(profile: dict[str, Any]) -> None:
    """Catches pooled numbers under a task's name, and a slower or hotter setting in front."""
    assert profile["per_category"].keys() == {"code", "prose"}
    assert profile["per_category"]["code"]["mean_accept_length"] == round(10 / 6, 6)
    assert profile["per_category"]["prose"]["mean_accept_length"] == 3.0
    more = [
        entry("all", CODE, temperature=1.0, speedup=5.0),
        entry("all", CODE, name="fast", family="dflash", speedup=2.0),
        entry("all", CODE, name="made up", simulated=[0.5]),
    ]
    found = profiled(report(*more))
    assert found is not None
    assert (found["name"], found["accept_length_model"]) == ("fast", "measured_per_k")
    others = [(x["name"], x["measurement_conditions"]["temperature"]) for x in found["other_profiles"]]  # fmt: skip
    assert others == [("mine", 0.0), ("mine", 1.0)]
    assert found["other_profiles"][0]["accept_length_model"] == "chain_analytic"
    assert found["per_category"] == {}


@pytest.mark.parametrize(
    ("changes", "model"),
    [
        ({"family": "causal"}, "chain_analytic"),
        ({"tree": {"width": 2, "nodes": 4}}, "measured_per_k"),
        ({"lookup": {"name": "ngram", "min_match": 2}}, "measured_per_k"),
        ({"family": "pard"}, "measured_per_k"),
        ({"family": "swift"}, "measured_per_k"),
    ],
)
def test_only_chains_say_what_shorter_ones_give(changes: dict[str, Any], model: str) -> None:
    """Catches a tree or a block whose prefix is taken for a shorter draft."""
    found = profiled(report(), [entry("all", CODE, **changes)])
    assert found is not None
    assert found["accept_length_model"] == model


def test_nothing_measured_gives_no_file(profile: dict[str, Any], tmp_path: Path) -> None:
    """Catches a baseline that is published as a draft that accepts nothing, and a file left from an earlier report."""
    plain = {**report(), "methods": report()["methods"][:1]}
    assert profiled(plain) is None
    write_profile(from_json(SpeculationProfile, profile), tmp_path)
    file = tmp_path / "speculation_profile.json"
    assert json.loads(file.read_text())["tau"] == pytest.approx(15 / 8)
    write_profile(None, tmp_path)
    assert not file.exists()
    old = [{k: v for k, v in m.items() if k != "mean_accept_length"} for m in report()["methods"]]
    assert profiled({**report(), "methods": old}) is None


def test_all_of_it_is_published(profile: dict[str, Any]) -> None:
    """Catches a field that is private without need, and a local path in it."""
    whole = json.loads(json.dumps({**profile, "other_profiles": [profile]}))
    del whole["other_profiles"][0]["other_profiles"]
    assert published(whole, SpeculationProfile, "x", {"ab" * 32}) == whole
    secret = {**whole, "draft_checkpoint": {"name": "/home/alice/drafts/mine", "sha256": None}}
    shown = published(secret, SpeculationProfile, "x")["draft_checkpoint"]
    assert shown == {"name": "mine", "sha256": None}
