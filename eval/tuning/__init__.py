"""Finds the fastest draft length, tree and batch size of each method.

- search: what eval/tune.py does. config: checks of its settings, and the stages of its sweep.
- sweep: times the settings of a stage. selection: speed-ups, predictions of them, and the fastest settings.

May import eval.settings, eval.metrics, eval.results, eval.tasks, eval.benchmark, eval.reporting and decode.
"""
