"""Checks of the output itself: is it lossless, and are the answers right?

- greedy_equivalence: greedy output against transformers' `generate`.
- sampling_distribution: sampled output against the target's distribution.
- answer_quality: scores of answers that have a reference; sandbox: runs code that a model wrote.
- target_drift: a target that was trained itself, or has another dtype, against the original target.

May import eval.settings, eval.metrics, eval.results, eval.tasks, eval.benchmark and decode.
"""
