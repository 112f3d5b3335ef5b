"""The laboratory: what a machine can do, and experiments of which the log keeps the results.

cells.py             the harness of all of them: cells in alternating turns, kept one by one, averages and intervals
floor.py             command: what a step of the target could take at best on this machine, and what it takes; also
                     sampling, a pass of features and a training step. floor_work.py does it
gpu_smoke.py         command: what a GPU must show first; not run on one yet. gpu_checks.py does it
compare_trainers.py  command: this training loop beside those of reference_trainers.py. trainer_runs.py does it
task_prompts.py      command: prompts like those of GSM8K, HumanEval and CNN/DailyMail to train on
quickstart.py        command: prompts of the quickstart, and what its report says in words
build_target.py      command: trains the bundled target and base draft. bundled_model.py does it
settings.py          the settings of these five
sweep_plan.py        the settings of scripts/sweep.py and its trials, checked by the swept command's own parser
sweep_pool.py        runs trials in processes: claimed by a lock, resumed, tried again when they fail
sweep_results.py     the metric of each trial, the table and the chart

May import decode, eval and train.
"""
