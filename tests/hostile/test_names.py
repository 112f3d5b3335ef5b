"""Names that nothing has: devices, data types, methods, tasks, families, losses, rules, engines, formats."""
# ruff: noqa: E501 (a case is one row of its table)

from pathlib import Path

import pytest

from tests.hostile.case import Case, check, params
from tests.hostile.lab import Lab

RUNS_A_MODEL = ("train/sample.py", "train/write_prompts.py", "eval/run.py", "eval/tune.py")
DEVICES = ("tpu", "cuda:9", "cuda:-1", "cpu:x", "gpu", "''", "cuda:99999999999999999999", "meta")

NAMES = [
    *(("decode/generate.py", f"--device {device}", "device") for device in DEVICES),
    *((command, f"--device {device}", "device") for command in RUNS_A_MODEL for device in DEVICES[:2]),
    *(("decode/generate.py", f"--dtype {dtype}", "float32") for dtype in ("int3", "''", "float8")),
    *((command, "--dtype int3", "float32") for command in RUNS_A_MODEL),
    ("train/distill.py", "--target_dtype int3", "float32"),
    ("train/distill.py", "--mixed_precision int8", "mixed_precision"),
    ("eval/run.py", "--methods '[{name: causal, draft: $lab/causal, device: tpu}]'", "device"),
    ("eval/run.py", "--methods '[{name: causal, draft: $lab/causal, device: \"cuda:9\"}]'", "device"),
    ("eval/run.py", "--methods '[{name: causal}]'", "draft"),
    ("eval/run.py", "--methods '[{name: telepathy}]'", "telepathy"),
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
    ("eval/run.py", "--compare exllama", "exllama"),
    ("eval/run.py", "--compare vllm --vllm_python $tmp/none", "none"),
    ("eval/tune.py", "--mode turbo", "mode"),
    ("eval/tune.py", "--mode graph", "graph"),
    ("eval/tune.py", "--methods '[{name: telepathy}]'", "telepathy"),
    ("eval/tune.py", "--tasks '[{name: nonsense}]'", ("nonsense", "path")),
    ("train/sample.py", "--origin dreams", "origin"),
    ("train/sample.py", "--mode captured", "needs a CUDA device"),
    ("train/sample.py", "--mode compiled --origin text", "--mode"),
    ("train/sample.py", "--turns some", "turns"),
    ("train/sample.py", "--turns all --sources '[{kind: file, path: $lab/prompts.jsonl}]' --draft telepathy", "telepathy"),
    ("train/sample.py", "--draft telepathy", "telepathy"),
    ("train/sample.py", "--sources '[{kind: bundled, path: poetry}]'", "poetry"),
    ("train/sample.py", "--sources '[{kind: bundled}]'", "path"),
    ("train/sample.py", "--sources '[{kind: file}]'", "path"),
    ("train/sample.py", "--sources '[{kind: hub}]'", "path"),
    ("train/sample.py", "--sources '[{kind: hub, path: no/such-set}]'", "no/such-set"),
    ("train/sample.py", "--origin text --sources '[{kind: file, path: $lab/prompts.jsonl, samples: 3}]'", "samples"),
    ("train/doctor.py", "--sources '[{kind: bundled, path: poetry}]'", "poetry"),
    ("train/distill.py", "--loss nonsense", "loss"),
    ("train/distill.py", "--divergence.mix '{nonsense: 1}'", "nonsense"),
    ("train/distill.py", "--draft.family nonsense", "nonsense"),
    ("train/distill.py", "--draft.family ngram", "ngram"),
    ("train/distill.py", "--weights.positions nonsense", "positions"),
    ("train/distill.py", "--wandb nonsense", "wandb"),
    ("train/distill.py", "--tracker nonsense", "tracker"),
    ("decode/generate.py", "--draft telepathy", "telepathy"),
    ("decode/generate.py", "--draft early-exit", "early exit"),
    ("decode/generate.py", "--draft ''", "draft"),
    ("decode/generate.py", "--draft none --target nonsense", "nonsense"),
    ("scripts/export.py", "--format onnx", ("format", "gguf")),
    ("scripts/export.py", "--format gguf", "GGUF"),
    ("scripts/export.py", "--format hf", "hf"),
    ("scripts/export.py", "--format medusa-legacy", "medusa-legacy"),
    ("scripts/export.py", "--draft $lab/causal --format flat", "causal"),
    ("scripts/export.py", "--draft $lab/causal --format hf --target org/none", "--target"),
    ("scripts/check_draft.py", "--engine_version new", "new"),
    ("scripts/lab/build_target.py", "--model big", "model"),
    ("scripts/readme_table.py", "--name nonsense --readme $lab/prompts.txt", "nonsense"),
    ("scripts/lab/floor.py", "--dtype int3", "float32"),
    ("scripts/lab/floor.py", "--mode nonsense", "nonsense"),
    ("scripts/lab/floor.py", "--device tpu", "device"),
    ("scripts/lab/gpu_smoke.py", "--device tpu", "device"),
    ("scripts/lab/gpu_smoke.py", "--dtype int3", "float32"),
]  # fmt: skip
"""(command, arguments, what the message names)."""

