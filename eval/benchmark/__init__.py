"""Decodes the prompts of tasks with several methods and times them.

- config: checks of the settings of eval/run.py. methods: a draft at one setting, built from the settings.
- timing: the loop that times methods in turn. turns: what was measured of a turn, and which are repeated.
- untimed_passes: acceptance, phases and GPU utilisation.
- journal: finished measurements on disk. multi_turn: prompts whose history holds the target's answers.
- baselines: other engines on the same prompts. llamacpp_baseline: llama.cpp's server, one of them.

May import eval.settings, eval.metrics, eval.results, eval.tasks and decode.
"""
