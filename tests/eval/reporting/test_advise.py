"""The advice follows the measurement, names rules of thumb that contradict it, and names missing values."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from decode.common.typed_json import from_json
from eval.reporting.advice import advice_markdown, advise
from eval.reporting.decision import DecisionInputs, decide, verdict_from_heuristic
from eval.results.report import EvalReport, MethodResult
from eval.results.tuned import TunedReport
from tests import drafts, worlds
from tests.eval.reporting.test_report import entry, plain

COMMAND = "eval/advise.py"
GIB = 2**30
FASTER, SLOWER, UNCLEAR = (1.2, 1.6), (0.6, 0.9), (0.9, 1.3)


def facts(**changes: Any) -> DecisionInputs:
    """An idle GPU, long replies, enough memory."""
    known = {
        "utilisation": 0.3, "reply_tokens": 200.0, "needed_bytes": 10.0 * GIB, "available_bytes": 24.0 * GIB,
    }  # fmt: skip
    return DecisionInputs(**{**known, **changes})


def measured(ci: tuple[float, float] | None, **changes: Any) -> MethodResult:
    """Of 40 prompts, α 0.612."""
    values = {"speedup": None if ci is None else sum(ci) / 2, "speedup_ci": ci} | changes
    return from_json(MethodResult, entry("eagle3", "all", None) | values)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, "on"),
        ({"utilisation": 0.49, "reply_tokens": 101.0}, "on"),
        ({"utilisation": 0.5}, "between"),
        ({"reply_tokens": 100.0}, "between"),
        ({"utilisation": 0.8}, "between"),
        ({"utilisation": 0.81}, "batch"),
        ({"needed_bytes": 25.0 * GIB}, "batch"),
        ({"needed_bytes": 25.0 * GIB, "utilisation": None}, "batch"),
        ({"utilisation": 0.81, "available_bytes": None, "reply_tokens": None}, "batch"),
        ({"utilisation": None}, "missing"),
        ({"reply_tokens": None}, "missing"),
        ({"available_bytes": None}, "missing"),
        ({"needed_bytes": None}, "missing"),
    ],
)
def test_rule_of_thumb(changes: dict[str, Any], wanted: str) -> None:
    """Truth table: below 50 %, above 100 tokens and fitting; above 80 % or short of memory; else nothing."""
    assert verdict_from_heuristic(facts(**changes)) == wanted


@pytest.mark.parametrize(
    ("ci", "changes", "wanted"),
    [
        (FASTER, {}, "on"),
        (FASTER, {"utilisation": 0.95}, "on"),
        (FASTER, {"utilisation": None, "reply_tokens": None, "available_bytes": None}, "on"),
        (SLOWER, {}, "off"),
        (SLOWER, {"utilisation": 0.95}, "off"),
        (UNCLEAR, {}, "measure"),
        (UNCLEAR, {"utilisation": 0.95}, "batch"),
        (UNCLEAR, {"utilisation": None}, "measure"),
        (UNCLEAR, {"reply_tokens": 50.0}, "measure"),
        (None, {}, "measure"),
        (None, {"reply_tokens": None}, "measure"),
        (FASTER, {"needed_bytes": 25.0 * GIB}, "batch"),
        (SLOWER, {"needed_bytes": 25.0 * GIB}, "batch"),
    ],
)
def test_measurement_decides(
    ci: tuple[float, float] | None, changes: dict[str, Any], wanted: str
) -> None:
    """Catches a rule of thumb that switches on what no measurement does. Memory decides alone."""
    assert decide(measured(ci), facts(**changes))[0] == wanted


@pytest.mark.parametrize(
    ("changes", "wanted", "lacks"),
    [
        ({"prompts": 12, "alpha": 0.5}, "on", ""),
        ({"prompts": 11}, "measure", "12 prompts (here 11)"),
        ({"prompts": 2, "tau": 1.36, "speedup_ci": [1.85, 2.4]}, "measure", "12 prompts (here 2), a confidence"),
        ({"tau": 1.36, "speedup_ci": [1.85, 2.4]}, "measure", "a confidence interval of the speed-up"),
        ({"void": "memory was slow"}, "measure", "a confidence interval of the speed-up"),
        ({"speedup_ci": [1.0, 1.4]}, "measure", "an interval above 1 (here 1.40× [1.00, 1.40])"),
        ({"alpha": 0.499}, "measure", "an acceptance of 50 % (here α 0.50)"),
        ({"alpha": None}, "measure", "an acceptance of 50 % (here α –)"),
        ({"speedup_ci": [0.6, 0.9], "prompts": 2}, "measure", "12 prompts (here 2), an interval above 1"),
        ({"speedup_ci": [0.6, 0.9], "alpha": 0.2}, "off", ""),
    ],
)  # fmt: skip
def test_a_verdict_needs_all_of_it(changes: dict[str, Any], wanted: str, lacks: str) -> None:
    """Catches "Switch it on" from two prompts, from a void row, or against the rule on acceptance."""
    verdict, reasons = decide(measured(FASTER, **changes), facts())
    assert verdict == wanted
    if lacks:
        assert reasons[0].startswith("The measurement lacks ")
        assert lacks in reasons[0]


def test_contradictions_are_named() -> None:
    """Catches a rule overruled in silence, and a contradiction claimed where both agree."""
    said = " ".join(decide(measured(FASTER), facts(utilisation=0.95))[1])
    assert "larger batches instead (GPU use 95 %, 200 tokens per reply)" in said
    assert "contradicts" in said
    assert "contradicts" not in " ".join(decide(measured(FASTER), facts())[1])
    assert "switching it on" in " ".join(decide(measured(SLOWER), facts())[1])
    assert "contradicts" not in " ".join(decide(measured(SLOWER), facts(utilisation=0.95))[1])


@pytest.fixture
def report() -> dict[str, Any]:
    """Two tasks on a known GPU; the fastest draft has α 0.61 and 1/20 of the target's size."""
    methods = []
    for task in ("all", "code"):
        methods += [plain(task), entry("eagle3", task, 1.92), entry("ngram", task, 0.7, draft=None)]
    for m in methods:
        m |= {"mean_output_tokens": 180.0, "finish": {"eos": 30, "length": 10}, "dtype": "bfloat16"}
    return {
        "schema": 1,
        "target": {"name": "big"},
        "hardware": {"device": "NVIDIA L4"},
        "versions": {},
        "seed": 0,
        "baseline": {"tokens_per_second": 600.0, "ms_per_token": 1.6},
        "gpu_utilisation": 92.0,
        "methods": methods,
        "models": {
            "target": {"parameters": 8 * 10**9, "kv_values": 65536, "experts": False},
            "drafts": {"eagle3": {"parameters": 4 * 10**8, "kv_values": 2048, "experts": False}},
        },
    }


