"""Draws panels as SVG text that is readable on light and dark pages and on small and large screens.

Every panel is a separate SVG, narrow enough for a phone, and the page places panels side by side. Lines and text take
the page's text colour. Series have colours of the Okabe-Ito palette, which colour-blind readers can tell apart, and
different markers, so that colour is never the only difference.
"""

import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eval.metrics.bootstrap import Interval

# Okabe-Ito without black and yellow, which are invisible on a dark or a white page.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")  # one more than colours: no pair repeats before 42
GLYPHS = ("●", "■", "▲", "◆", "▼", "✚", "✖")  # the same in text, for the legend
LINE_STYLES = ("-", "--", ":")  # the next one each time that all colours are used
SHADE_COLORS = (
    "#9aa3ad",
    "#c6dbef",
    "#9ecae1",
    "#6baed6",
    "#4292c6",
    "#2171b5",
    "#08519c",
    "#08306b",
)
"""From small to large; the first one stands for zero."""
PHASE_COLORS = {"draft": "#E69F00", "verify": "#0072B2", "overhead": "#9aa3ad"}
TEXT_COLOR = "#7a7b7c"  # used by nothing else: replaced by the page's text colour
MATPLOTLIB_STYLE = {
    "svg.fonttype": "none",  # text stays text: it can be selected and searched
    "svg.hashsalt": "draftsmith",  # the same report gives the same bytes
    "text.parse_math": False,  # a task may have a $ in its name
    "text.color": TEXT_COLOR,
    "axes.labelcolor": TEXT_COLOR,
    "axes.edgecolor": TEXT_COLOR,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": TEXT_COLOR,
    "ytick.color": TEXT_COLOR,
    "grid.color": TEXT_COLOR,
    "grid.alpha": 0.25,
}
WIDTH, HEIGHT = 4.6, 3.0  # inches
ROW_HEIGHT = 0.17  # inches for a dot and its share of the gap to the next row
MOST_TICKS = 12
DODGE_WIDTH = 0.7  # share of the distance between two ticks that points of one tick are spread over


@dataclass(frozen=True)
class Point:
    """A value y at x with its 95 % interval; `dot_plot` ignores x."""

    x: float
    y: float
    ci: Interval | None = None


@dataclass(frozen=True)
class ChartSeries:
    """The points of one name; `dashed` for predicted instead of measured values."""

    name: str
    points: list[Point]
    dashed: bool = False


@dataclass(frozen=True)
class ReportChart:
    """One figure of the page: SVG panels, their caption, the legend that they share, and a note that explains them."""

    caption: str
    note: str
    panels: list[str]
    legend: list[tuple[str, str, str]] = field(default_factory=list)  # (glyph, colour, name)


def legend_entries(names: Sequence[str]) -> list[tuple[str, str, str]]:
    """(glyph, colour, name) of each series, by its index in `names`."""
    return [
        (GLYPHS[i % len(GLYPHS)], COLORS[i % len(COLORS)], name) for i, name in enumerate(names)
    ]


def axis_limits(points: Iterable[Point], *others: float) -> tuple[float, float]:
    """(low, high) of an axis for all these points, their intervals and `others`, with a margin: one for all panels."""
    values = [*others]
    for point in points:
        values += [point.y, *(point.ci or ())]
    low, high = min(values), max(values)
    margin = 0.05 * (high - low) or 0.5
    return low - margin, high + margin


def recolor(svg: str) -> str:
    """`svg` in a grey that is visible on light and dark pages: an image cannot use the page's text colour."""
    return svg.replace("currentColor", TEXT_COLOR)


