"""Paths that are missing, of the wrong kind, unreadable, or that hold something else."""
# ruff: noqa: E501 (a case is one row of its table)

import os
from pathlib import Path

import pytest

from tests.hostile.case import Case, check, params
from tests.hostile.files import copy, folder, link, mode, write
from tests.hostile.lab import Lab

TARGETS = {
    "train/sample.py": "target",
    "train/distill.py": "target",
    "eval/run.py": "target",
    "eval/tune.py": "target",
    "decode/generate.py": "target",
    "scripts/referee.py": "target",
    "scripts/export.py": "target",
    "scripts/check_draft.py": "target",
    "scripts/experiments/compare_losses.py": "target",
    "scripts/experiments/compare_trainers.py": "target",
    "scripts/experiments/reference_eagle3.py": "target",
    "scripts/benchmarks/decoder_bench.py": "target",
    "scripts/benchmarks/gpu_bench.py": "target",
}
MISSING = (
    *((command, f"--{name} ./gone") for command, name in TARGETS.items()),
    ("train/sample.py", "--target $tmp/gone"),
    ("train/sample.py", "--target outputs/gone/target"),
    ("train/sample.py", "--target gone/"),
    ("train/sample.py", "--target ~/gone"),
    ("train/sample.py", "--target ../gone"),
    ("train/sample.py", "--draft ./gone"),
    ("train/sample.py", "--draft outputs/drafts/gone"),
    ("train/sample.py", "--sources '[{kind: file, path: $tmp/gone.jsonl}]'"),
    ("train/sample.py", "--sources '[{kind: file, path: gone.txt}]'"),
    ("train/sample.py", "--decontaminate gone.jsonl"),
    ("train/sample.py", "--decontaminate '[$lab/prompts.jsonl, gone.jsonl]'"),
    ("train/distill.py", "--data ./gone"),
    ("train/distill.py", "--data '[{path: $lab/samples}, {path: ./gone}]'"),
    ("train/distill.py", "--draft.init ./gone"),
    ("train/distill.py", "--draft.init outputs/drafts/gone"),
    ("train/distill.py", "--draft.family eagle3 --draft.init ./gone"),
    ("eval/run.py", "--original ./gone"),
    ("eval/run.py", "--methods '[{name: causal, draft: ./gone}]'"),
    ("eval/run.py", "--methods '[{name: causal, draft: outputs/drafts/gone}]'"),
    ("eval/run.py", "--tasks '[{name: own, path: ./gone.jsonl}]'"),
    ("eval/tune.py", "--methods '[{name: causal, draft: ./gone}]'"),
    ("eval/tune.py", "--tasks '[{name: own, path: ./gone.txt}]'"),
    ("eval/report.py", "--folder ./gone"),
    ("eval/report.py", "--folder $lab/report --tuned ./gone.json"),
    ("eval/advise.py", "--report ./gone.json"),
    ("eval/advise.py", "--tuned ./gone.json"),
    ("decode/generate.py", "--prompt '' --prompt_file gone.txt"),
    ("decode/generate.py", "--draft ./gone"),
    ("decode/generate.py", "--draft outputs/drafts/gone"),
    ("scripts/export.py", "--draft ./gone"),
    ("scripts/publish.py", "--draft ./gone"),
    ("scripts/publish.py", "--draft '' --samples ./gone"),
    ("scripts/publish.py", "--report ./gone.json"),
    ("scripts/publish.py", "--referee ./gone.json"),
    ("scripts/publish.py", "--tuned ./gone.json"),
    ("scripts/check_draft.py", "--draft ./gone"),
    ("scripts/build_target.py", "--gsm8k ./gone.jsonl"),
    ("scripts/readme_table.py", "--readme ./gone.md"),
    ("scripts/readme_table.py", "--report ./gone.json"),
    ("scripts/track_report.py", "--run ./gone"),
    ("scripts/track_report.py", "--report ./gone"),
    ("scripts/referee.py", "--draft ./gone"),
    ("scripts/referee.py", "--python ./gone"),
    ("scripts/experiments/compare_losses.py", "--sources '{a: {data: ./gone, losses: [forward_kl]}}'"),
    ("scripts/experiments/compare_losses.py", "--recipe ./gone.yaml"),
    ("scripts/experiments/compare_losses.py", "--init ./gone"),
    ("scripts/experiments/compare_trainers.py", "--draft ./gone"),
    ("scripts/experiments/compare_trainers.py", "--data ./gone"),
    ("scripts/experiments/reference_eagle3.py", "--data ./gone"),
    ("scripts/benchmarks/decoder_bench.py", "--draft ./gone"),
    ("scripts/benchmarks/gpu_bench.py", "--draft ./gone"),
    ("scripts/engine_compat/corruption_study.py", "--drafts ./gone"),
)  # fmt: skip
"""Nothing is called `gone`, and its message says so without asking the network."""

