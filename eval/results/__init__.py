"""What is measured, as types with their JSON, in which a text says what may be published of it.

- report: report.json, and its entries by task and setting. tuned: tuned.json.
- referee: the greedy result of scripts/referee.py.

May import eval.metrics and decode, nothing else of eval.
"""
