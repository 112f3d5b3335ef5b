"""The README's table: which numbers stand in which row and column."""

from typing import Any

from scripts.tables import draft_sizes, large_target, readme_table
from scripts.tables.large_target import DraftReads, LargeTarget


def entry(name: str, task: str, speedup: float, **more: Any) -> dict[str, Any]:
    return {
        "name": name, "task": task, "temperature": 0.0, "k": 3, "prompts": 8, "tau": 1.0 + speedup, "alpha": 0.5,
        "alpha_ci": [0.4, 0.6], "tokens_per_second": 10 * speedup, "speedup": speedup, "speedup_ci": [speedup, speedup],
        "lossless": {"identical": 8, "ties": [], "prompts": 8}, **more,
    }  # fmt: skip


def make_report(tasks: list[str]) -> dict[str, Any]:
    """A method and two engines; the speed-up of each element is a number of its own."""
    names = {"all": 0.5, **{task: float(i + 1) for i, task in enumerate(tasks)}}
    return {
        "settings": "max_new_tokens: 96\ndtype: float32\nmode: eager\n",
        "hardware": {"device": "a CPU", "threads": 2},
        "comparisons": [],
        "methods": [entry("eagle3", task, 1 + x) for task, x in names.items()],
        "engines": [
            *(entry("plain", task, 0.5 + x, engine="hf", k=0) for task, x in names.items()),
            *(entry("ngram", task, 0.75 + x, engine="hf-lookup") for task, x in names.items()),
        ],
    }


def rows_of(report: dict[str, Any], layout: str = "pooled") -> list[list[str]]:
    table = readme_table.render_table(report, layout)
    lines = [line for line in table.splitlines() if line[:1] == "|"]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_each_speedup_stands_under_its_task() -> None:
    """Bug: a task's speed-up in another task's column, an engine's in a method's row, or rows out of order."""
    head, _, *rows = rows_of(make_report(["math", "code"]))
    assert head == ["T", "method", "τ", "α", "tokens/s", "math", "code", "speed-up [95 %]"]
    shown = [(row[1], *row[5:]) for row in rows]
    assert shown == [
        ("*transformers*", "1.50×", "2.50×", "1.00× [1.00, 1.00]"),
        ("*transformers, prompt lookup*", "1.75×", "2.75×", "1.25× [1.25, 1.25]"),
        ("eagle3", "2.00×", "3.00×", "1.50× [1.50, 1.50]"),
    ]
    assert [row[3] for row in rows] == ["–", "–", "0.500 [0.400, 0.600]"]


def test_one_task_needs_no_column_of_its_own() -> None:
    """Bug: the only task's speed-up is shown twice."""
    head, *_ = rows_of(make_report(["math"]))
    assert head == ["T", "method", "τ", "α", "tokens/s", "speed-up [95 %]"]


def test_each_method_has_its_own_draft_length() -> None:
    """Bug: the longest K stands for all methods."""
    report = make_report(["math"])
    for m in report["methods"]:
        m["k"] = 2
    last = readme_table.render_table(report).splitlines()[-1]
    assert ", K = 2, but 3 (transformers, prompt lookup), batch 1" in last


def test_the_line_below_says_how_it_was_measured() -> None:
    """Bug: the answer length, K or the number of equal outputs of another run."""
    last = readme_table.render_table(make_report(["math"])).splitlines()[-1]
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


def sizes_report() -> dict[str, Any]:
    """Two drafts on two tasks at T = 0 and 1, small listed first; a target step takes 10 ms."""
    alphas = {"small": 0.5, "large": 0.75}
    milliseconds = {"plain": 0.0, "small": 4.0, "large": 12.0}
    methods = []
    for temperature in (1.0, 0.0):
        for name, ms in milliseconds.items():
            for task in ("all", "words", "news"):
                k = 0 if name == "plain" else 4
                row = entry(
                    name, task, 1.0, k=k, temperature=temperature, alpha_ci=None, speedup_ci=None
                )
                row["alpha"] = None if k == 0 else alphas[name] - 0.25 * temperature
                row["speedup"] = {"plain": 1.0, "small": 1.5, "large": 1.25}[name]
                verify = 10.0 if k == 0 else 11.0
                timed = {"draft": ms, "verify": verify, "overhead": 0.0}
                row["phase_ms"] = timed if task == "all" else None
                methods.append(row)
    return {**make_report([]), "methods": methods, "engines": []}


