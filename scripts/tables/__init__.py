"""Tables of documentation pages, from reports of eval/run.py.

readme_table.py      command: writes a measured table into a Markdown page, in one of several layouts
draft_sizes.py       the layout of Leviathan et al.'s table
large_target.py      what the same acceptance would gain with a target of 70 billion weights

May import decode and eval.
"""