def written(report: dict[str, Any], **how: Any) -> str:
    return advice_markdown(advise(from_json(EvalReport, report), **how), "big")


def test_advice_is_filled_in_with_the_report_s_numbers(report: dict[str, Any]) -> None:
    """Catches a template with blanks, and a number of another method."""
    text = written(report)
    assert "**Switch it on: eagle3 at K = 3, temperature 0, batch 1.**" in text
    assert "GPU use 92 %, 180 tokens per reply" in text
    assert "| 1/50 to 1/10 of the target | 1/20 | yes |" in text
    assert "16.8 GB needed, 24.0 GB available" in text
    assert "others on the same prompts: ngram 0.70× [0.60, 0.80]." in text
    assert "1 + α + … + α^3: 2.22; measured: τ 2.35." in text  # 1 + 0.612 + 0.3745 + 0.2292
    assert "A round costs 1.22 steps" in text  # τ 2.345 at 1.92× the speed
    assert "Not tuned: K = 3 was given" in text
    assert "at 300 GB/s allows 18.8 passes/s" in text  # 8e9 weights of two bytes
    assert "computes 403 tokens" in text  # 121 TFLOP/s ÷ 0.3 TB/s
    assert "(here 1 × 4)" in text
    assert "Not shown to be faster" not in text
    assert [x[3:] for x in text.splitlines() if x.startswith("## ")] == [
        "Rules", "Measured", "Limits", "Tuning", "Roll-out",
    ]  # fmt: skip
    assert len(text.splitlines()) <= 40  # a page
    doubtful = {"task": "prose", "speedup": 1.05, "speedup_ci": [0.95, 1.15]}
    report["methods"] += [m | doubtful for m in report["methods"] if m["task"] == "code"]
    assert "Not shown to be faster on prose 1.05× [0.95, 1.15] (n = 40)." in written(report)


