"""What scripts/quickstart.sh asks and says: things that nobody trained on, and no gain where none was measured."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from decode.common.typed_json import Estimate
from eval.results.report import read_report
from scripts.lab import quickstart
from tests import worlds


def test_nothing_is_asked_twice_and_no_prompt_holds_its_answer(tmp_path: Path) -> None:
    """Catches a food of the evaluation that is trained on or that chose a setting, and an example in a prompt, which a
    lookup would copy."""
    quickstart.write_prompts(tmp_path)
    asked = {
        part: [json.loads(line)["prompt"] for line in (tmp_path / f"{part}.jsonl").open()]
        for part in quickstart.FOODS
    }
    counts = {part: len(rows) for part, rows in asked.items()}
    assert counts == {"train": 240, "choice": 16, "eval": 24}
    before, after = quickstart.QUESTION.split("FOOD")
    foods = {
        part: {row.removeprefix(before).removesuffix(after) for row in rows}
        for part, rows in asked.items()
    }
    assert len(set[str]().union(*foods.values())) == 280
    words = [set(food.split()) for food in foods["train"] | foods["choice"]]
    assert [x for x in foods["eval"] if any({*x.split()} <= others for others in words)] == []
    assert max(len(row.split()) for rows in asked.values() for row in rows) <= 16


def test_the_trained_draft_is_compared_with_the_n_gram_prompt_by_prompt(tmp_path: Path) -> None:
    """Catches seconds of a turn that counts for nothing, and a ratio that is turned over."""
    rows = [
        {"task": "t", "id": str(i), "method": method, "untimed": "busy" if i == 3 else "",
         "seconds": 99.0 if i == 3 else seconds, "output_ids": [0] * 10}
        for i in range(4) for method, seconds in (("plain", 3.0), ("ngram", 2.0), ("continued", 1.0))
    ]  # fmt: skip
    file = tmp_path / "outputs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert (
        quickstart.over_lookup(file, "continued")
        == "continued over the n-gram: 2.00× [2.00, 2.00] (n = 3)."
    )


@pytest.mark.parametrize(
    ("interval", "said"),
    [((0.02, 0.04), "has raised"), ((-0.01, 0.04), "no gain is shown"), ((-0.2, -0.1), "has lowered")],
)  # fmt: skip
def test_a_gain_is_said_where_the_interval_shows_one(
    interval: tuple[float, float], said: str
) -> None:
    """Bug: words that stand whatever was measured."""
    report = read_report(worlds.ROOT / "docs/results/quickstart_smollm2.json")
    difference = Estimate(0.0123, interval)
    changed = replace(
        report, comparisons=[replace(c, difference=difference) for c in report.comparisons]
    )
    text = quickstart.seen(changed)
    assert said in text
    assert "+0.012" in text
    assert len(text.splitlines()) <= 9


def test_few_prompts_give_no_verdict() -> None:
    """Catches "has raised acceptance" and "Fastest" from two prompts, and a void row with its figure."""
    report = read_report(worlds.ROOT / "docs/results/quickstart_smollm2.json")
    few = replace(
        report,
        comparisons=[replace(c, prompts=2) for c in report.comparisons],
        methods=[replace(m, prompts=2) for m in report.methods],
    )
    text = quickstart.seen(few)
    assert "The interval is of 2 prompts: no verdict on fewer than 12." in text
    assert "At least 12 prompts are needed for a verdict" in text
    assert "To switch continued on this lacks 12 prompts (here 2)" in text
    assert "Fastest" not in text
    text = quickstart.seen(
        replace(few, methods=[replace(m, void="memory was slow") for m in few.methods])
    )
    assert "VOID, their seconds say nothing" in text
    assert "× [" not in text
