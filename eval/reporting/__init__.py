"""Turns report.json into Markdown, an HTML page, a console table and advice.

- formatting: numbers, intervals and tables as text.
- tables: the tables of a report.
- summary: the sentences at the head of a report.
- plots: draws SVG panels; figures: chooses which figures a report has.
- token_traces: a few answers with the origin (draft or target) of each token.
- decision: whether to switch speculative decoding on; checklist: the production checklist;
  advice: both of them together, as `eval/advise.py` prints them.
- render: writes report.json, report.md and report.html (template: report.html.j2).
- readme_table: what scripts/readme_table.py does.

May import eval.metrics, eval.results and decode, nothing else of eval.
"""
