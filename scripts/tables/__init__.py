"""Tables of documentation pages, from reports of eval/run.py.

readme_table.py      command: writes a measured table into a Markdown page, in one of two layouts

May import decode and eval.
"""
