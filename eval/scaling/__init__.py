"""How acceptance grows with the amount of training data, what more of it is worth, and what a changed target needs.

- power_law: the fit, and what it predicts for twice the data, with intervals.
- data_curve: the content of data_curve.json, its verdict, sentences and tables.
- transfer: what eval/transfer.py does: a draft with the target that it was trained for and with others.

scripts/lab/data_curve.py measures the curve. May import eval.settings, eval.metrics,
eval.results, eval.tasks, eval.reporting and decode.
"""
