"""Comparisons of trainers and of amounts of data, and prompts to train on.

compare_trainers.py     command: this training loop beside those of trainers/
data_curve.py           command: how acceptance grows with the data, and what twice the data would give
task_prompts.py         command: prompts like those of GSM8K, HumanEval and CNN/DailyMail to train on
trainers/               transformers' Trainer, TRL's GKDTrainer, EAGLE-3 as public trainers have it
nested_sets.py          parts of a sampled set for data_curve.py;  held_out.py  acceptance on held-out prompts

May import decode, eval and train.
"""
