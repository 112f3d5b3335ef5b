"""Comparisons: losses, trainers, draft families, the EAGLE-3 recipe, amounts of data, and drafting beside the target.

compare_losses.py       command: which divergence and which data raise a small LM's acceptance
compare_trainers.py     command: this training loop beside those of trainers/
data_curve.py           command: how acceptance grows with the data, and what twice the data would give
forecast_check.py       command: eval/forecast.py beside what vLLM accepts and how long it takes
constrained.py          command: a JSON task with and without a grammar, forced tokens and a draft
task_prompts.py         command: prompts like those of GSM8K, HumanEval and CNN/DailyMail to train on
mirror_ablation.py      command: drafting while the target verifies, by exit layer and number of branches
reference_eagle3.py     command: the common EAGLE-3 training recipe beside this one
trainers/               transformers' Trainer, TRL's GKDTrainer, EAGLE-3 as public trainers have it
nested_sets.py          parts of a sampled set for data_curve.py;  held_out.py  acceptance on held-out prompts

May import decode, eval and train.
"""
