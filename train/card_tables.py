"""The measured parts of a card: tables and images of a draft's entries in a report, its recipe and its data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eval import plots
from eval.tables import Table, setting_title, settings_of, unique
from eval.wording import NONE, identical, inside, markdown, number, with_interval, words

Entry = dict[str, Any]

MISSING = "not recorded"
NO_RECIPE = ("out", "resume", "overwrite", "dry_run", "wandb", "project", "publish")
"""Settings that say where, and not what."""
COST = {"wall_seconds": "wall time, s", "tokens": "tokens trained on"}


@dataclass(frozen=True)
class Image:
    """A figure of the card, saved as images/`name`."""

    name: str
    caption: str
    svg: str
    key: str


def acceptance(own: Sequence[Entry]) -> list[Table]:
    """For each setting: methods by task, pooled first, with intervals, and the positions behind."""
    tables = []
    for setting, entries in by_setting(own):
        last = max(len(m["alpha_by_position"]) for m in entries)
        rows = []
        for m in entries:
            pairs = zip(m["alpha_by_position"], m["alpha_by_position_ci"], strict=True)
            cells = [with_interval(value, interval, 3) for value, interval in pairs]
            rows.append(
                [
                    m["task"],
                    m["name"],
                    number(m["k"], 0),
                    number(m["prompts"], 0),
                    with_interval(m["tau"], m["tau_ci"], 2),
                    with_interval(m["alpha"], m["alpha_ci"], 3),
                    *cells,
                    *[NONE] * (last - len(cells)),
                ]
            )
        header = ["task", "method", "K", "n", "τ", "α", *(f"α_{i}" for i in range(1, last + 1))]
        tables.append(Table(heading(setting), header, rows))
    return tables


def speed(own: Sequence[Entry]) -> list[Table]:
    """For each setting what was timed."""
    header = ["task", "method", "K", "n", "speed-up", "tokens/s", "first token ms", "identical"]
    tables = []
    for setting, entries in by_setting(own):
        rows = [
            [
                m["task"],
                m["name"],
                number(m["k"], 0),
                number(m["prompts"], 0),
                with_interval(m["speedup"], m["speedup_ci"], 2, "×"),
                with_interval(m["tokens_per_second"], m.get("tokens_per_second_ci"), 1),
                number(inside(m, "latency_ms", "first_token"), 1),
                identical(m["lossless"]),
            ]
            for m in entries
            if m["speedup"] is not None
        ]
        if len(rows) > 0:
            tables.append(Table(heading(setting), header, rows))
    return tables


def tuned_lengths(chains: Sequence[Entry]) -> Table | None:
    """The fastest draft length of each domain, as eval/tune.py chose it; None where all are the same."""
    if len({c["k"] for c in chains}) < 2:
        return None
    rows = [
        [
            c["task"],
            f"{c['temperature']:g}",
            number(c["k"], 0),
            number(c["prompts"], 0),
            with_interval(c["speedup"], c["ci"], 2, "×"),
            number(c["held_out"], 2, "×"),
        ]
        for c in chains
    ]
    header = ["domain", "temperature", "fastest K", "n", "speed-up in rounds", "held out"]
    return Table("Tuned draft lengths", header, rows)


def images(own: Sequence[Entry], k: int) -> list[Image]:
    """Of what was measured: α by position with a line for each task, speed-ups with a row for each method.

    Positions are those of chains with K = `k`; where a report has none, as when K was tuned after it, of its longest.
    """
    found = []
    for (temperature, batch), entries in by_setting(own):
        title, name = setting_title(temperature, batch), f"t{temperature:g}-b{batch}.svg"
        tasks = unique([m["task"] for m in entries])
        chain = [m for m in entries if m["tree"] is None and m["alpha"] is not None]
        lengths = {m["k"] for m in chain}
        shown = k if k in lengths else max(lengths, default=0)
        chain = [m for m in chain if m["k"] == shown]
        one = [m for m in chain if m["name"] == chain[0]["name"]]
        if len(one) > 0:
            series = [plots.Series(m["task"], positions(m)) for m in one]
            svg = plots.lines(series, tasks, title, "position i", "α_i", ylim=(0.0, 1.03))
            found.append(
                Image(f"acceptance-{name}", "Acceptance by position", in_ink(svg), key(tasks))
            )
        timed = [m for m in entries if m["speedup"] is not None]
        if len(timed) > 0:
            points = {
                (m["name"], m["task"]): plots.Point(0, m["speedup"], m["speedup_ci"]) for m in timed
            }
            rows = unique([m["name"] for m in timed])
            width = plots.span(points.values(), 1.0)
            svg = plots.dots(points, rows, tasks, title, "× plain decoding (dashed)", width, 1.0)
            found.append(Image(f"speedup-{name}", "Speed-up by task", in_ink(svg), key(tasks)))
    return found


def positions(entry: Entry) -> list[plots.Point]:
    """α_i with its interval, of the positions that were reached."""
    pairs = zip(entry["alpha_by_position"], entry["alpha_by_position_ci"], strict=True)
    return [plots.Point(i, a, ci) for i, (a, ci) in enumerate(pairs, start=1) if a is not None]


def in_ink(svg: str) -> str:
    """An image cannot take the colour of the page around it: a grey that a light and a dark one both show."""
    return svg.replace("currentColor", plots.INK)


def key(tasks: Sequence[str]) -> str:
    """What the markers mean."""
    return ", ".join(f"{glyph} {markdown(name)}" for glyph, _, name in plots.legend_of(tasks))


def slower(own: Sequence[Entry]) -> list[str]:
    """A line for each method and setting in which tasks were surely slowed down."""
    lines = []
    for setting, entries in by_setting(own):
        sure = [m for m in entries if m["speedup_ci"] is not None and m["speedup_ci"][1] < 1]
        for name in unique([m["name"] for m in sure]):
            cases = ", ".join(
                f"{m['task']} {number(m['speedup'], 2, '×')}" for m in sure if m["name"] == name
            )
            lines.append(
                f"Slower than plain decoding as {name}, {setting_title(*setting)}: {cases}."
            )
    return lines


def training(draft: Mapping[str, Any]) -> Table:
    """The recipe, a row a setting; those that are empty, or only say where and how to start, are left out."""
    recipe = {k: v for k, v in draft.get("training", {}).items() if k not in NO_RECIPE}
    return Table("Training", ["setting", "value"], flat(recipe) or [["recipe", MISSING]])


def cost(draft: Mapping[str, Any]) -> Table:
    """What training took."""
    spent = draft.get("cost") or {}
    rows = [[label, words(spent.get(key, MISSING))] for key, label in COST.items()]
    rows += [[f"hardware {key}", words(value)] for key, value in draft.get("hardware", {}).items()]
    if not draft.get("hardware"):
        rows.append(["hardware", MISSING])
    rows += [[key, words(draft.get(key, MISSING))] for key in ("processes", "samples")]
    return Table("Cost", ["cost", "value"], rows)


def data(draft: Mapping[str, Any]) -> Table:
    """The manifests of the sampled sets."""
    rows = [row for name, made in manifests(draft) for row in flat(made, name)]
    return Table("Data", ["manifest", "value"], rows or [["manifest", MISSING]])


def manifests(draft: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """(prefix of its rows, manifest) of each sampled set; the prefix names it if there are several."""
    found = draft.get("data_manifest") or []
    if isinstance(found, dict):
        return [("", found)]
    return [(f"{part['path']} (weight {part['weight']:g}) ", part["manifest"]) for part in found]


def heading(setting: tuple[float, int]) -> str:
    return f"{setting_title(*setting).capitalize()}:"


def by_setting(own: Sequence[Entry]) -> list[tuple[tuple[float, int], list[Entry]]]:
    """Entries that compare with each other, the pooled task first."""
    found = []
    for setting in settings_of(own):
        entries = [m for m in own if (m["temperature"], m["batch_size"]) == setting]
        order = unique([m["task"] for m in entries])
        entries.sort(key=lambda m: (order.index(m["task"]), m["name"], m["k"]))
        found.append((setting, entries))
    return found


def flat(value: Mapping[str, Any], prefix: str = "") -> list[list[str]]:
    """[dotted name, words] of everything in nested settings but what is empty."""
    rows: list[list[str]] = []
    for key, item in value.items():
        if isinstance(item, dict):
            rows += flat(item, f"{prefix}{key}.")
        elif item not in (None, "", []):
            rows.append([f"{prefix}{key}", words(item)])
    return rows


def provenance(
    draft: Mapping[str, Any], report: Mapping[str, Any] | None, tuned: Mapping[str, Any] | None
) -> Table:
    """Which weights, which code, which report."""
    rows = [["draft_sha256 (model.safetensors + config.json)", draft["draft_sha256"]]]
    rows.append(["trained by commit", words(draft.get("git") or MISSING)])
    rows.append(["trained with", words(draft.get("versions") or MISSING)])
    if report is None:
        rows.append(["report", "none given"])
    else:
        rows.append(["measured by commit", words(report.get("git") or MISSING)])
        rows.append(["seed of the measurement", words(report.get("seed", MISSING))])
        rows.append(["measured on", words(report.get("hardware") or MISSING)])
        rows.append(["measured with", words(report.get("versions") or MISSING)])
    if tuned is not None:
        rows.append(["tuned by commit", words(tuned.get("git") or MISSING)])
        rows.append(["tuned on", words(tuned.get("hardware") or MISSING)])
    return Table("Provenance", ["what", "value"], rows)