def test_the_layout_of_sizes_has_the_columns_of_leviathan() -> None:
    """Bug: c of a round and not of a token, verification in place of a plain step, or rows in another order."""
    head, _, *rows = rows_of(sizes_report(), "sizes")
    assert head == ["task", "T", "draft", "γ", "α [95 %]", "c", "τ", "predicted", "speed-up [95 %]"]
    cells = [("words", "0"), ("words", "1"), ("news", "0"), ("news", "1")]
    assert [tuple(row[:3]) for row in rows] == [
        (*cell, name) for cell in cells for name in ("small", "large")
    ]
    # 1 + 0.5 + 0.25 + 0.125 + 0.0625 = 1.9375 tokens in 4 · 0.1 + 1 target steps
    assert rows[0][3:] == ["4", "0.500", "0.10", "2.00", "1.38×", "1.50×"]
    assert rows[1][3:8] == ["4", "0.750", "0.30", "2.00", "1.39×"]


def test_orderings_are_counted_as_they_came_out() -> None:
    """Bug: an ordering that failed is reported as held."""
    report = sizes_report()
    text = draft_sizes.orderings_text(report)
    assert text == (
        "Of 4 pairs of task and T, α rises with every step from small to large in 4; greedy α is above sampled α in 4 "
        "of 4; fastest: small 4, large 0; the formula names the fastest draft in 2 of 4."
    )
    for m in report["methods"]:
        if (m["name"], m["task"], m["temperature"]) == ("large", "news", 0.0):
            m |= {"alpha": 0.25, "speedup": 3.0}
    text = draft_sizes.orderings_text(report)
    assert (
        "small to large in 3; greedy α is above sampled α in 3 of 4; fastest: small 3, large 1"
        in text
    )
    assert text in readme_table.render_table(report, "sizes")


def test_untimed_phases_leave_dashes() -> None:
    """Bug: a report without phases (phase_prompts: 0) ends the table."""
    report = sizes_report()
    for m in report["methods"]:
        m["phase_ms"] = None
    _, _, *rows = rows_of(report, "sizes")
    assert {(row[5], row[7]) for row in rows} == {("–", "–")}
    assert draft_sizes.orderings_text(report).endswith("fastest: small 4, large 0.")


def test_costs_are_those_of_a_drafted_token_and_of_a_large_target() -> None:
    """Bug: the draft's time of a round taken for that of a token, another method's bound, tokens per draft for τ."""
    report = make_report(["math"])
    report["engines"] = []
    drafting = {"phase_ms": {"draft": 6.0, "verify": 21.0}, "counts": {"drafted": 30, "rounds": 10}}
    for m in report["methods"]:
        m |= {"predicted_speedup": 1.25, **drafting}
    plain = {
        "k": 0,
        "phase_ms": {"verify": 20.0},
        "alpha": None,
        "counts": {"drafted": 0, "rounds": 9},
    }
    report["methods"].append(entry("plain", "all", 1.0, **plain))
    large = {"eagle3": DraftReads(layers=0.25, head=1.0)}
    head, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in readme_table.render_table(report, "costs", large).splitlines()
        if line[:1] == "|" and "---" not in line
    ]
    assert head[2:] == ["τ [95 %]", "α", "c", "predicted", "speed-up [95 %]", "80 layers"]
    shown = {row[1]: row for row in rows}
    assert shown["eagle3"][4:6] == ["0.100", "1.25×"]
    assert shown["plain"][4] == shown["plain"][-1] == "–"
    target = LargeTarget()
    assert 69e9 < target.weights + target.vocab * target.hidden < 71e9  # with its embedding
    c = (20 * target.layer_weights + target.vocab * target.hidden) / target.weights
    assert shown["eagle3"][-1] == f"{2.5 / (1 + 3 * c):.2f}×"
    assert large_target.speedup(report["methods"][0], DraftReads(), target) == 2.5
