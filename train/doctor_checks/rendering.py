"""Samples with their loss mask, and the findings: for a terminal, and as an HTML page of what a terminal shows."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.console import Console
from rich.text import Text

from train.doctor_checks.examination import Examination
from train.doctor_checks.rows import SeenRow, decode

LABEL_STYLE, READ_STYLE = "bold green", "dim"
SEVERITY_STYLES = {"stops": "bold red", "costs": "yellow", "note": "cyan"}
PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Data for a target</title>
<style>body {{ margin: 2rem auto; max-width: 76rem; padding: 0 1rem; background: {background}; color: {foreground}; }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; font: 14px/1.5 ui-monospace, monospace; }}
span[style*="#008000"] {{ background: #d5f2df; }}</style></head>
<body><pre>{code}</pre></body></html>
"""
PICTURES = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"}
PICTURES |= dict.fromkeys(range(127, 160), "�")
"""{control character: what is shown for it}."""


@dataclass(frozen=True)
class MaskedText:
    """Consecutive text of a row that is supervised, or that is only read."""

    text: str
    supervised: bool
    tokens: int


def masked_texts(row: SeenRow, limit: int) -> list[MaskedText]:
    """The row's text in pieces of one colour: at most `limit` tokens, from a quarter of them before the labels on.

    A character whose tokens lie on both sides of a seam belongs to the piece of its last token.
    """
    labels = row.labels.tolist()
    begin = labels.index(True) if True in labels else 0
    start = max(0, begin - limit // 4) if len(labels) > limit else 0
    pieces, at, text = [], start, ""
    for supervised, group in groupby(labels[start : start + limit]):
        end = at + len(list(group))
        whole = decode(row.chat.tokenizer, row.ids[start:end])
        if end < len(labels):
            whole = whole.rstrip("\ufffd")
        same = whole.startswith(text)
        new = whole[len(text) :] if same else decode(row.chat.tokenizer, row.ids[at:end])
        pieces.append(MaskedText(new, supervised, end - at))
        text, at = whole, end
    return pieces


def visible(text: str, style: str = "") -> Text:
    """The text with control characters as pictures, line feeds and tabs excepted: a terminal would obey them."""
    return Text(text.translate(PICTURES), style=style)


def print_samples(console: Console, rows: Sequence[SeenRow], limit: int) -> None:
    """Prints samples in colour; without colours supervised text stands in ⟦ ⟧."""
    for row in rows:
        ended = f", ended by {row.row['finish_reason']}" if row.spans else ""
        about = f"{row.id} ({row.row['source']}): {len(row.ids):,} tokens, {row.labels.sum():,} supervised{ended}"
        console.print(visible(about, "bold"), soft_wrap=True)
        shown = Text()
        for piece in masked_texts(row, limit):
            marked = piece.supervised and not console.is_terminal
            style = LABEL_STYLE if piece.supervised else READ_STYLE
            shown += visible(f"⟦{piece.text}⟧" if marked else piece.text, style)
        console.print(shown, soft_wrap=True, highlight=False)
        console.print()


def print_facts(console: Console, title: str, facts: Mapping[str, object]) -> None:
    console.print(Text(title, style="bold"))
    for name, value in facts.items():
        console.print(visible(f"  {name}: {value}"), soft_wrap=True, highlight=False)
    console.print()


def print_findings(console: Console, title: str, examined: Examination) -> None:
    """Prints the facts and the findings, the gravest first."""
    print_facts(console, title, examined.facts)
    for finding in examined.findings:
        head = Text(f"{finding.severity:<5} ", style=SEVERITY_STYLES[finding.severity])
        head.append(f"{finding.name} ({finding.rows:,} of {finding.of:,})", style="bold")
        console.print(head, soft_wrap=True, highlight=False)
        lines = [finding.cost, f"mend: {finding.mend}"]
        if finding.examples:
            lines.append("examples: " + ", ".join(finding.examples))
        for line in lines:
            console.print(visible(f"      {line}"), soft_wrap=True, highlight=False)
    if not examined.findings:
        console.print(Text("nothing was found", style="green"))
    console.print()


def render_page(
    target: str, template: dict[str, str], parts: dict[str, Examination], limit: int
) -> str:
    """One HTML page that needs no other file and no script. `parts`: {title: what was found}."""
    page = Console(record=True, file=io.StringIO(), force_terminal=True, width=120)
    print_facts(page, f"Data for {target}", {})
    for title, examined in parts.items():
        print_findings(page, title, examined)
        print_samples(page, examined.shown, limit)
    print_facts(page, "The target's chat template", template)
    return page.export_html(code_format=PAGE, inline_styles=True)
