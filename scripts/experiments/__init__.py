"""Comparisons of trainings: losses, trainers, draft families, the EAGLE-3 recipe, and amounts of data.

compare_losses.py       command: which divergence and which data raise a small LM's acceptance
compare_trainers.py     command: this training loop beside transformers' Trainer and TRL's GKDTrainer
data_curve.py           command: how acceptance grows with the data, and what twice the data would give
task_prompts.py         command: prompts like those of GSM8K, HumanEval and CNN/DailyMail to train on
readme_table.py         command: writes a measured table into a Markdown page
track_report.py         command: adds a report to the tracked run of a training
reference_eagle3.py     command: the common EAGLE-3 training recipe beside this one
reference_trainers.py   the trainers that compare_trainers.py compares with;  step_timer.py  clock of their steps
nested_sets.py          parts of a sampled set for data_curve.py;  held_out.py  acceptance on held-out prompts

May import decode, eval and train.
"""
