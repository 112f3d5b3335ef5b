"""The laboratory: what a machine can do, and experiments of which a log keeps the results.

gpu_smoke.py   command: what a GPU must show first; not run on one yet

May import decode, eval and train.
"""
