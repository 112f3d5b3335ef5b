"""Files given as --report and --tuned that are something else, or lack what is read from them."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from decode.common.errors import UserError
from decode.common.typed_json import from_json, to_json
from eval.reporting.render import render_html
from eval.results.report import EvalReport, read_report
from eval.results.tuned import TunedReport, read_tuned

RESULTS = Path(__file__).resolve().parents[3] / "docs" / "results"


def holds(new: Any, old: Any) -> bool:
    """Whether everything of `old` is in `new`, which may have further fields."""
    if isinstance(old, dict):
        return isinstance(new, dict) and all(k in new and holds(new[k], x) for k, x in old.items())
    if isinstance(old, list):
        return len(new) == len(old) and all(map(holds, new, old))
    return bool(new == old)


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_results_come_back_as_they_were_written(path: Path) -> None:
    """Catches a field that is lost when an older file is read, or changed when it is written again."""
    old = json.loads(path.read_text())
    marks = {"baseline": EvalReport, "chosen": TunedReport}
    kinds = [kind for key, kind in marks.items() if key in old]
    for kind in kinds:
        read = from_json(kind, old)
        written = json.loads(json.dumps(to_json(read)))
        assert holds(written, old)
        assert from_json(kind, written) == read
    assert kinds or path.stem not in ("smollm2", "tuned")


def shortened() -> dict[str, Any]:
    """The published report with its first two methods."""
    report = json.loads((RESULTS / "reproduce.json").read_text())
    return {**report, "methods": report["methods"][:2], "domains": [], "models": {}}


def without_one_key(report: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for key in report:
        yield key, {k: v for k, v in report.items() if k != key}
    for key in report["methods"][0]:
        lacking = copy.deepcopy(report)
        del lacking["methods"][1][key]
        yield key, lacking


def test_a_report_without_one_of_its_fields(tmp_path: Path) -> None:
    """Catches a KeyError from deep in the rendering: a field is optional or its absence is one line."""
    path, report, refused = tmp_path / "report.json", shortened(), []
    path.write_text(json.dumps(report))
    render_html(read_report(path))
    for key, lacking in without_one_key(report):
        path.write_text(json.dumps(lacking))
        try:
            read = read_report(path)
        except UserError:
            refused.append(key)
        else:
            render_html(read)
    assert {"schema", "methods", "target", "tau", "speedup", "task"} <= set(refused)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[]", "it holds a list"),
        ('"text"', "it holds text"),
        ('{"schema": 1}', "it has no"),
        ('{"schema": 2, "methods": [], "chosen": []}', "it has no|of schema 1"),
        ("{", "is not valid JSON"),
        ("", "is empty"),
    ],
)
def test_other_files_are_refused(text: str, reason: str, tmp_path: Path) -> None:
    """Catches a file that is taken for a report or for tuned settings, and a message that names no command."""
    path = tmp_path / "given.json"
    path.write_text(text)
    for read, command in ((read_report, "eval/run.py"), (read_tuned, "eval/tune.py")):
        with pytest.raises(UserError, match=f"given.json .*({reason})") as error:
            read(path)
        assert (
            "JSON" in str(error.value) or "empty" in str(error.value) or command in str(error.value)
        )
