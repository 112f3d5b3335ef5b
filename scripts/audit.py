"""Audits a draft: does an engine accept what our decoder accepts, and if not, which way of reading its files does it?

    python scripts/audit.py outputs/bundled/drafts/eagle3 --target assets/target --python ~/vllm/bin/python
    python scripts/audit.py org/eagle3 --target org/model --served kept.jsonl --tasks '[{name: a, path: prompts.jsonl}]'
    python scripts/audit.py org/eagle3 --target org/model --served none

The draft is any that decode/checkpoints/importers.py reads, from a folder or the Hub. First its files are checked
against vLLM's rules (scripts/check_draft.py), unless --served is a file. Then the same prompts are decoded here and in
the engine, greedily and at --temperature. Last our decoder reads the files in other ways, one thing switched at a time:
the layers that are tapped, norms, the base and scaling of RoPE, the map of a reduced vocabulary, biases, missing or
shared tensors. The reading that accepts, prompt by prompt, what the engine accepted is how the engine reads the files;
one that accepts significantly more is how they are meant.

--served is vllm (--python is an interpreter with it, by default that of VLLM_PYTHON, else of .venv-vllm), none, or a
file of what any engine accepted, decoded greedily: a line for each prompt of --tasks, in their order, such as
{"rounds": [[drafted, accepted], ...]} (docs/engine_logs.md). Files are compared by a permutation test, and several
readings may fit them. Suspects are known for EAGLE-1, EAGLE-3, P-EAGLE, Medusa and causal drafts; of the other families
only RoPE is switched.

`audit.json` in --out has all counts, `causes` with their evidence and the `verdict`, which is printed. The command ends
with 0 whatever it finds.
"""

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from decode.common.command import run_command
from eval.settings.served import AuditConfig


def main(s: AuditConfig) -> None:
    from eval.served.auditing import audit  # loads torch: --help does without

    audit(s)


if __name__ == "__main__":
    run_command(main, AuditConfig, __doc__, first="draft")
