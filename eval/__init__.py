"""Measures drafts: acceptance, speed-up, losslessness, and what to do about the result.

Commands: run.py (a report), tune.py (the fastest settings), report.py (a report's pages again), advise.py (whether to
use speculative decoding), transfer.py (whether a draft fits another target), fidelity.py (what a dtype changes of a
target), rescore.py (figures from the logs of serving engines), forecast.py (what an engine would serve, for every K),
load.py (a server with the draft and without, under load). evaluate.py measures what a report holds.

Packages: metrics <- results; metrics, results, tasks <- benchmark <- checks, tuning; metrics, tasks <- served;
metrics, results <- reporting <- scaling; benchmark, reporting <- forecasting; commands on top. Imports decode only.
"""
