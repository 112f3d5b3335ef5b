"""Committed results on damaged drafts in vLLM: the checker sees each damage, and the page has what was measured."""

import json
from pathlib import Path

from tests.eval.served.mistakes import mistakes

ROOT = Path(__file__).resolve().parents[3]


def test_results_list_what_was_served_in_silence() -> None:
    """Catches a damage in the committed results that the checker did not see, or whose baseline is not beside it."""
    rows = json.loads((ROOT / "docs/results/served_damage.json").read_text())["rows"]
    audits = json.loads((ROOT / "docs/results/audit_damage.json").read_text())["rows"]
    audited = {row["damage"]: row["audit"]["named"] for row in audits}
    good = {row["family"]: row for row in rows if row["damage"] == "none"}
    known = mistakes(12)
    for row in rows:
        assert row["family"] in good
        if row["damage"] == "none":
            assert (row["checker"], row["vllm"]) == ([], "served")
        else:
            rules = [rule for rule, _, _ in row["checker"]]
            mistake = known[row["family"]][row["damage"]]
            assert mistake.rules["vllm"] in rules
            assert mistake.suspect in audited[row["damage"]]


def test_the_committed_audit_is_what_the_page_says() -> None:
    """Catches a page whose table is not the measured one, and an alarm that nobody reports."""
    measured = json.loads((ROOT / "docs/results/audit_damage.json").read_text())
    assert measured["summary"]["good"]["alarms"] == 0
    lines = (ROOT / "docs/audit.md").read_text().splitlines()
    for row in measured["rows"]:
        if row["damage"] != "none":
            (line,) = (x for x in lines if f"| {row['damage']} |" in x)
            named = ", ".join(row["audit"]["named"]) or "–"
            tau = f"{row['tau']:.3f}" if "tau" in row else "–"
            assert f"| {row['vllm']} | {tau} |" in line, line
            assert named in line.replace("**", ""), line