PAGE = "<!-- table: begin -->\n<!-- table: end -->\n"
KINDS = [
    Case("scripts/build_target.py", "--model draft", "tokenizer.json"),
    Case("train/sample.py", "--target $lab/prompts.txt", "prompts.txt"),
    Case("train/sample.py", "--target $tmp/empty", "empty", (folder("empty"),)),
    Case("train/sample.py", "--target $tmp/link", "link", (link("link", "gone"),)),
    Case("train/sample.py", "--draft $lab/target/config.json", "config.json"),
    Case("train/sample.py", "--sources '[{kind: file, path: $lab/samples}]'", "samples"),
    Case("train/sample.py", "--sources '[{kind: file, path: $tmp/a.jsonl}]'", "a.jsonl", (folder("a.jsonl"),)),
    Case("train/sample.py", "--sources '[{kind: file, path: $tmp/a.jsonl}]'", "a.jsonl", (link("a.jsonl", "gone"),)),
    Case("train/sample.py", "--sources '[{kind: file, path: $lab/gsm8k.csv}]'", "gsm8k.csv"),
    Case("train/sample.py", "--out $tmp/page.md --overwrite false", "page.md", (write("page.md", PAGE),)),
    Case("train/sample.py", "--out $tmp/page.md/below --overwrite false", "page.md", (write("page.md", PAGE),)),
    Case("train/sample.py", "--out $tmp/link --overwrite false", "link", (link("link", "gone/deep"),)),
    Case("train/sample.py", "--out /proc/none --overwrite false", "/proc"),
    Case("train/distill.py", "--data $lab/prompts.jsonl", "prompts.jsonl"),
    Case("train/distill.py", "--data $lab/target", "target"),
    Case("train/distill.py", "--data $tmp/empty", "empty", (folder("empty"),)),
    Case("train/distill.py", "--features $tmp/a.txt", "a.txt", (copy("prompts.txt", "a.txt"),)),
    Case("train/distill.py", "--features $tmp/target", "target", (copy("target"),)),
    Case("train/distill.py", "--draft.init $lab/medusa", "medusa"),
    Case("train/distill.py", "--draft.family eagle3 --draft.init $lab/medusa", "medusa"),
    Case("train/distill.py", "--draft.family medusa --draft.init $lab/draft", "draft"),
    Case("train/distill.py", "--out $tmp/page.md --overwrite false", "page.md", (write("page.md", PAGE),)),
    Case("eval/run.py", "--out $tmp/page.md --overwrite false", "page.md", (write("page.md", PAGE),)),
    Case("eval/tune.py", "--out $tmp/page.md --overwrite false", "page.md", (write("page.md", PAGE),)),
    Case("eval/run.py", "--tasks '[{name: own, path: $lab/target}]'", "target"),
    Case("eval/run.py", "--tasks '[{name: own, path: $lab/prompts.csv}]'", "prompts.csv"),
    Case("eval/run.py", "--methods '[{name: causal, draft: $lab/prompts.txt}]'", "prompts.txt"),
    Case("eval/run.py", "--methods '[{name: causal, draft: $lab/samples}]'", "samples"),
    Case("eval/report.py", "--folder $lab/samples", "report.json"),
    Case("eval/report.py", "--folder $lab/report/report.json", "report.json"),
    Case("eval/advise.py", "--report $lab/report", "report"),
    Case("eval/advise.py", "--report $lab/tuned/tuned.json", "tuned.json"),
    Case("eval/advise.py", "--report $lab/prompts.txt", "prompts.txt"),
    Case("eval/advise.py", "--tuned $lab/report/report.json", "report.json"),
    Case("eval/advise.py", "--tuned $lab/tuned", "tuned"),
    Case("eval/advise.py", "--out $lab/report", "report"),
    Case("eval/advise.py", "--out $tmp/page.md/below", "page.md", (write("page.md", PAGE),)),
    Case("eval/report.py", "--tuned $lab/report/report.json", "report.json", (copy("report"),)),
    Case("eval/report.py", "--tuned $lab/prompts.jsonl", "prompts.jsonl", (copy("report"),)),
    Case("decode/generate.py", "--prompt '' --prompt_file $lab/target", "target"),
    Case("decode/generate.py", "--prompt '' --prompt_file $tmp/a", "a", (link("a", "a"),)),
    Case("scripts/export.py", "--out $lab/target", "target"),
    Case("scripts/export.py", "--out $tmp/page.md", "page.md", (write("page.md", PAGE),)),
    Case("scripts/export.py", "--out $tmp/page.md/below", "page.md", (write("page.md", PAGE),)),
    Case("scripts/export.py", "--draft $lab/target/config.json", "config.json"),
    Case("scripts/export.py", "--draft $lab/samples", "samples"),
    Case("scripts/publish.py", "--draft $lab/target", "target"),
    Case("scripts/publish.py", "--draft $lab/samples", "samples"),
    Case("scripts/publish.py", "--draft '' --samples $lab/eagle3", "eagle3"),
    Case("scripts/publish.py", "--out $lab/eagle3", "eagle3"),
    Case("scripts/publish.py", "--out $tmp/mine", "mine", (write("mine/thesis.tex", "x"),)),
    Case("scripts/publish.py", "--out $tmp/mine", "mine", (write("mine/README.md", "x"),)),
    Case("scripts/publish.py", "--out $tmp/page.md", "page.md", (write("page.md", PAGE),)),
    Case("scripts/publish.py", "--report $lab/tuned/tuned.json", "tuned.json"),
    Case("scripts/publish.py", "--report $lab/report", "report"),
    Case("scripts/publish.py", "--report $lab/prompts.txt", "prompts.txt"),
    Case("scripts/publish.py", "--report $lab/report/report.json", "report"),
    Case("scripts/publish.py", "--tuned $lab/report/report.json", "report.json"),
    Case("scripts/publish.py", "--referee $lab/report/report.json", "report.json"),
    Case("scripts/check_draft.py", "--draft $lab/samples", "samples"),
    Case("scripts/check_draft.py", "--draft $lab/prompts.txt", "prompts.txt"),
    Case("scripts/readme_table.py", "--readme $lab/target", "target"),
    Case("scripts/readme_table.py", "", "page.md", (write("page.md", "no markers\n"),)),
    Case("scripts/readme_table.py", "", "page.md", (write("page.md", PAGE * 2, "markers twice"),)),
    Case("scripts/readme_table.py", "", "page.md", (write("page.md", "\n".join(PAGE.split("\n")[1::-1]), "order"),)),
    Case("scripts/readme_table.py", "", "page.md", (write("page.md", b"\xff" + PAGE.encode(), "not UTF-8"),)),
    Case("scripts/readme_table.py", "--report $lab/tuned/tuned.json", "tuned.json", (write("page.md", PAGE),)),
    Case("scripts/track_report.py", "--run $lab/samples", "samples"),
    Case("scripts/track_report.py", "--run $lab/eagle3", "eagle3"),
    Case("scripts/track_report.py", "--report $lab/tuned", "tuned", (copy("causal"),)),
    Case("scripts/referee.py", "--python $lab/prompts.txt", "prompts.txt"),
    Case("scripts/build_target.py", "--work $tmp/page.md", "page.md", (write("page.md", PAGE),)),
    Case("scripts/build_target.py", "--gsm8k $lab/prompts.jsonl", "prompts.jsonl"),
    Case("scripts/build_target.py", "--gsm8k $tmp/g.jsonl", "g.jsonl", (write("g.jsonl", "{}\n"),)),
    Case("scripts/build_target.py", "--gsm8k $tmp/g.jsonl", "g.jsonl", (write("g.jsonl", "", "empty"),)),
    Case("scripts/experiments/compare_losses.py", "--out $lab/report", "report"),
    Case("scripts/experiments/compare_trainers.py", "--out $lab/report", "report"),
    Case("scripts/benchmarks/train_bench.py", "--out $lab/report", "report"),
    Case("scripts/benchmarks/decoder_bench.py", "--out $lab/report --race false --predict false", "report"),
    Case("scripts/referee.py", "--out $lab/report", "report"),
    Case("scripts/engine_compat/corruption_study.py", "--out $lab/report", "report"),
]  # fmt: skip

