"""The rendered report has the numbers of report.json, with n and intervals."""

import copy
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from decode.checkpoints.draft_folder import DraftMetadata
from decode.common.errors import UserError
from decode.common.typed_json import from_json, to_json
from eval.measuring import format_summary_line
from eval.reporting import readme_table, render, summary
from eval.reporting.advice import advice_markdown, advise
from eval.reporting.tables import format_identical
from eval.results.report import EvalReport, MethodResult, read_report
from eval.results.tuned import TunedReport
from tests import drafts, worlds
from train.hub.evidence import Evidence


def entry(name: str, task: str, speedup: float | None, **changes: Any) -> dict[str, Any]:
    """A full method entry of schema 1: K = 3, 40 prompts, greedy."""
    fields: dict[str, Any] = {
        "name": name,
        "draft": f"drafts/{name}",
        "k": 3,
        "tree": None,
        "temperature": 0.0,
        "batch_size": 1,
        "task": task,
        "prompts": 40,
        "tau": 2.345,
        "tau_ci": [2.111, 2.567],
        "alpha": 0.612,
        "alpha_ci": [0.587, 0.634],
        "alpha_by_position": [0.711, 0.622, 0.533],
        "alpha_by_position_ci": [[0.7, 0.72], [0.6, 0.64], [0.5, 0.56]],
        "acceptance_rate": 0.448,
        "acceptance_rate_ci": [0.421, 0.475],
        "counts": {
            "rounds": 400, "drafted": 1200, "accepted": 538, "emitted": 938,
            "rounds_by_position": [400, 284, 177],
        },
        "draft_sha256": "ab" * 32,
        "mode": "eager",
        "dtype": "float32",
        "verification": "exact",
        "lossy": False,
        "latency_ms": {"p50": 12.34, "p95": 23.45, "first_token": 5.6},
        "tokens_per_second": 1234.5,
        "tokens_per_second_ci": [1200.0, 1260.0],
        "ms_per_token": 0.81,
        "speedup": speedup,
        "speedup_ci": None if speedup is None else [speedup - 0.1, speedup + 0.1],
        "predicted_speedup": None,
        "phase_ms": {"draft": 1.111, "verify": 8.222, "overhead": 0.333},
        "lossless": verdict(40),
    }  # fmt: skip
    return fields | changes


def verdict(identical: int, ties: int = 0) -> dict[str, Any]:
    """The `lossless` field for 40 prompts; what is neither identical nor a tie failed."""
    tied = [{"task": "code", "id": str(i), "position": 3} for i in range(ties)]
    return {
        "greedy_identical": identical + ties == 40, "prompts": 40, "identical": identical,
        "ties": tied,
    }  # fmt: skip


def plain(task: str) -> dict[str, Any]:
    """Plain decoding: everything that belongs to a draft is null."""
    absent = (
        "draft", "draft_sha256", "alpha", "alpha_ci", "acceptance_rate", "acceptance_rate_ci",
        "phase_ms",
    )  # fmt: skip
    own = {
        "k": 0, "tau": 1.0, "tau_ci": [1.0, 1.0],
        "lossless": {"greedy_identical": None, "prompts": 40},
    }  # fmt: skip
    positions = {"alpha_by_position": [], "alpha_by_position_ci": []}
    return entry("plain", task, 1.0, **dict.fromkeys(absent), **own, **positions)


@pytest.fixture
def report() -> dict[str, Any]:
    methods = []
    for task in ("code", "prose", "all"):
        methods.append(plain(task))
        methods.append(entry("ngram", task, 0.83, draft=None, draft_sha256=None))
        methods.append(entry("eagle3", task, 1.92, alpha_by_position=[0.8, None, None]))
        methods[-1]["alpha_by_position_ci"] = [[0.75, 0.85], None, None]
    return {
        "schema": 1,
        "target": {"name": "assets/target", "revision": None},
        "hardware": {"device": "cpu", "threads": 8},
        "versions": {"torch": "2.13.0"},
        "seed": 7,
        "baseline": {"tokens_per_second": 642.9, "ms_per_token": 1.56},
        "methods": methods,
        "comparisons": [
            {
                "a": "eagle3", "b": "ngram", "task": "all", "temperature": 0.0, "metric": "alpha",
                "difference": 0.123, "ci": [0.1, 0.15], "prompts": 40,
            }
        ],
    }  # fmt: skip


