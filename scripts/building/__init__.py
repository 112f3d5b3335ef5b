"""Models trained from scratch by scripts: the loop of all of them, and the T5s of docs/seq2seq.md with their two tasks.

build_seq2seq.py    trains a T5 target and three T5 drafts, and writes prompts (command)
translation_task.py, summary_task.py   pairs made from rules
scratch_training.py the resumable training loop, also of scripts/build_target.py
"""
