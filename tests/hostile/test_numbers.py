"""Numbers out of their range: negative, zero, not finite, or larger than the model or the machine allows."""

import shlex
from pathlib import Path

import pytest

from tests.hostile.case import Case, check, params
from tests.hostile.lab import Lab

NUMBERS = {
    "train/sample.py": """
        batch_size 0 -1 | k 0 -3 1000000 | max_new_tokens -5 | shard_rows 0 -1 |
        concurrency 0 -1 1000000 | timeout 0 -1 .nan .inf | retries -1 | window 0 1 |
        seed -1 99999999999999999999999 | sampling.temperature -0.5 .nan .inf | sampling.top_k -1 |
        sampling.top_p 0 1.5 .nan | filters.min_prompt 0 -1 | filters.max_prompt -1 | filters.min_answer 0 |
        filters.near_duplicates 0.3 1.5 .nan -1
    """,
    "train/write_prompts.py": """
        count 0 -1 1000000000 | max_new_tokens 0 -5 | batch_size 0 | seed -1 99999999999999999999999 |
        sampling.temperature -0.5 .nan | sampling.top_k -1 | sampling.top_p 0 1.5
    """,
    "train/distill.py": """
        loop.clip -1 0 .nan | loop.lr -0.001 .nan .inf 0 | loop.muon_lr -0.02 .nan |
        loop.weight_decay -1 .nan | loop.epochs -1 .nan .inf 1e30 | loop.steps -1 | loop.batch_size 0 -4 |
        loop.micro_batch 0 | loop.warmup -1 | loop.max_length 0 -1 | loop.log_every 0 | loop.eval_every -1 |
        loop.save_every 0 | loop.keep 0 | seed -1 99999999999999999999999 | check.prompts 0 | check.k 0 |
        check.max_new_tokens 0 | divergence.temperature 0 -1 .nan .inf | divergence.beta 0 1 .nan |
        divergence.top -1 | divergence.mix '{hard_ce: -1}' '{hard_ce: .nan}' '{hard_ce: .inf}' |
        weights.decay -1 .nan | weights.feature -1 .nan | weights.divergence -1 | weights.heads -1 |
        features_top -1 | on_policy.share -0.1 1.5 .nan | on_policy.every 0 | on_policy.max_new_tokens 0 |
        on_policy.batch_size 0 | on_policy.sampling.top_p 0 | draft.lora_rank -1 | draft.heads 0 |
        draft.head_layers -1 | draft.steps 0 | draft.vocab -1 | draft.width -1 | draft.target_lora_rank 0
    """,
    "train/doctor.py": """
        max_length 0 -1 | vocabs '[0]' '[-1]' | short 0 | near_duplicates 0.3 1.5 .nan |
        worth -0.1 1.5 .nan | rows -1 | show -1 | show_tokens 0 | seed -1 99999999999999999999999
    """,
    "eval/run.py": """
        k 0 -1 1000000 | max_new_tokens 0 -1 | batch_size 0 -1 | top_k -1 | top_p 0 1.01 .nan |
        temperatures '[-1.0]' '[.nan]' '[.inf]' '[0.0, 0.0]' | phase_prompts -1 | check_law -1 | seed -1 |
        acceptance.rows 0 | acceptance.prompts -1 | acceptance.temperature -1 .nan
    """,
    "eval/tune.py": """
        ks '[0]' '[]' '[1, 1]' '[-1]' '[1000000]' | calibrate '[3, 1]' '[1]' '[0, 2]' |
        tree_nodes '[0]' '[100000]' | tree_width 0 -1 | tree_levels 0 |
        batch_sizes '[0]' '[-2]' '[100000]' | batch_ks '[]' '[0]' | temperatures '[.nan]' '[-1.0]' |
        max_new_tokens 0 | top_p 0 | seed -1
    """,
    "eval/advise.py": "rows -1 | length -1 | memory_gb -1 .nan .inf",
    "eval/transfer.py": """
        k 0 600 | temperatures '[]' '[-1.0]' | max_new_tokens 0 | keep -1 2 .nan | retrain -1 2 0.99
    """,
    "eval/fidelity.py": "max_new_tokens 0 -1 | rows 0 | limit -1 | seed -1",
    "decode/generate.py": """
        k 0 -1 1000000 | max_new_tokens 0 -1 | seed -1 99999999999999999999999 |
        sampling.temperature -1 .nan .inf | sampling.top_k -1 | sampling.top_p 0 2 .nan
    """,
    "scripts/export.py": "k 0 -1",
    "scripts/lab/build_target.py": """
        tokens 0 -1 | batch_tokens 0 -1 | window 0 -1 | short_window 0 | muon_lr -1 .nan | adam_lr -1 .nan |
        decay -1 .nan 2 | save_every 0 | seed -1
    """,
    "scripts/referee.py": "k 0 -1 | max_new_tokens 0 | margin -1 .nan | temperature -1 .nan | draws 0 | seed -1",
    "scripts/audit.py": "k 0 -1 | max_new_tokens 0 | temperature -1 .nan | draws 0 | seed -1",
    "scripts/sweep.py": """
        grid '{loop.lr: [.nan]}' | random '{loop.lr: {low: .nan, high: 1}}' '{loop.lr: {low: 2, high: 1}}' |
        draws 0 -1 | seed -1 | workers -1 | retries -1
    """,
    "scripts/lab/compare_trainers.py": """
        rounds 0 | warm 0 | steps 0 | batch_size 0 | max_length 0 | max_new_tokens 0 | on_policy_every 0 |
        epochs 0 | eagle_vocab -1 | eagle_steps 0
    """,
    "scripts/lab/data_curve.py": """
        sizes '[5]' '[0, 5]' '[5, 5]' '[5, 100000]' '[1, 2]' | points 1 0 | span 1 .nan |
        seeds '[]' '[-1]' '[0, 0]' | passes 0 -1 .nan | least_steps -1 | steps -1 | k 0 1000 |
        max_new_tokens 0 | temperatures '[]' '[.nan]' '[0.0, 0.0]' | worth -2 .nan |
        distill.loop.lr 0 .nan
    """,
    "scripts/lab/task_prompts.py": "math_count -1 | code_count -1 x | article_count -1 | seed -1",
    "scripts/lab/floor.py": """
        rows '[]' '[0]' | repeats 0 | max_new_tokens 0 | sampled_rows '[0]' | samples -1 |
        sample_tokens 0 1
    """,
    "scripts/lab/gpu_smoke.py": "k 0 | rows 0 | max_new_tokens 0",
    "scripts/llamacpp_parity.py": "k 0 -1 | max_new_tokens 0 | margin -1 .nan",
}
"""{command: settings, each with the values that it refuses}."""

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
    ("eval/run.py", "methods", "[{name: simulated, alpha: [1.5]}]", "alpha"),
    ("eval/run.py", "methods", "[{name: simulated, alpha: [.nan]}]", "alpha"),
    ("eval/run.py", "methods", "[{name: simulated, alpha: [-0.1]}]", "alpha"),
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
