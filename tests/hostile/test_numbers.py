"""Numbers out of their range: negative, zero, not finite, or larger than the model or the machine allows."""

import shlex
from pathlib import Path

import pytest

from tests.hostile.case import Case, check, params
from tests.hostile.lab import Lab

NUMBERS = {
    "train/sample.py": "batch_size 0 | k 1000000 | seed 99999999999999999999999 | sampling.temperature .nan",
    "train/write_prompts.py": "count 1000000000 | sampling.top_p 1.5",
    "train/distill.py": """
        loop.clip 0 | loop.epochs 1e30 | divergence.mix '{hard_ce: .nan}' | weights.decay .nan | draft.heads 0 |
        draft.lora_rank -1 | draft.target_lora_rank 0 | on_policy.every 0
    """,
    "train/doctor.py": "max_length 0 | worth .nan",
    "eval/run.py": "k 0 | temperatures '[-1.0]' '[.inf]' '[0.0, 0.0]' | acceptance.rows 0",
    "eval/tune.py": """
        ks '[0]' '[]' '[1, 1]' '[1000000]' | calibrate '[3, 1]' '[1]' '[0, 2]' | tree_nodes '[0]' '[100000]' |
        batch_sizes '[0]' '[100000]' | batch_ks '[]' '[0]' | temperatures '[.nan]'
    """,
    "eval/advise.py": "memory_gb .nan",
    "eval/fidelity.py": "rows 0 | limit -1",
    "decode/generate.py": "k 1000000 | sampling.top_p .nan",
    "scripts/export.py": "k 0",
    "scripts/lab/build_target.py": "tokens 0 | decay 2",
    "scripts/referee.py": "temperature .nan",
    "scripts/audit.py": "draws 0",
    "scripts/lab/task_prompts.py": "code_count x",
    "scripts/lab/floor.py": "rows '[]' '[0]'",
    "scripts/lab/gpu_smoke.py": "rows 0",
    "scripts/llamacpp_parity.py": "margin .nan",
}
"""{command: settings, each with values that it refuses}: some of each command, since tests/test_settings.py has every
number of every command, and what is no range."""

NESTED = (
    ("eval/run.py", "temperatures", "[]", "temperature"),
    ("eval/tune.py", "temperatures", "[]", "temperature"),
    ("eval/run.py", "methods", "[{name: causal, draft: $lab/causal, k: -1}]", "k"),
    ("eval/run.py", "methods", "[{name: causal, draft: $lab/causal, k: 1000000}]", "k"),
    ("eval/run.py", "methods", "[{name: medusa, draft: $lab/medusa, k: 9}]", "k"),
    ("eval/run.py", "methods", "[{name: early-exit, layers: 0}]", "layers"),
    ("eval/run.py", "methods", "[{name: early-exit, layers: 99}]", "layers"),
    ("eval/run.py", "methods", "[{name: early-exit, layers: -1}]", "layers"),
    ("eval/run.py", "methods", "[{name: causal, draft: $lab/causal, tree: {nodes: 100000}}]", "nodes"),
    ("eval/run.py", "methods", "[{name: causal, draft: $lab/causal, tree: {nodes: -1}}]", "nodes"),
    ("eval/run.py", "methods", "[{name: causal, draft: $lab/causal, tree: {nodes: 4, width: 0}}]", "width"),
    ("eval/run.py", "methods", "[{name: causal, draft: $lab/causal, tree: {nodes: 4, width: -2}}]", "width"),
    ("eval/run.py", "methods", "[{name: causal, draft: $lab/causal, tree: {paths: [[-1]]}}]", "path"),
    ("eval/run.py", "methods", "[{name: causal, draft: $lab/causal, tree: {paths: [[0, 0]]}}]", "path"),
    ("eval/run.py", "methods", "[{name: causal, draft: $lab/causal, tree: {paths: [[]]}}]", "path"),
    ("eval/run.py", "methods", "[{name: causal, draft: $lab/causal, tree: {paths: [[1000000]]}}]", "path"),
    ("eval/run.py", "tasks", "[{name: own, path: $lab/prompts.txt, limit: -1}]", "limit"),
    ("eval/run.py", "tasks", "[{name: own, path: $lab/prompts.txt, turns: -1}]", "turns"),
    ("eval/tune.py", "tasks", "[{name: own, path: $lab/prompts.txt, limit: -1}]", "limit"),
    ("eval/tune.py", "tasks", "[{name: own, path: $lab/prompts.txt, limit: 1}]", "prompt"),
    ("train/sample.py", "sources", "[{kind: file, path: $lab/prompts.jsonl, limit: 0}]", "limit"),
    ("train/sample.py", "sources", "[{kind: file, path: $lab/prompts.jsonl, samples: 0}]", "samples"),
    ("train/sample.py", "sources", "[{kind: bundled, path: code, limit: -1}]", "limit"),
    ("train/sample.py", "sources", "[{kind: stdlib}]", "limit"),
    ("train/distill.py", "data", "[{path: $lab/samples, weight: -1}]", "weight"),
    ("train/distill.py", "data", "[{path: $lab/samples, weight: .nan}]", "weight"),
    ("train/distill.py", "data", "[{path: $lab/samples, weight: .inf}]", "weight"),
    ("train/distill.py", "data", "[{path: $lab/samples, limit: -1}]", "limit"),
    ("train/distill.py", "data", "[]", "data"),
    ("train/distill.py", "draft.layers", "[99] --draft.init ''", "layers"),
    ("train/distill.py", "draft.layers", "[-1] --draft.init ''", "layers"),
    ("train/distill.py", "draft.init_config", "{num_hidden_layers: -1} --draft.init ''", "num_hidden_layers"),
    ("train/distill.py", "draft.init_config", "{hidden_size: 0} --draft.init ''", "hidden_size"),
    ("train/distill.py", "draft.init_config", "{vocab_size: 3} --draft.init ''", "vocab_size"),
    ("train/distill.py", "draft.taps", "[99] --draft.init '' --draft.family eagle3", "layer"),
    ("train/distill.py", "draft.taps", "[-3] --draft.init '' --draft.family eagle3", "taps"),
    ("train/distill.py", "draft.heads", "1000000 --draft.init '' --draft.family medusa", "heads"),
    ("train/distill.py", "loop.keep_best", "true", "keep_best"),
    ("decode/generate.py", "draft", "$lab/medusa --k 9", "k"),
)  # fmt: skip
"""(command, setting, its value and further arguments, what the message names)."""


def numbers() -> list[Case]:
    cases = []
    for command, settings in NUMBERS.items():
        for name, *values in map(shlex.split, settings.split("|")):
            for i, value in enumerate(values):
                quoted = f"'{value}'" if value[0] in "[{" else value
                says = name.split(".")[-1]
                cases.append(Case(command, f"--{name}={quoted}", says, slow=i > 0))
    for command, name, value, says in NESTED:
        text, _, more = value.partition(" --")
        cases.append(Case(command, f"--{name} '{text}'" + (f" --{more}" if more else ""), says))
    return cases


@pytest.mark.parametrize("case", params(*numbers()))
def test_a_number_out_of_range_is_refused(case: Case, lab: Lab, tmp_path: Path) -> None:
    check(case, lab, tmp_path)
