"""Measures drafts: acceptance, speed-up, losslessness, and what to do about the result.

Commands: run.py (a report), tune.py (the fastest settings), report.py (a report's pages again), advise.py (whether to
use speculative decoding), fidelity.py (what a dtype changes of a target), rescore.py (figures from the /metrics of
serving engines). Their settings are in settings/ or in their own files, and what they do is imported by `main` from the
packages; measuring.py does it for run.py, dtype_fidelity.py for fidelity.py, and evaluate.py measures what a report
holds.

Packages: settings <- tasks; metrics <- results <- reporting; metrics, results, tasks <- benchmark <- checks; benchmark,
reporting <- tuning; reporting <- served; commands on top. Imports decode only.
"""
