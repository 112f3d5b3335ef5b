"""The study of damaged drafts in vLLM: what counts as served, refused and rightly named; and its committed results."""

import json
from pathlib import Path
from typing import Any

from scripts.engine_compat.corruption_study import (
    EXPECTED_CAUSES,
    summarize_audit,
    summarize_result,
)
from scripts.engine_compat.corruptions import Corruption, all_corruptions
from tests.scripts.test_vllm_parity import reply

ROOT = Path(__file__).resolve().parents[2]


def test_a_refusal_and_an_acceptance_are_told_apart() -> None:
    """Catches a damaged draft that vLLM refused counted as one that accepted nothing."""
    assert summarize_result({"error": "ValueError: bad\n  names"}) == {
        "vllm": "refused",
        "says": "ValueError: bad names",
    }
    row = {"rounds": 4, "drafted": 8, "accepted": 2, "by_position": [2, 0], "ids": [[1]]}
    served = summarize_result(reply([row, row]))
    assert (served["vllm"], served["tau"], served["acceptance_rate"]) == ("served", 1.5, 0.25)
    assert served["by_position"] == [4, 0]


def test_results_list_what_was_served_in_silence() -> None:
    """Catches a damage in the committed results that the checker did not see, or whose baseline is not beside it."""
    rows = json.loads((ROOT / "docs/results/served_damage.json").read_text())["rows"]
    good = {row["family"]: row for row in rows if row["damage"] == "none"}
    known: dict[str, Corruption] = all_corruptions(12)
    for row in rows:
        assert row["family"] in good
        if row["damage"] == "none":
            assert (row["checker"], row["vllm"]) == ([], "served")
        else:
            rules = [rule for rule, _, _ in row["checker"]]
            assert known[row["damage"]].expected_rules["vllm"] in rules


def study_row(
    damage: str, decoded: list[str], named: list[str], accepted: int = 9
) -> dict[str, Any]:
    """A row of the study: of 10 rounds, or of a refused draft if `accepted` is -1."""
    counts = {"rounds": 10, "drafted": 40, "accepted": accepted, "by_position": [accepted, 0, 0, 0]}
    served = {"vllm": "refused"} if accepted < 0 else {"vllm": "served", **counts}
    audit = {"decoded": decoded, "named": named}
    return {"family": "eagle3", "damage": damage, **served, "audit": audit}


def test_only_the_right_cause_counts_as_named() -> None:
    """Catches a wrong cause counted as found, a refusal counted as served, and an alarm that no sum shows."""
    rows = [
        study_row("none", [], []),
        study_row("d2t is missing", ["norms"], ["norms", "vocabulary map"], accepted=2),
        study_row("fc_norm", ["norms"], ["norms"], accepted=3),
        study_row("rope_parameters", [], ["tensors"]),  # wrong, and served as the good one is
        study_row("attention_bias", [], ["biases"], accepted=-1),
    ]
    served = {"drafts": 3, "spared": 1, "decoded": 1, "named": 2}
    assert summarize_audit(rows) == {
        "served": served,
        "refused": {"drafts": 1, "named": 1},
        "good": {"drafts": 1, "alarms": 0},
    }
    rows[0]["audit"]["named"] = ["taps"]
    assert summarize_audit(rows)["good"]["alarms"] == 1


def test_each_damage_of_the_study_has_its_cause() -> None:
    """Catches a damage that is added without a cause, and would then count as missed."""
    known = all_corruptions(12)
    studied = {name for name, corruption in known.items() if corruption.run_in_vllm}
    assert studied == {name for names in EXPECTED_CAUSES.values() for name in names}


def test_the_committed_audit_is_what_the_page_says() -> None:
    """Catches a page whose table is not the measured one, a damage left out, and an alarm that nobody reports."""
    measured = json.loads((ROOT / "docs/results/audit_damage.json").read_text())
    rows = measured["rows"]
    assert measured["summary"] == summarize_audit(rows)
    assert {row["damage"] for row in rows} >= {
        x for names in EXPECTED_CAUSES.values() for x in names
    }
    assert measured["summary"]["good"]["alarms"] == 0
    lines = (ROOT / "docs/audit.md").read_text().splitlines()
    for row in rows:
        if row["damage"] != "none":
            (line,) = (x for x in lines if f"| {row['damage']} |" in x)
            named = ", ".join(row["audit"]["named"]) or "–"
            tau = f"{row['tau']:.3f}" if "tau" in row else "–"
            assert f"| {row['vllm']} | {tau} |" in line, line
            assert named in line.replace("**", ""), line