def test_memory_is_that_of_the_planned_load(report: dict[str, Any]) -> None:
    """Catches planned rows and lengths ignored: 8 B in bf16 leave little of an L4 for long caches."""
    text = written(report, rows=32, length=8192)
    assert text.splitlines()[2].startswith("**Use larger batches instead")
    assert "do not fit" in text
    assert "Switch it on" in written(report, rows=32, length=8192, memory=80e9)


def test_numbers_that_were_not_measured_are_missing(report: dict[str, Any]) -> None:
    """Catches a verdict over values that nobody measured, in a report before they existed."""
    report = copy.deepcopy(report)
    del report["gpu_utilisation"], report["models"]
    for m in report["methods"]:
        del m["finish"], m["mean_output_tokens"]
        m["speedup_ci"] = None
    text = written(report)
    assert "**Measure more before deciding" in text
    assert "| GPU use below 50 % | yes | – | missing |" in text
    assert "None" not in text
    assert "nan" not in text


def test_replies_cut_at_the_limit_say_nothing_of_their_length(report: dict[str, Any]) -> None:
    """Catches "replies are short" concluded from a run that cut them."""
    for m in report["methods"]:
        m |= {"mean_output_tokens": 47.0, "finish": {"length": 40}}
    assert "| replies above 100 tokens | yes | 47, cut at the run's limit | missing |" in written(
        report
    )
    for m in report["methods"]:
        m["finish"] = {"eos": 40}
    assert "| replies above 100 tokens | yes | 47 | no |" in written(report)


def test_simulated_drafts_advise_nothing(report: dict[str, Any]) -> None:
    """Catches "switch it on" for a draft that does not exist."""
    for m in report["methods"]:
        if m["name"] == "eagle3":
            m["simulated"] = [0.9]
    assert "eagle3" not in written(report).splitlines()[2]


def tuned() -> TunedReport:
    """eagle3 helps up to 8 rows."""
    choice = drafts.cell(
        task="code", setting="K = 6", speedup=2.1, ci=[1.9, 2.3], held_out=2.05, guide=[4, 7]
    )
    sizes = {1: 2.0, 8: 1.2, 16: 0.9}
    return from_json(TunedReport, drafts.tuned("", {}) | {
        "chosen": [choice, choice | {"method": "ngram"}],
        "predictions": {"cells": [], "counted": 12, "median_error": 0.07},
        "cells": [drafts.cell(batch_size=b, speedup=x, ci=None) for b, x in sizes.items()],
    })  # fmt: skip


def test_tuning_stands_beside_the_guides(report: dict[str, Any]) -> None:
    """Catches guides given as if they had been measured, and a batch limit that was not."""
    text = written(report, tuned=tuned())
    assert "code: K = 6, 2.10× [1.90, 2.30] in rounds" in text
    assert "measured on the other half: 2.05×; guides recommend K 4 to 7." in text
    assert "off by 7 %" in text
    assert "1: 2.00×, 8: 1.20×, 16: 0.90×. Switch off above 8 concurrent requests." in text


def test_command(report: dict[str, Any], tmp_path: Path) -> None:
    """Catches a report that must be named by a flag, and a traceback for a file that is none."""
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report))
    done = worlds.call(COMMAND, path, "--out", tmp_path / "advice.md").ok()
    assert done.out == (tmp_path / "advice.md").read_text()
    assert done.out.startswith("# Speculative decoding of big: advice")
    path.write_text("{}")
    assert "is not a report" in worlds.call(COMMAND, path).error()
    assert "does not exist" in worlds.call(COMMAND, tmp_path / "none.json").error()