def parsed(report: dict[str, Any]) -> EvalReport:
    return from_json(EvalReport, report)


def both(report: dict[str, Any]) -> list[str]:
    """Its texts as Markdown and as HTML, where a cell's interval is an element of its own."""
    page = re.sub(r'<span class="interval">(.*?)</span>', r"\1", render.render_html(parsed(report)))
    return [render.render_markdown(parsed(report)), page]


def svgs(page: str) -> list[ElementTree.Element]:
    """The page's plots, parsed: a plot that is not well-formed fails here."""
    parts = page.split("<svg")[1:]
    return [ElementTree.fromstring("<svg" + part.split("</svg>")[0] + "</svg>") for part in parts]


def test_numbers_stand_with_their_intervals(report: dict[str, Any]) -> None:
    """Catches a bare mean, a wrong interval beside a number, and a lost n."""
    for text in both(report):
        assert "1.92× [1.82, 2.02]" in text
        assert "2.35 [2.11, 2.57]" in text or "2.34 [2.11, 2.57]" in text
        assert "0.612 [0.587, 0.634]" in text
        assert "0.448 [0.421, 0.475]" in text
        assert "0.711 [0.700, 0.720]" in text
        assert "1,234.5 [1,200.0, 1,260.0]" in text
        assert "+0.123 [+0.100, +0.150]" in text
        assert "40/40" in text
        assert "n = 40" in text


def test_nulls_are_dashes(report: dict[str, Any]) -> None:
    """Catches None, null or nan in a cell: nothing measured is –."""
    report["methods"][0]["latency_ms"] = None
    report["methods"][0]["lossless"] = {"greedy_identical": None, "prompts": 40}
    report["methods"][1]["speedup"] = report["methods"][1]["speedup_ci"] = None
    for text in both(report):
        assert "None" not in text
        assert "NaN" not in text
        assert "nan" not in text
    row = next(
        x for x in render.render_markdown(parsed(report)).splitlines() if x.startswith("| plain")
    )
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[4] == cells[6] == "–"  # predicted, α


def test_sorted_by_speedup_pooled_task_first(report: dict[str, Any]) -> None:
    """Catches a table in measuring order: "all" leads and the fastest is on top of each table."""
    found = parsed(report).sections
    assert [section.task for section in found] == ["all", "code", "prose"]
    assert [m.name for m in found[0].entries] == ["eagle3", "plain", "ngram"]


def test_settings_are_not_mixed(report: dict[str, Any]) -> None:
    """Catches speeds of two temperatures or batch sizes in one table, as if they compared."""
    hot = [copy.deepcopy(m) | {"temperature": 1.0} for m in report["methods"]]
    report["methods"] += hot
    titles = [section.title for section in parsed(report).sections]
    assert titles[:2] == ["all tasks, temperature 0, batch 1", "all tasks, temperature 1, batch 1"]
    assert all(len(section.entries) == 3 for section in parsed(report).sections)


def captions(page: str) -> list[str]:
    return re.findall("<figcaption>(.*?)</figcaption>", page)


def test_the_page_fits_wide_and_narrow_screens(report: dict[str, Any]) -> None:
    """Bug: plots in the left half, cells that a phone shows without their heading, a path as the title, and the same
    rows twice, under "all" and under the only task."""
    report["target"]["name"] = "/data/models/Some-Model-1B/"
    report["methods"] = [m for m in report["methods"] if m["task"] != "prose"]
    report["methods"] += [m | {"temperature": 1.0, "tau": None} for m in report["methods"]]
    page, text = render.render_html(parsed(report)), render.render_markdown(parsed(report))
    assert "<h1>Speculative decoding of Some-Model-1B</h1>" in page
    assert text.startswith("# Speculative decoding of Some-Model-1B\n")
    assert page.count("<td") == page.count('<td data-name="') > 50
    assert page.count('<figure class="several"') == 4  # a panel for each temperature, but of τ
    assert page.count("<figure role") == 1
    rows = re.findall("^\\| eagle3 \\| 3 \\| 40 .*", text, re.MULTILINE)
    assert len(rows) == 2  # one for each temperature
    assert "code" not in re.findall(r"</span> (.*?)</li>", page)


