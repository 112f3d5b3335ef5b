"""What is measured, as types with their JSON: report.json and what follows from it.

- report: report.json and tuned.json, and the entries of a report by task and setting.
- forecast, referee: forecast.json, and the greedy result of scripts/referee.py.
- speculation_profile: speculation_profile.json, acceptance in the fields that NVIDIA Model-Optimizer proposes.

May import eval.metrics and decode, nothing else of eval.
"""
