"""Turns report.json into Markdown, an HTML page, a console table and advice."""