def test_html_stands_alone(report: dict[str, Any]) -> None:
    """Catches a missing or broken plot, and a page that needs the network or a script."""
    page = render.render_html(parsed(report))
    assert len(svgs(page)) == len(captions(page)) == 5
    assert "<script" not in page
    assert "src=" not in page
    assert "<link" not in page


def test_plots_name_what_they_show(report: dict[str, Any]) -> None:
    """Catches an empty or unlabelled figure; names stay text, so they can be found."""
    page = render.render_html(parsed(report))
    for plot in svgs(page):
        assert "temperature 0, batch 1" in " ".join(plot.itertext())
    for figure in page.split("<figure")[1:]:
        assert "eagle3" in figure.split("</figure>")[0]


def test_strings_are_escaped(report: dict[str, Any]) -> None:
    """Catches a task name that ends a table row or becomes a tag, in text and plots."""
    for m in report["methods"]:
        m["task"] = m["task"].replace("code", "<b>co|de</b> $x_1$")
    page, text = render.render_html(parsed(report)), render.render_markdown(parsed(report))
    assert "<b>co" not in page
    assert "&lt;b&gt;co|de&lt;/b&gt; $x_1$" in page
    assert "<b>" not in text
    assert "co\\|de" in text
    assert "$x_1$</span>" not in page
    for m in report["methods"]:
        m["name"] = m["name"].replace("ngram", "<i>n</i> $y$")
    page = render.render_html(parsed(report))
    assert "<i>" not in page
    assert "<i>n</i> $y$" in " ".join(svgs(page)[0].itertext())


def test_lossless_verdict(report: dict[str, Any]) -> None:
    """Catches a pass claimed while one task differs, or while nothing was compared."""
    first = both(report)[0]
    assert (
        "equals transformers' own generate, token by token (ngram, eagle3; n = 40; ties of two logits: 0"
        in first
    )
    report["methods"][1]["lossless"] = verdict(39, ties=1)
    assert "n = 40; ties of two logits: 1)" in summary.lossless_verdict(parsed(report))
    report["methods"][1]["lossless"] = verdict(38, ties=1)
    text = summary.lossless_verdict(parsed(report))
    assert "NOT identical to transformers' generate: ngram on code 38/40 + 1 tie." in text
    for m in report["methods"]:
        m["lossless"] = {"greedy_identical": None, "prompts": 40}
    assert summary.lossless_verdict(parsed(report)) == "Lossless: not checked."


def test_lossy_methods_are_named_not_checked(report: dict[str, Any]) -> None:
    """Catches a method that changes the output by choice counted as a broken or a lossless one."""
    for m in report["methods"]:
        if m["name"] == "ngram":
            m |= {"lossy": True, "lossless": verdict(3)}
    text = summary.lossless_verdict(parsed(report))
    assert "NOT" not in text
    assert "Lossy by choice: ngram." in text


def test_identical_counts_ties_apart() -> None:
    """Catches a tie counted as identical, which would hide it."""
    for found, text in ((verdict(40), "40/40"), (verdict(38, ties=2), "38/40 + 2 ties")):
        assert (
            format_identical(from_json(MethodResult, entry("x", "all", 1.0, lossless=found)))
            == text
        )


def test_slow_drafts_are_not_praised(report: dict[str, Any]) -> None:
    """Catches "fastest" for a speed-up whose interval holds 1.0."""
    assert summary.fastest_method_line(parsed(report)).startswith("Fastest: eagle3, 1.92×")
    for m in report["methods"]:
        m["speedup_ci"] = [0.5, 2.5]
    assert summary.fastest_method_line(parsed(report)).startswith("No method is clearly faster")
    for m in report["methods"]:
        m |= {"speedup_ci": [1.8, 2.1], "prompts": 11}
    few = "At least 12 prompts are needed for a verdict; the best here is eagle3, 1.92×"
    assert summary.fastest_method_line(parsed(report)).startswith(few)


def test_stalls_are_said(report: dict[str, Any]) -> None:
    """Catches turns counted once for each method or task, and a line where nothing stalled."""
    assert summary.dropped_turns_line(parsed(report)) == ""
    for m in report["methods"]:
        m |= {"repeated_turns": 2, "dropped_turns": {"a method stalled": 1}}
    temperatures = {m["temperature"] for m in report["methods"] if m["task"] == "all"}
    n = len(temperatures)
    said = (
        f"Turns in which a method stalled or the machine was busy: {2 * n} measured again for all methods, {n} "
        f"dropped for all (a method stalled {n})."
    )
    assert summary.dropped_turns_line(parsed(report)) == said
    assert said in render.render_markdown(parsed(report))


