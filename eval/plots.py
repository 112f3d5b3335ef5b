"""The report's figures as SVG text that fits a light and a dark page.

Lines and text take the page's own colour; methods and tasks take colours of the Okabe-Ito palette,
which colour-blind readers can tell apart, and a marker each, so that colour is never the only cue.
"""

import io
from collections.abc import Iterable, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Entry = dict[str, Any]

# Okabe-Ito without black and yellow, which vanish on a dark or a white page.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")  # one more than colours: no pair returns before 42
LINES = ("-", "--", ":")  # the next one each time the colours are used up
INK = "#7a7b7c"  # a colour that nothing else uses: replaced by the page's text colour
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: selectable, searchable, in the page's colour
    "svg.hashsalt": "draftsmith",  # the same report gives the same bytes
    "text.parse_math": False,  # a task may have a $ in its name
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": INK,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "legend.fontsize": 9,
}
PANEL_WIDTH, PANEL_HEIGHT, LEGEND_WIDTH = 4.6, 3.6, 1.9  # inches
DOT_HEIGHT = 0.17  # inches for a dot and its share of the gap to the next method
SPREAD = 0.7  # how much of the room between two ticks the points that share a tick fill


def acceptance_plot(methods: Sequence[Entry]) -> str:
    """SVG of α_i over position i with intervals: a line for each method, a panel for each setting.

    Only entries of the pooled task are drawn, and of them only methods that drafted anything.
    """
    shown = [m for m in methods if m["task"] == "all" and m["alpha"] is not None]
    names = unique(m["name"] for m in sorted(shown, key=lambda m: -m["alpha"]))
    with mpl.rc_context(STYLE):
        figure, panels = _panels(shown, PANEL_HEIGHT)
        for axes, entries in panels:
            for entry in entries:
                _draw_line(axes, entry, names.index(entry["name"]), len(names))
            last = max((len(m["alpha_by_position"]) for m in entries), default=1)
            axes.set(xlabel="position i", ylim=(0, 1.03), xticks=range(1, last + 1))
            axes.grid(axis="y")
        panels[0][0].set_ylabel("α_i")
        _legend(panels[-1][0], names)
        return _svg(figure)


def dot_plot(methods: Sequence[Entry], field: str, label: str, line_at: float | None = None) -> str:
    """SVG of entry[field] with entry[field + "_ci"]: a row for each method, a colour for each task.

    Methods are ordered by their best value, the highest on top. Plain decoding is not a row but
    the line at `line_at`.
    """
    shown = [m for m in methods if m[field] is not None and m["name"] != "plain"]
    names = unique(m["name"] for m in sorted(shown, key=lambda m: -m[field]))
    tasks = unique(m["task"] for m in shown)
    with mpl.rc_context(STYLE):
        figure, panels = _panels(shown, 1.0 + DOT_HEIGHT * len(names) * (len(tasks) + 1))
        for axes, entries in panels:
            for entry in entries:
                row, task = names.index(entry["name"]), tasks.index(entry["task"])
                _draw_dot(axes, entry, field, row + _offset(task, len(tasks)), task)
            if line_at is not None:
                axes.axvline(line_at, color=INK, linestyle="--", linewidth=1)
            axes.set(xlabel=label, ylim=(len(names) - 0.4, -0.6))
            axes.set_yticks(range(len(names)), names if axes is panels[0][0] else [])
            axes.grid(axis="x")
        _legend(panels[-1][0], tasks)
        return _svg(figure)


def settings_of(methods: Iterable[Entry]) -> list[tuple[float, int]]:
    """The (temperature, batch_size) pairs that occur, in order: numbers compare only within one."""
    return sorted({(m["temperature"], m["batch_size"]) for m in methods})


def setting_title(temperature: float, batch_size: int) -> str:
    """The words for one setting in titles."""
    return f"temperature {temperature:g}, batch {batch_size}"


def unique(names: Iterable[str]) -> list[str]:
    """Each name once, in order of first appearance, the pooled task "all" first."""
    return sorted(dict.fromkeys(names), key=lambda name: name != "all")


def _panels(
    methods: Sequence[Entry], height: float
) -> tuple[Figure, list[tuple[Axes, list[Entry]]]]:
    """A figure with one panel for each setting, and the entries that belong in each."""
    settings = settings_of(methods)
    count = max(1, len(settings))
    size = (PANEL_WIDTH * count + LEGEND_WIDTH, height)
    figure = Figure(figsize=size, layout="constrained")
    figure.patch.set_alpha(0)
    row = list(figure.subplots(1, count, squeeze=False, sharex=True)[0])
    for axes in row:
        axes.patch.set_alpha(0)
    if len(settings) == 0:
        row[0].set_title("nothing measured")
        return figure, [(row[0], [])]
    panels = []
    for axes, setting in zip(row, settings, strict=True):
        axes.set_title(setting_title(*setting))
        chosen = [m for m in methods if (m["temperature"], m["batch_size"]) == setting]
        panels.append((axes, chosen))
    return figure, panels


def _draw_line(axes: Axes, entry: Entry, index: int, count: int) -> None:
    color, marker, line = _look(index)
    points = [
        (position + _offset(index, count) / 2, value, interval)
        for position, (value, interval) in enumerate(
            zip(entry["alpha_by_position"], entry["alpha_by_position_ci"], strict=True), start=1
        )
        if value is not None
    ]
    xs, ys = [x for x, _, _ in points], [y for _, y, _ in points]
    axes.plot(xs, ys, color=color, marker=marker, linestyle=line, markersize=5, linewidth=1.4)
    for x, _, interval in points:
        if interval is not None:
            axes.vlines(x, *interval, color=color, linewidth=1.2)


def _draw_dot(axes: Axes, entry: Entry, field: str, y: float, index: int) -> None:
    color, marker, _ = _look(index)
    axes.plot(entry[field], y, color=color, marker=marker, markersize=5.5)
    interval = entry[f"{field}_ci"]
    if interval is not None:
        axes.hlines(y, *interval, color=color, linewidth=1.6)


def _legend(axes: Axes, names: Sequence[str]) -> None:
    """One legend right of the last panel, also for names that this panel does not show."""
    for index, name in enumerate(names):
        color, marker, line = _look(index)
        axes.plot([], [], color=color, marker=marker, linestyle=line, markersize=5, label=name)
    if len(names) > 0:
        axes.legend(loc="center left", bbox_to_anchor=(1.02, 0.5))


def _look(index: int) -> tuple[str, str, str]:
    """Colour, marker and line of method or task number `index`."""
    line = LINES[index // len(COLORS) % len(LINES)]
    return COLORS[index % len(COLORS)], MARKERS[index % len(MARKERS)], line


def _offset(index: int, count: int) -> float:
    """Where point `index` of `count` that share a tick goes, in units of ticks, around 0."""
    return SPREAD * ((index + 0.5) / count - 0.5)


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :].replace(INK, "currentColor")