MISMATCHED = [
    ("train/sample.py", "--target $lab/stranger --draft $lab/medusa", ("medusa", "tokenizer")),
    ("train/write_prompts.py", "--target $lab/target", "chat template"),
    ("train/write_prompts.py", "--overwrite true --resume true", ("overwrite", "resume")),
    ("train/sample.py", "--draft $lab/medusa --k 9", "k"),
    ("train/doctor.py", "--target $lab/stranger", ("samples", "tokenizer")),
    ("train/distill.py", "--draft.init $lab/stranger", ("stranger", "tokenizer")),
    ("train/distill.py", "--target $lab/stranger", "tokenizer"),
    ("train/distill.py", "--target $lab/stranger --draft.init '' --draft.layers '[0]'", ("samples", "tokenizer")),
    ("train/distill.py", "--draft.init '' --draft.family medusa --draft.heads 2 --check.k 9 --loop.eval_every 1", "k"),
    ("train/distill.py", "--overwrite true --resume true", ("overwrite", "resume")),
    ("eval/run.py", "--target $lab/stranger --methods '[{name: heads, draft: $lab/medusa}]'", ("medusa", "tokenizer")),
    ("eval/run.py", "--original $lab/stranger", ("stranger", "tokenizer")),
    ("eval/run.py", "--methods '[{name: causal, draft: $lab/causal, k: 600}]'", "k"),
    ("eval/tune.py", "--target $lab/stranger --methods '[{name: heads, draft: $lab/medusa}]'", ("medusa", "tokenizer")),
    ("eval/tune.py", "--ks '[1, 2, 600]'", "ks"),
    ("eval/fidelity.py", "--dtypes '[w8a8, w8a8]'", "dtypes"),
    ("eval/fidelity.py", "--dtypes '[float32]'", ("dtypes", "float32")),
    ("eval/fidelity.py", "--dtypes '[w4a4]'", "w4a4"),
    ("eval/fidelity.py", "--dtypes '[int4]'", "int4"),
    ("eval/fidelity.py", "--tasks '[]'", "tasks"),
    ("decode/generate.py", "--target $lab/stranger --draft $lab/medusa", ("medusa", "tokenizer")),
    ("decode/generate.py", "--k 600", "k"),
    ("scripts/export.py", "--draft $lab/causal --format hf --target $lab/stranger", "tokenizer"),
    ("scripts/publish.py", "--draft $lab/causal --report $lab/report/report.json --tuned $lab/report/report.json", "tuned"),
    ("scripts/lab/gpu_smoke.py", "--target $lab/stranger --draft $lab/medusa", ("medusa", "tokenizer")),
]  # fmt: skip
"""The same of things that are there, but do not go together."""


@pytest.mark.parametrize("case", params(*(Case(*words) for words in [*NAMES, *MISMATCHED])))
def test_an_unknown_name_is_refused(case: Case, lab: Lab, tmp_path: Path) -> None:
    check(case, lab, tmp_path)
