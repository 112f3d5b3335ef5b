"""The README's table: which numbers stand in which row and column."""

import json
from pathlib import Path
from typing import Any

import pytest

from decode.common.errors import UserError
from decode.common.typed_json import from_json
from eval.reporting import readme_table
from eval.reporting.readme_table import rivals_of
from eval.results.report import EvalReport
from tests import drafts, worlds

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


def headline(*options: str) -> list[str]:
    return worlds.call("scripts/readme_table.py", "--readme", "", *options).ok().out.splitlines()


def test_a_command_prints_the_readme_s_headline() -> None:
    """Catches a headline that no command prints, or one over another engine that hides the one over plain decoding."""
    report = ("--report", "docs/results/coder.json")
    lines = headline(*report, "--requests", "docs/results/llamacpp_coder.json")
    plain = next(
        x
        for x in lines
        if x.startswith("0.5B + ngram over plain decoding (T = 0, n = 40): all 1.38×")
    )
    other = next(
        x for x in lines if x.startswith("0.5B + ngram over the best arm of llama.cpp (n = 40)")
    )
    assert lines.index(plain) < lines.index(other)
    readme = (worlds.ROOT / "README.md").read_text()
    for figure in ("1.38× [1.26, 1.51]", "1.01× [0.91, 1.11]"):
        assert figure in plain
        assert figure in readme
    for figure in (
        "1.51× [1.39, 1.64]",
        "1.72× [1.62, 1.81]",
        "1.57× [1.51, 1.64]",
        "1.14× [1.04, 1.25]",
    ):
        assert figure in other
        assert figure in readme
    (line,) = (
        x for x in headline("--report", "docs/results/coder_t1.json") if x.startswith("0.5B")
    )
    assert "(T = 1, n = 40): all 1.22× [1.12, 1.33]" in line
    assert "1.22× [1.12, 1.33]" in readme
    assert not [x for x in headline(*report) if "best arm" in x]


REQUESTS = [
    {"task": "t", "id": str(i), "arm": arm, "tokens": 10, "seconds": seconds}
    for i in range(12)
    for arm, seconds in {
        "here plain": 3.0,
        "here d": 2.0,
        "e plain": 4.0 - i % 2,
        "e ngram": 3.0 + i % 3,
    }.items()
]


@pytest.mark.parametrize(
    ("dropped", "arm", "value"),
    [
        ([], "e plain", 1.75),  # 3.5 seconds against 4 and our 2
        (
            [(x, "e ngram") for x in range(1, 12, 3)] + [(x, "e ngram") for x in range(2, 12, 3)],
            "e ngram",
            1.5,
        ),
        ([(x, "here d") for x in range(12)], "", None),
        ([(x, "e plain") for x in range(0, 12, 2)], "e plain", 1.5),
    ],
)
def test_the_best_arm_is_that_of_the_shared_prompts(
    dropped: list[tuple[int, str]], arm: str, value: float | None, tmp_path: Path
) -> None:
    """Catches arms that are compared on other prompts than ours, or the slower arm taken for the best."""
    kept = [x for x in REQUESTS if (int(str(x["id"])), x["arm"]) not in dropped]
    (tmp_path / "q.json").write_text(json.dumps({"requests": kept}))
    report = from_json(EvalReport, make_report(["t"]))
    found = [r for r in rivals_of(report, tmp_path / "q.json") if r.task == "all"]
    if value is None:
        assert found == []
    else:
        assert [(r.method, r.engine, r.arm) for r in found] == [("d", "e", arm)]
        assert found[0].speedup.value == pytest.approx(value)


def test_requests_that_lack_a_field_are_refused_in_a_line(tmp_path: Path) -> None:
    """Catches a traceback for a file of another kind."""
    (tmp_path / "q.json").write_text(json.dumps({"requests": [{"task": "t"}]}))
    said = worlds.call(
        "scripts/readme_table.py", "--readme", "", "--report", "docs/results/coder.json",
        "--requests", tmp_path / "q.json",
    ).error()  # fmt: skip
    assert "a request lacks 'seconds': give one with task, id, arm, tokens, seconds" in said