UNREADABLE = [
    Case("train/sample.py", "--config $tmp/c.yaml", "c.yaml", (write("c.yaml", "k: 3\n"), mode("c.yaml", 0))),
    Case("train/sample.py", "--sources '[{kind: file, path: $tmp/a.jsonl}]'", "a.jsonl", (copy("prompts.jsonl", "a.jsonl"), mode("a.jsonl", 0))),
    Case("decode/generate.py", "--prompt '' --prompt_file $tmp/a.txt", "a.txt", (write("a.txt", "x"), mode("a.txt", 0))),
    Case("train/sample.py", "--out $tmp/shut/out --overwrite false", "shut", (folder("shut"), mode("shut", 0o500))),
    Case("scripts/export.py", "--out $tmp/shut/out", "shut", (folder("shut"), mode("shut", 0o500))),
    Case("decode/generate.py", "--target $tmp/target", "target", (copy("target"), mode("target/model.safetensors", 0))),
]  # fmt: skip


@pytest.mark.parametrize("case", params(*(Case(*words, "gone") for words in MISSING)))
def test_a_missing_path_is_refused_at_once(case: Case, lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(PAGE)
    check(case, lab, tmp_path)


@pytest.mark.parametrize("case", params(*KINDS))
def test_a_path_to_something_else_is_refused(case: Case, lab: Lab, tmp_path: Path) -> None:
    check(case, lab, tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
@pytest.mark.parametrize("case", params(*UNREADABLE))
def test_a_path_without_permission_is_refused(case: Case, lab: Lab, tmp_path: Path) -> None:
    check(case, lab, tmp_path)
