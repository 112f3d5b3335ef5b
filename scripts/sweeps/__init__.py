"""The parts of scripts/sweep.py.

plan.py       the settings of a sweep and the trials that they make, checked by the swept command's own parser
trial_pool.py runs trials in processes: claimed by a lock, resumed, tried again when they fail
results.py    the metric of each trial, the table and the chart

It may import decode and eval.
"""
