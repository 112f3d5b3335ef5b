"""report.json (schema 1) as Markdown, as one self-contained HTML page, and as a console table.

Every result stands with its n and its 95 % interval; what was not measured is shown as –.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from rich import box
from rich.table import Table as RichTable
from rich.text import Text

from eval.plots import Entry, acceptance_plot, dot_plot, setting_title, settings_of, unique

Report = dict[str, Any]
Interval = Sequence[float] | None

NONE = "–"
TEMPLATE = "report.html.j2"
DEFINITIONS = {
    "τ": "tokens emitted after prefill ÷ rounds, pooled over prompts; a round's own token from the "
    "target counts, so plain decoding is 1.0.",
    "α_i": "P(position i accepted | position i reached). Reached: at least i tokens were drafted "
    "and the i − 1 before were accepted.",
    "α": "Σ accepted at i ÷ Σ reached at i, over all positions.",
    "acceptance_rate": "accepted ÷ drafted tokens. Not α: tokens behind a rejection count as "
    "drafted, so it falls as K grows.",
    "speed-up": "seconds per token of plain decoding ÷ those of the method: same engine, same "
    "prompts, same batch size, prefill included. Predicted: from measured α and phase times.",
    "K": "tokens drafted in a round; for a tree, its depth.",
    "identical": "prompts whose greedy output equals that of transformers' own generate, token by token. "
    "A divergence is a tie only if the two largest logits are closer than twice the measured "
    "difference between one-token and several-token passes; any other is a failure.",
    "[low, high]": "95 % bootstrap interval over prompts, paired for speed-ups and differences. "
    "n is the number of prompts.",
}


@dataclass(frozen=True)
class Table:
    """One table of the report, its cells already words; every row is as long as the header.

    `prose` tables hold text, which is set left and may wrap; the others hold numbers.
    """

    title: str
    header: list[str]
    rows: list[list[str]]
    prose: bool = False


@dataclass(frozen=True)
class Section:
    """The entries of one task and setting, the only ones whose speeds compare; fastest first."""

    task: str
    setting: str
    entries: list[Entry]

    @property
    def title(self) -> str:
        return f"{'all tasks' if self.task == 'all' else self.task}, {self.setting}"


def write_report(report: Report, folder: Path) -> None:
    """Write report.json, report.md and report.html into `folder`. Raises on NaN or infinity."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False)
    (folder / "report.json").write_text(text + "\n", encoding="utf-8")
    (folder / "report.md").write_text(render_markdown(report), encoding="utf-8")
    (folder / "report.html").write_text(render_html(report), encoding="utf-8")


def render_markdown(report: Report) -> str:
    """The report as Markdown: verdicts, tables, definitions; no plots."""
    parts = [
        f"# Speculative decoding of {_markdown(target_name(report))}",
        "\n".join(f"- {_markdown(line)}" for line in verdicts(report)),
        *(_markdown_table(table) for table in tables(report)),
        "## Definitions",
        "\n".join(f"- **{word}**: {meaning}" for word, meaning in DEFINITIONS.items()),
    ]
    return "\n\n".join(parts) + "\n"


def render_html(report: Report) -> str:
    """The report as one HTML page that needs no other file and no script, with three plots."""
    methods = report["methods"]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(TEMPLATE).render(
        target=target_name(report),
        verdicts=verdicts(report),
        plots={
            "Speed-up by method and task": dot_plot(
                methods, "speedup", "speed-up (dashed: plain)", line_at=1.0
            ),
            "τ by method and task": dot_plot(methods, "tau", "τ (dashed: plain)", line_at=1.0),
            "Acceptance by position, all tasks pooled": acceptance_plot(methods),
        },
        tables=tables(report),
        definitions=DEFINITIONS,
    )


def terminal_table(report: Report) -> RichTable:
    """A table of 80 columns for the console: one row for each task, temperature and method."""
    table = RichTable(title=Text(f"Speculative decoding of {target_name(report)}"), box=box.SIMPLE)
    table.add_column("task")
    table.add_column("T", justify="right")
    table.add_column("method", no_wrap=True)
    for name in ("K", "n", "τ", "α", "tok/s", "speed-up"):
        table.add_column(name, justify="right", no_wrap=True)
    for section in sections(report):
        for m in section.entries:
            cells = [
                section.task,
                f"{m['temperature']:g}",
                m["name"],
                number(m["k"], 0),
                number(m["prompts"], 0),
                number(m["tau"], 2),
                number(m["alpha"], 3),
                number(m["tokens_per_second"], 0),
                with_interval(m["speedup"], m["speedup_ci"], 2, "×"),
            ]
            table.add_row(*[Text(cell) for cell in cells])  # Text: no markup in names
        table.add_section()
    return table


def target_name(report: Report) -> str:
    """The target's name, whether the report gives it alone or with its revision and tokenizer."""
    target = report["target"]
    return str(target["name"]) if isinstance(target, dict) else words(target)


