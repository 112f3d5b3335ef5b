"""Finds the fastest draft length, tree and batch size of each method.

- config: the settings of eval/tune.py and the stages of its sweep. sweep: times the settings of a stage.
- selection: speed-ups, predictions of them, and the fastest settings.

May import eval.metrics, eval.results, eval.tasks, eval.benchmark and decode.
"""
