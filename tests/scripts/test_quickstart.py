"""What scripts/quickstart.sh asks and says: orders that nobody trained on, and no gain where none was measured."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from decode.common.typed_json import Estimate
from eval.results.report import read_report
from scripts.lab import quickstart
from tests import worlds


def shingles(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + 5]) for i in range(len(words) - 4)}


def test_trained_and_evaluated_orders_have_nothing_in_common() -> None:
    """Bug: a sentence, a name, a city or a product of the evaluation is trained on."""
    trained, evaluated = (set(quickstart.orders(part)) for part in ("train", "eval"))
    assert (len(trained), len(evaluated)) == (64, 24)
    together = [set[tuple[str, ...]]().union(*map(shingles, x)) for x in (trained, evaluated)]
    assert together[0].isdisjoint(together[1])
    for key, values in quickstart.VALUES["train"].items():
        assert set(values.split(", ")).isdisjoint(quickstart.VALUES["eval"][key].split(", "))
    assert quickstart.orders("train") == quickstart.orders("train")


def test_prompts_are_rows_of_the_orders(tmp_path: Path) -> None:
    quickstart.write_prompts(tmp_path)
    rows = [json.loads(line)["prompt"] for line in (tmp_path / "eval.jsonl").open()]
    asked = [row.rpartition("Order: ")[2].removesuffix("\nJSON:") for row in rows]
    assert asked == quickstart.orders("eval")


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
    assert len(text.splitlines()) <= 8


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
    assert "Fastest" not in text
    text = quickstart.seen(
        replace(few, methods=[replace(m, void="memory was slow") for m in few.methods])
    )
    assert "VOID, their seconds say nothing" in text
    assert "× [" not in text
