"""The laboratory: what a machine can do, and what the bundled models, the quickstart and reproduce.sh are made by.

floor.py           command: what a step of the target could take at best on this machine, and what it takes.
                   floor_work.py does it
gpu_smoke.py       command: what a GPU must show first; not run on one yet. gpu_checks.py does it
planted_clocks.py  command: whether speed-ups mislead when the machine is disturbed
task_prompts.py    command: prompts like those of GSM8K, HumanEval and CNN/DailyMail to train on
quickstart.py      command: prompts of the quickstart, and what its report says in words
build_target.py    command: trains the bundled target and base draft. bundled_model.py does it
settings.py        the settings of floor.py, gpu_smoke.py and build_target.py

May import decode, eval and train.
"""