def test_a_void_row_is_shown_as_void_and_never_praised(report: dict[str, Any]) -> None:
    """Catches a busy machine's 1.92 × in any view: text, page, terminal, README table, picture, advice, last line."""
    assert "1.92×" in render.render_markdown(parsed(report))
    why = "other processes had the CPUs (9 of 31 prompts)"
    for m in report["methods"]:
        m["void"] = why
    report["settings"] = "{max_new_tokens: 64, dtype: float32, mode: eager}"
    found = parsed(report)
    console = Console(width=120, file=io.StringIO())
    console.print(render.terminal_table(found))
    views = {
        "markdown": render.render_markdown(found),
        "html": render.render_html(found),
        "terminal": console.file.getvalue(),  # type: ignore[attr-defined]
        "README": readme_table.render_table(found),
        "advice": advice_markdown(advise(found), "x"),
        "last line": format_summary_line(found, Path("out")),
    }
    assert {name: text for name, text in views.items() if "1.92" in text or "Fastest" in text} == {}
    assert [name for name in views if "void" not in views[name].lower()] == []
    (said,) = (x for x in views["markdown"].splitlines() if "VOID" in x)
    assert "plain" in said
    assert "eagle3" in said
    assert why in said
    assert why in views["html"]
    best = json.loads(views["last line"])["best"]["0"]
    assert (best["name"], best["speedup"]) == (None, None)


@pytest.mark.parametrize(
    ("tau", "low", "void"),
    [
        (1.36, 1.85, True),
        (1.36, 1.361, True),
        (1.36, 1.36, False),
        (1.93, 1.85, False),
        (None, 9.0, False),
    ],
)
def test_no_method_is_faster_than_its_tokens_a_round(
    report: dict[str, Any], tau: float | None, low: float, void: bool
) -> None:
    """Catches "2.14 × [1.85, 2.40]" at τ 1.36, whatever the machine's counters say, in older reports too."""
    m = next(m for m in report["methods"] if m["name"] == "eagle3" and m["task"] == "all")
    m |= {"tau": tau, "speedup": 2.14, "speedup_ci": [low, 2.4], "void": ""}
    found = next(x for x in parsed(report).pooled if x.name == "eagle3")
    assert found.void == ("no method is faster than its 1.36 tokens a round" if void else "")
    assert found.valid_speedup.value == (None if void else 2.14)


def test_empty_report_renders(report: dict[str, Any]) -> None:
    """Catches a crash, or a warning from a figure without data, when every method failed."""
    report |= {"methods": [], "comparisons": []}
    report["baseline"] = {"tokens_per_second": None, "ms_per_token": None}
    text, page = both(report)
    assert "No speed-up was measured." in text
    assert len(svgs(page)) == 0
    assert "Nothing to advise on" in page


def test_write_report(report: dict[str, Any], tmp_path: Path) -> None:
    """Catches a report.json that is not the report, and renders that change from run to run."""
    report["target"] = {"name": "nowhere", "revision": None}
    render.write_report(parsed(report), tmp_path / "a")
    render.write_report(parsed(report), tmp_path / "b")
    models = {"target": None, "drafts": {}}  # nothing of this report lies on the disk
    written = json.loads((tmp_path / "a" / "report.json").read_text("utf-8"))
    assert written == json.loads(json.dumps(to_json(parsed(report)))) | {"models": models}
    for name in ("report.md", "report.html"):
        first, second = ((tmp_path / run / name).read_bytes() for run in ("a", "b"))
        assert first == second
    report["methods"][0]["tau"] = float("nan")
    with pytest.raises(ValueError, match="JSON"):
        render.write_report(parsed(report), tmp_path / "c")


def test_terminal_table(report: dict[str, Any]) -> None:
    """Catches console markup eating [low, high] or a task name in square brackets."""
    report["methods"][0]["task"] = "[red]x"
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(render.terminal_table(parsed(report)))
    text = console.export_text()
    assert "[red]x" in text
    assert "1.92× [1.82, 2.02]" in text


