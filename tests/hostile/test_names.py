"""Names that nothing has: devices, data types, methods, tasks, families, losses, rules, engines, formats."""
# ruff: noqa: E501 (a case is one row of its table)

from pathlib import Path

import pytest

from tests.hostile.case import Case, check, params
from tests.hostile.lab import Lab

RUNS_A_MODEL = ("train/sample.py", "eval/run.py", "eval/tune.py")
DEVICES = ("tpu", "cuda:9", "cuda:-1", "cpu:x", "gpu", "''", "cuda:99999999999999999999", "meta")

NAMES = [
    *(("decode/generate.py", f"--device {device}", "device") for device in DEVICES),
    *((command, f"--device {device}", "device") for command in RUNS_A_MODEL for device in DEVICES[:2]),
    *(("decode/generate.py", f"--dtype {dtype}", "float32") for dtype in ("int8", "''", "float8")),
    *((command, "--dtype int8", "float32") for command in RUNS_A_MODEL),
    ("train/distill.py", "--target_dtype int8", "float32"),
    ("train/distill.py", "--mixed_precision int8", "mixed_precision"),
    ("eval/run.py", "--methods '[{name: causal, draft: $lab/causal, device: tpu}]'", "device"),
    ("eval/run.py", "--methods '[{name: causal, draft: $lab/causal, device: \"cuda:9\"}]'", "device"),
    ("eval/run.py", "--methods '[{name: causal}]'", "draft"),
    ("eval/run.py", "--methods '[{name: telepathy}]'", "telepathy"),
    ("eval/run.py", "--methods '[{name: simulated}]'", "alpha"),
    ("eval/run.py", "--methods '[{name: causal, draft: $lab/causal, rule: magic}]'", "magic"),
    ("eval/run.py", "--methods '[{name: causal, draft: $lab/causal, rule: \"\"}]'", "rule"),
    ("eval/run.py", "--methods '[{name: ngram, tree: {nodes: 4}}]'", "tree"),
    ("eval/run.py", "--methods '[{name: ngram, draft: $lab/causal, layers: 3}]'", "layers"),
    ("eval/run.py", "--tasks '[{name: nonsense}]'", ("nonsense", "path")),
    ("eval/run.py", "--tasks '[{name: own, path: $lab/prompts.txt, kind: nonsense}]'", "kind"),
    ("eval/run.py", "--tasks '[{name: own, path: $lab/prompts.txt, too_long: maybe}]'", "too_long"),
    ("eval/run.py", "--tasks '[{name: a, path: $lab/prompts.txt}, {name: a, path: $lab/prompts.txt}]'", "name"),
    ("eval/run.py", "--mode turbo", "mode"),
    ("eval/run.py", "--mode graph", "graph"),
    ("eval/run.py", "--compare llamacpp", "llamacpp"),
    ("eval/run.py", "--compare vllm --vllm_python $tmp/none", "none"),
    ("eval/tune.py", "--mode turbo", "mode"),
    ("eval/tune.py", "--mode graph", "graph"),
    ("eval/tune.py", "--methods '[{name: telepathy}]'", "telepathy"),
    ("eval/tune.py", "--tasks '[{name: nonsense}]'", ("nonsense", "path")),
    ("train/sample.py", "--origin dreams", "origin"),
    ("train/sample.py", "--turns some", "turns"),
    ("train/sample.py", "--turns all --sources '[{kind: file, path: $lab/prompts.jsonl}]' --draft telepathy", "telepathy"),
    ("train/sample.py", "--draft telepathy", "telepathy"),
    ("train/sample.py", "--sources '[{kind: bundled, path: poetry}]'", "poetry"),
    ("train/sample.py", "--sources '[{kind: bundled}]'", "path"),
    ("train/sample.py", "--sources '[{kind: file}]'", "path"),
    ("train/sample.py", "--sources '[{kind: hub}]'", "path"),
    ("train/sample.py", "--sources '[{kind: hub, path: no/such-set}]'", "no/such-set"),
    ("train/sample.py", "--origin text --sources '[{kind: file, path: $lab/prompts.jsonl, samples: 3}]'", "samples"),
    ("train/distill.py", "--loss nonsense", "loss"),
    ("train/distill.py", "--divergence.mix '{nonsense: 1}'", "nonsense"),
    ("train/distill.py", "--draft.family nonsense", "nonsense"),
    ("train/distill.py", "--draft.family ngram", "ngram"),
    ("train/distill.py", "--weights.positions nonsense", "positions"),
    ("train/distill.py", "--wandb nonsense", "wandb"),
    ("decode/generate.py", "--draft telepathy", "telepathy"),
    ("decode/generate.py", "--draft early-exit", "early exit"),
    ("decode/generate.py", "--draft ''", "draft"),
    ("decode/generate.py", "--draft none --target nonsense", "nonsense"),
    ("scripts/export.py", "--format gguf", ("format", "flat")),
    ("scripts/export.py", "--format hf", "hf"),
    ("scripts/export.py", "--format medusa-legacy", "medusa-legacy"),
    ("scripts/export.py", "--draft $lab/causal --format flat", "causal"),
    ("scripts/export.py", "--draft $lab/causal --format hf --target org/none", "--target"),
    ("scripts/check_draft.py", "--engine llamacpp", "llamacpp"),
    ("scripts/check_draft.py", "--engine_version new", "new"),
    ("scripts/build_target.py", "--model big", "model"),
    ("scripts/readme_table.py", "--name nonsense --readme $lab/prompts.txt", "nonsense"),
    ("scripts/experiments/compare_losses.py", "--sources '{a: {data: $lab/samples, losses: [nonsense]}}'", "nonsense"),
    ("scripts/experiments/compare_losses.py", "--sources '{a: {data: $lab/samples, losses: []}}'", "losses"),
    ("scripts/experiments/compare_losses.py", "--sources '{}'", "sources"),
    ("scripts/experiments/compare_trainers.py", "--arms '[nonsense]'", "arms"),
    ("scripts/experiments/compare_trainers.py", "--arms '[]'", "arms"),
    ("scripts/experiments/compare_trainers.py", "--dtype int8", "float32"),
    ("scripts/experiments/reference_eagle3.py", "--loss nonsense", "nonsense"),
    ("scripts/experiments/reference_eagle3.py", "--draft.family medusa", "family"),
    ("scripts/benchmarks/decoder_bench.py", "--device tpu", "device"),
    ("scripts/benchmarks/decoder_bench.py", "--dtype int8", "float32"),
    ("scripts/benchmarks/train_bench.py", "--sizes '[huge]'", "huge"),
    ("scripts/benchmarks/train_bench.py", "--families '[nonsense]'", "nonsense"),
    ("scripts/benchmarks/train_bench.py", "--sizes '[]'", "sizes"),
    ("scripts/benchmarks/train_bench.py", "--families '[]'", "families"),
    ("scripts/benchmarks/train_bench.py", "--device tpu", "device"),
    ("scripts/benchmarks/train_bench.py", "--dtype int8", "float32"),
    ("scripts/benchmarks/gpu_bench.py", "--stages '[nonsense]'", "nonsense"),
    ("scripts/benchmarks/gpu_bench.py", "--shape nonsense", "nonsense"),
    ("scripts/benchmarks/gpu_bench.py", "--draft_shape nonsense --shape llama-3.1-8b", "nonsense"),
    ("scripts/benchmarks/gpu_bench.py", "--device tpu", "device"),
    ("scripts/benchmarks/gpu_bench.py", "--dtype int8", "float32"),
    ("scripts/benchmarks/gpu_bench.py", "--k 9", "ks"),
    ("scripts/engine_compat/corruption_study.py", "--only '[nonsense]'", "nonsense"),
]  # fmt: skip
"""(command, arguments, what the message names)."""

