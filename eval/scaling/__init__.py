"""How acceptance grows with the amount of training data, and whether more of it is worth its cost.

- power_law: the fit, and what it predicts for twice the data, with intervals.
- data_curve: the content of data_curve.json, its verdict, sentences and tables.

scripts/lab/data_curve.py measures the curve. May import eval.metrics, eval.results, eval.reporting
and decode.
"""