def test_the_terminal_table_fits_80_columns(report: dict[str, Any]) -> None:
    """Catches a column that squeezes out the task, and lossy or simulated methods that look like others."""
    for m in report["methods"]:
        m["task"] = "arithmetic" if m["task"] == "prose" else m["task"]
        m["predicted_speedup"] = 1.87 if m["name"] == "eagle3" else None
    report["methods"][1]["lossy"] = True
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(render.terminal_table(parsed(report)))
    rows = [line.split() for line in console.export_text().splitlines()]
    wanted = "arithmetic 0 eagle3 3 40 2.35 0.612 1,234 1.92× [1.82, 2.02] 1.87"
    assert wanted.split() in rows
    assert any(row[1:4] == ["0", "ngram", "(lossy)"] for row in rows)


def test_every_measurement_has_its_figure(report: dict[str, Any]) -> None:
    """Catches a figure without its data, and data without its figure."""
    for m in report["methods"]:
        m["histogram"] = [100, 60, 30, 10] if m["k"] else [400]
        spread = {"mean": 9.0, "p50": 8.8, "p95": 12.5, "variance": 2.25}
        m["latency_ms"] |= {"mean": 13.0, "variance": 4.5, "token": spread, "first_token_p95": 7.0}
    report["models"] = {
        "target": {"parameters": 10**7, "kv_values": 10, "experts": False},
        "drafts": {"eagle3": {"parameters": 10**6, "kv_values": 1, "experts": False}},
    }
    report["hardware"] = {"device": "NVIDIA L4"}
    cell = {"method": "eagle3", "task": "all", "temperature": 0.0, "batch_size": 1}
    guess = cell | {"fold": 0, "predicted": 1.9, "measured": 2.0, "ci": [1.8, 2.2], "error": 0.1}
    guesses = [guess | {"counted": True, "k": k} for k in (1, 2, 3)]
    own = drafts.tuned("", {}) | {
        "predictions": {"cells": guesses, "counted": 3, "median_error": 0.05},
        "cells": [drafts.cell(**cell | {"batch_size": b}, speedup=2 / b, ci=None) for b in (1, 2)],
    }
    page = render.render_html(parsed(report), (), from_json(TunedReport, own))
    assert captions(page) == [
        "Speed-up by method and task", "τ by method and task", "Acceptance by position",
        "Accepted lengths", "Latency", "Where a round&#39;s time goes", "Speed-up against draft length",
        "Speed-up against batch size", "Roofline",
    ]  # fmt: skip
    assert "ms per token" in page
    roofline = page.split("<figcaption>Roofline")[1].split("</figure>")[0]
    top = 2.345 * 0.3e12 / (4 * (10**7 + 3 * 10**6))  # τ × bandwidth ÷ bytes of a round
    assert (
        f"1,234 of {top:,.0f} tokens/s" in roofline or f"1,235 of {top:,.0f} tokens/s" in roofline
    )
    assert "300 GB/s" in roofline
    assert "2.25" in render.render_markdown(parsed(report))  # the variance


def test_checks_stand_in_the_report(report: dict[str, Any]) -> None:
    """Catches failed prompts, failed distribution tests and simulated drafts that the page does not show."""
    assert not summary.is_output_changed(parsed(report))
    report["methods"][0]["failed"] = []
    broken = next(m for m in report["methods"] if (m["name"], m["task"]) == ("ngram", "all"))
    broken["failed"] = [{"task": "code", "id": "p7", "error": "too long by 3 <tokens>"}]
    test = {
        "method": "eagle3", "order": "p", "tokens": 20000, "distance": 0.02, "p_value": 1e-6,
        "impossible": 0.0,
    }  # fmt: skip
    report["law"] = {
        "temperature": 1.0, "top_k": 0, "top_p": 1.0, "level": 1e-4, "passed": False, "tests": [test],
        "methods": [{"name": "eagle3", "lossy": False, "passed": False, "control_caught": True}],
    }  # fmt: skip
    error = {"task": "code", "id": "p9", "error": "RuntimeError: no room"}
    report["engines"] = [
        drafts.assisted("causal", prompts=40, same_as_ours=39, failed=[error]),
        drafts.assisted("plain", engine="vllm", in_turn=False, gain=None, gain_ci=None),
    ]
    broken["quality"] = [
        {
            "metric": "exact match", "prompts": 12, "value": 0.25, "ci": [0.0, 0.5], "plain": 0.5,
            "difference": -0.25, "difference_ci": [-0.5, 0.0],
        }
    ]  # fmt: skip
    report["gpu_utilisation"] = 87.0
    for text in both(report):
        assert "Failed prompts, excluded from that method" in text
        assert "too long by 3 &lt;tokens" in text
        assert "does NOT follow the target" in text
        assert "1.11× [1.01, 1.22]" in text
        assert "in turn with ours" in text
        assert "apart, after ours" in text
        assert "39/40" in text
        assert "hf-assisted causal 1." in text
        assert "RuntimeError: no room" in text
        assert "-0.250 [-0.500, +0.000]" in text
        assert "87 %" in text
    assert summary.is_output_changed(parsed(report))
    assert any("hf-assisted causal" in "".join(svg.itertext()) for svg in svgs(both(report)[1]))
    assert 'class="verdict bad"' in both(report)[1]
    report["law"]["methods"][0] |= {"passed": True, "control_caught": False}
    assert "too weak for eagle3" in summary.distribution_verdict(parsed(report))
    report["law"]["methods"][0]["control_caught"] = True
    assert summary.distribution_verdict(parsed(report)).startswith(
        "Sampled output follows the target's distribution (eagle3"
    )