def verdicts(report: Report) -> list[str]:
    """One line each: what is fastest, whether output is unchanged, how fast plain decoding is."""
    plain = report["baseline"]
    return [
        fastest(report),
        lossless_verdict(report),
        f"Plain decoding: {number(plain['tokens_per_second'], 1)} tokens/s, "
        f"{number(plain['ms_per_token'], 2)} ms per token.",
    ]


def fastest(report: Report) -> str:
    """The fastest method of the first section, or that none is clearly faster than plain."""
    for section in sections(report)[:1]:
        drafting = [m for m in section.entries if m["name"] != "plain" and m["speedup"] is not None]
        if len(drafting) > 0:
            best = drafting[0]
            sure = best["speedup_ci"] is not None and best["speedup_ci"][0] > 1
            claim = "Fastest:" if sure else "No method is clearly faster than plain; the best is"
            value = with_interval(best["speedup"], best["speedup_ci"], 2, "×")
            scope = f"n = {best['prompts']}, {section.title}"
            return f"{claim} {best['name']}, {value} the speed of plain decoding ({scope})."
    return "No speed-up was measured."


def lossless_verdict(report: Report) -> str:
    """Whether greedy output equals transformers' own, and which methods change it by choice."""
    drafting = [m for m in report["methods"] if m["name"] != "plain"]
    lossy = unique(m["name"] for m in drafting if m["lossy"])
    checked = [
        m
        for m in drafting
        if not m["lossy"] and _field(m, "lossless", "greedy_identical") is not None
    ]
    broken = [m for m in checked if not m["lossless"]["greedy_identical"]]
    if len(checked) == 0:
        text = "Lossless: not checked."
    elif len(broken) == 0:
        names = ", ".join(unique(m["name"] for m in checked))
        most = max(m["lossless"]["prompts"] for m in checked)
        ties = {(t["task"], t["id"], t["position"]) for m in checked for t in m["lossless"]["ties"]}
        claim = "Lossless: greedy output equals transformers' own generate, token by token"
        text = f"{claim} ({names}; n = {most}; {len(ties)} ties of logits)."
    else:
        cases = ", ".join(f"{m['name']} on {m['task']} {identical(m['lossless'])}" for m in broken)
        text = (
            f"NOT identical to transformers' generate: {cases}. In fp32 this is a bug; in lower precision "
            "near-ties of logits can flip."
        )
    return text + (f" Lossy by choice: {', '.join(lossy)}." if len(lossy) > 0 else "")


def sections(report: Report) -> list[Section]:
    """The report's entries by task ("all" first) and setting, each sorted by speed-up."""
    found = []
    for task in unique(m["task"] for m in report["methods"]):
        of_task = [m for m in report["methods"] if m["task"] == task]
        for setting in settings_of(of_task):
            entries = [m for m in of_task if (m["temperature"], m["batch_size"]) == setting]
            entries.sort(key=lambda m: (m["speedup"] is None, -(m["speedup"] or 0)))
            found.append(Section(task, setting_title(*setting), entries))
    return found


def tables(report: Report) -> list[Table]:
    """Every table of the report that has a row, most important first."""
    by_section = sections(report)
    pooled = [section for section in by_section if section.task == "all"]
    found = [
        *(_speed_table(section) for section in by_section),
        *(_position_table(section) for section in pooled),
        *(_phase_table(section) for section in pooled),
        _comparison_table(report.get("comparisons") or []),
        _quality_table(report.get("target_quality")),
        _setup_table(report["methods"]),
        _environment_table(report),
    ]
    return [table for table in found if len(table.rows) > 0]


def _speed_table(section: Section) -> Table:
    header = ["method", "K", "n", "speed-up", "predicted", "τ", "α", "acceptance_rate"]
    header += ["tokens/s", "ms/token", "round ms p50 / p95", "first token ms", "identical"]
    rows = [
        [
            m["name"],
            number(m["k"], 0),
            number(m["prompts"], 0),
            with_interval(m["speedup"], m["speedup_ci"], 2, "×"),
            number(m["predicted_speedup"], 2, "×"),
            with_interval(m["tau"], m["tau_ci"], 2),
            with_interval(m["alpha"], m["alpha_ci"], 3),
            with_interval(m["acceptance_rate"], m.get("acceptance_rate_ci"), 3),
            with_interval(m["tokens_per_second"], m.get("tokens_per_second_ci"), 1),
            number(m["ms_per_token"], 2),
            " / ".join(number(_field(m, "latency_ms", p), 2) for p in ("p50", "p95")),
            number(_field(m, "latency_ms", "first_token"), 1),
            identical(m["lossless"]),
        ]
        for m in section.entries
    ]
    return Table(f"Results: {section.title}", header, rows)


