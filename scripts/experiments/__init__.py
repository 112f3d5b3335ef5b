"""Comparisons whose results are kept in docs/results: losses, trainers, draft families, and the EAGLE-3 recipe.

compare_losses.py       command: which divergence and which data raise a small LM's acceptance
compare_trainers.py     command: this training loop beside transformers' Trainer and TRL's GKDTrainer
compare_heads.sh        all draft families on the same samples at equal steps
reference_eagle3.py     command: the common EAGLE-3 training recipe beside this one
reference_trainers.py   the trainers that compare_trainers.py compares with;  step_timer.py  clock of their steps

May import decode, eval and train.
"""
