"""Texts in HTML pages."""

from pathlib import Path

from eval.reporting.formatting import html_templates


def test_a_page_has_no_control_characters(tmp_path: Path) -> None:
    """Bug: what a model writes, NUL among it, makes a page that HTML forbids; markup and line ends stay."""
    (tmp_path / "page.j2").write_text("{{ text }}|{{ number }}|{{ svg | safe }}\n")
    text = "a\x00b\x1b[1m\n\t<\x7f\x85é"
    page = html_templates(tmp_path).get_template("page.j2")
    found = page.render(text=text, number=2, svg="<svg>\x01</svg>")
    assert found == "a␀b␛[1m\n\t&lt;␡�é|2|<svg>␁</svg>"