def _position_table(section: Section) -> Table:
    entries = [m for m in section.entries if m["alpha"] is not None]
    k = max((len(m["alpha_by_position"]) for m in entries), default=0)
    rows = []
    for m in entries:
        pairs = zip(m["alpha_by_position"], m["alpha_by_position_ci"], strict=True)
        cells = [with_interval(value, interval, 3) for value, interval in pairs]
        cells += [NONE] * (k - len(cells))
        rows.append([m["name"], number(m["prompts"], 0), *cells])
    header = ["method", "n", *(f"α_{i}" for i in range(1, k + 1))]
    return Table(f"Acceptance by position: {section.title}", header, rows)


def _phase_table(section: Section) -> Table:
    phases = ("draft", "verify", "overhead")
    rows = [
        [m["name"], *(number(_field(m, "phase_ms", phase), 3) for phase in phases)]
        for m in section.entries
        if m["phase_ms"] is not None
    ]
    title = f"Milliseconds by phase (separate instrumented pass): {section.title}"
    return Table(title, ["method", *phases], rows)


def _comparison_table(comparisons: Sequence[Entry]) -> Table:
    rows = [
        [
            f"{c['a']} − {c['b']}",
            c["task"],
            f"{c['temperature']:g}",
            c["metric"],
            with_interval(c["difference"], c["ci"], 3, signed=True),
            number(c["prompts"], 0),
        ]
        for c in comparisons
    ]
    header = ["methods", "task", "temperature", "metric", "difference", "n"]
    return Table("Differences on the same prompts", header, rows)


def _quality_table(quality: Entry | None) -> Table:
    """The target beside the one it was before its heads were trained with it."""
    header = ["before", "now", "n", "perplexity before", "now", "change of log perplexity", "KL"]
    if quality is None:
        return Table("", header, [])
    row = [
        quality["old"],
        quality["new"],
        number(quality["prompts"], 0),
        number(quality["perplexity_old"], 3),
        number(quality["perplexity_new"], 3),
        with_interval(
            quality["log_perplexity_change"],
            quality["log_perplexity_change_ci"],
            4,
            signed=True,
        ),
        number(quality["kl"], 4),
    ]
    title = "The target was trained with its heads: on answers of the one before, a token"
    return Table(title, header, [row])


def _setup_table(methods: Sequence[Entry]) -> Table:
    fields = (
        "name",
        "draft",
        "draft_sha256",
        "k",
        "tree",
        "mode",
        "dtype",
        "verification",
        "lossy",
    )
    rows = {tuple(words(m[field]) for field in fields): None for m in methods}  # unique, in order
    header = ["method", "draft", "draft sha256", "K", "tree", *fields[5:]]
    return Table("Methods", header, [list(row) for row in rows], prose=True)


def _environment_table(report: Report) -> Table:
    rows = [["seed", words(report["seed"])]]
    for part in ("target", "hardware", "versions"):
        value = report[part]
        fields = value.items() if isinstance(value, dict) else [("", value)]
        rows += [[f"{part} {key}".strip(), words(text)] for key, text in fields]
    return Table("Hardware and versions", ["what", "value"], rows, prose=True)


def number(value: float | None, digits: int, unit: str = "", signed: bool = False) -> str:
    """The number with that many decimals, thousands set apart, or – for None."""
    return NONE if value is None else f"{value:{'+' if signed else ''},.{digits}f}{unit}"


def with_interval(
    value: float | None, interval: Interval, digits: int, unit: str = "", signed: bool = False
) -> str:
    """The number and its [low, high], or the number alone, or – for None."""
    text = number(value, digits, unit, signed)
    if value is None or interval is None:
        return text
    low, high = (number(end, digits, signed=signed) for end in interval)
    return f"{text} [{low}, {high}]"


def identical(lossless: Entry | None) -> str:
    """How many prompts decode to the reference's own ids, as 40/40 or 39/40 + 1 tie, or –."""
    if lossless is None or lossless["greedy_identical"] is None:
        return NONE
    ties = len(lossless["ties"])
    tied = f" + {ties} tie{'s' if ties > 1 else ''}" if ties > 0 else ""
    return f"{lossless['identical']}/{lossless['prompts']}{tied}"


def words(value: Any) -> str:
    """A value of the report as plain words: – for None, yes or no, "key value" for a dict."""
    if value is None:
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{key} {words(item)}" for key, item in value.items())
    return str(value)


def _field(entry: Entry, outer: str, inner: str) -> Any:
    """entry[outer][inner], or None where there is no outer."""
    return None if entry[outer] is None else entry[outer][inner]


def _markdown(text: str) -> str:
    """Text that cannot break a table row or turn into HTML."""
    return text.replace("<", "&lt;").replace("|", "\\|").replace("\n", " ")


def _markdown_table(table: Table) -> str:
    lines = [table.header, ["---"] * len(table.header), *table.rows]
    body = "\n".join("| " + " | ".join(_markdown(cell) for cell in line) + " |" for line in lines)
    return f"## {_markdown(table.title)}\n\n{body}"
