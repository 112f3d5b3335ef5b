"""The README's table: which numbers stand in which row and column."""

import json
from pathlib import Path
from typing import Any

import pytest

from decode.common.errors import UserError
from decode.common.typed_json import from_json
from eval.reporting import readme_table
from eval.results.report import EvalReport
from tests import drafts

SETTINGS = "target: t\nmax_new_tokens: 96\ndtype: float32\nmode: eager\ntemperatures: [0.0]\n"


def entry(name: str, task: str, speedup: float, **more: Any) -> dict[str, Any]:
    own = {
        "k": 3, "prompts": 8, "tau": 1.0 + speedup, "tau_ci": None, "alpha": 0.5, "alpha_ci": [0.4, 0.6],
        "tokens_per_second": 10 * speedup, "speedup": speedup, "speedup_ci": [speedup, speedup],
        "alpha_by_position": [], "alpha_by_position_ci": [],
        "lossless": {"greedy_identical": True, "identical": 8, "ties": [], "prompts": 8},
    }  # fmt: skip
    return drafts.entry(None, name, task, **own | more)


def make_report(tasks: list[str]) -> dict[str, Any]:
    """A method and two engines; the speed-up of each element is a number of its own."""
    names = {"all": 0.5, **{task: float(i + 1) for i, task in enumerate(tasks)}}
    return drafts.report("") | {
        "settings": SETTINGS,
        "hardware": {"device": "a CPU", "threads": 2},
        "comparisons": [],
        "methods": [entry("eagle3", task, 1 + x) for task, x in names.items()],
        "engines": [
            *(entry("plain", task, 0.5 + x, engine="hf", k=0) for task, x in names.items()),
            *(entry("ngram", task, 0.75 + x, engine="hf-lookup") for task, x in names.items()),
        ],
    }


def rows_of(report: dict[str, Any], layout: str = "pooled") -> list[list[str]]:
    table = readme_table.render_table(from_json(EvalReport, report), layout)
    lines = [line for line in table.splitlines() if line[:1] == "|"]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_each_speedup_stands_under_its_task() -> None:
    """Bug: a task's speed-up in another task's column, an engine's in a method's row, or rows out of order."""
    head, _, *rows = rows_of(make_report(["math", "code"]))
    assert head == ["T", "method", "τ", "α", "tokens/s", "math", "code", "speed-up [95 %]"]
    shown = [(row[1], *row[5:]) for row in rows]
    assert shown == [
        ("eagle3", "2.00×", "3.00×", "1.50× [1.50, 1.50]"),
        ("*transformers, prompt lookup*", "1.75×", "2.75×", "1.25× [1.25, 1.25]"),
        ("*transformers*", "1.50×", "2.50×", "1.00× [1.00, 1.00]"),
    ]
    assert [row[3] for row in rows] == ["0.500 [0.400, 0.600]", "–", "–"]


def test_engines_of_another_run_have_rows(tmp_path: Path) -> None:
    """Bug: rows of a run on other prompts, or of another dtype, stand beside these."""
    report = make_report(["math"])
    other = report | {"engines": [entry("plain", "all", 0.8, engine="vllm", k=0)]}
    mine = from_json(EvalReport, report)
    (tmp_path / "other.json").write_text(json.dumps(other))
    names = [
        readme_table.row_name(m)
        for m in readme_table.by_speed(readme_table.with_engines_of(mine, tmp_path / "other.json"))
    ]
    assert names == ["eagle3", "*transformers, prompt lookup*", "*transformers*", "*vLLM*"]
    for change, reason in (
        ({"settings": SETTINGS.replace("float32", "bfloat16")}, "dtype is 'bfloat16'"),
        ({"methods": [entry("eagle3", "all", 1.5, prompts=9)]}, "all is 9, and 8"),
    ):
        (tmp_path / "other.json").write_text(json.dumps(other | change))
        with pytest.raises(UserError, match=reason):
            readme_table.with_engines_of(mine, tmp_path / "other.json")


def test_one_task_needs_no_column_of_its_own() -> None:
    """Bug: the only task's speed-up is shown twice."""
    head, *_ = rows_of(make_report(["math"]))
    assert head == ["T", "method", "τ", "α", "tokens/s", "speed-up [95 %]"]


def test_each_method_has_its_own_draft_length() -> None:
    """Bug: the longest K stands for all methods."""
    report = make_report(["math"])
    for m in report["methods"]:
        m["k"] = 2
    last = readme_table.render_table(from_json(EvalReport, report)).splitlines()[-1]
    assert ", K = 2, but 3 (transformers, prompt lookup), batch 1" in last


def test_the_line_below_says_how_it_was_measured() -> None:
    """Bug: the answer length, K or the number of equal outputs of another run."""
    last = readme_table.render_table(from_json(EvalReport, make_report(["math"]))).splitlines()[-1]
    assert last == (
        "8 prompts, answers of up to 96 tokens, K = 3, batch 1, float32, eager; a CPU, 2 threads; greedy outputs equal "
        "to transformers' `generate`: 8 of 8 (ties 0, failures 0)."
    )


def test_the_layout_of_positions_shows_where_a_draft_fails_and_what_it_costs() -> None:
    """Bug: a position that was never reached counts as 0, or an engine without phases ends the table."""
    report = make_report(["math"])
    for m in report["methods"]:
        m |= {"tau_ci": [1.2, 1.8], "alpha_by_position": [0.5, 0.25, None]}
        m["phase_ms"] = {"draft": 4.26, "verify": 20.0, "overhead": 0.1}
    head, _, *rows = rows_of(report, "positions")
    assert head[2:5] == ["τ [95 %]", "α by position", "draft, ms a round"]
    assert {row[1]: row[3:5] for row in rows} == {
        "*transformers*": ["–", "–"],
        "*transformers, prompt lookup*": ["–", "–"],
        "eagle3": ["0.50, 0.25, –", "4.3"],
    }


def test_the_picture_shows_the_rows_of_the_table() -> None:
    """Bug: a method is missing or twice in the picture, or stands in another order than in the table."""
    report = make_report(["math", "code"])
    svg = readme_table.draw_speedups(from_json(EvalReport, report))
    names = ["eagle3", "transformers, prompt lookup", "transformers"]
    assert [svg.count(f">{name}<") for name in names] == [1, 1, 1]
    assert sorted(names, key=lambda name: svg.index(f">{name}<")) == names
    assert "● temperature 0" in svg
    assert "currentColor" not in svg