MISMATCHED = [
    ("train/sample.py", "--draft $lab/stranger", ("stranger", "tokenizer")),
    ("train/sample.py", "--draft $lab/medusa --k 9", "k"),
    ("train/distill.py", "--draft.init $lab/stranger", ("stranger", "tokenizer")),
    ("train/distill.py", "--target $lab/stranger", "tokenizer"),
    ("train/distill.py", "--target $lab/stranger --draft.init '' --draft.layers '[0]'", ("samples", "tokenizer")),
    ("train/distill.py", "--draft.init '' --draft.family medusa --draft.heads 2 --check.k 9 --loop.eval_every 1", "k"),
    ("train/distill.py", "--overwrite true --resume true", ("overwrite", "resume")),
    ("eval/run.py", "--methods '[{name: causal, draft: $lab/stranger}]'", ("stranger", "tokenizer")),
    ("eval/run.py", "--target $lab/stranger", ("causal", "tokenizer")),
    ("eval/run.py", "--original $lab/stranger", ("stranger", "tokenizer")),
    ("eval/run.py", "--methods '[{name: causal, draft: $lab/causal, k: 600}]'", "k"),
    ("eval/tune.py", "--methods '[{name: causal, draft: $lab/stranger}]'", ("stranger", "tokenizer")),
    ("eval/tune.py", "--ks '[1, 2, 600]'", "ks"),
    ("decode/generate.py", "--draft $lab/stranger", ("stranger", "tokenizer")),
    ("decode/generate.py", "--k 600", "k"),
    ("scripts/export.py", "--draft $lab/causal --format hf --target $lab/stranger", "tokenizer"),
    ("scripts/publish.py", "--draft $lab/causal --report $lab/report/report.json --tuned $lab/report/report.json", "tuned"),
    ("scripts/benchmarks/decoder_bench.py", "--draft $lab/stranger", ("stranger", "tokenizer")),
    ("scripts/benchmarks/decoder_bench.py", "--draft $lab/medusa", "medusa"),
    ("scripts/benchmarks/gpu_bench.py", "--draft $lab/medusa", "medusa"),
    ("scripts/experiments/compare_losses.py", "--init $lab/stranger", ("stranger", "tokenizer")),
    ("scripts/experiments/compare_trainers.py", "--draft $lab/stranger", ("stranger", "tokenizer")),
]  # fmt: skip
"""The same of things that are there, but do not go together."""


@pytest.mark.parametrize("case", params(*(Case(*words) for words in [*NAMES, *MISMATCHED])))
def test_an_unknown_name_is_refused(case: Case, lab: Lab, tmp_path: Path) -> None:
    check(case, lab, tmp_path)