@pytest.mark.parametrize(
    ("gain", "interval", "draft_ms", "expected"),
    [
        (1.25, [1.13, 1.37], 4.0, ["It is faster", "1.40 drafted", "τ 2.40", "1.92 steps", "0.10 of", "1.71×"]),
        (0.80, [0.75, 0.85], 24.0, ["It is slower", "3.00 steps", "0.60 of", "0.71×", "too slow for its acceptance"]),
        (0.80, [0.75, 0.85], 4.0, ["It is slower", "1.71×", "transformers' own work"]),
        (1.25, [1.13, 1.37], 24.0, ["It is faster", "0.71×."]),
        (1.01, [0.95, 1.07], None, ["No clear difference", "2.38 steps of generate."]),
    ],
)  # fmt: skip
def test_assisted_generation_is_explained(
    report: dict[str, Any], gain: float, interval: list[float], draft_ms: float | None,
    expected: list[str],
) -> None:  # fmt: skip
    """Catches a verdict that the interval does not bear out, and a reason from another method, K or temperature."""
    for m in report["methods"]:
        m["phase_ms"] = (
            {"draft": 0.01, "verify": 9.0, "overhead": 0.99} if m["name"] == "plain" else None
        )
        if (m["name"], m["temperature"]) == ("eagle3", 0.0) and draft_ms is not None:
            m["phase_ms"] = {"draft": draft_ms, "verify": 12.0, "overhead": 1.0}
            m["k"] = 4
    report["engines"] = [drafts.assisted("eagle3", gain=gain, gain_ci=interval)]
    (line,) = summary.assisted_generation_lines(parsed(report))
    assert line.startswith("transformers with assistant_model = eagle3 (K = 4, temperature 0): ")
    for words in expected:
        assert words in line
    assert ("expected" in line) == (draft_ms is not None)
    assert summary.assisted_generation_lines(parsed(report), ["causal"]) == []


def test_simulated_drafts_win_nothing(report: dict[str, Any]) -> None:
    """Catches a made-up draft in the headline."""
    for m in report["methods"]:
        if m["name"] == "eagle3":
            m["simulated"] = [0.9]
    assert "ngram" in summary.fastest_method_line(parsed(report))
    assert "Simulated acceptance, no real draft: eagle3." in both(report)[0]


def test_page_follows_the_reader_s_colours(report: dict[str, Any]) -> None:
    """Catches black ink in a plot, which a dark page swallows: text and axes take the page's colour."""
    page = render.render_html(parsed(report))
    assert "prefers-color-scheme: dark" in page
    assert "currentColor" in page
    for plot in svgs(page):
        colours = re.findall(
            r"(?:fill|stroke): (#[0-9a-f]{6})", ElementTree.tostring(plot).decode()
        )
        assert "#000000" not in colours
        assert "#ffffff" not in colours


def test_report_is_rendered_again(report: dict[str, Any], tmp_path: Path) -> None:
    """Catches a page that only the run itself can write, and a traceback for a folder without a report."""
    report["target"] = {"name": "nowhere"}
    (tmp_path / "report.json").write_text(json.dumps(report))
    worlds.call("eval/report.py", tmp_path).ok()
    assert "1.92× [1.82, 2.02]" in (tmp_path / "report.html").read_text()
    (tmp_path / "report.json").write_text("[]")
    assert "is not a report" in worlds.call("eval/report.py", tmp_path).error()


