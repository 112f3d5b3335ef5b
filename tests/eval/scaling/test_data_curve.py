"""data_curve.json: pooled points, verdicts, sentences, tables and figures say what was measured, and no more."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decode.common.errors import UserError
from decode.common.target_record import TargetRecord
from decode.common.typed_json import from_json
from eval.metrics.bootstrap import ratio_interval
from eval.reporting import plots
from eval.scaling import data_curve
from eval.scaling.data_curve import GO_ON, NOT_CLEAR, STOP, DataCurve, TrainedPoint, build_curve
from tests import curves


def made(*how: Any, **changes: Any) -> DataCurve:
    return from_json(DataCurve, curves.curve(*how, **changes))


def test_points_pool_seeds_and_keep_prompts() -> None:
    """Catches a mean of ratios, and intervals that take two seeds of a prompt for two prompts."""
    one = TrainedPoint(100, 0, 101, 5, 7, {"0.0": [[10, 5, 6, 9], [4, 4, 0, 4]]})
    two = TrainedPoint(100, 1, 105, 7, 7, {"0.0": [[20, 5, 15, 18], [4, 4, 0, 4]]})
    facts = {"target": TargetRecord("t"), "family": "eagle3"}
    (point,) = build_curve([one, two], None, [0.0], 4, 0.02, **facts).points
    assert (point.tokens, point.rows, point.steps) == (103, 6, 7)
    assert point.tau.value == pytest.approx(38 / 18)
    assert point.alpha.value == pytest.approx(21 / 35)
    assert point.tau_seeds == [pytest.approx(14 / 9), pytest.approx(24 / 9)]
    assert point.tau.ci == ratio_interval([30, 8], [10, 8], data_curve.SEED)


@pytest.mark.parametrize(
    ("interval", "said"),
    [
        ((0.001, 0.0199), STOP),
        ((-0.3, -0.1), STOP),
        ((0.02, 0.05), GO_ON),
        ((0.0199, 0.05), NOT_CLEAR),
        ((0.01, 0.02), NOT_CLEAR),
        (None, NOT_CLEAR),
    ],
)
def test_verdicts(interval: tuple[float, float] | None, said: str) -> None:
    assert data_curve.verdict(interval, 0.02) == said


@pytest.mark.parametrize(
    ("each", "said"),
    [
        ([STOP, STOP], STOP),
        ([STOP, GO_ON], GO_ON),
        ([STOP, NOT_CLEAR], NOT_CLEAR),
        ([STOP], NOT_CLEAR),  # nothing could be fitted at the other temperature
        ([], NOT_CLEAR),
    ],
)
def test_the_verdict_of_all_temperatures(each: list[str], said: str) -> None:
    assert data_curve.overall_verdict(each, 2) == said


def test_a_steep_curve_goes_on_and_a_saturated_one_stops() -> None:
    steep = made(lambda n: 1.0 + 0.2 * np.log(n / 300))
    flat = made(lambda n: 2.4 - 8 * n**-0.7)
    assert (steep.verdict, flat.verdict) == (GO_ON, STOP)
    (line, _) = data_curve.doubling_lines(steep)
    assert line.startswith("T = 0: doubling 60,000 supervised tokens gives +6.")
    assert line.endswith(": go on (worth it from +2.0 %).")
    assert "τ (95 % interval +" in line
    assert ": stop (worth" in data_curve.doubling_lines(flat)[0]


def test_two_sizes_say_so() -> None:
    found = made(lambda n: 1.0 + 0.2 * np.log(n / 300), sizes=(600, 60_000))
    assert found.verdict == NOT_CLEAR
    assert (
        "no interval: too few sizes or prompts): not clear" in data_curve.doubling_lines(found)[0]
    )


def test_one_size_draws_and_prints() -> None:
    """Catches a table or a figure that needs a fit."""
    found = made(lambda n: 2.0 + 0 * n, sizes=(600,))
    assert (found.forecasts, found.verdict) == ([], NOT_CLEAR)
    assert len(data_curve.points_table(found).rows) == 4
    assert data_curve.laws_table(found).rows == []
    assert "<svg" in data_curve.curve_panel(found, "tau")


def test_tables_show_what_was_measured_and_what_was_not() -> None:
    found = made(lambda n: 2.4 - 8 * n**-0.4)
    rows = data_curve.points_table(found).rows
    assert [row[1] for row in rows[:7]] == [
        "before training", "600", "1,897", "6,000", "18,974", "60,000", "120,000, predicted",
    ]  # fmt: skip
    tau = found.points[0].tau
    assert tau.ci is not None
    assert rows[1][4] == f"{tau.value:.3f} [{tau.ci[0]:.3f}, {tau.ci[1]:.3f}]"
    laws = data_curve.laws_table(found).rows
    assert [row[:2] for row in laws] == [["0", "τ"], ["0", "α"], ["1", "τ"], ["1", "α"]]
    assert laws[0][4] == "2.400"
    flat = made(lambda n: 2.0 + 0 * n)
    assert data_curve.laws_table(flat).rows[0][4] == "not identified"
    assert "-0.0" not in str([data_curve.doubling_lines(flat), data_curve.laws_table(flat)])


def test_figures_draw_the_points_the_law_and_the_prediction() -> None:
    found = made(lambda n: 2.4 - 8 * n**-0.4)
    drawn = data_curve.curve_chart(found)
    assert [name for _, _, name in drawn.legend] == [
        "temperature 0", "temperature 1", "twice the data, predicted",
    ]  # fmt: skip
    assert len(drawn.panels) == 2
    for tick in ("0.6", "1.9", "6", "19", "60", "120"):
        assert f">{tick}</text>" in drawn.panels[0]
    assert all(
        panel.count("</text>") < 25 for panel in drawn.panels
    )  # not one for each fitted point
    assert "currentColor" in drawn.panels[0]
    assert "currentColor" not in plots.recolor(drawn.panels[0])
    assert all(line in drawn.note for line in data_curve.doubling_lines(found))


def places(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The file, one of its points, one of its forecasts and its law."""
    forecast = found["forecasts"][0]
    return [found, found["points"][0], forecast, forecast["law"]]


def test_a_file_without_one_of_its_fields(tmp_path: Path) -> None:
    """Catches a KeyError from deep in the drawing: the absence is one line that names the field."""
    found = curves.curve(lambda n: 2.4 - 8 * n**-0.4)
    path, refused = tmp_path / "data_curve.json", 0
    for number, holder in enumerate(places(found)):
        for key in list(holder):
            lacking = json.loads(json.dumps(found))
            del places(lacking)[number][key]
            path.write_text(json.dumps(lacking))
            try:
                read = data_curve.read_data_curve(path)
            except UserError as error:
                refused += f"has no {key!r}" in str(error)
            else:
                data_curve.curve_chart(read)
                data_curve.points_table(read)
                data_curve.laws_table(read)
    # an interval that lacks is no interval
    assert refused == 27


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": 2}, "schema 1"),
        ({"target": {"name": "x", "tokenizer": "0123"}}, "about another target"),
        ({"target": {"name": "x"}}, "target has no 'tokenizer'"),
        ({"target": "x"}, "target has no 'tokenizer'"),
        ({"points": []}, "it has no points"),
        ({"points": 3}, "points is not a list"),
        ({"forecasts": [{}]}, "forecasts\\[0\\] has no"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    path = tmp_path / "data_curve.json"
    path.write_text(json.dumps(curves.curve(lambda n: 2.4 - 8 * n**-0.4) | change))
    with pytest.raises(UserError, match=said):
        data_curve.read_data_curve(path, curves.TOKENIZER)