def line_chart(
    series: Sequence[ChartSeries],
    names: Sequence[str],
    title: str,
    xlabel: str,
    ylabel: str,
    *,
    line_at: float | None = None,
    xscale: str = "linear",
    ylim: tuple[float, float] | None = None,
) -> str:
    """SVG of values over x with intervals; the colour of a series is by the index of its name in `names`."""

    def draw(axes: Axes) -> None:
        xs = sorted({point.x for one in series if not one.dashed for point in one.points})
        nudge = 0.0 if xscale == "log" or len(xs) < 2 else DODGE_WIDTH / 2
        for one in series:
            color, marker, line = _series_style(names.index(one.name))
            shift = nudge * ((names.index(one.name) + 0.5) / len(names) - 0.5)
            at = [point.x + shift for point in one.points]
            values = [point.y for point in one.points]
            if one.dashed:
                axes.plot(at, values, color=color, linestyle="--", linewidth=1.1)
                continue
            axes.plot(
                at, values, color=color, marker=marker, linestyle=line, markersize=5, linewidth=1.4
            )
            for x, point in zip(at, one.points, strict=True):
                if point.ci is not None:
                    axes.vlines(x, point.ci[0], point.ci[1], color=color, linewidth=1.2)
        if line_at is not None:
            axes.axhline(line_at, color=TEXT_COLOR, linestyle="--", linewidth=1)
        axes.set(xlabel=xlabel, ylabel=ylabel, title=title, xscale=xscale)
        if len(xs) <= MOST_TICKS:  # of a training's steps matplotlib chooses some
            axes.set_xticks(xs, [f"{x:g}" for x in xs])
        axes.minorticks_off()
        if ylim is not None:
            axes.set_ylim(*ylim)
        axes.grid(axis="y")

    return _render_svg(draw, HEIGHT)


def dot_plot(
    values: dict[tuple[str, str], Point],
    rows: Sequence[str],
    names: Sequence[str],
    title: str,
    xlabel: str,
    xlim: tuple[float, float],
    line_at: float | None = None,
) -> str:
    """SVG of {(row, name): point}: y of each point along the horizontal axis, a colour for each of `names`."""

    def draw(axes: Axes) -> None:
        for (row, name), point in values.items():
            index = names.index(name)
            color, marker, _ = _series_style(index)
            at = rows.index(row) + DODGE_WIDTH * ((index + 0.5) / len(names) - 0.5)
            axes.plot(point.y, at, color=color, marker=marker, markersize=5.5)
            if point.ci is not None:
                axes.hlines(at, point.ci[0], point.ci[1], color=color, linewidth=1.6)
        if line_at is not None:
            axes.axvline(line_at, color=TEXT_COLOR, linestyle="--", linewidth=1)
        _format_row_axis(axes, rows, title, xlabel)
        axes.set_xlim(*xlim)

    return _render_svg(draw, 1.0 + ROW_HEIGHT * len(rows) * (len(names) + 1))


def stacked_bars(
    parts: dict[str, list[tuple[float, str]]],
    ends: dict[str, str],
    title: str,
    xlabel: str,
    right: float,
) -> str:
    """SVG of horizontal bars {row: [(length, colour), …]}, with the text `ends[row]` to the right of each."""
    rows = list(parts)

    def draw(axes: Axes) -> None:
        for at, row in enumerate(rows):
            left = 0.0
            for length, color in parts[row]:
                axes.barh(at, length, left=left, color=color, height=0.62)
                left += length
            axes.text(left, at, f" {ends.get(row, '')}", va="center", fontsize=8.5)
        _format_row_axis(axes, rows, title, xlabel)
        axes.set_xlim(0, right)

    return _render_svg(draw, 0.9 + 0.32 * len(rows))


def _format_row_axis(axes: Axes, rows: Sequence[str], title: str, xlabel: str) -> None:
    """A vertical axis with the names of the rows, the first one on top."""
    axes.set(xlabel=xlabel, ylim=(len(rows) - 0.4, -0.6), title=title)
    axes.set_yticks(range(len(rows)), rows)
    axes.grid(axis="x")


def _render_svg(draw: Callable[[Axes], None], height: float) -> str:
    """The SVG text of a figure of WIDTH × `height` inches that `draw` fills."""
    with mpl.rc_context(MATPLOTLIB_STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        figure.patch.set_alpha(0)
        axes = figure.subplots()
        axes.patch.set_alpha(0)
        draw(axes)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :].replace(TEXT_COLOR, "currentColor")


def _series_style(index: int) -> tuple[str, str, str]:
    """Colour, marker and line style of series number `index`."""
    line = LINE_STYLES[index // len(COLORS) % len(LINE_STYLES)]
    return COLORS[index % len(COLORS)], MARKERS[index % len(MARKERS)], line
