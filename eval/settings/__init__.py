"""The settings of the commands that measure, below everything that uses them.

    evaluation.py  prompts, methods; eval/run.py, eval/tune.py, eval/fidelity.py
    served.py      a draft here and in an engine: scripts/referee.py, scripts/llamacpp_parity.py, scripts/audit.py

Those of the smaller commands stand in their own files. Nothing here imports torch: commands say their --help at once.
"""