def rounded(plain_gap: float, own_gap: float | None, **changes: Any) -> EvalReport:
    """A w4a8 report whose plain decoding leaves transformers' text once and whose draft at the same place, or not."""

    def leaving(gap: float | None, **more: Any) -> dict[str, Any]:
        found = [] if gap is None else [
            {"task": "code", "id": "7", "position": 5, "gap": gap, "noise": 0.1, "tie": abs(gap) <= 0.1}
        ]  # fmt: skip
        ties = [x for x in found if x["tie"]]
        return {
            "greedy_identical": len(ties) == len(found), "prompts": 40, "identical": 40 - len(found),
            "ties": ties, "failures": [x for x in found if not x["tie"]],
        } | more  # fmt: skip

    methods = [
        entry("plain", "all", 1.0, k=0, dtype="w4a8", lossless=leaving(plain_gap)),
        entry("eagle3", "all", 1.9, dtype="w4a8", lossless=leaving(own_gap) | changes),
    ]
    report = {
        "schema": 1, "target": {"name": "t", "dtype": "w4a8"}, "hardware": {}, "versions": {}, "seed": 0,
        "baseline": {"tokens_per_second": 1.0, "ms_per_token": 1.0}, "methods": methods,
    }  # fmt: skip
    return parsed(report).with_own_texts()


WITH_PLAIN = "Lossless: greedy output equals plain decoding of the same weights in w4a8, token by token (eagle3"


@pytest.mark.parametrize(
    ("report", "said"),
    [
        (rounded(0.2, 0.2), [WITH_PLAIN, "1 of 40 texts leave it at margins of 0.200 to 0.200", "1 by more than",
                             "Up to there they were compared"]),
        (rounded(0.05, 0.05), [WITH_PLAIN, "0 by more than its own passes differ"]),
        (rounded(0.2, None), ["NOT identical to plain decoding of the same weights in w4a8: eagle3 on all 39/40"]),
        (rounded(0.2, 0.3), ["NOT identical to plain decoding", "eagle3 on all 39/40"]),
        (rounded(0.2, None, reference="plain", leaves=[]), [WITH_PLAIN, "No text leaves that of transformers'"]),
        (rounded(0.2, 0.2, reference="plain", leaves=[
            {"task": "code", "id": str(i), "position": 1, "gap": -0.01 * i, "noise": 0.03, "tie": i < 4}
            for i in (2, 3, 4)
        ]), ["NOT identical to plain decoding", "3 of 40 texts leave it at margins of 0.020 to 0.040", "1 by more"]),
    ],
)  # fmt: skip
def test_a_rounded_target_s_text_is_that_of_plain_decoding(
    report: EvalReport, said: list[str]
) -> None:
    """Catches "NOT identical … a bug" for transformers' other rounding, and a draft that changes the text excused."""
    text = summary.lossless_verdict(report)
    assert [x for x in said if x not in text] == []
    assert ("NOT" in text) == summary.is_output_changed(report)
    assert "fp32" not in text


def test_what_the_readme_says_of_its_table() -> None:
    """Catches a README above failures: its own report is lossless by the one meaning of it, and so may be published."""
    report = read_report(worlds.ROOT / "docs/results/coder.json")
    assert not summary.is_output_changed(report)
    line = readme_table.comparison_text(report)
    assert "equal to plain decoding of the same weights: 120 of 120 (ties 0, failures 0)" in line
    assert "17 of 40 texts leave it at margins of 0.009 to 0.180" in line
    assert line in (worlds.ROOT / "README.md").read_text()
    sha = next(m.draft_sha256 for m in report.pooled if m.name == "0.5B + ngram")
    assert [m.name for m in report.of_draft(sha)] == ["0.5B + ngram"] * 5
    Evidence(report=report).check(DraftMetadata(family="causal", draft_sha256=sha))
    changed = [
        replace(m, lossless=replace(m.lossless, greedy_identical=False)) for m in report.methods
    ]
    with pytest.raises(UserError, match="greedy outputs equal those of plain decoding"):
        Evidence(report=replace(report, methods=changed)).check(
            DraftMetadata(family="causal", draft_sha256=sha)
        )
